"""Profiles a data set: lengths of as many samples as it takes to know how to split the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator import Workload
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.data.steps.stream_steps import StreamSteps
from flowtrain_lightning.packing import IntArray, SampleSizes
from flowtrain_lightning.packing.media_groups import MediaGroups
from flowtrain_lightning.packing.role_graph import RoleGraph
from flowtrain_lightning.packing.shared_media import encoded_parts
from flowtrain_lightning.packing.step_members import TWO_ROLES
from flowtrain_lightning.placement.profile import Profile

_TRIALS = math.ceil(math.log(0.05) / math.log(1 - 0.05))
"""59: were the choice to differ in 5 % of all draws, so many draws would miss that in 5 % of all tests."""
_FIRST = 256
"""Samples of the first test; fewer would say little about how lengths are distributed."""
_MOST = 100_000
"""Samples among which is drawn: what sizes are read of."""


Decide = Callable[[IntArray], Hashable]
"""A decision that depends on samples: indices of the drawn ones -> the decision."""


@dataclass(frozen=True)
class DataProfile:
    """Samples drawn from the training data, and what they say.

    Attributes:
        sizes: of the drawn samples.
        available: samples of the data.
        stable: other draws of so many samples led to the same split. Where the data are too few for that test, all of
            them are here.
        devices: that were to be split.
        encoder_devices: of these, how many the drawn samples want for the encoder.
        encoder_share: of the encoder in all work, from 0 to 1.
        workload: what the samples are to the planner.
    """

    sizes: SampleSizes
    available: int
    stable: bool
    devices: int
    encoder_devices: int
    encoder_share: float
    workload: Workload


def profile_data(data: FlowDataModule, profile: Profile, devices: int = 8, graph: RoleGraph = TWO_ROLES) -> DataProfile:
    """Draw training samples until the split of devices between encoder and backbone no longer depends on the draw.

    After Entrain (arXiv 2605.27918): the work of encoder and backbone varies much between samples, but a few hundred
    tell their ratio.

    Args:
        data: its training data are used.
        profile: says what each sample costs.
        devices: that are to be split; the more, the more samples it takes.
        graph: the roles of the module.

    Raises:
        DataError: there are no training data, they cannot be read, or they are a stream.
    """
    steps = data.train_dataloader().steps
    if isinstance(steps.sampling, StreamSteps):
        raise DataError(
            "The training data are a stream, of which no samples can be drawn to measure the module with. Set "
            "FlowTrainStrategy(profile='off'), or name the ranks of its roles."
        )
    source, together = steps.samples.source, data.group_by is not None
    draw = np.random.default_rng(data.seed)
    pool = draw.permutation(len(source))
    if together:
        pool = MediaGroups.of_sizes(source.sizes(np.sort(pool))).ordered(pool, 1)  # whole groups are drawn
    sizes = steps.sizes(pool[:_MOST])
    of_step = steps.sampling.samples_per_step
    parts = encoded_parts(sizes.alike, len(sizes.media_patches), len(sizes), of_step, together=together)
    encoder, backbone = sample_costs(sizes, profile, data.token_budget, parts, graph)

    def split(drawn: IntArray) -> int:
        return encoder_devices(float(encoder[drawn].sum()), float(backbone[drawn].sum()), devices)

    count, stable = stable_count(len(sizes), split, draw)
    drawn = np.arange(count)
    share = float(encoder[drawn].sum() / (encoder[drawn].sum() + backbone[drawn].sum()))
    chosen = sizes.select(drawn)
    workload = _workload(chosen, data, of_step)
    return DataProfile(chosen, len(source), stable, devices, split(drawn), share, workload)


def sample_costs(
    sizes: SampleSizes,
    profile: Profile,
    token_budget: int,
    parts: FloatArray | float = 1.0,
    graph: RoleGraph = TWO_ROLES,
) -> tuple[FloatArray, FloatArray]:
    """``[samples]`` seconds of all that encode or generate, and of the trunk, for each sample.

    What a forward itself costs is shared by all samples of a full microbatch, whose media are one encoder batch.

    Args:
        sizes: of the samples.
        profile: says what they cost.
        token_budget: of a microbatch.
        parts: ``[media items]`` the part of each that is encoded, on average.
        graph: the roles of the module.
    """
    forwards, trunk = sizes.tokens / token_budget, profile.cost
    of_media, constant = np.zeros(len(sizes.media_patches)), 0.0
    for modality in sizes.modalities if len(sizes.media_patches) else ():
        half, media = profile.roles[graph.taker_of(modality)], sizes.of_modality(modality)
        of_media[media] = half.cost.of_each(sizes.media_patches[media])
        constant += half.cost.constant
    encoding = np.bincount(sizes.media_sample, parts * of_media, minlength=len(sizes))
    return encoding + constant * forwards, trunk.of_each(sizes.tokens) + trunk.constant * forwards


def encoder_devices(encoder: float, backbone: float, devices: int) -> int:
    """Counts the encoder's devices with which the slower half is as fast as can be; at least one, if it has work."""
    if encoder == 0 or devices < 2:
        return 0
    counts = np.arange(1, devices)
    return int(counts[np.argmin(np.maximum(encoder / counts, backbone / (devices - counts)))])


def stable_count(available: int, choose: Decide, draw: np.random.Generator) -> tuple[int, bool]:
    """Counts the samples that make a choice stable: 59 draws of as many all lead to the same one.

    Args:
        available: samples that can be drawn.
        choose: the choice.
        draw: decides about samples.

    Returns:
        The number, and whether it makes the choice stable: False where all samples are too few for the test.
    """
    count = _FIRST
    while 2 * count <= available:
        choices = {choose(draw.choice(available, count, replace=False)) for _ in range(_TRIALS)}
        if len(choices) == 1:
            return count, True
        count *= 2
    return available, False


def _workload(sizes: SampleSizes, data: FlowDataModule, samples_per_step: int) -> Workload:
    """The lengths, with batches as the packer makes them: an encoder batch is what one microbatch reads."""
    patches_per_token = sizes.media_patches.sum() / sizes.tokens.sum()
    content, of_modality = sizes.alike, {modality: sizes.of_modality(modality) for modality in sizes.modalities}
    return Workload(
        sizes.tokens,
        {modality: sizes.media_patches[own] for modality, own in of_modality.items()},
        global_batch_size=samples_per_step,
        token_budget=data.token_budget,
        encoder_budget=min(data.encoder_budget, max(1, round(data.token_budget * patches_per_token))),
        content={} if content is None else {modality: content[own] for modality, own in of_modality.items()},
        together=data.group_by is not None and content is not None,
    )
