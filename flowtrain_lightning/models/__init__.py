"""Vision-language models of Hugging Face, trained as they are.

Importing this package does not import ``transformers``; building a model does. Begin with `pretrained.py`;
`huggingface_vlm.py` is what all families share, and one file for each says what only it does; `any_family.py` trains
those without a file, as far as `certificate.py` finds them exact. What a model reads is in
`processor.py`: `processor_template.py` writes its conversations, `images.py` and `videos.py` make its pixels.
"""

from flowtrain_lightning.models.any_family import AnyVLM
from flowtrain_lightning.models.certificate import Certificate, certify
from flowtrain_lightning.models.gemma import GemmaVLM
from flowtrain_lightning.models.huggingface_images import HuggingFaceImages, tile_images
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.image_words import ImageWords, VideoWords
from flowtrain_lightning.models.images import images_of
from flowtrain_lightning.models.internvl import InternVLM
from flowtrain_lightning.models.kept_certificates import certificate_of
from flowtrain_lightning.models.llava import LlavaVLM
from flowtrain_lightning.models.onevision import OnevisionVLM
from flowtrain_lightning.models.packed_attention import pack_attention, sequence_bounds
from flowtrain_lightning.models.paligemma import PaliGemmaVLM
from flowtrain_lightning.models.pretrained import from_pretrained, module_class, register
from flowtrain_lightning.models.processor import Processor, processor_of, template_of
from flowtrain_lightning.models.processor_template import ProcessorTemplate
from flowtrain_lightning.models.published_config import read_config
from flowtrain_lightning.models.qwen import QwenVLM
from flowtrain_lightning.models.smolvlm import SmolVLM
from flowtrain_lightning.models.videos import Qwen3Videos, videos_of

__all__ = [
    "AnyVLM",
    "Certificate",
    "GemmaVLM",
    "HuggingFaceImages",
    "HuggingFaceVLM",
    "ImageWords",
    "InternVLM",
    "LlavaVLM",
    "OnevisionVLM",
    "PaliGemmaVLM",
    "Processor",
    "ProcessorTemplate",
    "Qwen3Videos",
    "QwenVLM",
    "SmolVLM",
    "VideoWords",
    "certificate_of",
    "certify",
    "from_pretrained",
    "images_of",
    "module_class",
    "pack_attention",
    "processor_of",
    "read_config",
    "register",
    "sequence_bounds",
    "template_of",
    "tile_images",
    "videos_of",
]
