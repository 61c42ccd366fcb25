"""A profile of the module that is about to train: kept from an earlier start, or measured in a process of its own.

That process is this one's command, started once more. It comes as far as this one has come, measures where this one
would connect to other ranks, and ends. So nothing that measuring does to random states, memory or devices reaches the
run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.sources.index import cache_folders
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.placement.module_profile import origin_of, profile_module
from flowtrain_lightning.placement.profile import Profile, ProfileError, ProfileOrigin, read_profile, write_profile
from flowtrain_lightning.runtime.process_end import die_with_parent

_PROFILE_VARIABLE = "FLOWTRAIN_PROFILE"
"""Environment of the process that measures: who started it, and the file to write."""

_MEASURED_SECONDS = 8.0
DEADLINE_SECONDS = 300.0
"""After which the process that measures is ended."""

_SHOWN_LINES = 3


def measured_profile(trainer: L.Trainer, module: FlowModule, data: FlowDataModule) -> Profile:
    """Costs of the halves on this machine.

    Args:
        trainer: about to run.
        module: not built yet.
        data: with training data.

    Raises:
        ProfileError: it cannot be measured.
    """
    origin = origin_of(module, data, trainer.strategy.root_device, str(trainer.precision))
    files = list(_kept_files(data, origin))
    for file in files:
        with suppress(ProfileError):
            if (kept := read_profile(file)).origin == origin:
                return kept
    rank_zero_info(
        f"flowtrain: measuring the halves of {type(module).__name__} in a process of its own, to plan by. "
        "FlowTrainStrategy(profile='off') leaves it out; the next start finds what was measured."
    )
    profile = _measure(DEADLINE_SECONDS)
    if profile.origin != origin:
        raise ProfileError(f"the process that measures came to {profile.origin} first, and not to {origin}")
    _keep(profile, files)
    return profile


def measure_if_asked(trainer: L.Trainer, module: FlowModule) -> None:
    """In a process that was started to measure, measures and ends it. Elsewhere does nothing."""
    if _PROFILE_VARIABLE not in os.environ:
        return
    parent, _, path = os.environ.pop(_PROFILE_VARIABLE).partition(":")
    die_with_parent(parent=int(parent))
    data = trainer.datamodule.apart()  # type: ignore[attr-defined]
    origin = origin_of(module, data, trainer.strategy.root_device, str(trainer.precision))  # as the run finds it
    profile = profile_module(
        module,
        data,
        accelerator=trainer.strategy.root_device.type,
        device_number=trainer.strategy.root_device.index,
        precision=trainer.precision,
        seconds=_MEASURED_SECONDS,
        progress=False,
    )
    write_profile(replace(profile, origin=origin), Path(path))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what follows in the script is the run's affair


def _measure(deadline: float) -> Profile:
    if multiprocessing.parent_process() is not None:
        raise ProfileError("this process was started by multiprocessing, so it has no command to start once more")
    with tempfile.TemporaryDirectory(prefix="flowtrain-") as folder:
        path = Path(folder) / "profile.json"
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, _PROFILE_VARIABLE: f"{os.getpid()}:{path}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, output = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired as error:
            raise ProfileError(f"the process that measures had not ended after {deadline:.0f} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started itself
            process.wait()
        if not path.exists():
            lines = " / ".join(output.strip().splitlines()[-_SHOWN_LINES:])
            raise ProfileError(
                f"the process that measures ended with exit code {process.returncode} and measured nothing: {lines}"
            )
        return read_profile(path)


def _kept_files(data: FlowDataModule, origin: ProfileOrigin) -> Iterator[Path]:
    """Returns the file for a profile of this origin: beside the index of the training data."""
    name = f"profile.{fingerprint(asdict(origin))}.json"
    folders = cache_folders(data.path("train")) if data.index.cache_dir is None else [Path(data.index.cache_dir)]
    yield from (folder / name for folder in folders)


def _keep(profile: Profile, files: list[Path]) -> None:
    """Write the profile into the first of the files that can be written."""
    for file in files:
        with suppress(OSError, ProfileError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_profile(profile, file)
            return
