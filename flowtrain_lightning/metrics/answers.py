"""Scores of generated answers beside the true ones: exact match, and ANLS, which reads past slips of spelling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.text import edit_distance


class AnswerMetric(Metric):
    """The mean of a score of 0 to 1 over answers; case and white space around them do not count."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)  # every rank is given all answers
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, answers: Sequence[str], truths: Sequence[str]) -> None:
        """Takes in answers and what they should have been, pair by pair."""
        for answer, truth in zip(answers, truths, strict=True):
            self.total += self.score(answer.strip().lower(), truth.strip().lower())
        self.count += len(answers)

    def compute(self) -> Tensor:
        """The mean; not a number before the first answer."""
        return self.total / self.count

    @abstractmethod
    def score(self, answer: str, truth: str) -> float:
        """Of one answer, 0 to 1."""


class AnswerExactMatch(AnswerMetric):
    """The share of answers that are the true ones."""

    def score(self, answer: str, truth: str) -> float:
        """See `AnswerMetric`."""
        return float(answer == truth)


class AnswerSimilarity(AnswerMetric):
    """ANLS, the average normalized Levenshtein similarity of Biten et al. 2019 (arXiv 1905.13648, section 5).

    One minus the edits that lead from one text to the other through the length of the longer one; 0 from half on.
    """

    def score(self, answer: str, truth: str) -> float:
        """See `AnswerMetric`."""
        if answer == truth:
            return 1.0
        edits = float(edit_distance([answer], [truth], reduction="sum"))
        apart = edits / max(len(answer), len(truth))
        return 1 - apart if apart < 0.5 else 0.0
