"""Is an answer right? A program judges: JSON by value, anything else by its words. And a baseline that only looks up.

Two figures a set: the share of answers that are right whole, and, where answers are JSON objects, the share of
expected fields that are right. The baseline answers with the completion of the most similar training prompt (TF-IDF
cosine): what a model would score that had memorized and not learned. In the built-in task no held-out value occurs in
training, so it cannot be right whole; its fields show how much of the form alone earns.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Score:
    """`right` and `fields` are shares from 0 to 1; `fields` is None where the expected answers are no JSON objects."""

    right: float
    fields: float | None
    count: int


def is_right(answer: str, expected: str) -> bool:
    """Whether `answer` says what `expected` does: equal JSON (key order and spacing free), else equal words."""
    wanted = _as_json(expected)
    if wanted is None:
        return answer.split() == expected.split()
    given = _as_json(answer)
    return given is not None and _canonical(given) == _canonical(wanted)


def score(answers: Sequence[str], expected: Sequence[str]) -> Score:
    """Score of `answers` against `expected`, pair by pair. Raises ValueError where the lengths differ."""
    right = fields_right = fields = 0
    objects = bool(expected)
    for answer, wanted_text in zip(answers, expected, strict=True):
        right += is_right(answer, wanted_text)
        wanted, given = _as_json(wanted_text), _as_json(answer)
        if not isinstance(wanted, dict):
            objects = False
            continue
        fields += len(wanted)
        if isinstance(given, dict):
            fields_right += sum(key in given and _canonical(given[key]) == _canonical(wanted[key]) for key in wanted)
    count = len(expected)
    return Score(right / max(count, 1), fields_right / max(fields, 1) if objects else None, count)


def _as_json(text: str) -> dict[str, Any] | list[Any] | None:
    """The object or list that `text` is, else None (a bare number or word is compared as text)."""
    try:
        value = json.loads(text)
    except ValueError:  # RecursionError cannot come from an answer of a few dozen tokens
        return None
    return value if isinstance(value, dict | list) else None


def _canonical(value: Any) -> str:
    """A string equal for equal JSON values only: Python's own == holds True and 1, or 1 and 1.0, to be the same."""
    return json.dumps(value, sort_keys=True)


class NearestNeighbour:
    """Answers with the completion of the training prompt closest by TF-IDF cosine; ties go to the earliest row."""

    def __init__(self, prompts: Sequence[str], completions: Sequence[str]) -> None:
        self._completions = list(completions)
        counts = [Counter(_words(prompt)) for prompt in prompts]
        documents = Counter(word for count in counts for word in count)
        self._idf = {word: math.log((1 + len(counts)) / (1 + n)) + 1 for word, n in documents.items()}
        # word → [(row, weight)]: only rows that share a word with the question are looked at.
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row, count in enumerate(counts):
            for word, weight in self._weights(count).items():
                self._postings[word].append((row, weight))

    def answer(self, prompt: str) -> str:
        similarity: dict[int, float] = defaultdict(float)
        for word, weight in self._weights(Counter(_words(prompt))).items():
            for row, row_weight in self._postings.get(word, ()):
                similarity[row] += weight * row_weight
        best = max(similarity, key=lambda row: (similarity[row], -row), default=0)
        return self._completions[best]

    def _weights(self, count: Counter[str]) -> dict[str, float]:
        """Unit-length TF-IDF vector; words training never saw carry nothing."""
        weights = {word: n * self._idf[word] for word, n in count.items() if word in self._idf}
        length = math.sqrt(sum(weight * weight for weight in weights.values())) or 1.0
        return {word: weight / length for word, weight in weights.items()}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
