"""FLOPs of live modules against those of their dimensions, and what of a module can be counted."""

import numpy as np
import pytest
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.allocator.dimensions import backbone, vision_encoder
from flowtrain_lightning.allocator.flops import MODEL_BACKWARD, backward_flops, forward_flops
from flowtrain_lightning.packing.cost_model import Observation, predict
from flowtrain_lightning.placement.flop_counter import count_flops
from flowtrain_lightning.placement.probes import load_probes
from flowtrain_lightning.placement.profile import ProfileError
from recipes.quickstart.module import QuickstartVLM
from tests.tiny import IMAGES, WIDTH, CharTokenizer, TinyVLM, tiny_data, write_records

TINY_ENCODER = {"layers": 1, "hidden": WIDTH, "feed_forward": 2 * WIDTH, "heads": 2, "patch": 4, "merge": 2}
TINY_BACKBONE = {"layers": 1, "hidden": WIDTH, "feed_forward": 2 * WIDTH, "heads": 2, "gated": False}


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counting")
    write_records(folder, 48)
    data = tiny_data(folder)
    data.setup("fit")
    return load_probes(data)


def quickstart(freeze):
    """The quickstart's module, and its halves from their dimensions."""
    sizes = {"vocabulary": 256, "encoder_width": 48, "encoder_depth": 2, "backbone_depth": 2}
    module = QuickstartVLM(**sizes, patch_dim=IMAGES.patch_dim, freeze_encoder=freeze)
    encoder = vision_encoder(
        layers=2, hidden=48, feed_forward=128, heads=4, patch=4, output=8, merge=2, gated=True, projector_width=192
    )
    return module, encoder, backbone(layers=2, hidden=192, feed_forward=512, heads=4, vocabulary=256)


def tiny(freeze):
    """The tests' module, and its halves from their dimensions."""
    encoder = vision_encoder(**TINY_ENCODER, output=WIDTH)
    return TinyVLM(freeze_encoder=freeze), encoder, backbone(**TINY_BACKBONE, vocabulary=CharTokenizer.vocabulary)


@pytest.mark.parametrize(("module_with_dimensions", "freeze"), [(tiny, False), (quickstart, True)])
def test_a_live_module_has_the_flops_of_its_dimensions(module_with_dimensions, freeze, probes):
    module, encoder, decoder = module_with_dimensions(freeze)
    halves = {"encoder": encoder.frozen() if freeze else encoder, "backbone": decoder}
    counted = count_flops(module, probes)
    for role, half in halves.items():
        for lengths in (np.array([70]), np.array([20, 20, 30]), np.array([100, 4])):
            item = Observation.of(lengths, 1.0)
            forward = forward_flops(half, lengths).total
            backward = backward_flops(half, lengths, role == "backbone" and not freeze, MODEL_BACKWARD).total
            assert predict(counted[role].forward, item) == pytest.approx(forward, rel=0.01)
            assert predict(counted[role].backward, item) == pytest.approx(backward, rel=0.01)


def test_a_built_module_is_counted_as_one_that_is_not_and_left_as_it_is(probes):
    module = TinyVLM()
    module.configure_model()
    assert count_flops(module, probes) == count_flops(TinyVLM(), probes)
    assert all(weight.device.type == "cpu" and weight.grad is None for weight in module.parameters())


def test_a_half_without_work_is_absent(tmp_path):
    write_records(tmp_path, 16, images=False)
    data = tiny_data(tmp_path)
    data.setup("fit")
    assert set(count_flops(TinyVLM(), load_probes(data))) == {"backbone"}


def test_what_is_computed_again_counts_again(probes):
    class Recomputing(TinyVLM):
        def encode(self, media):
            return checkpoint(self.encoder, media, use_reentrant=False)

    plain, again = (count_flops(module, probes)["encoder"] for module in (TinyVLM(), Recomputing()))
    assert again.forward == plain.forward
    item = Observation.of(np.array([64, 16]), 1.0)
    assert predict(again.backward, item) == pytest.approx(plain.of(item), rel=0.03)  # all but the last product


def test_a_module_that_reads_what_it_computes_cannot_be_counted(probes):
    class Reading(TinyVLM):
        def encode(self, media):
            features = super().encode(media)
            assert features[0].sum().item() != 0
            return features

    with pytest.raises(ProfileError, match="FLOPs of Reading cannot be counted, since its methods do not run without"):
        count_flops(Reading(), probes)
