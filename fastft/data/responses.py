"""Train on the answers only: labels that are the assistant's turns and -100 everywhere else.

The labels become a column of the dataset, because that is what a collator honours: TRL's takes `labels` as they are
and pads them with -100. Masks (`assistant_masks`, `completion_mask`) are read while TRL prepares a dataset and never
again, so on a trainer's prepared rows they would do nothing. A collator that makes its own labels is refused, tried
on a real row.

TRL's `assistant_only_loss` wants `{% generation %}` blocks in the template, and messages in the dataset. This needs
neither: it finds the answers in the ids (markers.py, decoded.py), on rows that are tokenized, cut or packed already.
Messages whose template has the blocks get exactly TRL's mask.

An answer is what the model has to produce behind the generation prompt: its words and the end of its turn, with the
whitespace the template puts behind it at every turn, as TRL's own training templates have it. Where rows carry labels
already, what they mask stays masked, so calling twice changes nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from fastft.data.containers import column_names, each
from fastft.data.decoded import Speller
from fastft.data.markers import Markers, explicit_markers, probe_markers

IGNORED = -100
SHOWN_TOKENS = 400  # of the row an error shows
STREAMED_ROWS = 200  # looked at in a dataset that is read as it streams


def train_on_responses_only(
    trainer: Any,
    instruction_part: str | None = None,
    response_part: str | None = None,
    *,
    tokenizer: Any = None,
    last_response_only: bool = False,
    num_proc: int | None = None,
) -> Any:
    """Mask everything but the assistant's answers.

    Args:
        trainer: an `SFTTrainer` (its train and eval datasets get new labels), any `transformers.Trainer` over tokenized
            rows, or a `Dataset`, `IterableDataset` or dict of them with `input_ids`, `messages` or `text`.
        instruction_part: text a user turn begins with, e.g. "<|im_start|>user\\n".
        response_part: text an answer begins behind, e.g. "<|im_start|>assistant\\n". None: both are found by rendering
            conversations with the tokenizer's chat template.
        tokenizer: needed with a dataset; for a trainer None takes its `processing_class`.
        last_response_only: keep only the last answer of each document.
        num_proc: processes for `Dataset.map`; None takes the trainer's `dataset_num_proc`.

    Returns:
        The trainer, changed, or a new dataset with `labels` [tokens] beside `input_ids`.

    Raises:
        ValueError: no markers can be found, the dataset has no text, the collator makes its own labels, or more than
            half of the rows have no answer (one is shown). Nothing has been changed then.

    Warns:
        UserWarning: some rows have no answer: they add nothing to the loss; or the template does not tell a system turn
            from an answer.
    """
    if instruction_part is not None and response_part is None:
        raise ValueError(
            "instruction_part was given without response_part: without it there is no telling where an answer begins. "
            "Give both, or neither to have them found in the chat template."
        )
    is_trainer = hasattr(trainer, "train_dataset") and hasattr(trainer, "data_collator")
    tokenizer = tokenizer if tokenizer is not None or not is_trainer else trainer.processing_class
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's own
    if tokenizer is None:
        raise ValueError(
            "a tokenizer is needed to read the rows: train_on_responses_only(dataset, tokenizer=tokenizer)"
        )
    if response_part is None:
        markers = probe_markers(tokenizer)
        if markers.system_like_answers:
            warnings.warn(
                "fastft: the tokenizer's chat template sets a system turn off as it does an answer, so rows with one "
                "would train on the wrong turns. Where there are such rows, give instruction_part and response_part.",
                stacklevel=2,
            )
    else:
        markers = explicit_markers(tokenizer, instruction_part, response_part)
    labeller = Labeller(tokenizer, markers, last_response_only=last_response_only, exact=response_part is None)
    if not is_trainer:
        return each(trainer, lambda name, rows: _labelled(rows, labeller, name, num_proc), "dataset")

    num_proc = num_proc if num_proc is not None else getattr(trainer.args, "dataset_num_proc", None)

    def relabel(name: str, rows: Any) -> Any:
        labelled = _labelled(rows, labeller, name, num_proc)
        _require_honest_collator(trainer.data_collator, labelled)
        return labelled

    train = None if trainer.train_dataset is None else each(trainer.train_dataset, relabel, "train dataset")
    evaluation = None if trainer.eval_dataset is None else each(trainer.eval_dataset, relabel, "eval dataset")
    if train is not None:
        trainer.train_dataset = train
    if evaluation is not None:
        trainer.eval_dataset = evaluation
    return trainer


class Labeller:
    """One row to its labels; module-level and picklable, so `Dataset.map` may start processes however it likes.

    Args:
        tokenizer: the one that made (or makes) the row's ids.
        markers: what delimits answers.
        last_response_only: keep only the last answer of each document.
        exact: where the template marks the answers itself, take its marks for messages.
    """

    def __init__(self, tokenizer: Any, markers: Markers, *, last_response_only: bool, exact: bool = True) -> None:
        self.tokenizer = tokenizer
        self.speller = Speller(tokenizer)
        self.markers = _as_spelled(markers, self.speller)
        self.last_response_only = last_response_only
        self.exact = exact

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """`input_ids` and `labels` of a row, both [tokens]."""
        tokenized = self._tokenize(row)
        input_ids = list(tokenized["input_ids"])
        kept = tokenized.get("assistant_masks")
        if kept is None:
            kept = [False] * len(input_ids)
            for start, end in _documents(row, len(input_ids)):
                kept[start:end] = self._answers(input_ids[start:end])
        elif self.last_response_only:
            kept = _last_run(kept)
        before = row.get("labels")
        if before is None:
            before = input_ids
        labels = [token if keep else IGNORED for token, keep in zip(before, kept, strict=True)]
        return {"input_ids": input_ids, "labels": labels}

    def _answers(self, input_ids: Sequence[int]) -> list[bool]:
        """For each token of one document, whether an answer has a character of it (as transformers' own masks do)."""
        text, offsets = self.speller(input_ids)
        spans = self.markers.spans(text)
        if self.last_response_only:
            spans = spans[-1:]
        kept, current = [], 0
        for start, end in offsets:
            while current < len(spans) and start >= spans[current][1]:
                current += 1
            kept.append(current < len(spans) and end > spans[current][0])
        return kept

    def _tokenize(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ids of a row as SFTTrainer would make them, unless it has them."""
        from trl.chat_template_utils import has_generation_markers

        if row.get("input_ids") is not None:
            return row
        if row.get("messages") is not None:
            masks = self.exact and has_generation_markers(self.tokenizer.chat_template)
            ids: Mapping[str, Any] = self.tokenizer.apply_chat_template(
                row["messages"],
                tools=json.loads(tools) if isinstance(tools := row.get("tools"), str) else tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=masks,
                **(row.get("chat_template_kwargs") or {}),
            )
            return ids
        text, tokenizer = row["text"], self.tokenizer
        if tokenizer.eos_token and not text.endswith(tokenizer.eos_token):
            text += tokenizer.eos_token
        # Text rendered by a template begins with BOS already; a second one is no help to anybody.
        rendered = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return {"input_ids": tokenizer(text, add_special_tokens=not rendered)["input_ids"]}


def _as_spelled(markers: Markers, speller: Speller) -> Markers:
    """`markers`, and each as it reads in ids where that differs (tokenizers that lose or add spaces)."""

    def both(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(form for text in texts for form in (text, speller.round_trip(text)) if form.strip()))

    return Markers(both(markers.response), both(markers.end), both(markers.stop), markers.instruction)


def _documents(row: Mapping[str, Any], length: int) -> Iterator[tuple[int, int]]:
    """First and one past the last token of each document packed into the row."""
    start = 0
    for size in row.get("seq_lengths") or [length]:
        yield start, start + size
        start += size


def _last_run(mask: Sequence[int]) -> list[int]:
    """Only the last run of ones."""
    kept = [0] * len(mask)
    end = max((index for index, bit in enumerate(mask) if bit), default=-1)
    while end >= 0 and mask[end]:
        kept[end] = 1
        end -= 1
    return kept


def _labelled(dataset: Any, labeller: Labeller, name: str, num_proc: int | None) -> Any:
    """`dataset` with labels, most of whose rows have some."""
    from datasets import IterableDataset

    columns = column_names(dataset)
    if next(iter(dataset), None) is None:
        raise ValueError(f"the {name} has no rows, so there is no answer to train on. Its columns are {columns}.")
    if not {"input_ids", "messages", "text"} & set(columns):
        hint = "fastft.data.standardize_chat(dataset) makes messages of the usual chat formats"
        if {"prompt", "completion"} <= set(columns):
            hint = "SFTTrainer trains on completions only by itself when a dataset has prompt and completion"
        raise ValueError(f"the {name} has none of the columns input_ids, messages and text; it has {columns}. {hint}.")
    masks = [column for column in ("assistant_masks", "completion_mask") if column in columns]
    if isinstance(dataset, IterableDataset):
        labelled = dataset.map(labeller, remove_columns=masks)
        _require_answers(islice(labelled, STREAMED_ROWS), labeller, name)
        return labelled
    labelled = dataset.map(labeller, num_proc=num_proc, remove_columns=masks, desc=f"Labelling answers in {name}")
    _require_answers(labelled.select_columns(["input_ids", "labels"]), labeller, name)
    return labelled


def _require_answers(rows: Any, labeller: Labeller, name: str) -> None:
    """Raises if more than half of the rows train on nothing; warns if some do.

    Causal models never predict a row's first token, so a label there alone counts for nothing.
    """
    total = empty = 0
    sample: list[int] | None = None
    for row in rows:
        total += 1
        if all(label == IGNORED for label in row["labels"][1:]):
            empty += 1
            sample = list(row["input_ids"]) if sample is None else sample
    if sample is None:
        return
    causes = "the row was cut before its answer, or it was made with another template than these markers are from"
    if empty * 2 > total:
        shown = labeller.speller(sample[:SHOWN_TOKENS])[0]
        more = "" if len(sample) <= SHOWN_TOKENS else f" … ({len(sample)} tokens in all)"
        raise ValueError(
            f"{empty} of {total} rows of the {name} have no answer to train on. Answers were looked for behind "
            f"{_quoted(labeller.markers.response)}, up to {_quoted(labeller.markers.end + labeller.markers.stop)}. "
            f"One such row:\n{shown}{more}\nUsual causes: {causes}. Give instruction_part and response_part as they "
            "read in that row, or raise max_length."
        )
    warnings.warn(
        f"fastft: {empty} of {total} rows of the {name} have no answer and add nothing to the loss "
        f"(usual causes: {causes})",
        stacklevel=5,
    )


def _quoted(markers: Sequence[str]) -> str:
    return " or ".join(repr(marker) for marker in markers) if markers else "the end of the row"


def _require_honest_collator(collator: Any, labelled: Any) -> None:
    """Raises if `collator` trains on tokens which the labels of the first row with an answer mask."""
    row = next(
        (row for row in islice(labelled, STREAMED_ROWS) if any(label != IGNORED for label in row["labels"])), None
    )
    if row is None:
        return
    kept = {
        key: row[key] for key in ("input_ids", "labels", "seq_lengths", "attention_mask") if row.get(key) is not None
    }
    collated = collator([kept])["labels"].flatten().tolist()
    trained = sum(label != IGNORED for label in collated)
    wanted = sum(label != IGNORED for label in row["labels"])
    # Where documents are packed a collator may mask more, their first tokens; never less.
    if trained > wanted or trained == 0:
        raise ValueError(
            f"the trainer's collator, {type(collator).__name__}, makes its own labels: of a row with {wanted} answer "
            f"tokens it would train on {trained}. Use one that keeps the labels column: TRL's SFTTrainer has it by "
            "default; for transformers.Trainer, transformers.DataCollatorForSeq2Seq(tokenizer)."
        )
