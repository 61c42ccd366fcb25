"""Questions and answers in columns of any names, read as the conversations that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowtrain_lightning.data.records.record_fields import FORMS
from flowtrain_lightning.data.records.understood import NotUnderstoodError


@dataclass(frozen=True)
class Columns:
    """The names of the columns of question/answer data: the section ``columns`` of a data module.

    A record becomes a question and an answer, of which the answer is learned. Its images and its audio stand before
    the question, unless ``<image>`` and ``<audio>`` in it mark their places.

    Attributes:
        question: with what is asked, a text.
        answer: with what the model is to say, a text; a record without it has nothing to learn.
        image: with an image, or a list of them; None: images are found where conversations have them.
        system: with a text for the system's turn; None: there is none.
        audio: with a clip of audio, or a list of them; None: as with images.
    """

    question: str
    answer: str
    image: str | None = None
    system: str | None = None
    audio: str | None = None

    def conversation(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record as a conversation; other fields stay as they are.

        Args:
            record: field -> value; what is null is not in it.

        Raises:
            NotUnderstoodError: there is no question, a text is none, or the record is a conversation already.
        """
        if self.question not in record:
            raise NotUnderstoodError(
                f"it has no {self.question!r}, in which columns says that the question is; it has "
                f"{', '.join(map(repr, record)) or 'nothing':.200}"
            )
        said = [("user", self.question), ("assistant", self.answer)]
        turns = [{"role": role, "content": _text(record, name)} for role, name in said if name in record]
        named = {"images": self.image, "audios": self.audio, "system": self.system}
        moved = {name: of for name, of in named.items() if of is not None}
        found: dict[str, Any] = {
            "messages": turns,
            **{name: record[of] for name, of in moved.items() if of in record},
        }
        used = {self.question, self.answer, *moved.values()}
        others = {name: value for name, value in record.items() if name not in used}
        if twice := next((name for name in others if name in FORMS or name in found), None):
            raise NotUnderstoodError(
                f"columns says where its question and its answer are, but it also holds {twice!r}; leave columns out, "
                f"or say that this means nothing: FlowDataModule(ignore_columns=[{twice!r}])"
            )
        return {**others, **found}


def _text(record: Mapping[str, Any], name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise NotUnderstoodError(
            f"its {name!r}, which columns calls question or answer, must be a text, but is a {type(text).__name__}"
        )
    return text
