"""Documents that share a row: found once per forward, and told to the attention backend in the terms it knows.

Boundaries come from `cu_seq_lens_q` where the collator gives it, else from `position_ids`: a document begins where
positions do not go on by one, as transformers has it. What keeps documents apart then depends on the backend:

- *sdpa* would get a dense T × T mask. It gets a `DocumentMask` instead: to our attention, and to PyTorch's
  `scaled_dot_product_attention` wherever a stock layer calls it, that is a list of boundaries
  (kernels/document_attention.py); to anybody else it is the dense boolean mask, built when first read. So a layer that
  runs stock, a recomputation, and a forward without gradient are all isolated by the same object.
- *flash attention* gets `cu_seq_lens_q/k` and `max_length_q/k` over the whole batch. Left to itself, transformers looks
  for documents in a batch of one row only: with two packed rows they would attend to each other.
- *eager* and *flex* build their masks from `position_ids`, as transformers does, once nothing stands in the way.

In the way stand a 2-D mask and a cache: with either, transformers does not look at positions. An all-ones mask is
dropped and the cache left out; where one cannot be (padding inside packed rows, `use_cache=True`), the forward is
refused, because a leak would be silent.

A padded batch is a packed one, too: `one_row` makes its real tokens one row. And a packed row may be made longer, where
CUDA graphs want rows alike: `lengthen` puts a last document of no consequence at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from fastft.kernels.document_attention import Documents, document_attention
from fastft.patching.families import FAMILIES

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True, slots=True)
class Padding:
    """What a batch of `rows * length` was made of.

    Left out were all but `tokens`, `[n]` int64, places in the line of all; None: no token was. What the row has beyond
    that was added at its end.
    """

    tokens: Tensor | None
    rows: int
    length: int


class DocumentMask(Tensor):
    """A boolean attention mask `[rows, 1, length, length]` that knows what it says, and is built only if it is read."""

    documents: Documents
    window: int | None
    padding: Padding | None

    @staticmethod
    def __new__(cls, documents: Documents, window: int | None = None, padding: Padding | None = None) -> DocumentMask:
        shape = (documents.rows, 1, documents.length, documents.length)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=documents.device)  # type: ignore[attr-defined]

    def __init__(self, documents: Documents, window: int | None = None, padding: Padding | None = None) -> None:
        self.documents, self.window, self.padding = documents, window, padding
        self._dense: Tensor | None = None

    def dense(self) -> Tensor:
        """The mask as an ordinary tensor, True where attention is allowed."""
        if self._dense is None:
            self._dense = self.documents.dense_mask(self.window)
        return self._dense

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DocumentMask({self.documents}, window={self.window})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})  # results are plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` where the mask (or, absurdly, another argument) is a `DocumentMask`."""
    documents = attn_mask.documents if isinstance(attn_mask, DocumentMask) else None
    if documents is not None and query.dim() == 4 and query.shape[2] == key.shape[2] == documents.length:
        output = document_attention(
            query, key, value, documents, scale=scale, window=attn_mask.window, dropout=dropout_p
        )
        return output.transpose(1, 2)
    mask = attn_mask.dense() if isinstance(attn_mask, DocumentMask) else attn_mask
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def implementation_of(module: Any) -> str:
    """The attention implementation of a backbone."""
    return str(module.config._attn_implementation)


def keep_apart(module: nn.Module, kwargs: dict[str, Any], rows: int, length: int, device: torch.device) -> None:
    """Keep packed documents from attending to each other, by changing keywords in place; called once per forward.

    Args:
        module: the planned backbone.
        kwargs: its keywords, no cache among them.
        rows: of the batch.
        length: tokens in each row.
        device: of the tokens.

    Raises:
        ValueError: if the documents cannot be kept apart, or the boundaries are of another batch.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return  # a 4-D or prepared mask says itself who attends to whom
    given = isinstance(kwargs.get("cu_seq_lens_q"), Tensor)
    documents = documents_in(kwargs, rows, length, device)
    if documents is None or len(documents.lengths) == rows:
        return
    documents.device = device  # the boundaries may have come on another
    _refuse_what_hides_documents(kwargs)
    kwargs["attention_mask"], kwargs["use_cache"] = None, False
    if given:
        _agree_on_positions(kwargs, documents)
    _tell(module, kwargs, documents, given)


def documents_in(kwargs: dict[str, Any], rows: int, length: int, device: torch.device) -> Documents | None:
    """The documents of a batch, by the boundaries that came with it, else by its positions; None: these say nothing.

    Raises:
        ValueError: the boundaries are of another batch.
    """
    return _explicit(kwargs, rows, length, device) or _by_positions(kwargs, rows, length)


def spelled_out(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with `labels` in which packed documents are plain to stock transformers too: what `fastft.verify` runs.

    Stock isolates by positions alone, where no mask and no cache stands in the way, and counts what labels say: so
    the documents' first tokens are masked, positions are there, and a mask of ones is not.

    Raises:
        ValueError: the documents cannot be kept apart.
    """
    rows, length = batch["labels"].shape
    mask = batch.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return batch
    documents = documents_in(batch, rows, length, batch["labels"].device)
    if documents is None or len(documents.lengths) == rows:
        return batch
    _refuse_what_hides_documents(batch)
    starts = documents.boundaries[:-1].to(batch["labels"].device, torch.long)
    labels = batch["labels"].flatten().index_fill(0, starts, -100).view(rows, length)
    changed = {**batch, "labels": labels, "attention_mask": None, "use_cache": False}
    _agree_on_positions(changed, documents)
    return changed


def _explicit(kwargs: dict[str, Any], rows: int, length: int, device: torch.device) -> Documents | None:
    """Documents between the boundaries the caller gave, if it gave any."""
    boundaries = kwargs.get("cu_seq_lens_q")
    if not isinstance(boundaries, Tensor):
        return None
    return Documents.from_boundaries(boundaries.flatten().tolist(), rows, length, device)


def _by_positions(kwargs: dict[str, Any], rows: int, length: int) -> Documents | None:
    """Documents by `position_ids`, or None where these say nothing of any."""
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != length or length < 2:
        return None
    if mask is not None:
        # The mask's pads have positions of their own, and a jump ahead is one document to a forward with a mask.
        if mask.shape[1] != length:
            return None
        real = mask.to(positions.device) != 0
        restarts = (positions[:, 1:] <= positions[:, :-1]) & real[:, 1:] & real[:, :-1]
        if not bool(restarts.any()):
            return None
    return Documents.from_starts(starts_of(positions).expand(rows, length))


def starts_of(positions: Tensor) -> Tensor:
    """bool like `positions` `[rows, length]`: where a document begins, by transformers' rule (not one further)."""
    return functional.pad(positions.diff(dim=-1) != 1, (1, 0), value=True)


def first_tokens(positions: Tensor, mask: Tensor | None) -> Tensor:
    """bool `[rows, length]`: tokens that begin a document as `keep_apart` has it; never waits for the device.

    Args:
        positions: `[rows or 1, length]`.
        mask: `[rows, length]`, nonzero where a token is real, or None. With one, documents are looked for only where
            positions of real tokens restart; behind padding a row's text begins, not another document.
    """
    starts = starts_of(positions)
    if mask is None:
        return starts
    real = mask.to(positions.device) != 0
    real = real & functional.pad(real[:, :-1], (1, 0))  # and the token before
    restarts = functional.pad(positions.diff(dim=-1) <= 0, (1, 0)) & real
    return starts & real & restarts.any()


def _refuse_what_hides_documents(kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if kwargs.get("use_cache"):
        raise ValueError(
            "fastft: position_ids restart inside a row (packed documents) and use_cache=True was asked for; with a "
            "cache the documents would attend to each other. Pass use_cache=False, or one document a row."
        )
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            "fastft: position_ids restart inside a row (packed documents) and attention_mask marks padding; "
            "transformers would let the documents attend to each other. Pass attention_mask=None (padding-free rows), "
            "or one document a row."
        )


def _agree_on_positions(kwargs: dict[str, Any], documents: Documents) -> None:
    """Positions to go with explicit boundaries: each document counts from 0 unless the caller said otherwise."""
    if kwargs.get("position_ids") is not None:
        return
    offsets = torch.cat([torch.arange(n) for n in documents.lengths])
    kwargs["position_ids"] = offsets.view(documents.rows, documents.length).to(documents.device)


def _tell(module: nn.Module, kwargs: dict[str, Any], documents: Documents, given: bool) -> None:
    """Tell the backend about `documents`; `given`: they are not from the position_ids."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    name = implementation_of(module)
    known = name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    if "flash" in name or (known and ALL_MASK_ATTENTION_FUNCTIONS[name] is flash_attention_mask):
        ends = documents.boundaries
        kwargs.update(zip(BOUNDARIES, (ends, ends, documents.longest, documents.longest), strict=True))
        return
    if name == "sdpa" and (masks := sdpa_masks(module, documents)) is not None:
        kwargs["attention_mask"] = masks
        return
    if not known:
        raise ValueError(
            f"fastft: the batch holds packed documents and attn_implementation={name!r} has no mask function in "
            "transformers: they would attend to each other. Load the model with attn_implementation='sdpa' or "
            "'flash_attention_2', register a mask function for it (transformers.AttentionMaskInterface.register), or "
            "put one document in a row (packing=False, padding_free=False)."
        )
    positions = kwargs["position_ids"]
    if given and Documents.from_starts(starts_of(positions).expand(documents.rows, -1)).lengths != documents.lengths:
        raise ValueError(
            f"fastft: cu_seq_lens_q and position_ids name different documents, and attn_implementation={name!r} "
            "isolates by position_ids alone. Pass position_ids that count from 0 in every document (or none), or use "
            "attn_implementation='sdpa' or 'flash_attention_2', which follow cu_seq_lens_q."
        )


def sdpa_masks(module: Any, documents: Documents, padding: Padding | None = None) -> Any:
    """What the backbone takes as `attention_mask` so that its layers get `DocumentMask`s.

    Returns:
        A mask, or one for each layer type where the family makes several; None where transformers must make its own.
    """
    return by_layer_type(module, lambda window: DocumentMask(documents, window, padding))


def by_layer_type(module: Any, make: Callable[[int | None], Tensor]) -> Any:
    """`make(window)` once, or once for each layer type, in the shape in which the backbone takes prepared masks.

    Returns:
        A mask or a dict of them; None for layer types that this family's declaration does not know.
    """
    from fastft.patching import registry

    site = registry.site_of(module)
    if site is None:
        return None
    config, family = module.config, FAMILIES[site.model_type]
    window = getattr(config, "sliding_window", None) if "sliding_window" in family.attention_arguments else None
    types = set(getattr(config, "layer_types", None) or ())
    if family.masks_by_layer_type:
        if not types <= {"full_attention", "sliding_attention"}:
            return None
        masks = {"full_attention": make(None)}
        if "sliding_attention" in types:
            masks["sliding_attention"] = make(window)
        return masks
    return None if types - {"full_attention"} else make(window)


def one_row(
    module: nn.Module, kwargs: dict[str, Any], length: int, lengths: list[int], real: Tensor | None
) -> dict[str, Any] | None:
    """A batch as one row of its real tokens: keywords for the backbone, or None where it takes no `DocumentMask`.

    A row of the batch is a document; pads are nowhere. `restore_padding` puts the output back into its old shape, zeros
    where pads stood (no label and no pooling reads those).

    Args:
        module: the planned backbone, on sdpa.
        kwargs: its keywords, with `input_ids` or `inputs_embeds`.
        length: of the batch.
        lengths: how many tokens of each of its rows are real; some are.
        real: bool `[rows, length]`: which; None: all.
    """
    rows, count = len(lengths), sum(lengths)
    tokens = next(t for name in ("input_ids", "inputs_embeds") if isinstance(t := kwargs.get(name), Tensor))
    left_out = real is not None and count < rows * length
    places = real.flatten().nonzero().flatten() if left_out else None  # type: ignore[union-attr]
    documents = Documents(1, count, tuple(n for n in lengths if n), tokens.device)
    masks = sdpa_masks(module, documents, Padding(places, rows, length))
    if masks is None:
        return None
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    changed = {**kwargs, "attention_mask": masks}

    def line(batch: Tensor) -> Tensor:
        flat = batch.flatten(0, 1)
        return (flat if places is None else flat.index_select(0, places))[None]

    changed["position_ids"] = line(positions.expand(rows, length))
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), Tensor):
            changed[name] = line(kwargs[name])
    return changed


def lengthen(module: nn.Module, kwargs: dict[str, Any], length: int) -> dict[str, Any] | None:
    """A packed row made `length` tokens long, or None where the backbone takes no `DocumentMask`.

    What is added is a document of its own at the end, so nothing attends to it, and `restore_padding` cuts it off
    again: no gradient comes to it. Its tokens all stand at position 0, so that no scaling of angles by the largest
    position sees them.

    Args:
        module: the planned backbone, on sdpa.
        kwargs: its keywords: `input_ids` or `inputs_embeds` of one row, `position_ids`, and the `DocumentMask`s that
            `keep_apart` or `one_row` has put there.
        length: more tokens than the row has.
    """
    documents = documents_of(kwargs["attention_mask"])
    assert documents is not None
    more = length - documents.length
    longer = Documents(1, length, (*documents.lengths, more), documents.device)
    before = padding_of(kwargs["attention_mask"])
    masks = sdpa_masks(module, longer, before or Padding(None, 1, documents.length))
    if masks is None:
        return None
    of_before = {*BOUNDARIES, "seq_idx"}  # say what the masks say, of the row as it came
    changed = {name: value for name, value in kwargs.items() if name not in of_before}
    changed["attention_mask"] = masks
    positions = kwargs["position_ids"]
    changed["position_ids"] = functional.pad(positions, (0, more))
    if isinstance(kwargs.get("input_ids"), Tensor):
        changed["input_ids"] = functional.pad(kwargs["input_ids"], (0, more))
    if isinstance(kwargs.get("inputs_embeds"), Tensor):
        changed["inputs_embeds"] = functional.pad(kwargs["inputs_embeds"], (0, 0, 0, more))
    return changed


def documents_of(mask: Any) -> Documents | None:
    """The documents that the backbone's `attention_mask` names, if it is one of ours."""
    first = next(iter(mask.values()), None) if isinstance(mask, dict) else mask
    return first.documents if isinstance(first, DocumentMask) else None


def padding_of(mask: Any) -> Padding | None:
    """What the batch whose `attention_mask` is `mask` now was made of, if it is not as it came."""
    first = next(iter(mask.values()), None) if isinstance(mask, dict) else mask
    return first.padding if isinstance(first, DocumentMask) else None


def restore_padding(hidden: Tensor, padding: Padding) -> Tensor:
    """`[1, n, hidden]` back to `[rows, length, hidden]`, zeros where pads stood, without what was added."""
    size = padding.rows * padding.length
    if padding.tokens is None:
        return hidden[:, :size].reshape(padding.rows, padding.length, -1)
    line = hidden.new_zeros(size, hidden.shape[-1])
    return line.index_copy(0, padding.tokens, hidden[0, : len(padding.tokens)]).view(padding.rows, padding.length, -1)
