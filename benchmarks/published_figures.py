"""Figures that papers print, with what they say of the set-up; dimensions that they leave out are assumed here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.dimensions import backbone, vision_encoder

_tower = partial(vision_encoder, perceptrons_only=False)
"""A vision encoder as Megatron-LM divides it among tensor ranks: attention too."""

_language_model = partial(backbone, gathered_logits=False)
"""A backbone as Megatron-LM divides it: its loss is of shares of the logits."""

# ---- Optimus, arXiv 2408.03505, section 5: dimensions (width x layers) are printed --------------------------------

OPTIMUS_TOKENS = 2048
"""Tokens of a sample, printed. Assumed to be those of its picture too: with that and full recomputing counted, the
printed MFU times an H100's peak gives the work of a step within 1 %, so both are assumed."""

VIT_22B = _tower(layers=48, hidden=6144, feed_forward=24576, heads=48, patch=14, output=12288)
VIT_3B = _tower(layers=48, hidden=2304, feed_forward=9216, heads=24, patch=14, output=3072)
GPT_175B = _language_model(
    layers=96, hidden=12288, feed_forward=49152, heads=96, vocabulary=50304, gated=False
)  # vocabulary assumed
GPT_11B = _language_model(layers=80, hidden=3072, feed_forward=12288, heads=24, vocabulary=50304, gated=False)

OPTIMUS = {
    "Megatron-LM": {1536: 10.65, 2048: 8.26, 3072: 5.91},
    "Megatron-LM balanced": {1536: 10.43, 2048: 8.06, 3072: 5.87},
    "Optimus": {1536: 9.80, 2048: 7.29, 3072: 4.87},
}
"""System -> GPUs -> seconds of a step; ViT-22B + GPT-175B, batch 1536, microbatches of 2, tensor 8, pipeline 8."""

OPTIMUS_IDLE = {
    "among data ranks": 0.122,
    "among tensor ranks": 0.112,
    "filling and draining": 0.142,
    "inside the pipeline": 0.087,
}
"""Shares of a step of 5.12 s in which GPUs wait, by what they wait for. All of gathering weights (3.3 %) and scattering
gradients (8.9 %) is among them, so that nothing hides it."""

OPTIMUS_SMALL_FSDP = 3.20
"""Seconds of a step of ViT-3B + GPT-11B with FSDP on 8 A100, batch 16."""

# ---- DIP, arXiv 2504.14145 ----------------------------------------------------------------------------------------

DIP_LM = _language_model(layers=32, hidden=4096, feed_forward=14336, heads=32, key_value_heads=8, vocabulary=128256)
"""Its 7B model, taken to be the Llama3-8B that its tables describe."""

DIP_LM_SECONDS = 4.068
"""8 H800, tensor 2, pipeline 4, 12.7 PFLOP a step."""

DIP_VIT_2B = _tower(layers=40, hidden=2048, feed_forward=8192, heads=16, patch=14, output=4096, merge=4)
DIP_LM_5B = _language_model(layers=22, hidden=4096, feed_forward=14336, heads=32, key_value_heads=8, vocabulary=128256)
DIP_STATIC_SECONDS = 4.567
"""ViT-2B + LM-5B, static load, same GPUs and work. Both sizes are printed, dimensions are assumed."""

DIP_VIT_5B = _tower(layers=64, hidden=1792, feed_forward=15360, heads=16, patch=14, output=5120, merge=4)
DIP_LM_32B = _language_model(layers=64, hidden=5120, feed_forward=27648, heads=40, key_value_heads=8, vocabulary=152064)
DIP_VIT_LAYER, DIP_LM_LAYER = 6.75e-3, 10.5e-3
"""Seconds of a layer, forward and backward: 8 pictures of 728 pixels and 8,192 tokens. Tensor 8 is assumed, which is
what the paper gives for these two models."""

# ---- HetPar, arXiv 2605.27678, tables A2 to A5: only sizes in billions are printed, so dimensions are assumed --------

_ENCODERS: dict[str, Half] = {
    name: _tower(layers=layers, hidden=hidden, feed_forward=4 * hidden, heads=16, patch=14, output=8192)
    for name, layers, hidden in (
        ("1B", 32, 1536),
        ("3B", 36, 2560),
        ("6B", 48, 3200),
        ("7.2B", 48, 3584),
        ("12B", 48, 4608),
    )
}
TRAINED = ("1B", "3B")
"""Encoders that train. The paper does not say which do, but its peaks of memory and its times do, see `HELD_OUT`."""

ENCODERS: dict[str, Half] = {
    name: half if name in TRAINED else half.frozen(keep_projector=True) for name, half in _ENCODERS.items()
}

RECOMPUTED = tuple(name for name in ENCODERS if name != "1B")
"""Encoders whose layers a backward computes again, printed; language models recompute nothing."""

LANGUAGE_MODELS: dict[str, Half] = {
    name: _language_model(
        layers=layers, hidden=hidden, feed_forward=inner, heads=heads, key_value_heads=8, vocabulary=128256
    )
    for name, layers, hidden, inner, heads in (
        ("7B", 32, 4096, 14336, 32),
        ("14B", 48, 5120, 13824, 40),
        ("32B", 64, 5120, 27648, 40),
        ("70B", 80, 8192, 28672, 64),
        ("120B", 96, 10240, 32768, 80),
    )
}
PICTURE = 1024
"""Patches of a picture, assumed. Each becomes a token, as in the LLaVA-1.5 that the paper checks itself with."""

HELD_OUT = "12B 120B 87.5 8192 256 8/1/4/8 2/1/1/4 8/1/2/16 17020 15540 9.5"
"""Of table A4: it decides that large encoders are frozen, with a projector that trains, and is not reported. 8 GPUs
encode 1.8 million tokens with 12B parameters in 15.54 s: 355 TFLOP/s a GPU for a forward, and 1.4 PFLOP/s with a
backward and recomputing, which no H100 does.

Of small ones peaks of memory say that they train. In the homogeneous layouts of table A2 an encoder of 3B takes 2.5 GB
a GPU more than one of 1B with 4 tensor ranks (14B and 32B), 1.2 GB with 8 (70B): 4 to 5 bytes for each of 0.5 and 0.25
billion weights, as with gradients in bf16, where frozen weights have 2. And beside the 120B model the encoder of 1B,
which recomputes nothing, takes 6 GB more with three quarters of the tokens from pictures than with half of them, that
of 3B, which recomputes everything, nothing: what grows with the pictures is kept for a backward.
"""


@dataclass(frozen=True)
class HetParResult:
    """One result in HetPar's tables.

    Attributes:
        encoder: billions of parameters.
        backbone: billions of parameters.
        vision: share of vision tokens.
        context: tokens of a sample.
        batch: samples of a step.
        shared: the homogeneous layout; with a pipeline its encoder has no stages and sits on the first one's devices.
        mode: what is compared with it: C (colocated) or NC (non-colocated).
        encoder_layout: of ``mode``.
        backbone_layout: of ``mode``.
        before: seconds of a step of the homogeneous layout; 0 where only the gain is printed.
        after: seconds of a step of ``mode``.
        gain: printed gain of ``mode``.
    """

    encoder: str
    backbone: str
    vision: float
    context: int
    batch: int
    shared: Layout
    mode: str
    encoder_layout: Layout
    backbone_layout: Layout
    before: float
    after: float
    gain: float


def _layout(text: str) -> Layout:
    """A layout from tensor/context/pipeline/data."""
    tensor, context, pipeline, data = map(int, text.split("/"))
    return Layout(data, tensor, pipeline, context, "zero1")


_A2 = """
1B 14B 50 288 4/1/1/18 2/1/1/36 2/1/2/18 7570 6750 12.1
1B 14B 75 288 4/1/1/18 1/1/1/72 2/1/2/18 7780 6840 13.5
1B 14B 87.5 288 4/1/1/18 1/1/1/72 2/1/2/18 7660 6800 12.7
3B 14B 50 288 4/1/1/18 2/1/1/36 2/1/2/18 7850 6970 12.9
3B 14B 75 288 4/1/1/18 1/1/1/72 2/1/2/18 8020 7140 12.7
3B 14B 87.5 288 4/1/1/18 1/1/1/72 2/1/2/18 8130 7150 14.0
1B 32B 75 288 4/1/1/18 1/1/1/72 4/1/2/9 14210 14380 -1.2
3B 32B 50 288 4/1/1/18 1/1/1/72 4/1/2/9 14330 14750 -2.8
3B 32B 75 288 4/1/1/18 1/1/1/72 4/1/2/9 14370 12950 11.1
3B 32B 87.5 288 4/1/1/18 1/1/1/72 4/1/2/9 14630 12910 13.1
1B 70B 50 256 8/1/1/32 1/1/1/256 8/1/2/16 8441 7244 16.5
1B 70B 75 256 8/1/1/32 1/1/1/256 8/1/2/16 8415 7312 15.1
3B 70B 50 256 8/1/1/32 1/1/1/256 8/1/2/16 8471 7434 13.9
3B 70B 75 256 8/1/1/32 1/1/1/256 8/1/2/16 8452 7501 12.7
1B 120B 50 256 8/1/4/8 1/1/1/256 8/1/4/8 15258 13081 16.6
1B 120B 75 256 8/1/4/8 1/1/1/256 8/1/4/8 15169 13319 13.9
3B 120B 50 256 8/1/4/8 2/1/1/128 8/1/4/8 15093 12420 21.5
3B 120B 75 256 8/1/4/8 2/1/1/128 8/1/4/8 15303 12579 21.6
6B 120B 50 256 8/1/4/8 2/1/1/128 8/1/4/8 17890 18020 -0.7
7.2B 120B 50 256 8/1/4/8 4/1/1/64 8/1/4/8 17980 18040 -0.3
12B 120B 50 256 8/1/4/8 4/1/1/64 8/1/4/8 15860 18190 -8.0
"""
"""Encoder, LLM, vision %, batch, H, C encoder, C LLM, ms of H, ms of C, gain %."""

_A3 = """
1B 7B 50 16384 8 2/2/1/4 1/1/1/16 2/2/1/4 1300 1221 6.6
1B 7B 75 16384 8 2/2/1/4 1/1/1/16 2/2/1/4 1352 1248 8.5
1B 7B 50 32768 4 2/4/1/2 1/1/1/16 2/4/1/2 1836 1644 11.7
1B 7B 75 32768 4 2/4/1/2 1/1/1/16 2/4/1/2 1980 1640 20.3
1B 7B 50 65536 4 4/8/1/1 1/1/1/32 2/8/1/2 3966 2937 34.3
1B 7B 75 65536 4 4/8/1/1 1/1/1/32 2/8/1/2 4457 2973 49.3
1B 7B 50 131072 4 4/16/1/1 1/1/1/64 2/16/1/2 6321 5381 17.8
1B 7B 75 131072 4 4/16/1/1 1/1/1/64 2/16/1/2 6614 5291 24.8
1B 14B 50 32768 4 4/2/1/4 2/1/1/16 4/2/1/4 1628 1583 2.9
1B 14B 75 32768 4 8/2/1/2 2/1/1/16 4/2/1/4 1962 1585 21.3
1B 14B 50 65536 4 8/4/1/1 2/1/1/16 4/4/1/2 5687 4579 23.9
1B 14B 75 65536 4 8/4/1/1 2/1/1/16 4/4/1/2 5848 4479 30.3
1B 14B 50 131072 4 4/8/2/1 2/1/1/32 4/8/1/2 9397 7184 29.8
1B 14B 75 131072 4 4/8/2/1 2/1/1/32 4/8/1/2 9692 7175 34.0
"""
"""Encoder, LLM, vision %, context, batch, H, C encoder, C LLM, ms of H, ms of C, gain %."""

_A4 = """
6B 120B 50 8192 256 8/1/4/8 1/1/1/8 8/1/2/16 17700 16710 5.9
6B 120B 75 8192 256 8/1/4/8 1/1/1/8 8/1/2/16 17600 16860 4.4
6B 120B 50 8192 512 8/1/4/16 1/1/1/8 8/1/2/32 17870 17180 4.0
6B 120B 50 16384 256 8/2/4/4 1/1/1/8 8/2/4/4 38380 38110 0.7
7.2B 120B 50 8192 256 8/1/4/8 1/1/1/8 8/1/2/16 17980 16790 7.1
7.2B 120B 75 8192 256 8/1/2/16 1/1/1/8 8/1/2/16 16210 14340 13.0
12B 120B 50 8192 256 8/1/4/8 2/1/1/4 8/1/2/16 15860 14780 7.3
12B 120B 75 8192 256 8/1/4/8 2/1/1/4 8/1/2/16 16690 14810 12.7
"""
"""Encoder, LLM, vision %, context, batch, H, NC encoder, NC LLM, ms of H, ms of NC, gain in tokens/s %."""


_A5 = """
1B 14B 50 8192 288 4/1/1/18 1/1/1/8 2/1/2/16 0 0 -5.4
3B 14B 50 8192 288 4/1/1/18 1/1/1/8 2/1/2/16 0 0 -5.4
1B 32B 50 8192 288 4/1/1/18 1/1/1/8 4/1/2/8 0 0 -5.4
3B 32B 50 8192 288 4/1/1/18 1/1/1/8 4/1/2/8 0 0 -5.4
1B 70B 50 8192 256 8/1/1/32 1/1/1/8 8/1/2/16 0 0 7.3
3B 70B 50 8192 256 8/1/1/32 1/1/1/8 8/1/2/16 0 0 9.3
1B 120B 50 8192 256 8/1/4/8 1/1/1/8 8/1/2/16 0 0 -3.0
3B 120B 50 8192 256 8/1/4/8 1/1/1/8 8/1/2/16 0 0 -9.9
"""
"""As A4, but only gains are printed (on 72 GPUs a range, -5.4 to -11.3 %, here its near end). Assumed are the layouts,
from tables A2 and A4, and that gains are in tokens/s."""


def hetpar_results() -> list[HetParResult]:
    """All results but the one that is held out."""
    found = []
    for mode, table in (("C", _A2), ("C", _A3), ("NC", _A4), ("NC", _A5)):
        for line in table.strip().splitlines():
            encoder, language, vision, *rest = line.split()
            context = 8192 if table is _A2 else int(rest.pop(0))
            batch, shared, one, other, before, after, gain = rest
            found.append(
                HetParResult(
                    encoder,
                    language,
                    float(vision) / 100,
                    context,
                    int(batch),
                    _layout(shared),
                    mode,
                    _layout(one),
                    _layout(other),
                    float(before) / 1e3,
                    float(after) / 1e3,
                    float(gain) / 100,
                )
            )
    return found
