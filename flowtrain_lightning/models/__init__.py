"""Vision-language models of Hugging Face, trained as they are.

Importing this package does not import ``transformers``; building a model does.
"""

from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.images import images_of
from flowtrain_lightning.models.llava import LlavaVLM
from flowtrain_lightning.models.packed_attention import pack_attention, sequence_bounds
from flowtrain_lightning.models.qwen import QwenVLM

__all__ = ["HuggingFaceVLM", "LlavaVLM", "QwenVLM", "images_of", "pack_attention", "sequence_bounds"]
