"""The secret of a job: only what was said by somebody who knows it is believed."""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path

SECRET = "FLOWTRAIN_JOB_SECRET"
"""Environment variable that holds the secret. Lightning's launcher hands it to the ranks that it starts on one node."""

_TAG_BYTES = 32  # of HMAC-SHA256
_FEWEST_CHARACTERS = 32
_LENGTH = struct.Struct("<I")
_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


class ForeignMessageError(RuntimeError):
    """A message in the name of this job comes from a process that does not know its secret."""


class JobKey:
    """A key that all ranks of a job have, and nobody else.

    Args:
        secret: what it is made of; as hard to guess as the key shall be.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def derive(self, purpose: str) -> JobKey:
        """The key for one purpose: what was sealed with it is of no use for another one."""
        return JobKey(hmac.digest(self._secret, b"derive" + purpose.encode(), "sha256"))

    def hex(self) -> str:
        """The key itself, as text."""
        return self._secret.hex()

    def seal(self, content: bytes, context: str) -> bytes:
        """The content behind a tag of 32 bytes (HMAC-SHA256), which only holders of the key can make.

        Args:
            content: any bytes. They are not encrypted.
            context: what the content is, and who says it; the same content in another context has another tag.
        """
        return self._tag(content, context) + content

    def open(self, sealed: bytes, context: str) -> bytes:
        """The content.

        Raises:
            ForeignMessageError: it was not sealed with this key, or not for this context.
        """
        content = sealed[_TAG_BYTES:]
        if not hmac.compare_digest(sealed[:_TAG_BYTES], self._tag(content, context)):
            raise ForeignMessageError(
                f"What came for {context} was not said with this job's secret, and was not believed. Either somebody "
                f"else speaks here, or nodes have different secrets: set {SECRET} to one value on all of them, or let "
                f"them share {secret_file()}."
            )
        return content

    def _tag(self, content: bytes, context: str) -> bytes:
        name = context.encode()
        return hmac.digest(self._secret, _LENGTH.pack(len(name)) + name + content, "sha256")


def job_key(ranks: int) -> JobKey:
    """The key of the run that this process belongs to, in all starts by torchrun.

    It comes from ``FLOWTRAIN_JOB_SECRET``, else from a file in the user's home, which the first job makes and which
    nodes with a common home share.

    Args:
        ranks: of the run. One rank talks to nobody and so needs no secret.

    Raises:
        RuntimeError: there is no secret that others do not know.
    """
    if ranks == 1:
        return JobKey(secrets.token_bytes(_TAG_BYTES))
    run = "/".join(os.environ.get(name, "") for name in _RUN)
    return JobKey(_secret().encode()).derive(f"run {run}")


def offer_secret() -> None:
    """Make a secret for the processes that this one is about to start, unless it has one itself."""
    os.environ.setdefault(SECRET, secrets.token_hex(_TAG_BYTES))


def secret_file() -> Path:
    """The file of the user's secret: below ``XDG_STATE_HOME``, as a rule ``~/.local/state``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "flowtrain", "job-secret")


def _secret() -> str:
    given = os.environ.get(SECRET)
    try:
        secret, origin = (_kept_secret(), str(secret_file())) if given is None else (given.strip(), SECRET)
    except (OSError, RuntimeError) as error:  # the latter: there is no home
        raise RuntimeError(
            f"The ranks of this job need a secret by which they know each other, but none can be kept in the home "
            f"folder ({error}). Set {SECRET} to the same value on all ranks, for example that of "
            "`openssl rand -hex 32`."
        ) from error
    if len(secret) < _FEWEST_CHARACTERS:
        raise RuntimeError(
            f"{origin} holds a secret of {len(secret)} characters; expected {_FEWEST_CHARACTERS} or more, for example "
            "those of `openssl rand -hex 32`."
        )
    return secret


def _kept_secret() -> str:
    """The secret in the user's file. The first process of all that looks makes it; it is there whole or not at all."""
    file = secret_file()
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as new:
                new.write(secrets.token_hex(_TAG_BYTES))
                new.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):  # another process was faster
                os.link(own, file)
        finally:
            own.unlink(missing_ok=True)
    with file.open() as kept:
        status = os.fstat(kept.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(
                f"{file} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}; expected this user's "
                "own file of mode 600. If somebody else has read it, delete it; the next job makes another one"
            )
        return kept.read().strip()
