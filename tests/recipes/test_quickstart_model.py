"""The quickstart's model: positions of patches, isolation of pictures and sequences, halves that fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowtrain_lightning.data import ImageProcessor
from recipes.quickstart.model import LanguageModel, VisionEncoder, patch_positions, rotary_angles, rotate
from recipes.quickstart.module import QuickstartVLM

GRIDS = [(2, 4), (6, 2), (4, 4)]


def encoder_inputs(seed: int = 0) -> dict[str, Tensor | int]:
    generator = torch.Generator().manual_seed(seed)
    patches = [rows * columns for rows, columns in GRIDS]
    return {
        "patches": torch.randn(sum(patches), 12, dtype=torch.float64, generator=generator),
        "positions": patch_positions(torch.tensor(GRIDS), 2),
        "cu_seqlens": torch.tensor([0, *np.cumsum(patches)], dtype=torch.int32),
        "max_seqlen": max(patches),
    }


@pytest.fixture
def encoder() -> VisionEncoder:
    torch.manual_seed(0)
    return VisionEncoder(patch_dim=12, width=16, depth=2, heads=2, merge_size=2, feature_width=10).double()


@pytest.fixture
def backbone() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(vocabulary=20, feature_width=10, width=16, depth=2, heads=2).double()


def test_places_of_patches_are_those_at_which_the_data_cut_them(tmp_path: Path) -> None:
    rows, columns, side = 4, 6, 4
    pixels = np.zeros((rows * side, columns * side, 3), dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            pixels[row * side : (row + 1) * side, column * side : (column + 1) * side] = (row, column, 0)
    Image.fromarray(pixels).save(tmp_path / "positions.png")
    images = ImageProcessor(
        patch_size=side, merge_size=2, min_pixels=64, max_pixels=10_000, mean=(0.0,) * 3, std=(1 / 255,) * 3
    )
    patches, grid = images.load(tmp_path / "positions.png")
    assert grid == (rows, columns)
    seen = patches.reshape(-1, 3, side * side)[:, :2, 0].round().astype(int)
    np.testing.assert_array_equal(patch_positions(torch.tensor([grid]), merge_size=2).numpy(), seen)


def test_one_row_of_features_comes_out_per_block_of_patches(encoder: VisionEncoder) -> None:
    inputs = encoder_inputs()
    assert encoder(**inputs).shape == (sum(rows * columns for rows, columns in GRIDS) // 4, 10)


def test_a_picture_does_not_see_its_neighbours_in_the_batch(encoder: VisionEncoder) -> None:
    inputs = encoder_inputs()
    before = encoder(**inputs)
    inputs["patches"][8:20] += 1  # type: ignore[index]
    after = encoder(**inputs)
    assert torch.equal(before[:2], after[:2])
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[2:5], after[2:5])


def test_a_picture_s_features_are_the_same_alone_and_among_others(encoder: VisionEncoder) -> None:
    inputs = encoder_inputs()
    alone = encoder(
        inputs["patches"][8:20],
        patch_positions(torch.tensor([GRIDS[1]]), 2),
        torch.tensor([0, 12], dtype=torch.int32),
        12,
    )  # type: ignore[index]
    torch.testing.assert_close(encoder(**inputs)[2:5], alone, rtol=1e-12, atol=1e-12)


def test_moving_a_patch_changes_what_is_seen(encoder: VisionEncoder) -> None:
    inputs = encoder_inputs()
    before = encoder(**inputs)
    inputs["patches"] = inputs["patches"].clone()  # type: ignore[union-attr]
    inputs["patches"][[0, 4]] = inputs["patches"][[4, 0]]  # type: ignore[index]
    assert not torch.allclose(before[:2], encoder(**inputs)[:2])


def test_a_sequence_does_not_see_its_neighbours_in_the_microbatch(backbone: LanguageModel) -> None:
    embeddings = torch.randn(12, 16, dtype=torch.float64)
    position_ids = torch.cat([torch.arange(n) for n in (5, 4, 3)])
    cu_seqlens = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    before = backbone(embeddings, position_ids, cu_seqlens, 5)
    embeddings[5:9] += 1
    after = backbone(embeddings, position_ids, cu_seqlens, 5)
    assert torch.equal(before[:5], after[:5])
    assert torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


def test_a_token_s_scores_do_not_depend_on_later_tokens(backbone: LanguageModel) -> None:
    embeddings = torch.randn(6, 16, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    before = backbone(embeddings, torch.arange(6), cu_seqlens, 6)
    embeddings[4:] += 1
    assert torch.equal(before[:4], backbone(embeddings, torch.arange(6), cu_seqlens, 6)[:4])


def test_rotary_positions_keep_lengths_and_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def product(query_position: int, key_position: int) -> Tensor:
        angles = [
            rotary_angles(torch.tensor([position]), 8, base=100.0).double()
            for position in (query_position, key_position)
        ]
        return (rotate(query, angles[0]) * rotate(key, angles[1])).sum()

    torch.testing.assert_close(product(3, 1), product(12, 10), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotate(query, rotary_angles(torch.tensor([7]), 8, 100.0)).norm(), query.norm())


def test_freezing_the_encoder_leaves_the_backbone_trainable() -> None:
    module = QuickstartVLM(encoder_depth=1, backbone_depth=1, freeze_encoder=True)
    module.configure_model()
    assert not any(parameter.requires_grad for parameter in module.encoder.parameters())
    assert all(parameter.requires_grad for parameter in module.backbone.parameters())
