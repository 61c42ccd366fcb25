"""Short names for content: equal content, equal name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(content: Any) -> str:
    """A short hexadecimal name of a value made of JSON types."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def file_fingerprint(path: Path) -> str:
    """A short hexadecimal name of a file's content."""
    digest = hashlib.blake2b(digest_size=12)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
