"""The files of a folder at addresses of the web, for as long as a test reads them; parts of a file are given, too."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *request) -> None:
        self._folder = folder
        super().__init__(*request)

    def do_HEAD(self) -> None:
        self._answer(sends=False)

    def do_GET(self) -> None:
        self._answer(sends=True)

    def log_message(self, *_) -> None:
        """Nothing."""

    def _answer(self, *, sends: bool) -> None:
        file = self._folder / self.path.lstrip("/")
        content = file.read_bytes() if file.is_file() else b""
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.send_response(404 if not file.is_file() else 206 if part else 200)
        if part:
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if sends:
            self.wfile.write(content)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address under which the files of the folder are found inside."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
