"""Three ranks in one process with a pool each, over every transport."""

import pytest

from tests.pool.contract import CAPACITY, FLOATS, TRANSPORTS
from tests.pool.ranks import meshes, open_pools


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
def three(transport):
    with meshes(3, transport) as made:
        yield made


@pytest.fixture
def pools(three, transport):
    opened = open_pools(three, CAPACITY, 4 * FLOATS, transport)
    yield opened
    for pool in opened:
        pool.close()
