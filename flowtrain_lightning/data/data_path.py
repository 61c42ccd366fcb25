"""Where data lie: a local path, or an address behind ``fsspec``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain_lightning.data.data_error import DataError


def data_path(given: str | Path) -> Path:
    """A local path, or one behind ``fsspec`` where ``given`` is an address such as ``s3://bucket/train.jsonl``.

    Raises:
        DataError: what opens addresses is not installed, or knows no such kind.
    """
    if isinstance(given, Path) or "://" not in given:
        return Path(given)
    try:
        from upath import UPath
    except ImportError as error:
        raise DataError(
            f"{given}: reading from an address needs universal-pathlib and fsspec; install them with: "
            "pip install 'flowtrain-lightning[data]'"
        ) from error
    try:
        remote: Any = UPath(given)  # has the methods of a Path
        remote.fs  # noqa: B018  # asks for the library of this kind of address
    except (ImportError, ValueError) as error:
        raise DataError(f"{given}: this kind of address cannot be read: {error}") from error
    return remote  # type: ignore[no-any-return]


def is_local(path: Path) -> bool:
    """Whether the operating system can open it."""
    return isinstance(path, Path)
