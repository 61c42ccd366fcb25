"""Tokens per second, MFU and memory of one vision-language model, trained in the five ways that a user has.

python -m benchmarks.gpu --model qwen2-vl-2b      on a GPU, separate roles on two where there are: some minutes a round
python -m benchmarks.gpu --devices 8              each way on so many GPUs
python -m benchmarks.gpu --tiny                   on a CPU, to see that it runs

The weights are random, at the model's published size, and every way trains on the same samples in the same steps, in
bfloat16 with fused AdamW. The ways take turns, each run in processes of its own; what is told are medians over the
rounds. Tokens are those of the samples, padding not counted, and FLOPs what training must compute, nothing of it twice.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gpu_variants
from benchmarks.gpu_model import MODELS, TINY, images_for
from benchmarks.gpu_variants import VARIANTS, Run
from benchmarks.launch import launch, machine
from benchmarks.modules import ROOT, Work, training_records
from benchmarks.report import machine_line, table, write_results

DEADLINE = 900.0
"""Seconds for one run."""

Rounds = dict[str, list[dict[str, float]]]
"""Variant -> figures of each round; none of a variant that did not run."""


def main() -> None:
    """Measure, print, and write the results."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        where, told, rounds, failures = measure(options, Path(temporary))
    text = f"{machine_line(where)}\n\n{describe(options, told)}\n\n{variants_table(told, rounds)}"
    text += "".join(f"\n{VARIANTS[variant]} did not run: {reason}\n" for variant, reason in failures.items())
    results = {"machine": where, "options": {k: str(v) for k, v in vars(options).items()}, "workload": told}
    write_results(options.out, f"gpu-{options.model}", {**results, "runs": rounds, "failures": failures}, text)
    print(f"\n{text}\nWritten to {options.out}.")
    if failures:
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2-vl-2b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one round; the figures mean nothing")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--devices", type=int, default=1, help="on which each variant trains; separate roles need two")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch, or of a padded batch")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations for the backward")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.rounds, options.steps, options.batch, options.budget = TINY, 1, 2, 8, 1024
    return options


def measure(
    options: argparse.Namespace, temporary: Path
) -> tuple[dict[str, str], dict[str, Any], Rounds, dict[str, str]]:
    """All runs: the machine, what the measured steps hold, figures of each round, and why a variant did not run."""
    where, on_gpu = machine(), not options.cpu and Path("/dev/nvidiactl").exists()
    work = Work(
        training_records(),
        temporary / "index",
        options.batch,
        options.budget,
        images=images_for(options.model),
        num_workers=0 if options.tiny else max(1, min(6, (os.cpu_count() or 2) // 2)),
    )
    work.data().setup("fit")  # writes the index, once for all runs
    warmup = 1 if options.tiny else 3

    def run(variant: str, name: str, padded_samples: int = 1) -> list[dict[str, Any]]:
        folder = temporary / name
        folder.mkdir()
        recompute = not options.no_recompute
        one = Run(
            variant,
            options.model,
            recompute,
            work,
            padded_samples,
            warmup,
            options.steps,
            on_gpu,
            folder,
            options.devices,
        )
        target, ranks = (gpu_variants.train, one.devices) if variant in VARIANTS else (gpu_variants.describe, 1)
        launch(target, one, ranks, folder, DEADLINE)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    (told,) = run("describe", "describe")
    if warmup + options.steps > told["steps"]:
        raise SystemExit(f"The data have {told['steps']} steps of {options.batch} samples; give fewer --steps.")
    if options.batch % options.devices:
        raise SystemExit(
            f"--batch {options.batch} cannot be dealt evenly to {options.devices} devices; give a multiple."
        )
    told["padded_samples"] = padded_samples(options.batch // options.devices, options.budget, told["longest"])
    chosen = [each for each in VARIANTS if each in options.variants]
    if on_gpu and told["devices"] < 2:
        chosen = [each for each in chosen if each != "separate"]
    rounds: Rounds = {variant: [] for variant in chosen}
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        for variant in chosen:
            if variant in failures:
                continue
            try:
                ranks = run(variant, f"{variant}-{number}", told["padded_samples"])
            except RuntimeError as error:
                failures[variant] = str(error)
                print(f"round {number + 1}, {variant}: {error}", flush=True)
                continue
            rounds[variant].append(figures(told, ranks))
            print(f"round {number + 1}, {variant}: {rounds[variant][-1]['tokens_per_second']:.0f} tokens/s", flush=True)
    return where, told, {variant: found for variant, found in rounds.items() if found}, failures


def padded_samples(batch: int, budget: int, longest: int) -> int:
    """Samples of a padded batch: as many of the longest as the budget holds, so that ``batch`` has whole ones."""
    return max(count for count in range(1, batch + 1) if batch % count == 0 and count * longest <= max(budget, longest))


def figures(told: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """One run: tokens a second in all and of a device, MFU where the peak is known, and the most bytes of a device."""
    seconds = max(rank["seconds"] for rank in ranks)
    found = {
        "tokens_per_second": told["tokens"] / seconds,
        "device_tokens_per_second": told["tokens"] / seconds / len(ranks),
        "memory": max(rank["memory"] for rank in ranks),
    }
    if told["peak"] is not None:
        found["mfu"] = told["flops"] / (seconds * told["peak"] * len(ranks))
    return found


def describe(options: argparse.Namespace, told: dict[str, Any]) -> str:
    """What was trained on what, in two sentences."""
    recompute = "kept" if options.no_recompute else "computed again in the backward"
    return (
        f"{options.model} on {told['device']}{'' if told['cuda'] is None else ', CUDA ' + told['cuda']}; "
        f"{options.steps} steps of {options.batch} samples, {told['tokens'] / options.steps:.0f} tokens and "
        f"{told['flops'] / options.steps / 1e12:.3g} TFLOP each; microbatches of {options.budget} tokens, padded "
        f"batches of {told['padded_samples']} samples; activations {recompute}. Packed attention by "
        f"{told['attention']}. Medians of {options.rounds} rounds."
    )


def variants_table(told: dict[str, Any], rounds: Rounds) -> str:
    """A row for each variant; ratios are of tokens per second and device, each within a round."""
    rows = []
    for variant, found in rounds.items():
        typical = {name: median(one[name] for one in found) for name in found[0]}
        rows.append(
            [
                VARIANTS[variant],
                str(round(typical["tokens_per_second"] / typical["device_tokens_per_second"])),
                f"{typical['tokens_per_second']:.0f}",
                f"{typical['mfu']:.1%}" if "mfu" in typical else "-",
                f"{typical['memory'] / 2**30:.1f}",
                *(_ratio(rounds, variant, other) for other in ("padded", "loop")),
            ]
        )
    return table(["", "devices", "tokens/s", "MFU", "peak GiB", "x padded", "x plain loop"], rows)


def _ratio(rounds: Rounds, variant: str, other: str) -> str:
    if other not in rounds:
        return "-"
    pairs = zip(rounds[variant], rounds[other], strict=False)  # one of them may have failed in a later round
    return f"{median(a['device_tokens_per_second'] / b['device_tokens_per_second'] for a, b in pairs):.2f}"


if __name__ == "__main__":
    main()
