"""The files of a folder at addresses of the web, which count what they give; parts of a file are given, too."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, sent: list[int], gives_parts: bool, *request: Any) -> None:
        self._folder, self._sent, self._gives_parts = folder, sent, gives_parts
        super().__init__(*request)

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _answer(self, *, sends: bool) -> None:
        file = self._folder / self.path.lstrip("/")
        content = file.read_bytes() if file.is_file() else b""
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self._gives_parts else None
        self.send_response(404 if not file.is_file() else 206 if part else 200)
        if part:
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Accept-Ranges", "bytes" if self._gives_parts else "none")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if sends:
            self._sent.append(len(content))
            self.wfile.write(content)


@contextmanager
def served(folder: Path, sent: list[int] | None = None, *, gives_parts: bool = True) -> Iterator[str]:
    """The address under which the files of the folder are found inside.

    Args:
        folder: the folder.
        sent: gets the bytes of each answer.
        gives_parts: the server gives what is asked for of a file, and not all of it.
    """
    answering = partial(_Files, folder, [] if sent is None else sent, gives_parts)
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
