"""The table of all families: ``python -m flowtrain_lightning.models.family_table docs/families.md`` writes it anew."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from flowtrain_lightning.models.certificate import Certificate
from flowtrain_lightning.models.kept_certificates import certificate_of
from flowtrain_lightning.models.pretrained import module_class
from flowtrain_lightning.models.published_config import usual_config
from flowtrain_lightning.models.untrainable import UntrainableError

_LIMIT_S = 120
"""Of one family, on one core: a tower that takes thousands of patches of every picture is slow."""

_INTRODUCTION = """# All families

What `flowtrain check MODEL_TYPE` says of every family of `AutoModelForImageTextToText`, on {date}, with transformers
{transformers}, torch {torch}, {beside}. A twin of the family's usual config is trained in two halves, from packed
samples, and compared with Hugging Face's whole model sample by sample, in float64: *exact* is a relative error of at
most 1e-9 of the loss and of every gradient. Seconds are of one core. Written by
`python -m flowtrain_lightning.models.family_table FILE`. {trained} of {all} train.

| `model_type` | trained by | verdict | largest error | seconds | why not |
|---|---|---|---|---|---|
"""


def families() -> list[str]:
    """The ``model_type`` of all families that ``transformers`` has for images and text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return sorted(NAMES)


def certificates(names: Sequence[str]) -> Iterator[Certificate]:
    """Certificates of families by their usual configs, each made in a process of its own.

    Args:
        names: their ``model_type``.
    """
    forking = multiprocessing.get_context("fork")
    for name in names:
        mine, other = forking.Pipe(duplex=False)
        process = forking.Process(target=_certify, args=(name, other), daemon=True)
        process.start()
        other.close()
        try:
            yield mine.recv()
        except EOFError:
            process.join()
            late = process.exitcode == -signal.SIGXCPU
            reason = f"no verdict within {_LIMIT_S} s." if late else "the process that compared it died."
            yield Certificate(name, "", False, reason=reason, seconds=_LIMIT_S if late else 0.0)
        finally:
            process.kill()
            process.join()


def _certify(name: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S + 1))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        found = certificate_of(usual_config(name), module_class(name))
    except UntrainableError as error:  # of a config that cannot be made by itself
        found = Certificate(name, "", False, reason=str(error))
    answer.send(found)


def table(found: Sequence[Certificate]) -> str:
    """The page, those that train first.

    Args:
        found: of all families.
    """
    ordered = sorted(found, key=lambda each: (not each.trains, each.family))
    rows = [
        f"| `{each.family}` | {f'`{each.module}`' if each.trains else ''} | {each.verdict} | "
        f"{'' if each.error is None else f'{each.error:.0e}'} | {each.seconds:.0f} | {_in_a_cell(each.reason)} |"
        for each in ordered
    ]
    head = _INTRODUCTION.format(
        date=datetime.now(timezone.utc).date().isoformat(),
        transformers=version("transformers"),
        torch=version("torch"),
        beside=_beside(),
        trained=sum(each.trains for each in found),
        all=len(found),
    )
    return head + "\n".join(rows) + "\n"


def _beside() -> str:
    """Libraries that some image processors and towers need, as far as they are installed."""
    found = []
    for name in ("torchvision", "timm"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return " and ".join(found)


def _in_a_cell(reason: str) -> str:
    words = " ".join(reason.split()).replace("|", "\\|")
    return words if len(words) < 200 else f"{words[:200]} …"


def main() -> None:
    """Writes the file that the command line names, anew after every family."""
    _, file, *names = sys.argv
    found: list[Certificate] = []
    for certificate in certificates(names or families()):
        found.append(certificate)
        Path(file).write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
