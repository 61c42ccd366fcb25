"""Notes whether the main thread of this process computes or waits for other ranks."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from flowtrain_lightning.data import LOADING_THREAD

_WAITS = (
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",  # those of DTensor, and so of tensor ranks
    "deepspeed.utils.nvtx",  # which wraps what DeepSpeed calls; all of that but waiting has a frame of its own
)
"""Modules in which a thread waits for other ranks, or is about to. By name: all but the first are internal."""

_CALLED_BY_THEM = (
    "torch._ops",
    "torch._library.",
    "flowtrain_lightning.parallel.ranks.keyed_store",
)
"""What they call to do so; others may call it, too."""

_LOADERS = ("flowtrain_lightning.data.loading.dataloader", "torch.utils.data.dataloader")
_DEBUGGERS = ("bdb", "IPython.core.debugger", "_pydevd_bundle", "debugpy")


def main_waits_for_ranks() -> bool:
    """Whether the main thread is in a collective, or makes a group, of PyTorch, whoever has called it."""
    frame = _main_frame()
    while frame is not None and _module(frame).startswith(_CALLED_BY_THEM):
        frame = frame.f_back
    return frame is not None and _module(frame) in _WAITS


def main_waits_for_data() -> bool:
    """Whether the main thread waits for a data loader, or reads the data itself."""
    return _main_is_within(_LOADERS)


def main_is_debugged() -> bool:
    """Whether the main thread stands in a debugger, where a person may think for long."""
    return _main_is_within(_DEBUGGERS)


def main_stack() -> str:
    """The lines of code in which the main thread is, outermost first."""
    frame = _main_frame()
    return "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)\n"


def loading_stack() -> str:
    """The same of the thread that loads for the main thread; empty where none does."""
    frames = sys._current_frames()
    loading = [thread.ident for thread in threading.enumerate() if thread.name.startswith(LOADING_THREAD)]
    found = [frames[ident] for ident in loading if ident is not None and ident in frames]
    return "".join(line for frame in found for line in traceback.format_stack(frame))


def _main_is_within(names: tuple[str, ...]) -> bool:
    """Whether the main thread runs code of these modules or packages, or was called by it."""
    frame = _main_frame()
    while frame is not None and not {_module(frame), _module(frame).partition(".")[0]}.intersection(names):
        frame = frame.f_back
    return frame is not None


def _main_frame() -> FrameType | None:
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
