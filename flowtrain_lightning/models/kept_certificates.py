"""Certificates of earlier comparisons, kept in the user's cache by all that may change them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.sources.index import user_cache
from flowtrain_lightning.models.certificate import Certificate, certify
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.packing_check.kept_results import installed_version, package_code

_LIBRARIES = ("torch", "transformers", "peft")


def certificate_of(config: Any, kind: type[HuggingFaceVLM], settings: Mapping[str, Any] | None = None) -> Certificate:
    """As `certify`; what an earlier comparison found is not computed again.

    It is found again by config, class and settings, the versions of the libraries and the sources of this package.
    """
    files = [folder / f"certificate.{_name(config, kind, settings or {})}.json" for folder in user_cache()]
    for file in files:
        with suppress(OSError, ValueError, TypeError):
            return Certificate(**json.loads(file.read_text(encoding="utf-8")))
    found = certify(config, kind, settings)
    if found.error is not None:  # else a library may have been missing, which is not known by its version
        _write(files, found)
    return found


def _name(config: Any, kind: type[HuggingFaceVLM], settings: Mapping[str, Any]) -> str:
    versions = [installed_version(name) for name in _LIBRARIES]
    return fingerprint(
        [config.to_json_string(), kind.__qualname__, repr(sorted(settings.items())), versions, package_code().hex()]
    )


def _write(files: list[Path], found: Certificate) -> None:
    data = {name: value for name, value in found.as_data().items() if name != "verdict"}
    for file in files:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(data), encoding="utf-8")
            return
