"""Attention's emptied graph over the backends of the device: each saves no more, and gives its own gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastft.autograd.emptied_graph import EmptiedGraph
from fastft.kernels.document_attention import DocumentAttention, Documents
from tests.contract import relative_error

BATCH, SEQUENCE, HEADS, KEY_HEADS = 2, 1024, 16, 4
Heads = tuple[Tensor, Tensor, Tensor]


def cut(side_by_side: Tensor, dim: int) -> Heads:
    """Q, K and V `[batch, heads, sequence, dim]` as a decoder layer has them: slices of one buffer."""
    rows = side_by_side.view(BATCH, SEQUENCE, -1, dim)
    key_heads = (rows.shape[2] - HEADS) // 2
    query, key, value = rows.split([HEADS, key_heads, key_heads], dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def draw(dim: int, key_heads: int) -> Tensor:
    width = (HEADS + 2 * key_heads) * dim
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(BATCH * SEQUENCE, width, device="cuda", dtype=torch.bfloat16, generator=generator)


def with_backend(backend: SDPBackend) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).contiguous()

    return attention


def documents() -> Callable[..., Tensor]:
    lengths = (700, 324, 1024)
    return DocumentAttention(Documents(BATCH, SEQUENCE, lengths, torch.device("cuda")), 0.125, None, 0.0)


ATTENTIONS = {  # and key heads: without enable_gqa (torch 2.11) varlen attention is given, and saves, copies of fewer
    "cudnn": (with_backend(SDPBackend.CUDNN_ATTENTION), KEY_HEADS),
    "flash": (with_backend(SDPBackend.FLASH_ATTENTION), KEY_HEADS),
    "documents": (documents(), HEADS),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_refilled_graph_gives_the_gradients_of_a_whole_one(name: str, dim: int) -> None:
    attention, key_heads = ATTENTIONS[name]
    side_by_side = draw(dim, key_heads)
    again = side_by_side.clone()
    output, graph = EmptiedGraph.record(attention, *cut(side_by_side, dim))
    assert graph is not None
    held = [StorageWeakRef(t.untyped_storage()) for t in (side_by_side, output)]
    kept = [t.clone() for t in graph.take()]
    assert sum(t.nbytes for t in kept) <= output.nbytes + 8 * BATCH * SEQUENCE * HEADS
    assert torch.equal(kept[0], output)
    grad = torch.randn_like(output)
    del side_by_side, output
    assert all(storage.expired() for storage in held)

    leaves = [t.detach().requires_grad_() for t in cut(again, dim)]
    whole = attention(*leaves)
    expected = torch.autograd.grad(whole, leaves, grad.view(whole.shape))
    for retain in (True, False):
        refilled = graph.refill(*cut(again, dim), kept)
        for ours, theirs in zip(refilled.backward(grad, retain), expected, strict=True):
            assert relative_error(ours, theirs) <= 2e-3, "flash and cuDNN add dQ up in any order"
