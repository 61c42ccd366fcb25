"""A data file of small records, and loaders of its steps."""

import pytest

from tests.data.support import data_module, write_set


@pytest.fixture
def file(tmp_path):
    """Eighteen records: four steps of four, and two records."""
    return write_set(tmp_path / "d.jsonl", 18)


@pytest.fixture
def loader_of(tmp_path):
    """Builds loaders of five steps; ends their workers afterwards."""
    file = write_set(tmp_path / "d.jsonl", 20)
    modules = []

    def build(**changes):
        data = data_module(file, **changes)
        modules.append(data)
        data.setup("fit")
        return data.train_dataloader()

    yield build
    for data in modules:
        data.teardown()
