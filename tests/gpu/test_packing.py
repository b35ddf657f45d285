"""Packed documents on the GPU: FlashAttention over boundaries against one dense mask, and what it is worth.

The CPU tests (tests/kernels/test_document_attention.py, tests/patching/test_documents.py) check the same code through
buckets and a stand-in; here the kernels themselves run.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fastft
from fastft.kernels import document_attention as module
from fastft.kernels.document_attention import Documents, document_attention
from fastft.patching import registry
from tests import support
from tests.gpu import models

LENGTHS = (300, 1, 17, 450, 128, 64, 40)  # 1,000 tokens
DEVICE = torch.device("cuda", 0)


def inputs(rows: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(rows, sum(LENGTHS), n, width, device=DEVICE, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


def masked(line: list[Tensor], documents: Documents, window: int | None) -> Tensor:
    groups = line[0].shape[1] // line[1].shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in line[1:])
    mask = documents.dense_mask(window)
    return functional.scaled_dot_product_attention(line[0], key, value, mask).transpose(1, 2)


def derivatives(output: Tensor, line: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, line, upstream.to(output.dtype)))


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "width"), [((8, 8), 64), ((8, 2), 128)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_good_as_a_dense_mask(
    dtype: torch.dtype, rows: int, heads: tuple[int, int], width: int, window: int | None
) -> None:
    """Errors against float64 are at most 1.5 times those of SDPA with the dense mask (2 ulp where that is exact)."""
    documents = Documents(rows, sum(LENGTHS), LENGTHS * rows, DEVICE)
    line = inputs(rows, heads, width, dtype)
    exact_line = [x.detach().double().requires_grad_() for x in line]
    upstream = torch.randn(rows, sum(LENGTHS), heads[0], width, device=DEVICE)
    results = [
        [output, *derivatives(output, tensors, upstream)]
        for output, tensors in (
            (document_attention(*line, documents, window=window), line),
            (masked(line, documents, window), line),
            (masked(exact_line, documents, window), exact_line),
        )
    ]
    for ours, theirs, exact in zip(*results, strict=True):
        size = exact.norm() or upstream.norm()  # a window of one token: Q and K have no gradient
        error, allowed = ((x.double() - exact).norm() / size for x in (ours, theirs))
        assert error <= max(1.5 * allowed.item(), 2 * torch.finfo(dtype).eps)


def test_flash_runs_for_16_bits_and_buckets_for_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare buckets with themselves."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs Ampere")
    documents = Documents(1, sum(LENGTHS), LENGTHS, DEVICE)
    expected = document_attention(*inputs(1, (4, 2), 64, torch.bfloat16), documents)
    assert expected.dtype == torch.bfloat16
    monkeypatch.setattr(module, "_in_buckets", lambda *_: pytest.fail("buckets ran"))
    document_attention(*inputs(1, (4, 2), 64, torch.bfloat16), documents)
    with pytest.raises(pytest.fail.Exception, match="buckets ran"):
        document_attention(*inputs(1, (4, 2), 64, torch.float32), documents)


def test_a_packed_loss_is_the_token_weighted_mean_of_separate_ones(tmp_path: pathlib.Path) -> None:
    """C27 and C28 on a QLoRA model in bf16, with the gradients' norm."""
    model = fastft.patch(models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE))
    with support.seeded(0):
        ids = torch.randint(3, 2048, (1, sum(LENGTHS))).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(DEVICE)
    counted = sum(LENGTHS) - len(LENGTHS)

    def norm() -> float:
        grads = torch.stack([g.float().norm() for g in support.trainable_gradients(model).values()])
        model.zero_grad()
        return grads.norm().item()

    loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
    loss.backward()
    packed = loss.item(), norm()
    separate = 0.0
    for part in ids.split(LENGTHS, 1):
        if part.shape[1] > 1:
            one = model(input_ids=part, labels=part, num_items_in_batch=counted).loss
            one.backward()
            separate += one.item()
    assert packed == pytest.approx((separate, norm()), rel=5e-3)
    layers = [s for m in model.modules() if (s := registry.site_of(m)) and s.part == "decoder layer"]
    assert all(site.stock_runs == 0 for site in layers)


def measured(step: Any, repeats: int = 5) -> tuple[float, int]:
    """Median milliseconds of `step` and its peak of allocated bytes above rest."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2], torch.cuda.max_memory_allocated() - rest


def test_short_documents_are_faster_and_smaller_than_through_a_dense_mask(
    record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """8,192 tokens of documents of 256, 32 and 8 heads of 128: forward and backward. Prints what it measured."""
    documents = Documents(1, 8192, (256,) * 32, DEVICE)
    line = [
        torch.randn(1, 8192, n, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (32, 8, 8)
    ]
    upstream = torch.randn(1, 8192, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    ours = measured(lambda: derivatives(document_attention(*line, documents), line, upstream))
    stock = measured(lambda: derivatives(masked(line, documents, None), line, upstream))
    figures = {"varlen ms": ours[0], "mask ms": stock[0], "varlen MiB": ours[1] >> 20, "mask MiB": stock[1] >> 20}
    record_property("packing", figures)
    with capsys.disabled():
        print(f"\npacked attention: {figures}")
    assert ours[0] < 0.5 * stock[0]
    assert ours[1] < stock[1]


def test_padding_left_out_follows_stock(tmp_path: pathlib.Path) -> None:
    """A padded bf16 batch: loss and gradient norm of stock, over its real tokens only."""
    model = models.load_qlora(tmp_path, torch.bfloat16, **models.MIDDLE)
    batch = models.on_gpu(support.random_batch(rows=4, length=200, vocabulary=2048, padded=True))
    batch["attention_mask"][1:, 60:] = 0
    batch["labels"][1:, 60:] = -100
    fastft.patch(model)

    def step() -> tuple[float, float]:
        loss = model(**batch).loss
        loss.backward()
        grads = torch.stack([g.float().norm() for g in support.trainable_gradients(model).values()])
        model.zero_grad()
        return loss.item(), grads.norm().item()

    fast = step()
    fastft.patch(model, padding_free=False)
    assert fast == pytest.approx(step(), rel=5e-3)
    site = registry.site_of(model.get_base_model().model)
    assert site is not None
    assert (site.tokens_padded, site.tokens_real) == (800, 380)
