"""Reading a model's decoder layers as the shapes that the memory planner reckons with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fastft.autograd import mlp_half
from fastft.autograd.head_products import chunk_bytes
from fastft.kernels.join import round_rank
from fastft.kernels.nf4 import QuantizedWeight
from fastft.memory.away import AWAY
from fastft.memory.costs import LayerShape, StepCosts, step_costs
from fastft.patching import registry
from fastft.patching.families import FAMILIES

__all__ = ["autocast_dtype", "costs_of", "model_of"]


def costs_of(backbone: nn.Module, layers: Sequence[nn.Module], tokens: int, longest: int) -> list[StepCosts] | None:
    """Costs of the backbone's layers as they are now, first with usual tiles, then with every other way to save memory.

    None where none can be read. The others: the MLP in small tiles; less of an offloaded layer in host memory; both.
    """
    from fastft.patching import decoder_layer  # which reads levels from levels.py, which reads costs from here

    shapes = []
    dtype = next(p.dtype for p in backbone.parameters() if p.is_floating_point())
    for layer in layers:
        site = registry.site_of(layer)
        assert site is not None
        reader = decoder_layer.reader_of(layer, FAMILIES[site.model_type])
        projections = reader.projections(dtype, autocast=True)
        if isinstance(projections, str):
            continue  # it runs stock
        shapes.append(_shape(layer, projections, dtype))
    if not shapes:
        return None
    widest = max(shapes, key=lambda s: (s.copied, s.qkv_rank + s.output_rank + s.gate_up_rank + s.down_rank))
    vocabulary = int(getattr(backbone.config, "vocab_size", 0))
    itemsize = widest.compute_bytes
    costs = partial(
        step_costs,
        widest,
        tokens=tokens,
        longest=longest,
        vocabulary=vocabulary,
        loss_chunk=chunk_bytes(tokens, vocabulary, itemsize, next(backbone.parameters()).device),
        head_trains=_head_trains(backbone),
    )
    found = [costs(compact=rows) for rows in (0, *mlp_half.COMPACT_ROWS)]
    less = AWAY[: AWAY.index(found[0].away)]
    return found + [costs(compact=one.compact, away=away) for away in less for one in found]


def _shape(layer: Any, projections: Sequence[Any], dtype: torch.dtype) -> LayerShape:
    q, k, v, o, gate, up, down = projections
    width = layer.self_attn.head_dim
    compute = autocast_dtype(next(layer.parameters()).device) or dtype
    return LayerShape(
        hidden=o.out_features,
        query=q.out_features,
        key_value=k.out_features,
        heads=q.out_features // width,
        intermediate=gate.out_features,
        qkv_rank=_rank(q, k, v),
        output_rank=_rank(o),
        gate_up_rank=_rank(gate, up),
        down_rank=_rank(down),
        head_norms=hasattr(layer.self_attn, "q_norm"),
        compute_bytes=compute.itemsize,
        stream_bytes=dtype.itemsize,
        drops=any(p.dropout is not None for p in projections),
        copied=any(isinstance(p.weight, QuantizedWeight) or p.weight.dtype != compute for p in projections),
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast, None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _rank(*group: Any) -> int:
    """Columns of X Aᵀ that a group saves: joined products of 4-bit weights round them up."""
    rank = sum(p.rank for p in group)
    joined = all(isinstance(p.weight, QuantizedWeight) for p in group)
    return round_rank(rank) if joined else rank


def model_of(backbone: nn.Module) -> Any:
    """The planned model around the backbone (a copy has none before it is patched itself: then the backbone)."""
    for model in registry.planned_models():
        if getattr(model, str(getattr(model, "base_model_prefix", "")), None) is backbone:
            return model
    return backbone


def _head_trains(backbone: nn.Module) -> bool:
    get_head = getattr(model_of(backbone), "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    return head is not None and any(p.requires_grad for p in head.parameters())
