"""Arguments of other libraries by which users look for something: each is refused by a sentence on what it is here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

_BITS = (
    "Weights of 4 or 8 bits are not trained here. To save memory train adapters beside frozen weights of 16 bits: "
    "adapters=LoraConfig(...), frozen_in_bf16=True."
)
_PRECISION = "Weights and arithmetic follow the Trainer: Trainer(precision='bf16-mixed'), 'bf16-true' or '32-true'."
_DEVICES = (
    "Who holds what follows from the Trainer and its strategy: Trainer(devices=8, strategy=FlowTrainStrategy(...))."
)
_FOLDER = "Fetch the model first, huggingface_hub.snapshot_download({name}=...), and give the folder that this returns."
_ADAPTERS = "They are called adapters here: adapters=LoraConfig(...)."
_READS = "What records become belongs to the data: FlowDataModule(tokenizer=..., template=..., images=...)."

_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config", "bnb_config"), _BITS),
    **dict.fromkeys(("torch_dtype", "dtype"), _PRECISION),
    **dict.fromkeys(("device_map", "max_memory", "tp_plan", "device"), _DEVICES),
    **dict.fromkeys(("revision", "token", "cache_dir", "local_files_only", "force_download"), _FOLDER),
    **dict.fromkeys(("peft_config", "lora_config"), _ADAPTERS),
    **dict.fromkeys(("tokenizer", "processing_class", "image_processor"), _READS),
    "attn_implementation": "Samples are packed, so attention is set here: flash attention on GPUs, else SDPA.",
    "trust_remote_code": "Code that comes with a model never runs; families of transformers itself are trained.",
    "gradient_checkpointing": "It is called recompute here: recompute=True.",
    "gradient_checkpointing_kwargs": "recompute=True computes whole layers again, 'selective' all but products.",
    "low_cpu_mem_usage": "Where ranks share weights, each gets memory for its own part only, without being told.",
    "use_cache": "Training needs no cache, and predictions take one where they can.",
    "learning_rate": "It is called lr here.",
}


def refuse_other_arguments(maker: Callable[..., Any], name: str, given: Collection[str]) -> None:
    """Raises for arguments that a function does not have, and that other libraries have for a similar one.

    Args:
        maker: the function.
        name: what users call it.
        given: names of the keyword arguments that it was called with.

    Raises:
        TypeError: says what to do instead.
    """
    parameters = inspect.signature(maker).parameters
    for argument in given:
        if argument in _INSTEAD and argument not in parameters:
            raise TypeError(f"{name} takes no {argument}. {_INSTEAD[argument].format(name=argument)}")
