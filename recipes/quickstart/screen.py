"""The last screen of the quickstart: what was proved, by which figures, and where the pictures are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recipes.quickstart.pictures import Answer, Curve

AVERAGED = 10  # steps of the first and the last training loss
WIDTH = 100

KINDS = ("compute", "stall", "communication")


@dataclass(frozen=True)
class PlacementTime:
    """Where the time of one placement's lanes went.

    Attributes:
        placement: which one.
        shares: role -> kind of time -> its share, from 0 to 1.
    """

    placement: str
    shares: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Findings:
    """What was found out about a run.

    Attributes:
        weights: of the model.
        seconds: that everything took until the end of training; None is not said.
        training: its loss.
        validation: its loss.
        losses: of the final model, for ``train`` and ``val`` with their own images, and ``_swapped``.
        moved: how far the encoder's weights moved, relative to their norm.
        shown: some unseen drawings.
        named: unseen drawings of which the first keyword was right.
        drawings: unseen drawings in all.
        placements: the one that the run chose, and the other one.
        repeated: losses of the first steps in both.
    """

    weights: int
    seconds: float | None
    training: Curve
    validation: Curve
    losses: Mapping[str, float]
    moved: float
    shown: list[Answer]
    named: int
    drawings: int
    placements: list[PlacementTime]
    repeated: list[tuple[float, float]]


def last_screen(found: Findings, run: Path) -> str:
    """All of it as text.

    Args:
        found: about the run.
        run: the folder where its files are.
    """
    rule = "─" * WIDTH
    took = "" if found.seconds is None else f" in {found.seconds / 60:.1f} min"
    head = f"A vision-language model of {found.weights / 1e6:.1f} million weights, trained on two processes{took}"
    return "\n".join([rule, head, "", *_proofs(found), "", *_answers(found), "", *_time(found), "", *_files(run), rule])


def _proofs(found: Findings) -> list[str]:
    losses = [loss for _, loss in found.training]
    first, last = (sum(part) / len(part) for part in (losses[:AVERAGED], losses[-AVERAGED:]))
    own, other = found.losses["val"], found.losses["val_swapped"]
    seen, swapped = found.losses["train"], found.losses["train_swapped"]
    chosen, compared = (each.placement for each in found.placements)
    difference = max((abs(one - again) / one for one, again in found.repeated), default=0.0)
    return [
        f"  it learns             loss per target token {first:.3f} → {last:.3f}, on unseen drawings "
        f"{found.validation[-1][1]:.3f}",
        f"  it looks              with images of other drawings {seen:.3f} → {swapped:.3f} "
        f"({swapped / seen - 1:+.0%}), unseen {own:.3f} → {other:.3f} ({other / own - 1:+.0%})",
        f"  its encoder trains    gradients came back to it: its weights moved by {found.moved:.0%} of their norm"
        if found.moved
        else "  its encoder is frozen  its weights are those with which it began",
        f"  it names              a true first keyword for {found.named} of {found.drawings} unseen drawings",
        f"  any layout is exact   first {len(found.repeated)} losses, {chosen} and {compared}: equal to "
        f"{difference:.0e}",
    ]


def _answers(found: Findings) -> list[str]:
    column = max([len(answer.true) for answer in found.shown], default=0) + 3
    return [
        f"  {'an unseen drawing is':<{column}}  the model says",
        *(f"    {answer.true:<{column}}{answer.generated}" for answer in found.shown),
    ]


def _time(found: Findings) -> list[str]:
    lines = [f"  {'where time went':<40}" + "".join(f"{kind:>15}" for kind in KINDS)]
    for each, name in zip(found.placements, ("chosen", "for comparison"), strict=True):
        for role, shares in sorted(each.shares.items()):
            label = f"{each.placement} ({name}), {role}"
            lines.append(f"    {label:<38}" + "".join(f"{shares.get(kind, 0.0):>15.0%}" for kind in KINDS))
    return lines


def _files(run: Path) -> list[str]:
    files = {
        "step.png": "one step of both placements: what each lane did when",
        "drawings.png": "the drawings above, and what the model says",
        "loss.png": "both losses over the steps",
        "checkpoints/last.ckpt": "go on from here, or `flowtrain export` it",
    }
    return [f"  {run / name!s:<44}{meaning}" for name, meaning in files.items()]
