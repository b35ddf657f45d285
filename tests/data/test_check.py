"""`check_dataset`: counts what the collator hands over, and names the classic mistakes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from datasets import Dataset

import fastft
from fastft.data import DatasetCheck
from tests import support
from tests.data.builders import CONVERSATION, byte_tokenizer
from tests.data.test_responses import ANSWERS, make_trainer

ROWS = [{"messages": [*CONVERSATION[:3], {"role": "user", "content": "So? " * n}, CONVERSATION[4]]} for n in (1, 5, 2)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return support.build_model("llama", vocab_size=512)


def plain_trainer(model: Any, tokenizer: Any, rows: list[dict[str, Any]], folder: pathlib.Path, collator: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        data_collator=collator,
        args=TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=2),
    )


def found(check: DatasetCheck, words: str) -> bool:
    return any(words in warning for warning in check.warnings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"packing": True}, {"padding_free": True, "max_length": None, "pad_to_multiple_of": 7}],
    ids=["padded", "packed", "flattened"],
)
def test_counts_are_of_documents_and_the_same_however_they_are_batched(
    model: Any, tokenizer: Any, tmp_path: pathlib.Path, settings: dict[str, Any]
) -> None:
    trainer = fastft.train_on_responses_only(make_trainer(tokenizer, tmp_path, ROWS, model=model, **settings))
    check = fastft.check_dataset(trainer, show=False)
    ids = [tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"] for row in ROWS]
    answers = sum(len(tokenizer.encode(answer, add_special_tokens=False)) for answer in ANSWERS)
    assert (check.documents, check.tokens) == (3, sum(map(len, ids)))
    assert check.trained_tokens == 3 * answers
    assert (check.trained_eos_tokens, check.eos_tokens) == (6, 15)
    assert check.longest == max(map(len, ids))
    assert check.warnings == ()
    assert [text for text, trained in check.example if trained] == ANSWERS
    assert "".join(text for text, _ in check.example).startswith("<|im_start|>system\nBe brief.")


def test_it_leaves_the_trainer_and_the_random_state_as_they_were(
    model: Any, tokenizer: Any, tmp_path: pathlib.Path
) -> None:
    trainer = make_trainer(tokenizer, tmp_path, ROWS, model=model)
    before, loaders = torch.get_rng_state(), list(trainer.accelerator._dataloaders)
    fastft.check_dataset(trainer, show=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.accelerator._dataloaders == loaders


def test_it_prints_the_example_with_the_answers_marked(
    model: Any, tokenizer: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fastft.train_on_responses_only(make_trainer(tokenizer, tmp_path, ROWS, model=model))
    check = fastft.check_dataset(trainer)
    printed = capsys.readouterr().out
    assert "⟦It is 4." in printed
    assert "nothing found amiss" in printed
    assert "trained tokens" in str(check)


def test_padding_that_is_eos_masked_by_its_id(tmp_path: pathlib.Path) -> None:
    """C30: transformers' collator masks every EOS; Seq2Seq's masks padding alone."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

    tokenizer = byte_tokenizer(None, pad_token="</s>")
    eos, model = tokenizer.eos_token_id, support.build_model("llama", vocab_size=512)
    model.generation_config.eos_token_id = eos
    rows = [{"input_ids": [11, 14, 15, eos]}, {"input_ids": [11, 14, eos]}]
    masked = plain_trainer(model, tokenizer, rows, tmp_path, DataCollatorForLanguageModeling(tokenizer, mlm=False))
    check = fastft.check_dataset(masked, show=False)
    assert (check.eos_tokens, check.trained_eos_tokens) == (2, 0)
    assert found(check, "padding is '</s>', the EOS token")
    labelled = [row | {"labels": row["input_ids"]} for row in rows]
    kept = plain_trainer(model, tokenizer, labelled, tmp_path, DataCollatorForSeq2Seq(tokenizer))
    check = fastft.check_dataset(kept, show=False)
    assert (check.eos_tokens, check.trained_eos_tokens) == (2, 2)
    assert check.warnings == ()


def test_each_mistake_has_its_warning(model: Any, tmp_path: pathlib.Path) -> None:
    """Double BOS (C31), EOS missing or masked, cut, too long, repeated, without labels."""
    from transformers import DataCollatorForSeq2Seq

    tokenizer = byte_tokenizer(None, adds_bos=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.generation_config.eos_token_id = eos

    def check(*rows: tuple[list[int], list[int]], max_length: int | None = None) -> DatasetCheck:
        data = [{"input_ids": ids, "labels": labels} for ids, labels in rows]
        trainer = plain_trainer(model, tokenizer, data, tmp_path, DataCollatorForSeq2Seq(tokenizer))
        trainer.args.max_length = max_length
        return fastft.check_dataset(trainer, show=False)

    good, ignored = [bos, 11, 12, eos], [-100] * 4
    assert check((good, good)).warnings == ()
    assert found(check(([bos, *good], [bos, *good])), "BOS twice")
    assert check(([bos, *good], [bos, *good])).double_bos == 1
    assert found(check((good[1:], good[1:])), "do not begin with BOS")
    assert found(check((good[:3], good[:3])), "no document has an EOS token")
    assert found(check((good, [*good[:3], -100])), "the labels mask every EOS")
    assert found(check((good, ignored)), "no token is trained")
    assert found(check((good, [bos, *ignored[1:]])), "no token is trained"), "a first token is never predicted"
    assert found(check((good, good), ([bos, 13, 14, eos], ignored)), "1 of 2 documents have no label")
    assert found(check((good, good), ([bos, 13, 14, 15], [bos, 13, 14, 15]), max_length=4), "cut at max_length=4")
    assert check((good, good), max_length=4).cut == 0
    assert found(check((good, good), max_length=3), "longer than 3 tokens, up to 4")
    assert check((good, good), (good, good), ([*good[:2], eos], [*good[:2], eos])).duplicates == 1


@pytest.mark.parametrize(("strategy", "cut"), [("bfd", 1), ("bfd_split", 0), ("wrapped", 0)])
def test_what_packing_goes_on_with_in_the_next_row_is_not_cut(
    model: Any, tmp_path: pathlib.Path, strategy: str, cut: int
) -> None:
    from transformers import DataCollatorForSeq2Seq

    tokenizer = byte_tokenizer(None)
    row = [11, 12, 13, 14]
    trainer = plain_trainer(
        model, tokenizer, [{"input_ids": row, "labels": row}], tmp_path, DataCollatorForSeq2Seq(tokenizer)
    )
    trainer.args.max_length, trainer.args.packing, trainer.args.packing_strategy = len(row), True, strategy
    assert fastft.check_dataset(trainer, show=False).cut == cut


def test_what_cannot_be_checked_is_refused(model: Any, tokenizer: Any, tmp_path: pathlib.Path) -> None:
    trainer = make_trainer(tokenizer, tmp_path, ROWS, model=model)
    trainer.data_collator = lambda rows: {"input_ids": torch.zeros(1, 1)}
    with pytest.raises(ValueError, match="without input_ids and labels"):
        fastft.check_dataset(trainer, show=False)
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="no training dataset"):
        fastft.check_dataset(trainer, show=False)
