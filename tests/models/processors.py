"""Hugging Face's own processors over small tokenizers, with each family's special tokens and published template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import transformers
from tokenizers import Regex, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "chat_templates"

_TEXTS = (
    "What is this? A cat.\n\nThe cat sat.\n\n\nassistant\n\nHello user: what is the image? model\n\nNo.  Two  blanks",
    "system\nYou are a helpful assistant. User: Assistant: USER: ASSISTANT: name arguments tools function type",
)
_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def _bytes() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges on bytes, where line breaks merge with each other, as Qwen's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _TEXTS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return _parts(tokenizer)


@cache
def _characters() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges on characters, with bytes where a character is missing, as Llama's and Gemma's."""
    specials = ["<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*specials, *bytes_of], show_progress=False)
    tokenizer.train_from_iterator([*_TEXTS * 4, *(text.replace("\n", " ") for text in _TEXTS)], trainer)
    return _parts(tokenizer)


def _parts(tokenizer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _qwen(*extra: str, **named: str) -> Any:
    vocabulary, merges = _bytes()
    special = ["<|im_start|>", "<|im_end|>", *extra]
    tokenizer = transformers.Qwen2Tokenizer(vocab=dict(vocabulary), merges=list(merges), extra_special_tokens=named)
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def _qwen_vl() -> Any:
    return _qwen("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _llama() -> Any:
    vocabulary, merges = _characters()
    tokenizer = transformers.LlamaTokenizer(vocab=dict(vocabulary), merges=list(merges), add_bos_token=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def gemma_tokenizer(image_token: str = "<image_soft_token>") -> Any:
    """Gemma's, with the token of Gemma 3's images or of PaliGemma's."""
    vocabulary, merges = _characters()
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": image_token}
    tokenizer = transformers.GemmaTokenizer(vocab=dict(vocabulary), merges=list(merges), extra_special_tokens=named)
    turns = ["<start_of_turn>", "<end_of_turn>", *named.values()]
    tokenizer.add_special_tokens({"additional_special_tokens": turns}, replace_extra_special_tokens=False)
    return tokenizer


def _smol() -> Any:
    tiles = [f"<row_{down}_col_{across}>" for down in range(1, 5) for across in range(1, 5)]
    named = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    named |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    vocabulary, merges = _bytes()
    tokenizer = transformers.GPT2Tokenizer(
        vocab=dict(vocabulary), merges=list(merges), bos_token="<|im_start|>", extra_special_tokens=named
    )
    special = {"additional_special_tokens": [*named.values(), *tiles]}
    tokenizer.add_special_tokens(special, replace_extra_special_tokens=False)
    return tokenizer


def _without_videos(kind: Any) -> Any:
    """A processor class that takes no video processor: those need torchvision, and nothing here is a video."""

    def checked(self: Any, name: str, argument: Any) -> type:
        return (
            type(argument) if name == "video_processor" else kind.check_argument_for_proper_class(self, name, argument)
        )

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": checked})


def _llava_config() -> Any:
    return transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(image_size=56, patch_size=14))


def _qwen_images(patch: int) -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, min_pixels=4 * patch**2, max_pixels=64 * patch**2
    )


def _clip_images() -> Any:
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})


def _onevision_images() -> Any:
    points = [[28 * high, 28 * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]
    return transformers.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=points)


def _internvl_images() -> Any:
    return transformers.GotOcr2ImageProcessorPil(
        size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=6
    )


def _smolvlm_images() -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}, do_image_splitting=True
    )


def _gemma_images() -> Any:
    return transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})


@dataclass(frozen=True)
class Published:
    """A family as it is published, but small.

    Attributes:
        config: the model's.
        tokenizer: the model's.
        image_processor: the model's, with its Pillow backend.
        processor: the name of the class that has both.
        template: the file of its chat template.
        settings: further arguments of the processor.
    """

    config: Callable[[], Any]
    tokenizer: Callable[[], Any]
    image_processor: Callable[[], Any]
    processor: str
    template: str
    settings: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """The processor of Hugging Face."""
        kind, template = getattr(transformers, self.processor), (TEMPLATES / self.template).read_text()
        parts = {"image_processor": self.image_processor(), "tokenizer": self.tokenizer()}
        if "video_processor" not in inspect.signature(kind.__init__).parameters:
            return kind(**parts, chat_template=template, **self.settings)
        videos = SimpleNamespace(num_frames=None, fps=None)
        return _without_videos(kind)(**parts, video_processor=videos, chat_template=template, **self.settings)

    def save(self, folder: Path, *, legacy: bool = False) -> Any:
        """Writes a folder as it is published, but for the weights, and gives the processor."""
        processor = self.make()
        for part in (self.config(), processor.tokenizer, processor.image_processor):
            part.save_pretrained(folder)
        name = "chat_template.json" if legacy else "chat_template.jinja"
        text = json.dumps({"chat_template": processor.chat_template}) if legacy else processor.chat_template
        (folder / name).write_text(text)
        return processor


_QWEN_CONFIGS = {
    "qwen2_vl": (transformers.Qwen2VLConfig, "Qwen2VLProcessor", 14, "qwen2_5_vl.jinja"),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, "Qwen2_5_VLProcessor", 14, "qwen2_5_vl.jinja"),
    "qwen3_vl": (transformers.Qwen3VLConfig, "Qwen3VLProcessor", 16, "qwen3_vl.jinja"),
}

PUBLISHED = {
    **{
        family: Published(config, _qwen_vl, partial(_qwen_images, patch), processor, template)
        for family, (config, processor, patch, template) in _QWEN_CONFIGS.items()
    },
    "llava": Published(
        _llava_config,
        _llama,
        _clip_images,
        "LlavaProcessor",
        "llava.jinja",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Published(
        transformers.LlavaOnevisionConfig,
        lambda: _qwen("<image>", "<video>"),
        _onevision_images,
        "LlavaOnevisionProcessor",
        "llava_onevision.jinja",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "internvl": Published(
        lambda: transformers.InternVLConfig(vision_config={"image_size": [56, 56], "patch_size": [14, 14]}),
        lambda: _qwen(
            "<img>",
            "</img>",
            "<IMG_CONTEXT>",
            "<video>",
            context_image_token="<IMG_CONTEXT>",
            start_image_token="<img>",
            end_image_token="</img>",
            video_token="<video>",
        ),
        _internvl_images,
        "InternVLProcessor",
        "internvl.jinja",
        {"image_seq_length": 4},
    ),
    "smolvlm": Published(
        lambda: transformers.SmolVLMConfig(scale_factor=2, vision_config={"patch_size": 14}),
        _smol,
        _smolvlm_images,
        "SmolVLMProcessor",
        "smolvlm.jinja",
        {"image_seq_len": 4},
    ),
    "gemma3": Published(
        lambda: transformers.Gemma3Config(mm_tokens_per_image=4, vision_config={"image_size": 56, "patch_size": 14}),
        gemma_tokenizer,
        _gemma_images,
        "Gemma3Processor",
        "gemma3.jinja",
        {"image_seq_length": 4},
    ),
}
"""By ``model_type``."""
