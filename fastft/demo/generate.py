"""Make the demo's three JSONL files: `python -m fastft.demo.generate` (run it after editing phrases.py).

Deterministic: one `random.Random` per file, seeded by the file's name; a test compares the files with what this module
returns. A row is `{"prompt": "<request>\\n", "completion": "<compact JSON>"}`.

    train.jsonl               seen templates, training values
    heldout_values.jsonl      seen templates, held-out values
    heldout_templates.jsonl   unseen templates, held-out values
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from fastft.demo.phrases import COMMANDS, HELD_OUT_POOLS, POOL_OF_SLOT, SEEN, TRAIN_POOLS, UNSEEN

DATA_FOLDER = Path(__file__).with_name("data")
ROWS_PER_TEMPLATE_IN_TRAINING = 8
HELD_OUT_ROWS_PER_COMMAND = 8

NUMBER_WORDS = {
    2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten",
    11: "eleven", 12: "twelve",
}  # fmt: skip
NUMBER_RANGES = {"sum": range(4, 200), "level": range(5, 100), "deg": range(14, 28), "min": range(2, 90),
                 "n": range(2, 13)}  # fmt: skip
CURRENCY_FORMS = ("{} euros", "{} dollars", "{} pounds", "{}")


def held_out_number(number: int) -> bool:
    """Which side a number is on: 3, 7, 11, 15, ... are never a slot value in training."""
    return number % 4 == 3


def held_out_time(hour: int, minute: int) -> bool:
    """Which side a time of day is on, hours and minutes mixed so that both sides have every hour and every minute."""
    return (hour + minute // 5) % 4 == 3


def _render_time(hour: int, minute: int, rng: random.Random) -> str:
    """On the 24-hour clock, or with am/pm: then the model has to convert, not copy."""
    if rng.random() < 0.5:
        return f"{hour}:{minute:02d}"
    half = "am" if hour < 12 else "pm"
    return f"{(hour - 1) % 12 + 1}:{minute:02d} {half}"


def _fill(slot: str, held_out: bool, rng: random.Random) -> tuple[str, str | int]:
    """A value for one slot: (as the request says it, as the answer writes it)."""
    if slot == "at":
        times = [(h, m) for h in range(6, 24) for m in range(0, 60, 5) if held_out_time(h, m) == held_out]
        hour, minute = rng.choice(times)
        return _render_time(hour, minute, rng), f"{hour:02d}:{minute:02d}"
    if slot in NUMBER_RANGES:
        number = rng.choice([n for n in NUMBER_RANGES[slot] if held_out_number(n) == held_out])
        if slot == "sum":
            return rng.choice(CURRENCY_FORMS).format(number), number
        if slot == "n" and rng.random() < 0.6:
            return NUMBER_WORDS[number], number
        return str(number), number
    pools = HELD_OUT_POOLS if held_out else TRAIN_POOLS
    value = rng.choice(pools[POOL_OF_SLOT[slot]])
    return value, value


def _row(command: str, template: str, held_out: bool, rng: random.Random) -> dict[str, str]:
    spoken: dict[str, str] = {}
    answer: dict[str, str | int] = {"do": command}
    for slot in COMMANDS[command]:
        spoken[slot], answer[slot] = _fill(slot, held_out, rng)
    request = template.format(**spoken)
    request = request[0].upper() + request[1:]
    style = rng.random()
    if style < 0.15:  # people type without a full stop, or without any capital at the start
        request = request.rstrip(".")
    elif style < 0.25 and not request.startswith(("I ", "I'", *spoken.values())):
        request = request[0].lower() + request[1:]
    return {"prompt": f"{request}\n", "completion": json.dumps(answer, separators=(",", ":"))}


def _rows(
    name: str, templates: dict[str, tuple[str, ...]], held_out: bool, per_command: int
) -> Iterator[dict[str, str]]:
    rng = random.Random(name)
    seen: set[str] = set()
    drawn = []
    for command in COMMANDS:
        order = rng.sample(templates[command], len(templates[command]))  # eight rows of twelve templates: any eight
        for index in range(per_command):
            template = order[index % len(order)]
            row = _row(command, template, held_out, rng)
            while row["prompt"] in seen:
                row = _row(command, template, held_out, rng)
            seen.add(row["prompt"])
            drawn.append(row)
    rng.shuffle(drawn)
    yield from drawn


def generate() -> dict[str, list[dict[str, str]]]:
    """The three files' rows by file name."""
    per_command = ROWS_PER_TEMPLATE_IN_TRAINING * len(next(iter(SEEN.values())))
    return {
        "train.jsonl": list(_rows("train", SEEN, False, per_command)),
        "heldout_values.jsonl": list(_rows("heldout_values", SEEN, True, HELD_OUT_ROWS_PER_COMMAND)),
        "heldout_templates.jsonl": list(_rows("heldout_templates", UNSEEN, True, HELD_OUT_ROWS_PER_COMMAND)),
    }


def as_jsonl(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    DATA_FOLDER.mkdir(exist_ok=True)
    for name, rows in generate().items():
        (DATA_FOLDER / name).write_text(as_jsonl(rows), encoding="utf-8")
        sys.stdout.write(f"{name}: {len(rows)} rows\n")


if __name__ == "__main__":
    main()
