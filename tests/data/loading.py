"""What a loader gave, in words that can be compared."""

import pytest

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def read(loader, epoch=0, count=None):
    """The names of an epoch's batches, all or the first ``count``."""
    loader.sampler.set_epoch(epoch)
    iterator = iter(loader)
    return named(next(iterator) for _ in range(count)) if count is not None else named(iterator)


def named(batches):
    """Epoch, step and samples of each batch."""
    return [(batch.epoch, batch.step, batch.plan.samples.tolist()) for batch in batches]
