"""Why a family cannot be trained, in a sentence for its users, whatever its code raised."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_OURS = __name__.partition(".")[0]
_MISSING = re.compile(r"(\w+) requires the (\w+) library")


class UntrainableError(ValueError):
    """A family cannot be trained in halves; the message says why."""


@contextmanager
def told_as(sentence: str) -> Iterator[None]:
    """Inside, what code of a family raises becomes a sentence; sentences of this package stay as they are.

    Args:
        sentence: what could not be done, without its full stop.

    Raises:
        UntrainableError: in place of any other exception.
    """
    try:
        yield
    except UntrainableError:
        raise
    except ImportError as error:
        raise UntrainableError(_missing_library(error)) from error
    except Exception as error:
        module, place = _raised_in(error.__traceback__)
        if module.startswith(_OURS) and str(error).endswith("."):  # not by Python itself
            raise UntrainableError(" ".join(str(error).split())) from error
        wants = f"asks for {error.name}, too" if isinstance(error, AttributeError) and error.obj is not None else ""
        raise UntrainableError(f"{sentence}: {place} {wants or 'fails on it'}.") from error


def raised(error: BaseException) -> str:
    """The exception that lies behind a sentence, as Python names it; empty where the sentence is all."""
    behind = error.__cause__ if isinstance(error, UntrainableError) else error
    return "" if behind is None else "".join(traceback.format_exception_only(behind)).strip()


def _missing_library(error: ImportError) -> str:
    found = _MISSING.search(str(error))
    if found is None:
        return f"A library is missing: {' '.join(str(error).split())}"
    name, library = found.groups()
    return f"{name} of transformers needs {library}, which is not installed here: pip install {library.lower()}."


def _raised_in(trace: TracebackType | None) -> tuple[str, str]:
    """The module that raised, and the innermost class or function of ``transformers`` on the way there."""
    module = place = ""
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("transformers.") and not module.startswith("transformers.utils."):
            owner = frame.f_locals.get("self")
            place = frame.f_code.co_name if owner is None else type(owner).__name__
        trace = trace.tb_next
    return module, f"{place} of transformers" if place else "its code"
