"""A key-value store whose values are believed only if they were put there by a rank of this job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.parallel.ranks.job_secret import ForeignMessageError, JobKey

_LOOK_SECONDS = 0.02
FOREIGN_SECONDS = 60.0  # in which the rank itself may still come and replace what somebody else has put


class KeyedStore(Store):  # type: ignore[misc]
    """Whoever reaches the store beneath can put anything there; here it counts as not there.

    Process groups of torch.distributed work with it as with any other store. What it has no key for, such as a
    comparison on the server, it does not offer. Values are not encrypted, and who can write can also overwrite: then
    a reader waits in vain and says why.

    Args:
        inner: the store beneath, which anybody may reach.
        key: of the job.

    Attributes:
        inner: the store beneath.
        key: of the job.
    """

    def __init__(self, inner: Store, key: JobKey) -> None:
        super().__init__()
        self.key = key
        self.inner = inner
        self._values = key.derive("store")
        self._foreign_since: dict[str, float] = {}  # key under which `check` last found what somebody else has put

    @property
    def timeout(self) -> timedelta:
        """After which a wait ends with an error."""
        found: timedelta = self.inner.timeout  # type: ignore[attr-defined]
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on waits end after ``timeout``."""
        self.inner.set_timeout(timeout)

    def clone(self) -> KeyedStore:
        """The same store over a connection of its own. Keep what is returned as long as what is made of it."""
        return KeyedStore(self.inner.clone(), self.key)  # type: ignore[attr-defined]

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, self._values.seal(content, _context(key)))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value that a rank of this job has put, or will.

        Raises:
            ForeignMessageError: for a minute there was only what somebody else has put.
        """
        deadline = time.monotonic() + FOREIGN_SECONDS
        while True:
            try:
                return self._values.open(self.inner.get(key), _context(key))
            except ForeignMessageError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECONDS)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether ranks of this job have put values for all these keys.

        Raises:
            ForeignMessageError: for a minute there was only what somebody else has put, whenever this was asked.
        """
        if not self.inner.check(list(keys)):
            return False
        return all(map(self._is_believed, keys))

    def _is_believed(self, key: str) -> bool:
        try:
            self._values.open(self.inner.get(key), _context(key))
        except ForeignMessageError:
            now = time.monotonic()
            if now - self._foreign_since.setdefault(key, now) > FOREIGN_SECONDS:
                raise
            return False
        self._foreign_since.pop(key, None)
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values for all these keys; `get` says whether they can be believed."""
        if timeout is None:
            self.inner.wait(list(keys))
        else:
            self.inner.wait(list(keys), timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Count. Numbers have no tag: whoever reaches the store can change them."""
        return int(self.inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        return bool(self.inner.delete_key(key))

    def has_extended_api(self) -> bool:
        """Whether values can be appended to: no."""
        return False


def _context(key: str) -> str:
    return f"{key!r} of the job's store"
