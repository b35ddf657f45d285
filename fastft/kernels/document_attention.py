"""Causal attention inside documents that lie one after the other in packed rows.

With one mask over the whole row, packed attention reads and skips T × T scores where Σ Lᵢ² are wanted: for rows of
8,192 tokens and documents of 300 that is 27 times too many, and the mask itself is 64 MiB. Here the boundaries are the
mask. Two routes, no kernel of our own:

- *varlen*: `torch.nn.attention.varlen`, FlashAttention over the boundaries; no padding, windows included. It needs a
  CUDA device from Ampere on and a 16-bit dtype.
- *buckets*: documents of like length are gathered into one padded batch each and go through PyTorch's
  `scaled_dot_product_attention(is_causal=True)`. Padding stands at the end, and causal attention never looks there, so
  no mask is needed; a document is padded by less than half of its length. It works on every device and dtype, and it is
  what the other route is tested against.

Both see the rows as one line of tokens: a document is a range of it, and no document spans two rows.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["DocumentAttention", "Documents", "document_attention", "takes_varlen"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of like length.

    Args:
        index: int64 `[documents, width]`: which token of the line stands where; past a document's end, its last one.
        width: length of the longest of them.
    """

    index: Tensor
    width: int


@dataclass(slots=True, eq=False)
class Documents:
    """Where each document begins and ends.

    Args:
        rows: rows of the batch.
        length: tokens in each row.
        lengths: of every document, in order; their sum is `rows * length`.
        device: where attention runs.
    """

    rows: int
    length: int
    lengths: tuple[int, ...]
    device: torch.device
    _boundaries: Tensor | None = field(default=None, repr=False)
    _buckets: tuple[list[Bucket], Tensor] | None = field(default=None, repr=False)

    @classmethod
    def from_starts(cls, starts: Tensor) -> Documents:
        """Documents that begin where `starts` is True, bool `[rows, length]`, and at every row's start. Waits once."""
        rows, length = starts.shape
        starts = starts.clone()
        starts[:, 0] = True
        begins = starts.flatten().nonzero().flatten().tolist()
        ends = [*begins[1:], rows * length]
        return cls(rows, length, tuple(e - b for b, e in zip(begins, ends, strict=True)), starts.device)

    @classmethod
    def from_boundaries(cls, boundaries: Sequence[int], rows: int, length: int, device: torch.device) -> Documents:
        """Documents between explicit boundaries over the line of `rows * length` tokens.

        Raises:
            ValueError: if they do not start at 0, rise to the number of tokens, and contain every row's start.
        """
        steps = tuple(e - b for b, e in itertools.pairwise(boundaries))
        fits = len(boundaries) > 1 and boundaries[0] == 0 and boundaries[-1] == rows * length
        if not fits or min(steps) < 0 or not set(range(0, rows * length, length)) <= set(boundaries):
            shown = list(boundaries) if len(boundaries) <= 8 else [*boundaries[:4], "…", *boundaries[-3:]]
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens ({rows} × {length} = {rows * length}), every "
                f"row starting a document; got {shown}. Pass the boundaries of this very batch, or leave them out: "
                "fastft then finds documents by position_ids."
            )
        return cls(rows, length, tuple(step for step in steps if step), device)

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(self.lengths)

    @property
    def boundaries(self) -> Tensor:
        """int32 `[documents + 1]`: where documents begin, and the end, as varlen kernels take them."""
        if self._boundaries is None:
            ends = torch.tensor((0, *self.lengths)).cumsum(0).to(torch.int32)
            self._boundaries = ends.to(self.device, non_blocking=True)
        return self._boundaries

    def dense_mask(self, window: int | None = None) -> Tensor:
        """bool `[rows, 1, length, length]`, True where attention is allowed: T × T, for whoever needs one."""
        lengths = torch.tensor(self.lengths, device=self.device)
        owner = torch.arange(len(self.lengths), device=self.device).repeat_interleave(lengths)
        owner = owner.view(self.rows, self.length)  # which document each token is of
        same = owner[:, None, :, None] == owner[:, None, None, :]
        return same & band(self.length, window, self.device)

    def buckets(self) -> tuple[list[Bucket], Tensor]:
        """The buckets, and int64 `[tokens]`: each token's place among the rows of all of them, one after the other."""
        if self._buckets is None:
            lengths = torch.tensor(self.lengths)
            starts = lengths.cumsum(0) - lengths
            classes = torch.tensor([size_class(n) for n in self.lengths])
            buckets, place, filled = [], torch.empty(self.rows * self.length, dtype=torch.long), 0
            for size in classes.unique().tolist():
                chosen = (classes == size).nonzero().flatten()
                width = int(lengths[chosen].max())
                offsets = torch.arange(width).expand(len(chosen), width)
                inside = offsets < lengths[chosen, None]
                index = starts[chosen, None] + torch.minimum(offsets, lengths[chosen, None] - 1)
                place[index[inside]] = filled + inside.flatten().nonzero().flatten()
                filled += index.numel()
                buckets.append(Bucket(index.to(self.device), width))
            self._buckets = buckets, place.to(self.device)
        return self._buckets


def size_class(length: int) -> int:
    """The bucket of a document: the next of 16, 24, 32, 48, 64, 96, …, so that less than half is padding."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def band(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool `[length, length]`: causal, and within the last `window` tokens, the query's own among them."""
    rows = torch.arange(length, device=device)[:, None]
    columns = torch.arange(length, device=device)
    causal = columns <= rows
    return causal if window is None else causal & (columns > rows - window)


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention in which every token sees its own document alone.

    Args:
        query: `[rows, heads, length, head_dim]`.
        key: `[rows, key_heads, length, head_dim]`; `key_heads` divides `heads`.
        value: as `key`.
        documents: the batch's documents.
        scale: of the scores; None means 1 / √head_dim.
        window: how many tokens back a query sees, itself among them; None sees all.
        dropout: of the attention weights.

    Returns:
        `[rows, length, heads, head_dim]`, contiguous, in query's dtype, or autocast's where that is on.

    Raises:
        ValueError: if the documents are of another batch.
    """
    rows, heads, length, width = query.shape
    if (rows, length) != (documents.rows, documents.length) or key.shape[2] != length:
        raise ValueError(
            f"documents over {documents.rows} × {documents.length} tokens do not fit queries {tuple(query.shape)} and "
            f"keys {tuple(key.shape)}"
        )
    if window is not None and window >= documents.longest:
        window = None
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    line = [x.transpose(1, 2).reshape(rows * length, x.shape[1], width) for x in (query, key, value)]
    varlen = _varlen() if takes_varlen(query.device, query.dtype, width, dropout) else None
    if varlen is not None:
        output = varlen(*line, documents, scale, window)
    else:
        output = _in_buckets(line, documents, scale, window, dropout)
    return output.view(rows, length, heads, width)


def _in_buckets(
    line: Sequence[Tensor], documents: Documents, scale: float | None, window: int | None, dropout: float
) -> Tensor:
    """Attention bucket by bucket; `line` holds query, key and value `[tokens, heads, head_dim]`, as does the result."""
    buckets, place = documents.buckets()
    grouped = line[0].shape[1] != line[1].shape[1]
    outputs = []
    for bucket in buckets:
        shape = bucket.index.shape  # (documents, width)
        parts = [x.index_select(0, bucket.index.flatten()).view(*shape, *x.shape[1:]).transpose(1, 2) for x in line]
        mask = None
        if window is not None and window < bucket.width:
            mask = band(bucket.width, window, line[0].device)
        output = functional.scaled_dot_product_attention(
            *parts, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout, enable_gqa=grouped
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # [documents · width, heads, head_dim]
    return torch.cat(outputs).index_select(0, place)


@dataclass(frozen=True, slots=True)
class DocumentAttention:
    """`document_attention` as a callable of query, key and value, that says what else it goes by."""

    documents: Documents
    scale: float | None
    window: int | None
    dropout: float

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return document_attention(
            query, key, value, self.documents, scale=self.scale, window=self.window, dropout=self.dropout
        )


def takes_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Whether FlashAttention over boundaries runs on such queries: then boundaries are read on the device alone."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or dropout or _varlen() is None:
        return False
    return head_dim % 8 == 0 and head_dim <= 256 and _has_flash(device.index)


@functools.cache
def _has_flash(device_index: int) -> bool:
    ampere = torch.cuda.get_device_capability(device_index) >= (8, 0)
    return ampere and torch.backends.cuda.is_flash_attention_available()


@functools.cache
def _varlen() -> Callable[..., Tensor] | None:
    """`(query, key, value, documents, scale, window) -> output` over PyTorch's varlen attention, or None without one.

    Its signature has grown: before `enable_gqa` it wants as many key heads as query heads.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return adapt_varlen(varlen_attn)


def adapt_varlen(varlen_attn: Callable[..., Any]) -> Callable[..., Tensor] | None:
    """The call of `varlen_attn` in our terms, or None if it knows no windows (they also say that it is causal)."""
    parameters = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= set(parameters):
        return None
    takes_groups = "enable_gqa" in parameters

    def run(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, window: int | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        if groups > 1 and takes_groups:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        ends, longest = documents.boundaries, documents.longest
        return varlen_attn(query, key, value, ends, ends, longest, longest, **options)

    return run
