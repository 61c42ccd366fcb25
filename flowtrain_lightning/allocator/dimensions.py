"""Halves built from their dimensions: a vision encoder, an audio encoder, a language backbone, a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from flowtrain_lightning.allocator.description import Half, ModuleDescription
from flowtrain_lightning.allocator.module_parts import Dense, Embedding, Layers, MixtureOfExperts, Norms, Part
from flowtrain_lightning.allocator.role_layout import PlanningError
from flowtrain_lightning.packing.role_graph import GENERATED, GENERATOR

_SWITCHES = ("crosses", "fused", "gated", "gathered_logits", "perceptrons_only", "pooled", "tied")
"""Dimensions that are true or false."""

_NO_NUMBERS = ("experts", "norms", *_SWITCHES)
"""Dimensions that are no whole numbers."""


def vision_encoder(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    patch: int,
    output: int,
    merge: int = 1,
    frames: int = 1,
    channels: int = 3,
    gated: bool = False,
    window: int | None = None,
    full_layers: int | None = None,
    projector_width: int | None = None,
    levels: int = 1,
    pooled: bool = False,
    unused_layers: int = 0,
    extra_tokens: int = 0,
    positions: int = 0,
    fused: bool = False,
    perceptrons_only: bool = True,
) -> Half:
    """A vision transformer with its projector. Its tokens are patches.

    Args:
        layers: transformer layers.
        hidden: width.
        feed_forward: inner width of the feed-forward network.
        heads: attention heads.
        patch: pixels along a side of a patch.
        output: width of the features, which is the backbone's.
        merge: patches along a side of a square that becomes one row of features.
        frames: pictures that a patch spans in time.
        channels: colours of a picture.
        gated: the feed-forward network has three matrices.
        window: patches of a block in which layers attend; None is the whole picture.
        full_layers: layers that attend to the whole picture nevertheless.
        projector_width: inner width of a projector of two matrices; None is one matrix.
        levels: feature levels with a projector each (Qwen3-VL has four).
        pooled: the patches of a square are averaged before the projector, not put side by side.
        unused_layers: last layers whose result nobody reads.
        extra_tokens: tokens that are added to every picture.
        positions: entries of the table of position embeddings.
        fused: queries, keys and values are one product, and are rotated.
        perceptrons_only: see `Half`.
    """
    whole = 0 if window is None else (full_layers or 0)
    _refuse_more_layers("tower", whole + unused_layers, layers)
    square = merge * merge
    inner = projector_width if projector_width is not None else output
    shape = (hidden, feed_forward, heads, heads, hidden // heads, gated, False)
    parts: list[Part] = [Dense(channels * frames * patch * patch, hidden)]
    parts += [Embedding(positions, hidden)] if positions else []
    parts += [Layers(layers - whole - unused_layers, *shape, window=window, fused=fused)]
    parts += [Layers(whole, *shape, fused=fused)] if whole else []
    parts += [Layers(unused_layers, *shape, unused=True, fused=fused)] if unused_layers else []
    parts += [Dense(hidden if pooled else square * hidden, inner, 1 / square, levels)]
    parts += [Dense(inner, output, 1 / square, levels)] if projector_width is not None else []
    return Half(tuple(parts), extra_tokens, perceptrons_only=perceptrons_only)


def audio_encoder(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    bins: int,
    output: int,
    pool: int = 2,
    positions: int = 0,
    window: int | None = None,
) -> Half:
    """An audio transformer of Whisper's form with its projector. Its tokens are the frames after the convolutions.

    Args:
        layers: transformer layers.
        hidden: width.
        feed_forward: inner width of the feed-forward network.
        heads: attention heads.
        bins: mel bins of a frame. Two convolutions of width 3 read them; the second one halves the frames.
        output: width of the features, which is the backbone's.
        pool: tokens that become one row of features.
        positions: entries of the table of position embeddings, which never trains.
        window: tokens that attend to each other; None is all of a clip.
    """
    parts: list[Part] = [Dense(3 * bins, hidden, 2.0), Dense(3 * hidden, hidden)]
    parts += [Embedding(positions, hidden, trainable=False)] if positions else []
    parts += [Layers(layers, hidden, feed_forward, heads, heads, hidden // heads, window=window)]
    return Half((*parts, Dense(hidden, output, 1 / pool)), perceptrons_only=True)


def backbone(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    vocabulary: int,
    key_value_heads: int | None = None,
    head_size: int | None = None,
    gated: bool = True,
    tied: bool = False,
    window: int | None = None,
    full_layers: int | None = None,
    experts: Mapping[str, Any] | None = None,
    gathered_logits: bool = True,
    queries: int = 0,
    norms: Mapping[str, Any] | None = None,
) -> Half:
    """A decoder with its embedding and head. Its tokens are those of the samples.

    Args:
        layers: transformer layers.
        hidden: width.
        feed_forward: inner width of the feed-forward network.
        heads: attention heads.
        vocabulary: token ids.
        key_value_heads: heads of keys and values; None is ``heads``.
        head_size: width of a head; None is ``hidden / heads``.
        gated: the feed-forward network has three matrices.
        tied: the head is the embedding.
        window: tokens that layers see; None is all.
        full_layers: layers that see all tokens nevertheless.
        experts: fields of `MixtureOfExperts`, for layers with a mixture of experts.
        gathered_logits: see `Dense`.
        queries: learned vectors in the places of a picture that is to be generated; they train in a frozen decoder too.
        norms: fields of `Norms`.
    """
    whole = 0 if window is None else (full_layers or 0)
    shape = (hidden, feed_forward, heads, key_value_heads or heads, head_size or hidden // heads, gated, True)
    mixture = None if experts is None else _mixture(experts)
    _refuse_more_layers("backbone", whole, layers)
    if heads % (key_value_heads or heads):
        raise PlanningError(
            f"The backbone has {heads} attention heads and {key_value_heads} of keys and values, of which each serves "
            "as many; the one must be a multiple of the other."
        )
    parts: list[Part] = [Embedding(vocabulary, hidden)]
    parts += [Embedding(queries, hidden, apart=True)] if queries else []
    every = Layers(layers, *shape, experts=mixture, norms=Norms(**(norms or {})))
    parts += [replace(every, count=layers - whole, window=window)]
    parts += [replace(every, count=whole)] if whole else []
    parts += [Dense(hidden, vocabulary, tied=tied, gathered=gathered_logits)]
    return Half(tuple(parts))


def _mixture(experts: Mapping[str, Any]) -> MixtureOfExperts:
    found = MixtureOfExperts(**experts)
    for name, least in (("count", 1), ("chosen", 1), ("feed_forward", 1), ("shared", 0)):
        if type(value := getattr(found, name)) is not int or value < least:
            raise PlanningError(f"The experts' {name} is {value!r}; it must be a whole number, at least {least}.")
    if found.chosen > found.count:
        raise PlanningError(f"A token chooses {found.chosen} of {found.count} experts; it cannot choose more than all.")
    return found


def _refuse_more_layers(half: str, some: int, layers: int) -> None:
    """Raises where more layers are of a kind than there are."""
    if some > layers:
        raise PlanningError(
            f"The {half} has {layers} layers, but {some} of them are said to attend to everything or to be unused; "
            "lower full_layers or unused_layers."
        )


def generator(
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    heads: int,
    numbers: int,
    condition: int,
    rows: int,
    gated: bool = False,
    crosses: bool = False,
) -> Half:
    """A diffusion transformer behind a backbone. Its tokens are patches of a picture, or of its latents.

    Args:
        layers: transformer layers.
        hidden: width.
        feed_forward: inner width of the feed-forward network.
        heads: attention heads.
        numbers: of a patch, that go in and come out.
        condition: width of the rows that it reads, which is the backbone's.
        rows: that it reads for each picture.
        gated: the feed-forward network has three matrices.
        crosses: rows are attended to in four more matrices of each layer, which are counted as if they were of its
            feed-forward network; else they are tokens of the sequence.
    """
    inner = feed_forward + (4 * hidden // (3 if gated else 2)) * crosses
    parts = (
        Dense(condition, hidden),
        Dense(numbers, hidden),
        Layers(layers, hidden, inner, heads, heads, hidden // heads, gated),
        Dense(hidden, numbers),
    )
    return Half(parts, extra_tokens=0 if crosses else rows)


def describe_dimensions(specification: Mapping[str, Any]) -> ModuleDescription:
    """A module from its dimensions.

    Args:
        specification: ``name``, ``backbone`` (arguments of `backbone`) and ``encoders``: modality -> arguments of
            `vision_encoder`, or of `audio_encoder` for the modality ``audio``. ``output`` may be left out, and of a
            language model ``encoders``. Where something generates, ``generator`` (arguments of `generator`, of which
            ``condition`` may be left out).

    Raises:
        PlanningError: a dimension is missing, unknown or no whole number above 0.
    """
    named = specification.get("encoders") or {}
    if not isinstance(specification.get("backbone"), Mapping) or not isinstance(named, Mapping):
        raise PlanningError(
            "A module's dimensions need 'backbone', and unless it reads text alone 'encoders', with dimensions by name."
        )
    given = specification["backbone"]
    reader = _build(backbone, given, "backbone")
    encoders = {}
    for modality, dimensions in named.items():
        build = audio_encoder if modality == "audio" else vision_encoder
        encoders[modality] = _build(build, dimensions or {}, f"{modality} encoder", output=given["hidden"])
    behind = {}
    if (dimensions := specification.get("generator")) is not None:
        behind[GENERATED] = _build(generator, dimensions, GENERATOR, condition=given["hidden"])
    return ModuleDescription(str(specification.get("name", "module")), encoders, reader, behind)


def _build(build: Callable[..., Half], given: Any, what: str, **usual: int) -> Half:
    known = signature(build).parameters
    if not isinstance(given, Mapping):
        raise PlanningError(f"The {what} is {given!r}; it must be dimensions by name, of {', '.join(known)}.")
    dimensions: dict[str, Any] = {**usual, **given}
    unknown: Sequence[str] = sorted(set(dimensions) - set(known))
    missing = [name for name, one in known.items() if one.default is one.empty and name not in dimensions]
    if unknown or missing:
        wrong = [f"it does not know {', '.join(unknown)}"] if unknown else []
        wrong += [f"it lacks {', '.join(missing)}"] if missing else []
        raise PlanningError(f"The {what} cannot be built: {'; '.join(wrong)}. It takes {', '.join(known)}.")
    for name, value in dimensions.items():
        default = known[name].default
        if name in _SWITCHES and not isinstance(value, bool):
            raise PlanningError(f"The {what}'s {name} is {value!r}; it must be true or false.")
        if name in _NO_NUMBERS or (value is None and default is None):
            continue
        least = 1 if default is known[name].empty or default else 0
        if type(value) is not int or value < least:
            raise PlanningError(f"The {what}'s {name} is {value!r}; it must be a whole number, at least {least}.")
    if not dimensions.get("head_size") and dimensions["hidden"] % dimensions["heads"]:
        hint = " or give head_size" if "head_size" in known else ""
        raise PlanningError(
            f"The {what}'s hidden of {dimensions['hidden']} cannot be divided into {dimensions['heads']} heads; "
            f"change one of them{hint}."
        )
    try:
        return build(**dimensions)
    except (TypeError, ZeroDivisionError) as error:
        raise PlanningError(f"The {what} cannot be built from {dimensions}: {error}.") from error
