"""A Ray cluster that exists: a full one loses no step, and a sentence names one that is lost or not there."""

import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from flowtrain_lightning.data import DataError, ImageProcessor
from tests.data.ray_runs import ON_LOOPBACK, are_equal, cluster, processes_of_ray, produced
from tests.data.support import data_module, message_record, write_image, write_records, write_set
from tests.pool.faults import slowness

pytestmark = pytest.mark.full

LARGE = {
    "images": ImageProcessor(patch_size=2, merge_size=2, min_pixels=16, max_pixels=1 << 22),
    "token_budget": 300_000,
    "encoder_budget": 300_000,
    "global_batch_size": 2,
}


@pytest.fixture
def address(monkeypatch):
    """Of a cluster of two processors, whose memory holds 80 MB of steps."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        cluster(Path(folder), num_cpus=2, object_store_memory=80_000_000) as (found, _),
    ):
        for name, value in {**ON_LOOPBACK, "RAY_ADDRESS": found}.items():
            monkeypatch.setenv(name, value)
        yield found


def test_a_full_store_loses_no_step_and_the_rank_holds_few_of_them(tmp_path, address):
    """Steps of 10 MB, of which twelve are ahead."""
    images = [write_image(tmp_path / f"images/{number}.png", 1024, 1600, number) for number in range(6)]
    records = [message_record(number, "ask", "answer", [images[number % 6]]) for number in range(32)]
    file = write_records(tmp_path / "d.jsonl", records)
    local = data_module(file, **LARGE)
    local.setup("fit")
    with produced(file, num_workers=6, **LARGE) as (loader, _):
        steps = iter(loader)
        first = next(steps)
        step_bytes = sum(media.pixels.nbytes for media in first.media["encoder"] if media is not None)
        assert step_bytes > 8_000_000
        own = psutil.Process()
        before = own.memory_info().rss
        time.sleep(15)  # the others are made meanwhile
        assert own.memory_info().rss - before < 3 * step_bytes
        assert are_equal(local.train_dataloader(), [first, *steps])


def slow(image, _):
    time.sleep(1)
    return image


@pytest.mark.parametrize("killed", [("gcs_server",), ("gcs_server", "raylet")], ids=["its head", "all of it"])
def test_a_cluster_that_is_lost_is_named_within_seconds_and_nothing_is_left(tmp_path, address, killed):
    with produced(write_set(tmp_path / "d.jsonl", 400), num_workers=1, augment=slow) as (loader, _):
        steps = iter(loader)
        next(steps)
        (asking,) = (process for process in psutil.Process().children() if "ray_client" in " ".join(process.cmdline()))
        for process in processes_of_ray():
            if process.is_running() and process.name() in killed:
                process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(DataError, match=rf"Ray at {address} was lost"):
            list(steps)
        print(f"named after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 20 * slowness()
    assert not asking.is_running()


def test_a_cluster_that_is_not_there_is_named_in_setup(file, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with (
        pytest.raises(DataError, match=r"The Ray cluster of RAY_ADDRESS=127\.0\.0\.1:9 cannot be used: .*unset it"),
        produced(file),
    ):
        pass
    assert not any("ray_host" in " ".join(child.cmdline()) for child in psutil.Process().children())
