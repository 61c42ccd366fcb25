"""What pages link to outside of docs/, for a site that has only docs/: pictures are brought in, files are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this once: the figures of the benchmarks belong to the site."""
    from mkdocs.structure.files import File

    for figure in sorted(Path(config.docs_dir).parent.glob("benchmarks/results/*.png")):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    markdown = re.sub(r"\]\(\.\./benchmarks/results/([\w.-]+\.png)\)", r"](figures/\1)", markdown)
    return _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}`)" if link[1] != link[2] else f"`{link[2]}`", markdown)
