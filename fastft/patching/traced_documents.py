"""Packed documents and `torch.compile`: what documents.py decides by looking at numbers, decided without.

In a trace nobody can ask whether positions restart or whether a mask is all ones. So what comes with `position_ids` is
handled as if documents were packed in it, in a way that gives the same where none are:

- *no mask*: transformers isolates by `position_ids`, if it is kept from making a cache.
- *boundaries* (`cu_seq_lens_q`): positions that follow from them, then as above.
- *a 2-D mask beside positions*: with one, transformers does not look at positions, and documents would attend to each
  other without a word. On sdpa and eager the dense mask that transformers would make of it is made here instead, with
  the documents in it; other backends have no such mask, and the trace is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastft.patching.attention import has_cache
from fastft.patching.documents import by_layer_type, first_tokens, implementation_of

__all__ = ["keep_apart"]


def keep_apart(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords for the planned backbone `module`, called with `args` and `kwargs`, while it is traced.

    Raises:
        ValueError: if documents could not be kept apart by what is given.
    """
    tokens = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    mask, positions, boundaries = (kwargs.get(n) for n in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    prepared = mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2)
    if not isinstance(tokens, Tensor) or has_cache(kwargs) or prepared:
        return kwargs
    rows, length = tokens.shape[:2]
    if isinstance(boundaries, Tensor):
        if mask is not None or kwargs.get("use_cache"):
            raise ValueError(
                "fastft: cu_seq_lens_q came with an attention_mask or with use_cache=True, and a compiled graph cannot "
                "look whether these hide the documents from each other. Leave both out: packed rows need neither."
            )
        if positions is None:
            positions = _positions(boundaries.flatten().to(tokens.device), rows, length)
        return {**kwargs, "position_ids": positions, "use_cache": False}
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != length:
        return kwargs
    if kwargs.get("use_cache"):
        if module.training:
            raise ValueError(
                "fastft: use_cache=True came with position_ids in training, and a compiled graph cannot look whether "
                "they pack documents, which would attend to each other over a cache. Leave use_cache out."
            )
        return kwargs
    if mask is None:
        return {**kwargs, "use_cache": False}
    if mask.shape != (rows, length):
        return kwargs
    return {**kwargs, "attention_mask": _masks(module, positions, mask.to(tokens.device))}


def _positions(boundaries: Tensor, rows: int, length: int) -> Tensor:
    """`[rows, length]`: each token's place in its document; `boundaries` `[documents + 1]` over the line of tokens."""
    line = torch.arange(rows * length, device=boundaries.device, dtype=boundaries.dtype)
    begin = boundaries[torch.searchsorted(boundaries, line, right=True) - 1]
    return (line - begin).view(rows, length).long()


def _masks(module: Any, positions: Tensor, mask: Tensor) -> Any:
    """What the backbone takes as `attention_mask`: causal, inside a document, to real tokens."""
    backend = implementation_of(module)
    if backend not in ("sdpa", "eager"):
        raise ValueError(
            f"fastft: attention_mask and position_ids came together, and under torch.compile attn_implementation="
            f"{backend!r} would not keep packed documents apart. Leave out attention_mask (packed rows) or "
            "position_ids (padded rows), or use attn_implementation='sdpa'."
        )
    owner = first_tokens(positions.to(mask.device), mask).cumsum(-1)  # which document each token is of
    allowed = (owner[:, :, None] == owner[:, None, :]) & (mask[:, None, :] != 0)
    place = torch.arange(mask.shape[1], device=mask.device)
    distance = place[:, None] - place[None, :]
    dtype = module.get_input_embeddings().weight.dtype

    def make(window: int | None) -> Tensor:
        near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        attended = (allowed & near)[:, None]  # [rows, 1, length, length]
        if backend == "sdpa":
            return attended
        return torch.where(attended, 0.0, torch.finfo(dtype).min).to(dtype)

    masks = by_layer_type(module, make)
    return mask if masks is None else masks
