"""Compares our words with those of published processors: ``python -m tests.models.published_templates NAME ...``.

A name is a model's on the Hugging Face Hub, of which everything but the weights is fetched, or a folder. Conversations
must become, token for token, what the model's own processor makes of them, by its own tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from flowtrain_lightning.data import TokenSequence
from flowtrain_lightning.models.processor import processor_of
from tests.models.both_processors import CONVERSATIONS, Both, write_images

_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Of a repository: what processors and tokenizers are made of. Indexes of weights are among them, but no weights."""

_SHOWN = 8
"""Tokens of each side from the first that differs."""


class NotComparedError(Exception):
    """A model whose processor is not there or cannot be opened here; says why."""


def main() -> int:
    """Compares all that are named; returns 1 where one differs or was not compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="such as Qwen/Qwen2.5-VL-3B-Instruct, or a folder")
    failed = 0
    for name in parser.parse_args().names:
        try:
            differences = list(compared(name))
        except NotComparedError as error:
            differences = [f"not compared: {error}"]
        equal = f"{len(CONVERSATIONS)} conversations and their prompts are, token for token, its processor's"
        for line in differences or [equal]:
            print(f"{name}: {line}", flush=True)
        failed |= bool(differences)
    return int(failed)


def compared(name: str) -> Iterator[str]:
    """A sentence for every conversation that is written otherwise than by the model's own processor.

    Args:
        name: the model's, or its folder.

    Raises:
        NotComparedError: the Hub cannot be reached or does not give it, or its processor needs what is not installed.
    """
    folder = Path(name) if Path(name).is_dir() else fetched(name)
    try:
        family = transformers.AutoConfig.from_pretrained(folder).model_type
        theirs, ours = transformers.AutoProcessor.from_pretrained(folder), processor_of(folder)
    except (ImportError, OSError, ValueError) as error:
        raise NotComparedError(f"its processor cannot be opened here: {error}") from error
    with tempfile.TemporaryDirectory() as temporary:
        both = Both(theirs, ours, write_images(Path(temporary)), family)
        for conversation, turns in CONVERSATIONS.items():
            for prompt in (False, True):
                record = both.record(turns)
                expected = both.expected(record, prompt=prompt)["input_ids"].tolist()
                difference = first_difference(both.sequence(record, prompt=prompt), expected)
                if difference:
                    yield f"{'the prompt of ' if prompt else ''}{conversation!r} differs {difference}"


def fetched(name: str) -> Path:
    """The folder with a model's files from the Hub but for its weights.

    Raises:
        NotComparedError: the Hub cannot be reached, or does not give them.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except LocalEntryNotFoundError as error:
        raise NotComparedError(
            "the Hugging Face Hub cannot be reached, and the model was not fetched before; run this where it can, or "
            "name a folder with the model's files"
        ) from error
    except (HfHubHTTPError, ValueError) as error:  # no such model, or one whose terms have to be accepted
        raise NotComparedError(f"the Hugging Face Hub does not give it: {error}") from error


def first_difference(found: TokenSequence, expected: list[int]) -> str:
    """Where two sequences differ first, and how; empty where they do not."""
    tokens = found.tokens.tolist()
    if tokens == expected:
        return ""
    same = (at for at, (one, other) in enumerate(zip(tokens, expected, strict=False)) if one != other)
    at = next(same, min(len(tokens), len(expected)))
    return f"at token {at}: {tokens[at : at + _SHOWN]}, but its processor's are {expected[at : at + _SHOWN]}"


if __name__ == "__main__":
    sys.exit(main())
