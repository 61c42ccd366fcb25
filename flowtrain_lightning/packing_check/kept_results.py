"""Results of earlier checks, kept in the user's cache by all that may change them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.sources.index import cache_folders, user_cache
from flowtrain_lightning.data.sources.naming import is_stream
from flowtrain_lightning.packing_check.detached_copy import detached_copy
from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.needed_weights import NeededWeight

_PACKAGE = Path(__file__).parents[1]


class Result(NamedTuple):
    """The part of a check's result that is kept.

    Attributes:
        findings: ways in which packing changes what the module learns.
        conditional: paths of modules that only some samples run.
        needed_weights: weights that are needed elsewhere than where they stand.
    """

    findings: tuple[Finding, ...] = ()
    conditional: tuple[str, ...] = ()
    needed_weights: tuple[NeededWeight, ...] = ()


@dataclass(frozen=True)
class KeptResults:
    """The file in which the result of one check is kept.

    Attributes:
        files: the places, in order; none where nobody can tell whether the module is the same.
    """

    files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, module: Any, data: FlowDataModule) -> KeptResults:
        """The places for this code, module, data and settings.

        What is kept is found again by the sources of all loaded code that is not installed, the versions of what is,
        the module as it was made, and what decides about samples.
        """
        if any(is_stream(source) for source in data.files["train"].sources):
            return cls()  # nobody can tell whether it brings the same samples again
        made = _as_made(module)
        code = _own_code()
        if made is None or code is None:
            return cls()
        versions = [installed_version(name) for name in ("torch", "lightning", "transformers", "peft")]
        name = f"check.{fingerprint([made, code, versions, data.fingerprint('fit'), data.settings])}.json"
        given = data.index.cache_dir
        folders = [*user_cache(), *cache_folders(data.path("train"))] if given is None else [Path(given)]
        return cls(tuple(folder / name for folder in folders))

    def read(self) -> Result | None:
        """Reads earlier findings; None where nothing is kept."""
        for file in self.files:
            with suppress(OSError, ValueError, TypeError, KeyError):
                kept = json.loads(file.read_text(encoding="utf-8"))
                return Result(
                    tuple(Finding(*each) for each in kept["findings"]),
                    tuple(kept["conditional"]),
                    tuple(NeededWeight(*each) for each in kept["needed_weights"]),
                )
        return None

    def write(self, result: Result) -> None:
        """Keeps a result in the first place that can be written."""
        for file in self.files:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(
                    json.dumps(
                        {
                            "findings": [[each.kind, each.sentence] for each in result.findings],
                            "conditional": result.conditional,
                            "needed_weights": result.needed_weights,
                        }
                    ),
                    encoding="utf-8",
                )
                return


def _as_made(module: Any) -> str | None:
    """A name for what the module was made with; None where it has weights already, or is of something unknown."""
    if any(True for _ in module.parameters()):
        return None
    try:
        return hashlib.blake2b(pickle.dumps(detached_copy(module)), digest_size=12).hexdigest()
    except Exception:  # whatever objects do that are not made to be pickled
        return None


def _own_code() -> str | None:
    """A name for the sources of this package and of all loaded code that is not installed.

    None where some of that has no file, as in a notebook.
    """
    digest = hashlib.blake2b(package_code(), digest_size=12)
    try:
        for file in sorted(set(_own_files())):
            digest.update(file.encode() + b"\0" + Path(file).read_bytes() + b"\0")
    except (OSError, _NoFileError):
        return None
    return digest.hexdigest()


@functools.cache
def package_code() -> bytes:
    """A name for the sources of this package."""
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


class _NoFileError(Exception):
    """Code was typed in."""


def _own_files() -> Iterator[str]:
    installed = tuple(
        {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {*site.getsitepackages()}
    )
    elsewhere = (*installed, str(_PACKAGE))
    for name, module in list(sys.modules.items()):
        file = module.__dict__.get("__file__")  # getattr would have some packages import what they put off
        if name == "__main__" and file is None:
            raise _NoFileError
        if file is not None and file.endswith(".py") and os.path.isabs(file) and not file.startswith(elsewhere):
            yield file  # torch.ops and its like say a relative one, where none is


@functools.cache
def installed_version(name: str) -> str:
    """The version of an installed package; empty where it is not installed."""
    with suppress(PackageNotFoundError):
        return version(name)
    return ""
