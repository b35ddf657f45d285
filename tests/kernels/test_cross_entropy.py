"""Cross-entropy over a chunk of logits, in place, against torch's own in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastft.kernels import cross_entropy as module
from fastft.kernels.cross_entropy import OPTIONAL_OUTPUTS, cross_entropy, cross_entropy_backward
from tests.kernels.reference import (
    INTERPRETED,
    assert_as_good_as_stock,
    assert_same,
    dtypes,
    interpreted_only,
    sparse_rows,
)

TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"logit_scale": 0.5, "temperature": 0.7},
    "capped": {"softcap": 5.0, "logit_scale": 2.0},
    "smoothed": {"label_smoothing": 0.1},
    "everything": {"softcap": 30.0, "logit_scale": 0.5, "temperature": 1.3, "label_smoothing": 0.2},
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def stock(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    wide: torch.dtype = torch.float32,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
) -> dict[str, torch.Tensor]:
    """What stock code computes from the same logits, in `wide`; gradients through autograd, in the logits' dtype."""
    raw = logits.detach().clone().requires_grad_()
    z = raw.to(wide) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    loss = F.cross_entropy(z, targets, reduction="none", label_smoothing=label_smoothing)
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return {
        "loss": loss.detach(),
        "maximum": z.amax(-1).detach(),
        "log_sum": (z - z.amax(-1, keepdim=True)).logsumexp(-1).detach(),
        "entropy": entropy.detach(),
        "is_top1": z.argmax(-1) == targets,
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": z.mean(-1).detach(),
        "gradient": torch.autograd.grad(loss.sum(), raw, retain_graph=True)[0],
        "entropy_gradient": torch.autograd.grad(entropy.sum(), raw)[0],
    }


def make_inputs(
    rows: int, vocabulary: int, dtype: torch.dtype, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose row stride is longer than a row, as in the operator's buffer; every other target is the argmax."""
    logits = (torch.randn(rows, vocabulary + 7) * scale).to(dtype)[:, :vocabulary]
    targets = torch.randint(0, vocabulary, (rows,))
    targets[::2] = logits[::2].float().argmax(-1)
    return logits, targets


def statistics_of(logits: torch.Tensor, targets: torch.Tensor, **transform: Any) -> torch.Tensor:
    """What the backward reads; `logits` stay."""
    statistics = torch.full((7, logits.shape[0]), float("nan"), dtype=torch.promote_types(logits.dtype, torch.float32))
    cross_entropy(logits, targets, outputs=("entropy",), write_gradient=False, out=statistics, **transform)
    return statistics


@dtypes
@transforms
@pytest.mark.parametrize("shape", [(1, 1), (7, 97), (19, 1500)], ids=str)
def test_statistics_and_gradient_are_as_good_as_stock(
    dtype: torch.dtype, transform: dict[str, Any], shape: tuple[int, int]
) -> None:
    logits, targets = make_inputs(*shape, dtype)
    theirs = stock(logits, targets, **transform)
    exact = stock(logits.double(), targets, wide=torch.float64, **transform)
    rows = cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS, **transform)
    assert torch.equal(rows.is_top1, theirs["is_top1"])
    for name in ("loss", "maximum", "log_sum", "entropy", "log_sum_sq_probs", "mean_logits"):
        ours, bound = getattr(rows, name), max(1.5 * (theirs[name] - exact[name]).abs().max().item(), 2e-6)
        assert (ours - exact[name]).abs().max() <= bound, name
    if shape[1] > 1:  # with one logit every gradient is zero
        assert_as_good_as_stock(logits, theirs["gradient"], exact["gradient"])
    else:
        assert logits.abs().max() <= 1e-6


@dtypes
@transforms
@pytest.mark.parametrize(
    ("with_log_probs", "with_entropy"),
    [(True, True), (True, False), (False, True)],
    ids=["both", "log_probs only", "entropy only"],
)
def test_backward_from_recomputed_logits_is_as_good_as_stock(
    dtype: torch.dtype, transform: dict[str, Any], with_log_probs: bool, with_entropy: bool
) -> None:
    logits, targets = make_inputs(18, 300, dtype)
    grads = [torch.randn(18) if given else None for given in (with_log_probs, with_entropy)]
    results = []
    for wide, raw in ((torch.float32, logits), (torch.float64, logits.double())):
        parts = stock(raw, targets, wide=wide, **transform)
        terms = zip(grads, (-parts["gradient"], parts["entropy_gradient"]), strict=True)
        results.append(sum(g[:, None] * part.to(wide) for g, part in terms if g is not None))
    statistics = statistics_of(logits, targets, **transform)
    ours = cross_entropy_backward(
        logits, targets, statistics, grad_log_probs=grads[0], grad_entropy=grads[1], **transform
    )
    assert ours is logits
    assert_as_good_as_stock(ours, results[0].to(dtype), results[1])


@dtypes
def test_the_gradient_goes_where_out_says_and_the_logits_stay(dtype: torch.dtype) -> None:
    logits, targets = make_inputs(18, 300, dtype)
    statistics, row, entropy_row = statistics_of(logits, targets), torch.randn(18), torch.randn(18)
    before, wider = logits.clone(), torch.full((18, 320), 7.0, dtype=dtype)
    ours = cross_entropy_backward(
        logits, targets, statistics, grad_log_probs=row, grad_entropy=entropy_row, out=wider[:, :300]
    )
    assert ours.data_ptr() == wider.data_ptr()
    assert_same(logits, before)
    assert (wider[:, 300:] == 7.0).all()
    assert_same(
        ours.contiguous(),
        cross_entropy_backward(logits, targets, statistics, grad_log_probs=row, grad_entropy=entropy_row),
    )


def test_float64_is_computed_in_float64() -> None:
    logits, targets = make_inputs(5, 97, torch.float64)
    exact = stock(logits, targets, wide=torch.float64, **TRANSFORMS["everything"])
    rows = cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS, **TRANSFORMS["everything"])
    assert rows.loss.dtype == torch.float64
    for name in ("loss", "entropy", "log_sum_sq_probs", "mean_logits"):
        torch.testing.assert_close(getattr(rows, name), exact[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, exact["gradient"], rtol=1e-12, atol=1e-14)


@dtypes
def test_statistics_do_not_depend_on_the_gradient_being_written(dtype: torch.dtype) -> None:
    logits, targets = make_inputs(7, 1500, dtype)
    untouched = logits.clone()
    without = cross_entropy(untouched, targets, outputs=OPTIONAL_OUTPUTS, write_gradient=False)
    assert_same(untouched, logits)
    for one, other in zip(without, cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS), strict=True):
        assert_same(one, other)
    assert not torch.equal(untouched, logits)


def test_outputs_not_asked_for_are_none() -> None:
    rows = cross_entropy(*make_inputs(3, 97, torch.float32), outputs=("entropy",))
    assert rows.entropy is not None
    assert rows.is_top1 is rows.log_sum_sq_probs is rows.mean_logits is None


def test_fills_slices_of_a_callers_statistics() -> None:
    logits, targets = make_inputs(10, 97, torch.float32)
    expected = cross_entropy(logits.clone(), targets, outputs=OPTIONAL_OUTPUTS)
    statistics = torch.full((7, 10), float("nan"))
    for part in (slice(0, 4), slice(4, 10)):
        cross_entropy(logits[part], targets[part], outputs=OPTIONAL_OUTPUTS, out=statistics[:, part])
    for row, name in zip(statistics, module.STATISTICS, strict=True):
        torch.testing.assert_close(row, getattr(expected, name).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [4, 64], ids=["ties across blocks", "ties within a block"])
def test_of_equal_logits_the_lowest_index_is_top1(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch_settings", lambda vocabulary: (2, block, 4))
    logits = torch.zeros(4, 13)
    logits[:, [2, 3, 9]] = 5.0
    rows = cross_entropy(logits, torch.tensor([2, 3, 9, 0]), outputs=("is_top1",))
    assert rows.is_top1.tolist() == [True, False, False, False]


@dtypes
def test_a_target_outside_the_vocabulary_is_nan_and_nothing_else_is_c08(dtype: torch.dtype) -> None:
    """C08: never a silent read. 97 and -1 would read a neighbour, 2**45 what is not there."""
    logits, targets = make_inputs(6, 97, dtype)
    clean = logits.clone()
    targets[1:5] = torch.tensor([97, -1, -100, 2**45])
    wrong = torch.tensor([False, True, True, True, True, False])
    rows = cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS)
    assert torch.equal(rows.loss.isnan(), wrong)
    assert torch.equal(logits.isnan().all(-1), wrong)
    assert torch.equal(logits.isnan().any(-1), wrong)
    assert not rows.is_top1[wrong].any()
    assert rows.entropy.isfinite().all()  # does not depend on the target
    cross_entropy_backward(clean, targets, statistics_of(clean, targets), grad_log_probs=torch.ones(6))
    assert torch.equal(clean.isnan().all(-1), wrong)


@pytest.mark.parametrize(
    "vocabulary", [97, 1000] if INTERPRETED else [97, 1000, 32003, 65537], ids=lambda v: f"{v} tokens"
)
@pytest.mark.parametrize("rows", [1, 7, 128, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_odd_sizes_and_large_logits_c15(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """C15: logits out to ±60, where exp overflows if the maximum is not taken off."""
    logits, targets = make_inputs(rows, vocabulary, dtype)
    logits = (logits / logits.float().abs().amax() * 60).to(dtype)
    exact = stock(logits.double(), targets, wide=torch.float64)
    theirs = stock(logits, targets)
    ours = cross_entropy(logits, targets)
    assert ours.loss.isfinite().all()
    torch.testing.assert_close(ours.loss.double(), exact["loss"], rtol=1e-6, atol=1e-5)
    if (
        dtype == torch.float32
    ):  # p − 1 is a difference of numbers near 1: of a tiny gradient only absolute digits remain
        torch.testing.assert_close(logits.double(), exact["gradient"], rtol=1e-5, atol=1e-6)
    else:
        assert_as_good_as_stock(logits, theirs["gradient"], exact["gradient"])


def test_a_loss_near_zero_keeps_its_digits() -> None:
    """log-sum-exp minus logit would leave multiples of 3.8e-6 under a logit of 60."""
    logits = torch.zeros(1, 3)
    logits[0, 0] = 60.0
    logits[0, 1] = 50.0
    rows = cross_entropy(logits, torch.tensor([0]), write_gradient=False)
    torch.testing.assert_close(rows.loss.item(), 4.539889921686465e-05, rtol=2e-3, atol=0)


def test_masked_vocabulary_entries_are_no_nan() -> None:
    """Logits of −inf (a padded vocabulary) have probability and gradient 0; also where a whole first block is −inf."""
    logits, targets = make_inputs(3, 5000, torch.float32)
    targets[:] = 4999
    logits[:, :4500] = -float("inf")
    exact = stock(logits[:, 4500:].double(), targets - 4500, wide=torch.float64)
    again, statistics = logits.clone(), statistics_of(logits, targets)
    rows = cross_entropy(logits, targets, outputs=("entropy", "log_sum_sq_probs"))
    for name in ("loss", "entropy", "log_sum_sq_probs"):
        torch.testing.assert_close(getattr(rows, name).double(), exact[name], rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(logits[:, :4500]) == 0
    torch.testing.assert_close(logits[:, 4500:].double(), exact["gradient"], rtol=1e-5, atol=1e-6)
    ones = torch.ones(3)
    cross_entropy_backward(again, targets, statistics, grad_log_probs=ones, grad_entropy=ones)
    assert again.isfinite().all()


def test_no_rows() -> None:
    empty, targets = torch.empty(0, 97), torch.empty(0, dtype=torch.int64)
    rows = cross_entropy(empty, targets, outputs=OPTIONAL_OUTPUTS)
    assert [row.shape for row in rows] == [(0,)] * 7
    assert cross_entropy_backward(empty, targets, torch.empty(7, 0), grad_log_probs=rows.loss) is empty


@interpreted_only
@pytest.mark.parametrize("settings", [(1, 256, 4), (8, 2048, 4)], ids=["one row a program", "one block"])
def test_the_gpus_row_a_program_gives_the_same(settings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's launch settings are its own; those of the GPU take the same way through the kernel."""
    logits, targets = make_inputs(9, 1500, torch.float32)
    here = logits.clone()
    expected = cross_entropy(here, targets, outputs=OPTIONAL_OUTPUTS, softcap=20.0)
    monkeypatch.setattr(module, "_launch_settings", lambda vocabulary: settings)
    ours = cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS, softcap=20.0)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(logits, here, rtol=1e-5, atol=1e-7)


@interpreted_only
@dtypes
def test_the_twin_computes_what_the_kernel_computes(dtype: torch.dtype) -> None:
    logits, targets = make_inputs(9, 1500, dtype)
    twin_logits, transform = logits.clone(), TRANSFORMS["everything"]
    twin = module.cross_entropy_torch(twin_logits, targets, outputs=OPTIONAL_OUTPUTS, **transform)
    for one, other in zip(cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS, **transform), twin, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-6, atol=3e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits, twin_logits, rtol=2 * eps + 1e-5, atol=1e-7)


@interpreted_only
def test_offsets_past_2_to_the_31_c17() -> None:
    """C17: a row that begins past 2**31 elements gives what it gives alone."""
    logits, targets = sparse_rows(3, 40), torch.tensor([3, 0, 39])
    alone, again = logits.contiguous(), sparse_rows(3, 40)
    dense = again.contiguous()
    expected = cross_entropy(alone, targets, outputs=OPTIONAL_OUTPUTS)
    for one, other in zip(cross_entropy(logits, targets, outputs=OPTIONAL_OUTPUTS), expected, strict=True):
        assert_same(one, other)
    assert_same(logits.contiguous(), alone)
    statistics, grads = statistics_of(dense, targets), torch.tensor([3.0, 4.0, 5.0])
    cross_entropy_backward(again, targets, statistics, grad_log_probs=grads)
    assert_same(again.contiguous(), cross_entropy_backward(dense, targets, statistics, grad_log_probs=grads))
