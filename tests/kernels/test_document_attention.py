"""Attention inside documents: against one mask over the whole row, in values and gradients, by every route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fastft.kernels import document_attention as module
from fastft.kernels.document_attention import Documents, document_attention

CPU = torch.device("cpu")
LENGTHS = (1, 5, 17, 2, 33, 6)  # 64 tokens: buckets of 16, 24 and 48


def documents(rows: int = 1) -> Documents:
    return Documents(rows, 64, LENGTHS * rows, CPU)


def inputs(rows: int = 1, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [
        torch.randn(rows, 64, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def masked(line: list[Tensor], docs: Documents, window: int | None = None, scale: float | None = None) -> Tensor:
    """The reference: one dense mask, written down from the definition."""
    owner = torch.arange(len(docs.lengths)).repeat_interleave(torch.tensor(docs.lengths)).view(docs.rows, docs.length)
    place = torch.arange(docs.length)
    back = place[:, None] - place
    allowed = (owner[:, :, None] == owner[:, None, :]) & (back >= 0)
    if window is not None:
        allowed &= back < window
    query, key, value = line
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, allowed[:, None], scale=scale)
    return output.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 4, 20, 33, 100])
@pytest.mark.parametrize(("rows", "key_heads"), [(1, 2), (2, 4)])
def test_equals_one_mask_over_the_row(rows: int, key_heads: int, window: int | None) -> None:
    line, docs = inputs(rows, key_heads), documents(rows)
    output = document_attention(*line, docs, scale=0.3, window=window)
    expected = masked(line, docs, window, scale=0.3)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad(y, line, upstream) for y in (output, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window", [None, 4])
def test_the_dense_mask_says_the_same(window: int | None) -> None:
    line, docs = inputs(2, 4), documents(2)
    expected = masked(line, docs, window)
    query, key, value = line
    output = functional.scaled_dot_product_attention(query, key, value, docs.dense_mask(window))
    torch.testing.assert_close(output.transpose(1, 2), expected)


def test_a_document_does_not_see_another() -> None:
    """Other tokens of the row may hold anything, NaN included."""
    line, docs = inputs(), documents()
    with torch.no_grad():
        clean = document_attention(*line, docs)[:, 6:23]  # the third document
        for x in line:
            x[:, :, :6], x[:, :, 23:] = torch.nan, torch.nan
        assert torch.equal(document_attention(*line, docs)[:, 6:23], clean)


def test_documents_are_padded_by_less_than_half() -> None:
    for length in range(1, 3000):
        size = module.size_class(length)
        assert size >= length
        assert size == 16 or size < 1.5 * length
    classes = {module.size_class(n) for n in range(1, 8193)}
    assert len(classes) == 19  # a handful of launches for whatever lengths


def test_starts_become_documents() -> None:
    starts = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 0]]).bool()  # every row starts one, said or not
    docs = Documents.from_starts(starts)
    assert docs.lengths == (3, 2, 1, 4)
    assert docs.longest == 4
    assert docs.boundaries.tolist() == [0, 3, 5, 6, 10]
    assert docs.boundaries.dtype == torch.int32
    assert not starts[1, 0]  # the caller's tensor is as it was


def test_explicit_boundaries_become_documents() -> None:
    docs = Documents.from_boundaries([0, 3, 3, 5, 10], 2, 5, CPU)  # an empty document is none
    assert docs.lengths == (3, 2, 5)


@pytest.mark.parametrize(
    "boundaries",
    [[0, 3, 9], [1, 5, 10], [0, 7, 5, 10], [0, 4, 10], [0], []],
    ids=["short", "not from 0", "falling", "across two rows", "one", "none"],
)
def test_boundaries_of_another_batch_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must rise from 0 to the number of tokens \(2 × 5 = 10\)"):
        Documents.from_boundaries(boundaries, 2, 5, CPU)


def test_documents_of_another_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        document_attention(*inputs(2), documents(1))


class Varlen:
    """Stands for `torch.nn.attention.varlen.varlen_attn`: notes its arguments and computes by its documentation."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def newest(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert enable_gqa or query.shape[1] == key.shape[1]
        return self._compute(query, key, value, cu_seq_q, max_q, scale, window_size)

    def without_groups(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert query.shape[1] == key.shape[1]
        return self._compute(query, key, value, cu_seq_q, max_q, scale, window_size)

    def _compute(self, query, key, value, ends, longest, scale, window_size):
        self.calls.append({"heads": key.shape[1], "longest": longest, "window": window_size, "ends": ends.tolist()})
        left, right = window_size
        assert right == 0
        outputs = []
        for begin, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            part = [x[begin:end].transpose(0, 1) for x in (query, key, value)]
            back = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            allowed = (back >= 0) & (back <= left if left >= 0 else True)
            groups = part[0].shape[0] // part[1].shape[0]
            part[1:] = [x.repeat_interleave(groups, 0) for x in part[1:]]
            outputs.append(functional.scaled_dot_product_attention(*part, allowed, scale=scale).transpose(0, 1))
        return torch.cat(outputs)


@pytest.mark.parametrize("signature", ["newest", "without_groups"])
@pytest.mark.parametrize("window", [None, 4, 100])
def test_varlen_gets_the_boundaries_and_the_window(
    signature: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FlashAttention would get on a GPU, computed by a stand-in that follows its documentation."""
    varlen = Varlen()
    monkeypatch.setattr(module, "takes_varlen", lambda *_: True)
    monkeypatch.setattr(module, "_varlen", lambda: module.adapt_varlen(getattr(varlen, signature)))
    line, docs = inputs(), documents()
    torch.testing.assert_close(document_attention(*line, docs, window=window), masked(line, docs, window))
    (call,) = varlen.calls
    assert call == {
        "heads": 2 if signature == "newest" else 4,
        "longest": 33,
        "window": (3, 0) if window == 4 else (-1, 0),  # a window no document reaches is none
        "ends": [0, 1, 6, 23, 25, 58, 64],
    }


def test_a_varlen_without_windows_is_not_used() -> None:
    assert module.adapt_varlen(lambda query, key, value, cu_seq_q, is_causal=False: None) is None


def test_the_installed_varlen_is_one_we_know() -> None:
    assert module._varlen() is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_sdpas(dtype: torch.dtype) -> None:
    line, docs = inputs(dtype=dtype), documents()
    with torch.autocast("cpu", torch.bfloat16):
        assert document_attention(*line, docs).dtype == torch.bfloat16


def test_dropout_drops() -> None:
    line, docs = inputs(), documents()
    assert not torch.equal(document_attention(*line, docs, dropout=0.5), document_attention(*line, docs))
