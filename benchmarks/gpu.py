"""Tokens per second, MFU and memory of one vision-language model, trained in the five ways that a user has.

python -m benchmarks.gpu --model qwen2-vl-2b      on a GPU, separate roles on two where there are: some minutes a round
python -m benchmarks.gpu --minutes 9 --rounds 1   what there is time for; the results are written after every run
python -m benchmarks.gpu --devices 8              each way on so many GPUs
python -m benchmarks.gpu --tiny                   on a CPU, to see that it runs

The weights are random, at the model's published size, and every way trains on the same samples in the same steps, in
bfloat16 with fused AdamW. The ways take turns, each run in processes of its own; what is told are medians over the
rounds. Tokens are those of the samples, padding not counted, and FLOPs what training must compute, nothing of it twice.
Stalls are the shares of a lane's time in which its GPU had nothing to do. Besides, attention kernels, the loss and the
pool, in one process and between two, are measured by themselves, and it is counted how often, and told where, the host
waits for the GPU in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from benchmarks import gpu_parts, gpu_variants
from benchmarks.emulated_records import write_records
from benchmarks.gpu_model import MODELS, TINY, Layers, images_for
from benchmarks.gpu_variants import VARIANTS, Run
from benchmarks.launch import launch, machine
from benchmarks.modules import ROOT, Work, training_records
from benchmarks.pool_report import device_table, passing_table
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.allocator import ROLES

LAYERS = {"compiled": "compiled", "liger": "with Liger's kernels"}
"""How layers run, in words, where they do not as they are."""

DEADLINE = 900.0
"""Seconds for one run."""

Rounds = dict[str, list[dict[str, float]]]
"""Variant -> figures of each round; none of a variant that did not run."""

PARTS: dict[str, Callable[[Run], None]] = {
    "kernels": gpu_parts.kernels,
    "pool": gpu_parts.pool,
    "passing": gpu_parts.passing,
    "waits": gpu_variants.train,
}
"""What is measured once -> by what."""


@dataclass
class Findings:
    """What was found so far; written after every run, so that nothing is lost where a later one hangs.

    Attributes:
        machine: where.
        told: what the measured steps hold, and what device this is.
        rounds: figures of the variants.
        parts: figures of what is measured once.
        failures: what did not run -> why.
    """

    machine: dict[str, str]
    told: dict[str, Any] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def text(self, options: argparse.Namespace) -> str:
        """All of it, for people."""
        texts = [machine_line(self.machine), describe(options, self.told)]
        if self.rounds:
            texts.append(variants_table(self.rounds))
        texts += [PART_TEXTS[name](found) for name, found in self.parts.items()]
        texts += [f"Did not run: {what}: {reason}" for what, reason in self.failures.items()]
        return "\n\n".join(texts) + "\n"

    def write(self, options: argparse.Namespace) -> str:
        """Writes the results; returns the text."""
        results = {
            "machine": self.machine,
            "options": {name: str(value) for name, value in vars(options).items()},
            "workload": self.told,
            "runs": self.rounds,
            "parts": self.parts,
            "failures": self.failures,
        }
        text = self.text(options)
        write_results(options.out, f"gpu-{options.model}", results, text)
        return text


def main() -> None:
    """Measure, print, and write the results."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        findings = measure(options, Path(temporary))
    print(f"\n{findings.write(options)}\nWritten to {options.out}.")
    if findings.failures:
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2-vl-2b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one round; the figures mean nothing")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--devices", type=int, default=1, help="on which each variant trains; separate roles share one")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch, or of a padded batch")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no run begins any more")
    parser.add_argument("--no-parts", action="store_true", help="variants alone, no kernels, pool and waits")
    parser.add_argument("--recompute", action="store_true", help="activations a second time, where memory is short")
    parser.add_argument("--layers", choices=get_args(Layers), default="eager", help="of all ways but the padded one")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.rounds, options.steps, options.batch, options.budget = TINY, 1, 2, 8, 1024
    return options


def measure(options: argparse.Namespace, temporary: Path) -> Findings:
    """All runs, as far as there is time for them: first one round, then what is measured once, then other rounds."""
    findings, on_gpu = Findings(machine()), not options.cpu and Path("/dev/nvidiactl").exists()
    until = time.monotonic() + 60 * options.minutes
    work = Work(
        records_for(options, temporary),
        temporary / "index",
        options.batch,
        options.budget,
        images=images_for(options.model),
        num_workers=0 if options.tiny else max(1, min(6, (os.cpu_count() or 2) // 2)),
    )
    work.data().setup("fit")  # writes the index, once for all runs

    def run(target: Callable[[Run], None], name: str, one: Run) -> list[dict[str, Any]]:
        folder = temporary / name
        folder.mkdir()
        ranks = one.ranks if target is gpu_variants.train else 2 if target is gpu_parts.passing else 1
        launch(target, replace(one, folder=folder), ranks, folder, min(DEADLINE, max(until - time.monotonic(), 60.0)))
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    warmup = 1 if options.tiny else 3
    one = Run("", options.model, options.recompute, work, 1, warmup, options.steps, on_gpu, temporary, options.devices)
    one = replace(one, layers=options.layers)
    (told,) = run(gpu_variants.describe, "describe", one)
    if warmup + options.steps > told["steps"]:
        raise SystemExit(f"The data have {told['steps']} steps of {options.batch} samples; give fewer --steps.")
    if options.batch % options.devices:
        raise SystemExit(
            f"--batch {options.batch} cannot be dealt evenly to {options.devices} devices; give a multiple."
        )
    told["padded_samples"] = padded_samples(options.batch // options.devices, options.budget, told["longest"])
    one = replace(one, padded_samples=told["padded_samples"], shared=on_gpu and told["devices"] < 2)
    findings.told = told

    def attempt(what: str, part: str | None, number: int = 0) -> None:
        """One run, or none where it failed before or no time is left."""
        if what in findings.failures:
            return
        if time.monotonic() > until:
            print(f"no time is left for {what}", flush=True)
            return
        target = gpu_variants.train if part is None else PARTS[part]
        try:
            ranks = run(target, f"{what}-{number}", replace(one, variant=what))
        except (RuntimeError, OSError) as error:
            findings.failures[what] = str(error)
            print(f"{what}: {error}", flush=True)
        else:
            if part is None:
                found = figures(told, ranks, replace(one, variant=what).devices)
                findings.rounds.setdefault(what, []).append(found)
                print(f"round {number + 1}, {what}: {found['tokens_per_second']:.0f} tokens/s", flush=True)
            else:
                findings.parts[part] = ranks[0]
                print(PART_TEXTS[part](ranks[0]), flush=True)
        findings.write(options)

    for number in range(options.rounds):
        for variant in (each for each in VARIANTS if each in options.variants):
            attempt(variant, None, number)
        for part in PARTS if number == 0 and not options.no_parts else ():
            attempt(part, part)
    return findings


def records_for(options: argparse.Namespace, temporary: Path) -> Path:
    """Photographs where they are, else pictures of one colour in sizes of photographs; drawings for the tiny model."""
    given = training_records()
    if options.tiny or "mini_vl" in given.parts:
        return given
    count = options.batch * (options.steps + 8)
    sides = np.random.default_rng(0).integers(8, 25, (2 * count, 2))  # 224 to 672 pixels, of at most two a record
    # Pictures that several samples have are encoded once, but by the plain loop.
    write_records(temporary / "records", count, sides=sides, words=(5, 400), row_pixels=28, repeated=False)
    return temporary / "records/train.jsonl"


def padded_samples(batch: int, budget: int, longest: int) -> int:
    """Samples of a padded batch: as many of the longest as the budget holds, so that ``batch`` has whole ones."""
    return max(count for count in range(1, batch + 1) if batch % count == 0 and count * longest <= max(budget, longest))


def figures(told: dict[str, Any], ranks: list[dict[str, Any]], devices: int) -> dict[str, float]:
    """One run: tokens a second in all and of a device, MFU where the peak is known, most bytes of a device, stalls."""
    seconds = max(rank["seconds"] for rank in ranks)
    together = len(ranks) // devices
    found = {
        "tokens_per_second": told["tokens"] / seconds,
        "device_tokens_per_second": told["tokens"] / seconds / devices,
        "memory": max(sum(rank["memory"] for rank in ranks[n : n + together]) for n in range(0, len(ranks), together)),
    }
    if told["peak"] is not None:
        found["mfu"] = told["flops"] / (seconds * told["peak"] * devices)
    for lane in ROLES:
        spent = [rank for rank in ranks if f"{lane} compute" in rank["lanes"]]
        if spent:
            shares = [rank["lanes"].get(f"{lane} stall", 0.0) / rank["seconds"] for rank in spent]
            found[f"{lane}_stall"] = sum(shares) / len(shares)
    return found


def describe(options: argparse.Namespace, told: dict[str, Any]) -> str:
    """What was trained on what, in two sentences."""
    recompute = "computed again in the backward" if options.recompute else "kept"
    layers = "" if options.layers == "eager" else f"; layers {LAYERS[options.layers]}, but for padded batches"
    return (
        f"{options.model} on {told['device']}{'' if told['cuda'] is None else ', CUDA ' + told['cuda']}; "
        f"{options.steps} steps of {options.batch} samples, {told['tokens'] / options.steps:.0f} tokens and "
        f"{told['flops'] / options.steps / 1e12:.3g} TFLOP each; microbatches of {options.budget} tokens, padded "
        f"batches of {told['padded_samples']} samples; activations {recompute}{layers}. Packed attention by "
        f"{told['attention']}. Medians of {options.rounds} rounds."
    )


def variants_table(rounds: Rounds) -> str:
    """A row for each variant; ratios are of tokens per second and device, each within a round."""
    rows = []
    for variant, found in rounds.items():
        typical = {name: median(one[name] for one in found) for name in found[0]}
        shares = ("mfu", *(f"{lane}_stall" for lane in ROLES))
        rows.append(
            [
                VARIANTS[variant],
                str(round(typical["tokens_per_second"] / typical["device_tokens_per_second"])),
                f"{typical['tokens_per_second']:.0f}",
                *(f"{typical[name]:.1%}" if name in typical else "-" for name in shares),
                f"{typical['memory'] / 2**30:.1f}",
                *(_ratio(rounds, variant, other) for other in ("padded", "loop")),
            ]
        )
    stalls = [f"{lane} stalls" for lane in ROLES]
    return table(["", "devices", "tokens/s", "MFU", *stalls, "peak GiB", "x padded", "x plain loop"], rows)


def _kernels_text(found: dict[str, Any]) -> str:
    head = ["attention of a microbatch, forward and backward", "ms", "TFLOP/s"]
    rows = [[name, f"{one['milliseconds']:.2f}", f"{one['teraflops']:.1f}"] for name, one in found["attention"].items()]
    loss = found["loss"]
    return table(head, rows) + (
        f"\nThe loss of {loss['targets']} targets, forward and backward: {loss['milliseconds']:.1f} ms, "
        f"{loss['GiB']:.2f} GiB at most."
    )


def _pool_text(found: dict[str, Any]) -> str:
    return device_table(found["sizes"]) if found["sizes"] else "No GPU whose memory the pool could use."


def _passing_text(found: dict[str, Any]) -> str:
    return passing_table(found["sizes"])


def _waits_text(found: dict[str, Any]) -> str:
    places = "; ".join(f"{place} ({count})" for place, count in found["places"].items())
    return f"The host waits for the GPU {found['waits']:.1f} times in a step{': ' if places else ''}{places}."


PART_TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "kernels": _kernels_text,
    "pool": _pool_text,
    "passing": _passing_text,
    "waits": _waits_text,
}
"""Part -> its figures for people."""


def _ratio(rounds: Rounds, variant: str, other: str) -> str:
    if other not in rounds:
        return "-"
    pairs = zip(rounds[variant], rounds[other], strict=False)  # one of them may have failed in a later round
    return f"{median(a['device_tokens_per_second'] / b['device_tokens_per_second'] for a, b in pairs):.2f}"


if __name__ == "__main__":
    main()
