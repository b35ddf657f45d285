"""Short rows of every kind that TRL's trainers take, from a seed and no files."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

WORDS = "stone rain other tender in a on red nest at late star heron edit order sit no one is sand".split()


def sentence(generator: random.Random, low: int = 2, high: int = 5) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(low, high)))


def dataset(kind: str, count: int = 40, seed: int = 0) -> Dataset:
    """`count` rows of `kind`: a key of `ROWS`."""
    generator = random.Random(seed)
    return Dataset.from_list([ROWS[kind](generator, index) for index in range(count)])


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _messages(generator: random.Random, index: int) -> dict[str, Any]:
    turns = []
    for _ in range(1 + index % 2):
        turns += [_turn("user", sentence(generator)), _turn("assistant", sentence(generator))]
    return {"messages": turns}


ROWS = {
    "text": lambda generator, _: {"text": sentence(generator, 2, 6)},
    "prompt-completion": lambda generator, _: {
        "prompt": sentence(generator) + ": ",
        "completion": sentence(generator),
    },
    "messages": _messages,
    "preference": lambda generator, _: {
        "prompt": sentence(generator) + ": ",
        "chosen": sentence(generator),
        "rejected": sentence(generator),
    },
    "unpaired": lambda generator, index: {
        "prompt": sentence(generator) + ": ",
        "completion": sentence(generator),
        "label": index % 3 != 0,
    },
    "prompt": lambda generator, _: {"prompt": sentence(generator) + ": "},
    "classified": lambda generator, index: {"text": sentence(generator), "label": index % 3},
}
