"""What trains and in which precision: options of ``flowtrain plan`` and ``simulate``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from flowtrain_lightning.allocator import PRECISIONS, ModuleDescription
from flowtrain_lightning.allocator.role_problem import OPTIMIZERS, Precision

_USUAL_PRECISION = "bf16-mixed"


def add_training(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Adds ``--freeze``, ``--lora``, ``--precision``, ``--optimizer`` and ``--frozen-bf16``.

    Args:
        parser: of the command.
        of: what they are said of, where the command can do without.
    """
    add = parser.add_argument
    add(
        "--freeze",
        action="append",
        default=[],
        help=f"{of}encoder, tower (all but projectors) or backbone; repeatable",
    )
    add("--lora", type=int, metavar="RANK", help=f"{of}train adapters of this rank in place of the backbone's weights")
    add("--precision", choices=list(PRECISIONS), default=_USUAL_PRECISION, help=f"{of}default: %(default)s")
    add("--optimizer", choices=list(OPTIMIZERS), default=OPTIMIZERS[0], help=f"{of}default: %(default)s")
    add("--frozen-bf16", action="store_true", help=f"{of}weights that do not train are kept in bf16")


def trained(module: ModuleDescription, options: argparse.Namespace) -> ModuleDescription:
    """The module with what trains of it, as the options of `add_training` say.

    Raises:
        PlanningError: there is no such half, or nothing would train.
    """
    if options.lora is not None:
        module = module.with_adapters(options.lora)
    return module.with_frozen(*options.freeze)


def precision_of(options: argparse.Namespace) -> Precision:
    """Bytes per number, and what of them is on the host, as the options of `add_training` say."""
    chosen = PRECISIONS[options.precision].with_optimizer(options.optimizer)
    return replace(chosen, frozen=2 if options.frozen_bf16 else None)


def said_of_training(options: argparse.Namespace) -> str | None:
    """The first option of `add_training` that was given and is not what is usual; None where none was."""
    unusual = {
        "--freeze": options.freeze,
        "--lora": options.lora is not None,
        "--precision": options.precision != _USUAL_PRECISION,
        "--optimizer": options.optimizer != OPTIMIZERS[0],
        "--frozen-bf16": options.frozen_bf16,
    }
    return next((name for name, given in unusual.items() if given), None)
