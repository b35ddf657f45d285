"""Look at what is trained before training: one example with the trained tokens marked, counts, and the classic
mistakes.

Everything is read from batches that the trainer's own collator made of its own dataset, since that is where most of
the mistakes are: a collator that masks padding by its id masks every true EOS when the two are one token, and a
dataset whose labels look right may never have them used. Rows are taken in order, so no random number is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fastft.data.decoded import Speller

IGNORED = -100
SHOWN_TOKENS = 600


@dataclass(frozen=True, slots=True)
class DatasetCheck:
    """What is in the batches; `print(check)` shows it.

    Args:
        documents: rows, or the documents packed into them.
        tokens: all of them, padding left out.
        trained_tokens: those with a label that the model is asked to predict (the first of a document never is).
        bos_tokens: beginning-of-sequence tokens.
        eos_tokens: tokens generation stops at.
        trained_eos_tokens: of those, the trained ones.
        without_labels: documents that train on nothing.
        double_bos: documents that begin with BOS twice.
        cut: documents as long as the trainer's `max_length` that do not stop at their end: truncated, very likely.
        too_long: documents longer than the model has positions, or than `max_length`.
        longest: tokens of the longest document.
        duplicates: documents whose tokens are those of an earlier one.
        example: the first document that trains on something, in pieces: (text, whether it is trained).
        warnings: the mistakes found, each with what to do.
    """

    documents: int
    tokens: int
    trained_tokens: int
    bos_tokens: int
    eos_tokens: int
    trained_eos_tokens: int
    without_labels: int
    double_bos: int
    cut: int
    too_long: int
    longest: int
    duplicates: int
    example: tuple[tuple[str, bool], ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        import io

        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=118, color_system=None).print(self)
        return buffer.getvalue()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        counts = Table(title="fastft.check_dataset", title_justify="left", show_header=False)
        counts.add_column()
        counts.add_column(justify="right")
        share = self.trained_tokens / max(self.tokens, 1)
        rows: tuple[tuple[str, object], ...] = (
            ("documents", self.documents),
            ("tokens", self.tokens),
            ("trained tokens", f"{self.trained_tokens} ({share:.0%})"),
            ("BOS", self.bos_tokens),
            ("EOS, trained / all", f"{self.trained_eos_tokens} / {self.eos_tokens}"),
            ("longest document", self.longest),
            ("cut at max_length", self.cut),
            ("duplicates", self.duplicates),
            ("without a label", self.without_labels),
        )
        for name, value in rows:
            counts.add_row(name, str(value))
        example = Text("one example, the trained tokens between ⟦ and ⟧:\n")
        for text, trained in self.example:
            example.append(f"⟦{text}⟧" if trained else text, style="bold green" if trained else "dim")
        notes = [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        return Group(counts, example, *notes, *([] if notes else [Text("nothing found amiss")]))


def check_dataset(trainer: Any, *, max_examples: int = 2000, show: bool = True) -> DatasetCheck:
    """Count and show what `trainer` will train on.

    Args:
        trainer: an `SFTTrainer`, or a `transformers.Trainer` over tokenized rows.
        max_examples: rows of the training dataset to look at.
        show: print the findings.

    Returns:
        The findings, with a warning for each mistake: BOS twice or missing, EOS never trained (and why), documents
        without labels, cut, too long, or repeated.

    Raises:
        ValueError: the trainer has no training dataset or tokenizer, or its batches have no `input_ids` and `labels`.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    if trainer.train_dataset is None or tokenizer is None:
        missing = "training dataset" if trainer.train_dataset is None else "processing_class (a tokenizer)"
        raise ValueError(f"the trainer has no {missing}, so there is nothing to check. Give it one when making it.")
    counts = _Counts(
        tokenizer,
        _stop_tokens(trainer, tokenizer),
        getattr(trainer.args, "max_length", None),
        trainer.model,
        splits=_splits(trainer.args),
    )
    for input_ids, labels in _documents(trainer, max_examples, tokenizer.pad_token_id):
        counts.add(input_ids, labels)
    check = counts.result()
    if show:
        from rich.console import Console

        Console().print(check)
    return check


def _splits(args: Any) -> bool:
    """Whether packing goes on in the next row with what does not fit into one: nothing is cut off then."""
    return bool(getattr(args, "packing", False)) and getattr(args, "packing_strategy", "bfd") != "bfd"


def _documents(trainer: Any, max_examples: int, pad_token_id: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """`input_ids` and `labels` of each document, as the trainer's own collator makes them, padding left off."""
    rows, collate = _rows_and_collator(trainer)
    rows = islice(rows, max_examples)
    while batch := list(islice(rows, max(1, trainer.args.per_device_train_batch_size))):
        collated = collate(batch)
        if "input_ids" not in collated or "labels" not in collated:
            raise ValueError(
                f"the trainer's collator makes {sorted(collated)}; without input_ids and labels there is no telling "
                "what is trained. Trainers of preferences (DPO, KTO, …), rewards and generation have none, and are not "
                "checked; elsewhere use a collator that keeps the labels column, e.g. "
                "transformers.DataCollatorForSeq2Seq."
            )
        for row in range(len(collated["input_ids"])):
            yield from _split(collated, row, pad_token_id)


def _rows_and_collator(trainer: Any) -> tuple[Iterator[Any], Any]:
    """Rows, in order, and the collator, of the loader the trainer would train with.

    Making that loader registers it with accelerate and draws a seed for the order; both are undone.
    """
    import torch

    registered = trainer.accelerator._dataloaders
    known = len(registered)
    with torch.random.fork_rng():
        loader = trainer.get_train_dataloader()
    del registered[known:]
    return iter(loader.dataset), loader.collate_fn


def _split(batch: Mapping[str, Any], row: int, pad_token_id: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """The documents of one row of a batch."""
    input_ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
    kept = [True] * len(input_ids)
    if batch.get("attention_mask") is not None and batch["attention_mask"].ndim == 2:
        kept = [bool(bit) for bit in batch["attention_mask"][row].tolist()]
    starts = [0]
    if batch.get("position_ids") is not None:
        positions = batch["position_ids"][row].tolist()
        starts = sorted({0, *(index for index, position in enumerate(positions) if position == 0)})
    for start, end in zip(starts, [*starts[1:], len(input_ids)], strict=True):
        tokens = [token for token, keep in zip(input_ids[start:end], kept[start:end], strict=True) if keep]
        targets = [label for label, keep in zip(labels[start:end], kept[start:end], strict=True) if keep]
        if not tokens or (len(starts) > 1 and tokens == [pad_token_id]):  # a flattened row filled to a multiple
            continue
        yield tokens, targets


def _stop_tokens(trainer: Any, tokenizer: Any) -> set[int]:
    """Ids that generation stops at, and the template's end of turn."""
    from fastft.data.markers import probe_markers

    found: list[int | None] = [tokenizer.eos_token_id]
    configured = getattr(getattr(trainer.model, "generation_config", None), "eos_token_id", None)
    found += configured if isinstance(configured, list) else [configured]
    try:
        ends = probe_markers(tokenizer).end
    except ValueError:  # no template, or one that shows nothing
        ends = ()
    for end in ends:
        ids = tokenizer.encode(end.strip(), add_special_tokens=False)
        found += ids if len(ids) == 1 else []
    return {token for token in found if token is not None}


class _Counts:
    """Adds documents up, and judges the sums."""

    def __init__(
        self, tokenizer: Any, stops: set[int], max_length: int | None, model: Any, *, splits: bool = False
    ) -> None:
        self.tokenizer, self.stops, self.max_length, self.splits = tokenizer, stops, max_length, splits
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self.limit = min((limit for limit in (max_length, positions) if limit is not None), default=None)
        self.bos: int | None = tokenizer.bos_token_id
        self.seen: set[tuple[int, ...]] = set()
        self.example: tuple[list[int], list[int]] | None = None
        self.documents = self.tokens = self.trained = self.bos_tokens = self.eos_tokens = self.trained_eos = 0
        self.empty = self.double_bos = self.no_bos = self.cut = self.too_long = self.longest = self.duplicates = 0

    def add(self, input_ids: list[int], labels: list[int]) -> None:
        """One document, `input_ids` and `labels` both [tokens]."""
        trained = [token for token, label in zip(input_ids[1:], labels[1:], strict=True) if label != IGNORED]
        self.documents += 1
        self.tokens += len(input_ids)
        self.trained += len(trained)
        self.bos_tokens += sum(token == self.bos for token in input_ids)
        self.eos_tokens += sum(token in self.stops for token in input_ids)
        self.trained_eos += sum(token in self.stops for token in trained)
        self.empty += not trained
        self.double_bos += self.bos is not None and input_ids[:2] == [self.bos, self.bos]
        self.no_bos += input_ids[0] != self.bos
        # White space may follow the end of the last turn ("<|im_end|>\n").
        full = len(input_ids) == self.max_length and not self.splits
        self.cut += full and not self.stops & set(input_ids[-2:])
        self.too_long += self.limit is not None and len(input_ids) > self.limit
        self.longest = max(self.longest, len(input_ids))
        key = tuple(input_ids)
        self.duplicates += key in self.seen
        self.seen.add(key)
        if self.example is None or (trained and all(label == IGNORED for label in self.example[1])):
            self.example = (input_ids, labels)

    def result(self) -> DatasetCheck:
        if self.example is None:
            raise ValueError("the training dataset has no rows.")
        return DatasetCheck(
            documents=self.documents,
            tokens=self.tokens,
            trained_tokens=self.trained,
            bos_tokens=self.bos_tokens,
            eos_tokens=self.eos_tokens,
            trained_eos_tokens=self.trained_eos,
            without_labels=self.empty,
            double_bos=self.double_bos,
            cut=self.cut,
            too_long=self.too_long,
            longest=self.longest,
            duplicates=self.duplicates,
            example=_marked(self.tokenizer, *self.example),
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterator[str]:
        documents = f"of {self.documents} documents"
        if self.trained == 0:
            yield (
                "no token is trained: every label is -100. Usual causes: truncation cut off the answers, wrong "
                "response "
                "markers, or a collator that masks them."
            )
        elif self.empty:
            yield (
                f"{self.empty} {documents} have no label and add nothing to the loss: cut before the answer, or "
                "without one."
            )
        if self.double_bos:
            yield (
                f"{self.double_bos} {documents} begin with BOS twice: the chat template writes it and the tokenizer "
                "adds it "
                "again. Tokenize rendered text with add_special_tokens=False, or give the trainer messages."
            )
        elif self.no_bos * 2 > self.documents and self._adds_bos():
            yield (
                f"{self.no_bos} {documents} do not begin with BOS, which this tokenizer puts before any text: the "
                "model is "
                "trained without it and used with it."
            )
        if self.trained and not self.trained_eos:
            yield f"the end of an answer is never trained, so the model will not learn to stop: {self._why_no_eos()}"
        if self.cut:
            yield (
                f"{self.cut} {documents} were cut at max_length={self.max_length}: their ends are not trained. Raise "
                "max_length."
            )
        if self.too_long:
            yield (
                f"{self.too_long} {documents} are longer than {self.limit} tokens, up to {self.longest}. Truncate or "
                "split them."
            )
        if self.duplicates:
            yield f"{self.duplicates} {documents} repeat an earlier one, token for token."

    def _why_no_eos(self) -> str:
        if not self.eos_tokens:
            return (
                "no document has an EOS token. Append tokenizer.eos_token, or use a chat template that ends its turns."
            )
        if self.tokenizer.pad_token_id in self.stops:
            return (
                f"padding is {self.tokenizer.pad_token!r}, the EOS token, and the labels mask every one of it. Use a "
                "collator "
                "that masks padding by position (TRL's, or transformers.DataCollatorForSeq2Seq), or another padding "
                "token."
            )
        return (
            "the labels mask every EOS. Take the end of the turn into the labels (fastft.train_on_responses_only does)."
        )

    def _adds_bos(self) -> bool:
        return self.bos is not None and self.tokenizer("a")["input_ids"][:1] == [self.bos]


def _marked(tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int]) -> tuple[tuple[str, bool], ...]:
    """The text of a document in runs, each with whether it is trained."""
    shown = input_ids[:SHOWN_TOKENS]
    text, offsets = Speller(tokenizer)(shown)
    flags = [index > 0 and labels[index] != IGNORED for index in range(len(shown))]
    pieces: list[tuple[str, bool]] = []
    begin = 0
    for index in range(1, len(shown) + 1):
        if index < len(shown) and flags[index] == flags[index - 1]:
            continue
        end = offsets[index][0] if index < len(shown) else len(text)
        pieces.append((text[begin:end], flags[index - 1]))
        begin = end
    return tuple(pieces)
