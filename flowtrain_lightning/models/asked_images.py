"""Images as a model's own image processor makes them, whatever it makes: it is asked once for every size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.image_files import ImageError, read_header
from flowtrain_lightning.data.media.media_files import MediaFile
from flowtrain_lightning.models.encoder_inputs import Arguments, AskedInputs

if TYPE_CHECKING:
    from PIL.Image import Image

_SIZES_KEPT = 4096

_ASKED = ((60, 84), (112, 60), (200, 333))
"""Height and width in pixels of images whose values must all lie in rows of as many numbers."""


@dataclass(frozen=True)
class AskedImages(ImageProcessor):
    """Images by the model's own processor, for encoders that take more than tiles of one size.

    The values of an image lie in rows of ``patch_dim`` numbers, one after another, as many as its encoder takes in;
    `inputs` gives them the processor's form again. Whatever else the processor gives, such as sizes of tiles, follows
    from the size of the image, and is asked of it by a grey one of the same size.

    Attributes:
        settings: of the processor, for comparing.
        processor: the image processor of Hugging Face.
        names: what ``get_image_features`` of the model takes.
        dim: numbers in a row of values.
        call: an image -> all that the processor gives for it, by name.
        count: height and width of an image in pixels -> rows of features.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = field(default=None, repr=False, compare=False)
    names: tuple[str, ...] = ()
    count: Any = field(default=None, repr=False, compare=False)
    dim: int = 0
    call: Any = field(default=None, repr=False, compare=False)

    @property
    def patch_dim(self) -> int:
        """Numbers in a row of values."""
        return self.dim or super().patch_dim

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever some image would become something else."""
        return fingerprint([type(self.processor).__name__, dict(self.settings), self.names, self.dim])

    @cached_property
    def inputs(self) -> AskedInputs:
        """Gives packed rows the form that the encoder takes."""
        return AskedInputs(self.asked, self.names)

    @cached_property
    def asked(self) -> Any:
        """Height and width of an image in pixels -> all that the processor gives for a grey one, pixels as shapes."""
        return lru_cache(_SIZES_KEPT)(self._ask)

    def given(self, image: Image) -> dict[str, Any]:
        """All that the processor gives for an image: tensors, and what it has no tensors for."""
        return {name: _as_tensor(value) for name, value in self.call(image).items()}

    def size(self, height: int, width: int, *, alone: bool = True) -> tuple[int, int]:
        """Rows of values of an image of ``height x width`` pixels, as height and width.

        Raises:
            ImageError: the processor takes no image of this size.
        """
        del alone
        asked = self._of_size(height, width)
        grid = asked.get("image_grid_thw")
        if grid is not None and int(grid.prod()) == self._rows(asked):
            return int(grid[0, 1]), int(grid[0, 2])
        return self._rows(asked), 1

    def rows_of_features(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """Rows of features, that is backbone tokens, of an image of a size in pixels."""
        return int(self.count(*size))

    def tiles_in(self, grid: tuple[int, int], size: tuple[int, int]) -> int:
        """Tiles of an image, where its values are theirs, one after another."""
        return 1 if grid[1] > 1 else self.inputs.tiles_of(self.asked(*size))

    def values(self, image: Image, grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.float32]:
        """``[rows, patch_dim]`` what the encoder is given, one number after another."""
        if (image.height, image.width) != size:
            image = image.resize((size[1], size[0]))  # the plan counts on the size of the original
        return self.flat(self.given(image))

    def flat(self, given: Arguments) -> NDArray[np.float32]:
        """``[rows, patch_dim]`` the numbers of all that the processor gives for an image."""
        parts = [given[name].flatten() for name in self.names if name in given and given[name].is_floating_point()]
        rows = torch.cat(parts).view(-1, self.patch_dim)
        return np.ascontiguousarray(rows.numpy(), dtype=np.float32)

    def cut(self, values: NDArray[Any], grid: tuple[int, int]) -> NDArray[Any]:
        """The values as they are: rows already."""
        return values

    def _of_size(self, height: int, width: int) -> dict[str, Tensor]:
        if min(height, width) < 1:
            raise ImageError(f"it is {height} pixels high and {width} wide, so there is nothing to see")
        try:
            return self.asked(height, width)  # type: ignore[no-any-return]
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise ImageError(f"the model's image processor takes none of {height} x {width} pixels: {error}") from error

    def _ask(self, height: int, width: int) -> dict[str, Tensor]:
        return {name: _remembered(value) for name, value in self.given(grey(height, width)).items()}

    def _rows(self, given: Mapping[str, Tensor]) -> int:
        floats = [given[name] for name in self.names if name in given and given[name].is_floating_point()]
        return sum(tensor.numel() for tensor in floats) // self.patch_dim


def _remembered(value: Any) -> Any:
    """The part of an output that other images of the size have, too: of pixels the shape, else sizes would fill hosts.

    A mask of pixels that are all seen takes the memory of one.
    """
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return value.to("meta")
    first = value.flatten()[:1].clone()
    return first.expand(value.shape) if value.numel() > 1 and bool((value == first).all()) else value


def size_of_image(file: MediaFile) -> tuple[int, int]:
    """Height and width of an image in pixels, by which a model's own processor decides what it writes."""
    header = read_header(file)
    return header.height, header.width


def grey(height: int, width: int) -> Image:
    """An image of a size."""
    from PIL import Image

    return Image.new("RGB", (width, height), (127, 127, 127))


def asked_images(processor: Any, names: tuple[str, ...], config: Any, call: Any = None) -> AskedImages:
    """Images by a processor of Hugging Face.

    Args:
        processor: an image processor.
        names: what ``get_image_features`` of the model takes.
        config: the model's.
        call: see `AskedImages`; None: the image processor alone.

    Raises:
        ValueError: the encoder takes something else than the processor gives.
    """
    vision = getattr(config, "vision_config", config)
    patch = getattr(processor, "patch_size", None) or getattr(vision, "patch_size", None) or 14
    patch = int(patch[0] if isinstance(patch, list | tuple) else getattr(patch, "height", patch))
    found = AskedImages(
        patch_size=patch,
        merge_size=1,
        fixed_size=(patch, patch),
        settings=json.loads(processor.to_json_string()),
        processor=processor,
        names=names,
        call=call or partial(_of_image, processor),
    )
    several = [found.asked(*size) for size in _ASKED]
    given = several[0]
    if "pixel_values" not in given:
        raise ValueError(
            f"{type(processor).__name__} makes {', '.join(given)} of an image; the encoder takes {', '.join(names)}."
        )
    return replace(found, dim=math.gcd(*(_dim_of(each, names, patch) for each in several)))


def _of_image(processor: Any, image: Image) -> Any:
    return processor([image], return_tensors="np")


def _dim_of(given: Mapping[str, Any], names: tuple[str, ...], patch: int, channels: int = 3) -> int:
    """Numbers in a row: of a patch, or fewer where that does not divide the values of an image."""
    numbers = [given[name].numel() for name in names if name in given and given[name].is_floating_point()]
    return math.gcd(channels * patch**2, *numbers)


def _as_tensor(value: Any) -> Any:
    array = np.asarray(value)
    return torch.from_numpy(array) if array.dtype != object and array.dtype.kind in "biuf" else value
