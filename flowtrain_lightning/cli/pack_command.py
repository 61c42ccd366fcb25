"""The command ``flowtrain pack``: lengths in a Parquet file to a plan in another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flowtrain_lightning.cli.command_table import command_parser
from flowtrain_lightning.cli.lengths import media_content, read_lengths
from flowtrain_lightning.packing import SYNC_EVERY, CostModel, PackingError
from flowtrain_lightning.packing.compiled import announce_compilation, compile_at_once
from flowtrain_lightning.packing.evaluation import evaluate
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings, pack_offline, warm_up
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray

if TYPE_CHECKING:
    import pyarrow

MISTAKES = (PackingError,)

_MEANINGS = {
    "steps": "in the plan",
    "samples_left": "samples that fill no step",
    "pad": "of the token budget is unused",
    "imb": "the costliest microbatch of a step over the mean one",
    "imb_position": "the same among microbatches that ranks run together",
    "idle_sync": "of their time ranks wait, if they meet at every microbatch",
    "idle_acc": "of their time ranks wait, if they meet once a step",
    "idle_enc": "idle_sync, of the media that each microbatch reads",
    "idle_two": "idle_sync, where every rank encodes what it reads",
    "mixcv": "how much samples per microbatch differ from step to step: deviation over mean",
    "over": "of the microbatches are over the budget",
    "encoder_idle": "of their time encoder ranks wait for each other",
    "max_delay_seen": "steps that a sample waited at most",
    "p999_delay": "steps that 999 of 1,000 samples waited at most",
    "mean_delay": "steps that a sample waited on average",
    "flow_gap": "by so much a step is longer than the work of its busiest rank, with an encoder that trains",
    "samples_to_split": "samples that cost more than a mean microbatch by themselves",
    "microseconds_per_sample": "that packing took",
    "samples": "that were packed",
    "samples_dropped": "over the budget",
    "seed": "for the record",
    "compile_seconds": "before packing began",
}
"""Figure -> what it says, after the number."""

_PERCENT = {name for name in _MEANINGS if name.startswith("idle_")} | {"pad", "over", "encoder_idle", "flow_gap"}

_AS_NEEDED = "as many microbatches are made as the samples need"
_AT_ONCE = "no sample waits for another step"
_NOT_OF_SAMPLES = {
    "microbatches": _AS_NEEDED,
    "balance_group": _AS_NEEDED,
    "max_delay": _AT_ONCE,
    "lookahead": _AT_ONCE,
}
"""Options that mean nothing where a step is a number of samples, and why."""


class _Media(NamedTuple):
    """The media items of a file of lengths.

    Attributes:
        start: ``[samples + 1]`` those of sample ``i`` are ``start[i]:start[i + 1]``.
        cost: ``[media items]`` what encoding each costs.
        content: ``[media items]`` equal numbers for equal ones, of which a step encodes one; None: no two are.
    """

    start: IntArray
    cost: FloatArray
    content: IntArray | None


def run() -> None:
    """Pack a file of lengths, and print how good the plan is.

    Raises:
        PackingError: an option cannot be used, or samples cannot be packed.
        UsageError: the file cannot be read.
    """
    options = _parser().parse_args(sys.argv[2:])
    _keep_apart(options)
    of_steps = _of_steps(options)
    tokens, media = _read(options.lengths)
    tokens, media, kept = _fit(tokens, media, options)
    media_start, media_cost = media.start, media.cost
    settings = OfflineSettings(
        token_budget=options.token_budget,
        ranks=options.ranks,
        sync_every=options.sync_every,
        cost=_cost(options),
        encoder_ranks=options.encoder_ranks,
        **of_steps,
    )
    announce_compilation(lambda sentence: print(sentence, file=sys.stderr))
    compile_at_once()
    compiling = warm_up(settings)
    plan = pack_offline(tokens, media_start, media_cost, settings, media.content)
    _write(plan, options.out, options.media_out, kept, media_start, settings)
    figures = evaluate(plan, tokens, media_start, media_cost, settings)
    figures |= {"samples": len(tokens), "samples_dropped": options.samples - len(tokens), "seed": options.seed}
    figures["compile_seconds"] = compiling
    if options.plot is not None:
        _plot(plan, settings.cost.of_each(tokens), settings, options.plot)
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<24}{_in_words(name, value):<12}{_MEANINGS[name]}" for name, value in figures.items()))
        if not plan.steps:
            print(f"{len(tokens):,} samples fill no step, so the plan is empty; make steps smaller.")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("pack")
    parser.epilog = "Costs are in any one unit, seconds for instance."
    add = parser.add_argument
    add(
        "lengths",
        type=Path,
        metavar="LENGTHS.parquet",
        help="columns tokens and, optional, lists media_cost, media_content",
    )
    add("--out", type=Path, required=True, metavar="PLAN.parquet", help="the plan: sample, step, rank, microbatch …")
    add("--media-out", type=Path, metavar="MEDIA.parquet", help="who encodes which media item in which batch")
    add("--token-budget", type=int, required=True, help="the most tokens of a microbatch")
    add("--ranks", type=int, required=True, help="backbone ranks")
    add("--microbatches", type=int, help="of each rank and step")
    add("--global-batch-size", type=int, help="samples of a step, in place of --microbatches")
    add(
        "--sync-every",
        choices=SYNC_EVERY,
        default="microbatch",
        help="how often ranks wait for each other (default: %(default)s)",
    )
    add("--cost-linear", type=float, default=1.0, help="cost of a token (default: %(default)s)")
    pair = "cost of a token pair in a sequence (default: %(default).3g)"
    add("--cost-quadratic", type=float, default=1 / 24_576, help=pair)
    add("--encoder-ranks", type=int, default=1, help="ranks that encode (default: %(default)s)")
    add("--balance-group", type=int, help="microbatches made alike in cost, of all ranks (default: about a quarter)")
    delay, ahead = OfflineSettings.max_delay, OfflineSettings.lookahead
    add("--max-delay", type=int, help=f"steps that a sample may wait (default: {delay})")
    add("--lookahead", type=int, help=f"steps drawn ahead at most (default: {ahead})")
    add("--too-long", choices=("error", "drop", "truncate"), default="error", help="samples over the budget")
    add("--seed", type=int, default=0, help="the sampler's, for the record: packing itself draws no random numbers")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--plot", type=Path, metavar="PLOT.png", help="cost per microbatch, in sampler order and as packed")
    return parser


def _keep_apart(options: argparse.Namespace) -> None:
    """Files that are written may be neither what is read nor each other."""
    written = {"--out": options.out, "--media-out": options.media_out, "--plot": options.plot}
    seen = {options.lengths.resolve(): "LENGTHS.parquet"}
    for name, path in written.items():
        if path is None:
            continue
        if (other := seen.setdefault(path.resolve(), name)) != name:
            raise PackingError(f"{name} would write over {path}, which is {other}; choose another name.")


def _of_steps(options: argparse.Namespace) -> dict[str, int]:
    """The options that say what a step is, as far as they were given."""
    names = ("global_batch_size", *_NOT_OF_SAMPLES)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if not given.keys() & {"microbatches", "global_batch_size"}:
        raise PackingError("Nothing says what a step is; set --microbatches, of each rank, or --global-batch-size.")
    for name, reason in _NOT_OF_SAMPLES.items():
        if name in given and "global_batch_size" in given:
            option = f"--{name.replace('_', '-')}"
            raise PackingError(
                f"{option}={given[name]} was given with --global-batch-size={given['global_batch_size']}, where "
                f"{reason}; leave one of them out."
            )
    return given


def _cost(options: argparse.Namespace) -> CostModel:
    try:
        return CostModel(options.cost_linear, options.cost_quadratic, 0.0)
    except ValueError as error:
        raise PackingError(str(error)) from error


def _read(path: Path) -> tuple[IntArray, _Media]:
    """Tokens, where each sample's media items start, and what each costs."""
    tokens, table = read_lengths(path)
    if "media_cost" not in table.column_names:
        counted = [name for name in table.column_names if name.endswith("_tokens")]
        if counted:
            print(
                f"{path} has a column {counted[0]!r} but none that says what encoding each media item costs "
                "('media_cost'), so media cost nothing here.",
                file=sys.stderr,
            )
        return tokens, _Media(np.zeros(len(tokens) + 1, dtype=np.int64), np.empty(0), None)
    start, cost = _costs_of_media(table["media_cost"].combine_chunks(), path)
    return tokens, _Media(start, cost, media_content(table, "media", start, path))


def _costs_of_media(column: pyarrow.Array, path: Path) -> tuple[IntArray, FloatArray]:
    import pyarrow.compute

    is_list = pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)
    if not is_list or not (
        pyarrow.types.is_floating(column.type.value_type)
        or pyarrow.types.is_integer(column.type.value_type)
        or pyarrow.types.is_null(column.type.value_type)
    ):
        raise PackingError(f"The column 'media_cost' of {path} must hold lists of numbers, but holds {column.type}.")
    counts = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    costs = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), costs


def _fit(tokens: IntArray, media: _Media, options: argparse.Namespace) -> tuple[IntArray, _Media, IntArray]:
    """Samples over the budget dropped or truncated, as asked; and the numbers of those that remain."""
    options.samples = len(tokens)
    everyone = np.arange(len(tokens))
    if options.too_long == "truncate":
        return np.minimum(tokens, options.token_budget), media, everyone
    if options.too_long == "error":
        return tokens, media, everyone
    kept = np.flatnonzero(tokens <= options.token_budget)
    counts = np.diff(media.start)
    stays = np.repeat(tokens <= options.token_budget, counts)
    content = None if media.content is None else media.content[stays]
    return tokens[kept], _Media(np.concatenate([[0], np.cumsum(counts[kept])]), media.cost[stays], content), kept


def _write(
    plan: OfflinePlan,
    out: Path,
    media_out: Path | None,
    kept: IntArray,
    media_start: IntArray,
    settings: OfflineSettings,
) -> None:
    columns: dict[str, list[IntArray]] = {n: [] for n in ("sample", "step", "rank", "microbatch", "position")}
    for number, step in enumerate(plan.steps):
        order = np.lexsort((step.samples, step.bin_of // settings.ranks, step.bin_of % settings.ranks))
        bins = step.bin_of[order]
        _append(columns, kept[step.samples[order]], number, bins % settings.ranks, bins // settings.ranks, bins)
    _save(columns, out)
    if media_out is None:
        return
    owner = np.repeat(np.arange(len(media_start) - 1), np.diff(media_start))
    names = ("sample", "media", "step", "encoder_rank", "encoder_batch", "position")
    found: dict[str, list[IntArray]] = {name: [] for name in names}
    for number, step in enumerate(plan.steps):
        for rank, batches in enumerate(step.encoder_batches):
            for batch, media in enumerate(batches):
                same = np.ones(len(media), dtype=np.int64)
                batches_of = [number * same, rank * same, batch * same, np.arange(len(media))]
                values = [kept[owner[media]], media - media_start[owner[media]], *batches_of]
                for name, value in zip(names, values, strict=True):
                    found[name].append(value)
    _save(found, media_out)


def _append(
    columns: dict[str, list[IntArray]], samples: IntArray, step: int, rank: IntArray, number: IntArray, bins: IntArray
) -> None:
    first = np.flatnonzero(np.append(True, np.diff(bins) != 0)) if len(bins) else np.empty(0, dtype=np.int64)
    position = np.arange(len(bins)) - np.repeat(first, np.diff(np.append(first, len(bins))))
    for name, value in zip(columns, (samples, np.full(len(samples), step), rank, number, position), strict=True):
        columns[name].append(value)


def _save(columns: dict[str, list[IntArray]], path: Path) -> None:
    import pyarrow.parquet

    empty = np.empty(0, dtype=np.int64)
    table = pyarrow.table({name: np.concatenate([empty, *parts]) for name, parts in columns.items()})
    try:
        pyarrow.parquet.write_table(table, path)
    except OSError as error:
        raise PackingError(f"{path} cannot be written: {error}") from error


def _plot(plan: OfflinePlan, costs: FloatArray, settings: OfflineSettings, path: Path) -> None:
    from flowtrain_lightning.cli.plots import draw_packing

    draw_packing(plan, costs, settings, path)


def _in_words(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    tidy = round(value, 9) + 0.0  # what rounding errors leave of nothing is nothing, and not below it
    return f"{tidy:.4g} %" if name in _PERCENT else f"{tidy:.4g}"
