"""Starts the other ranks of this node, and notices when one of them ends while no watchdog can tell."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from flowtrain_lightning.runtime.watchdog import end_children, say_fault

_LAUNCHER = "FLOWTRAIN_LAUNCHER"  # for the ranks that the first one of a node started: its process id
_LOOK_SECONDS = 0.2


class RankLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for every other rank, as Lightning's own launcher does.

    Lightning's kills all processes, without a word on why, up to 5 s after a child has failed. Here `Kin` notices that
    and leaves it to the watchdog, which knows more, wherever one runs.

    Args:
        environment: tells the ranks about each other.
        processes: ranks of this node.
        nodes: of the job.
        check: called with the Trainer before any other rank starts; raises where that would be in vain.

    Attributes:
        weights_only: what ``fit`` or its like was told about reading its checkpoint.
    """

    def __init__(
        self, environment: ClusterEnvironment, processes: int, nodes: int, check: Callable[[Any], None]
    ) -> None:
        super().__init__(environment, processes, nodes)
        self._check = check
        self._ckpt_path: Any = None
        self.weights_only: bool | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the other ranks, unless that was done before or is somebody else's affair, and calls ``function``."""
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        self._ckpt_path, self.weights_only = given.get("ckpt_path"), given.get("weights_only")
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if not self.cluster_environment.creates_processes_externally:
            if self.num_processes > 1:
                _refuse_what_cannot_run_again()
            self._check(trainer)
            os.environ[_LAUNCHER] = str(os.getpid())
            self._call_children_scripts()
            kin.rank = self.cluster_environment.global_rank()
            kin.know({rank: process.poll for rank, process in enumerate(self.procs, start=kin.rank + 1)})
        return function(*args, **kwargs)

    def checkpoint(self, trainer: Any) -> str | None:
        """The checkpoint that ``fit`` or its like was asked to load, which the Trainer itself tells only after setup.

        Raises:
            ValueError: there is no such checkpoint.
        """
        # Lightning's own way from "best", "last" and "hpc" to a path; there is no public one.
        found = trainer._checkpoint_connector._parse_ckpt_path(
            trainer.state.fn, self._ckpt_path, model_provided=True, model_connected=True
        )
        return None if found is None else str(found)


def _refuse_what_cannot_run_again() -> None:
    """Raises where Python was given no script and no module that another rank could run."""
    if sys.modules["__main__"].__spec__ is None and not Path(sys.argv[0]).is_file():
        raise MisconfigurationException(
            "Every rank runs your script once more, but Python got it from its command line (`python -c`) or from "
            "standard input. Save it as a file and run that, or set Trainer(devices=1)."
        )


class Kin:
    """The ranks that this process started, or the one that started it: whether they live, where no watchdog can tell.

    The first rank of a node starts the others there. A thread ends this process, with a sentence, when one of them
    is gone that it waits for, or a child ended with an error.

    Attributes:
        rank: of this process.
        needed: this rank waits for the others.
        watched: a watchdog runs, or has found a fault.
        folder: where ``fault-rank<rank>.txt`` is written.
        labels: what each rank is, once that is known.
        tell: lets ranks of other nodes know why this process ends, while no watchdog does.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.needed = False
        self.watched = False
        self.folder = Path()
        self.labels: list[str] = []
        self.tell: Callable[[str], None] | None = None

    def know(self, ended: Mapping[int, Callable[[], int | None]]) -> None:
        """Look after these processes from now on.

        Args:
            ended: for each rank a function that gives its exit code once it has ended, and None before.
        """
        threading.Thread(target=self._watch, args=(dict(ended),), name="flowtrain-kin", daemon=True).start()

    def know_launcher(self, first: int) -> None:
        """Look after ``first``, the first rank of this node, if it started this process."""
        launcher = int(os.environ.get(_LAUNCHER, os.getpid()))
        if launcher != os.getpid():
            self.know({first: lambda: None if os.getppid() == launcher else 0})

    def _watch(self, ended: dict[int, Callable[[], int | None]]) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            for rank, code in ((rank, exit_code()) for rank, exit_code in ended.items()):
                if code is not None and (code != 0 or self.needed) and not self.watched:
                    self._end(rank, code)

    def _end(self, rank: int, code: int) -> None:
        who = f"Rank {rank} ({self.labels[rank]})" if self.labels else f"Rank {rank}"
        how = f"ended with exit code {code}" if rank > self.rank else "ended"  # of its launcher nobody tells the code
        when = "during start-up, before it had joined the other ranks" if self.needed else "outside of fit and its like"
        sentence = f"{who} {how} {when}. Its own output says why."
        say_fault(sentence, self.folder, self.rank)
        if self.tell is not None:
            self.tell(sentence)
        end_children()
        os._exit(1)


kin = Kin()
"""Of this process, whichever Trainer runs."""
