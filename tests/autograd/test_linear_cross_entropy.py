"""Linear cross-entropy against the full logits: values, gradients, what it refuses, and what it allocates."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastft.autograd import head_products
from fastft.autograd import linear_cross_entropy as module
from fastft.autograd.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from fastft.kernels.backend import interpreting
from tests.autograd.pieces import name_of
from tests.kernels.reference import assert_as_good_as_stock

INTERPRETED = interpreting()
ALL_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scaled": {"logit_scale": 0.6, "temperature": 0.8},
    "everything": {"softcap": 3.0, "logit_scale": 0.6, "temperature": 0.8},
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
trained = pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
heads = pytest.mark.parametrize(
    "head",
    [{}, {"biased": True}, {"trained": True}, {"trained": True, "biased": True}],
    ids=["frozen", "frozen, bias", "trained", "trained, bias"],
)
in_float64 = pytest.mark.skipif(INTERPRETED, reason="float64 takes the twins: the other pass runs this")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


def make_inputs(
    rows: int = 13,
    hidden: int = 8,
    vocabulary: int = 23,
    dtype: torch.dtype = torch.float32,
    *,
    trained: bool = False,
    biased: bool = False,
    ignored: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """hidden, weight, bias, labels; every third label ignored."""
    x = torch.randn(rows, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5 * 2).to(dtype).requires_grad_(trained)
    bias = torch.randn(vocabulary).to(dtype).requires_grad_(trained) if biased else None
    labels = torch.randint(0, vocabulary, (rows,))
    if ignored:
        labels[1::3] = -100
    return x, weight, bias, labels


def full_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """What stock code builds: the logits, upcast as Hugging Face's loss does."""
    logits = F.linear(x, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def leaves(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [x for x in tensors if x is not None and x.requires_grad]


def small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Chunks of `rows` rows, so that a small test crosses chunk borders."""

    def chunks(count: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Any:
        for start in range(0, count, rows):
            end = min(start + rows, count)
            yield start, end, torch.empty((end - start, vocabulary), dtype=dtype, device=device)

    monkeypatch.setattr(module, "chunks", chunks)


# --- derivatives ---


@in_float64
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["hard labels", "smoothed"])
@pytest.mark.parametrize("transform", [TRANSFORMS["plain"], TRANSFORMS["everything"]], ids=["plain", "everything"])
@heads
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_its_derivatives_in_float64(
    transform: dict[str, Any],
    head: dict[str, bool],
    smoothing: float,
    reduction: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_chunks(monkeypatch, 4)
    x, weight, bias, labels = make_inputs(7, 4, 11, dtype=torch.float64, **head)

    def loss(*_: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            x, weight, labels, bias=bias, reduction=reduction, label_smoothing=smoothing, **transform
        )

    logits = full_logits(x, weight, bias, **transform)
    expected = F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(loss(), expected, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(loss, leaves(x, weight, bias))


@in_float64
@transforms
@heads
@pytest.mark.parametrize("through", ["log_probs", "entropy", "both"])
def test_log_probs_and_entropy_derivatives_in_float64(
    transform: dict[str, Any], head: dict[str, bool], through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 4)
    x, weight, bias, targets = make_inputs(5, 4, 11, dtype=torch.float64, ignored=False, **head)

    def outputs(*_: torch.Tensor) -> Any:
        log_probs, entropy, *_ = linear_log_probs(x, weight, bias, targets, outputs=ALL_OUTPUTS, **transform)
        return {"log_probs": log_probs, "entropy": entropy, "both": (log_probs, entropy)}[through]

    assert torch.autograd.gradcheck(outputs, leaves(x, weight, bias))


@in_float64
@heads
def test_the_pair_drops_ignored_rows_on_every_path(head: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward` and `backward` as plain functions, with entropies and ignored labels, as no public call has them."""
    small_chunks(monkeypatch, 4)
    x, weight, bias, labels = make_inputs(dtype=torch.float64, **head)
    needs_head = weight.requires_grad
    statics = module.Statics(
        ignore_index=-100,
        outputs=("entropy", "mean_logits", "is_top1"),
        summed=False,
        compute_dtype=torch.float64,
        needs_hidden=True,
        needs_weight=needs_head,
        needs_bias=needs_head and bias is not None,
        logit_scale=0.6,
        softcap=3.0,
        temperature=0.8,
        label_smoothing=0.0,
    )
    with torch.no_grad():
        outputs, saved = module.forward(module.Tensors(x, weight, bias, labels), statics)
    log_p = full_logits(x, weight, bias, 0.6, 3.0, 0.8).log_softmax(-1)
    counts = labels != -100
    log_probs = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0] * counts
    entropy = -(log_p.exp() * log_p).sum(-1) * counts
    torch.testing.assert_close(outputs.log_probs, log_probs.detach())
    torch.testing.assert_close(outputs.entropy, entropy.detach())
    assert outputs.counted == counts.sum()
    assert not outputs.is_top1[~counts].any()
    for grads in ((torch.randn(13), torch.randn(13)), (torch.randn(13), None), (None, torch.randn(13))):
        with torch.no_grad():
            ours = module.backward(saved, *(None if g is None else g.double() for g in grads))
        given = [(o, g.double()) for o, g in zip((log_probs, entropy), grads, strict=True) if g is not None]
        total = sum((output * g).sum() for output, g in given)
        theirs = torch.autograd.grad(total, leaves(x, weight, bias), retain_graph=True)
        for one, reference in zip([g for g in ours if g is not None], theirs, strict=True):
            torch.testing.assert_close(one, reference, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert module.backward(saved, None, None) == (None, None, None)


@in_float64
@pytest.mark.parametrize("only", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_gradient_alone(only: str, reduction: Any) -> None:
    x, weight, bias, labels = make_inputs(dtype=torch.float64, biased=True)
    assert bias is not None
    named = {"hidden": x.detach(), "weight": weight.detach(), "bias": bias.detach()}
    named[only] = named[only].requires_grad_()
    loss = linear_cross_entropy(named["hidden"], named["weight"], labels, bias=named["bias"], reduction=reduction)
    logits = full_logits(named["hidden"], named["weight"], named["bias"])
    expected = F.cross_entropy(logits, labels, reduction=reduction)
    ours, theirs = (torch.autograd.grad(value.sum(), named[only])[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_raises(reduction: Any) -> None:
    x, weight, _, labels = make_inputs()
    loss = linear_cross_entropy(x, weight, labels, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, x, create_graph=True)


# --- the Numbers contract ---


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@trained
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors_are_within_the_contract(dtype: torch.dtype, trained: bool, reduction: Any) -> None:
    """Each gradient's error against float64 is at most 1.5 times stock's in the same dtype."""
    rows, vocabulary = (40, 97) if INTERPRETED else (300, 997)
    x, weight, bias, labels = make_inputs(rows, 64, vocabulary, dtype, trained=trained, biased=True)
    weights = torch.rand(rows)
    inputs = leaves(x, weight, bias)
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, bias)]

    def reduced(loss: torch.Tensor) -> torch.Tensor:
        return loss if reduction == "mean" else (loss * weights.to(loss)).sum() / 7

    ours = reduced(linear_cross_entropy(x, weight, labels, bias=bias, reduction=reduction))
    stock = reduced(F.cross_entropy(full_logits(x, weight, bias), labels, reduction=reduction))
    exact = reduced(F.cross_entropy(full_logits(*wide), labels, reduction=reduction))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, stock, rtol=2e-6, atol=2e-6)
    gradients = [
        torch.autograd.grad(value, list_) for value, list_ in ((ours, inputs), (stock, inputs), (exact, leaves(*wide)))
    ]
    for ours_, stock_, exact_ in zip(*gradients, strict=True):
        assert_as_good_as_stock(ours_, stock_, exact_)
        assert ours_.dtype == dtype
    assert torch.count_nonzero(gradients[0][0][1::3]) == 0  # ignored rows


@pytest.mark.skipif(INTERPRETED, reason="the mixtures differ in the products, not in the kernel")
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype", "autocast"),
    [
        (torch.float32, torch.bfloat16, None),  # GRPO's cast_lm_head_to_fp32
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@trained
def test_mixed_dtypes_and_autocast(
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    autocast: torch.dtype | None,
    trained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compute dtype is autocast's if on, else hidden's; gradients come back in their inputs' dtypes."""
    monkeypatch.setattr(head_products, "_CAST_SLICE_BYTES", 64 * 4 * 50)  # 50 rows of the weight at a time in float32
    x, weight, bias, labels = make_inputs(60, 64, 217, trained=trained, biased=True)
    x, weight = x.detach().to(hidden_dtype).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_(trained)
    assert bias is not None
    bias = bias.detach().to(weight_dtype).requires_grad_(trained)
    compute = autocast or hidden_dtype
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = linear_cross_entropy(x, weight, labels, bias=bias)
    logits = full_logits(x.to(compute), weight.to(compute), bias.to(compute))
    stock = F.cross_entropy(logits, labels)
    torch.testing.assert_close(loss, stock, rtol=3e-6, atol=3e-6)
    exact_inputs = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, bias)]
    exact = F.cross_entropy(full_logits(*exact_inputs), labels)
    with torch.autocast("cpu", torch.bfloat16):  # a backward under another autocast state than its forward
        ours = torch.autograd.grad(loss, leaves(x, weight, bias))
    theirs = torch.autograd.grad(stock, leaves(x, weight, bias))
    for one, other, reference in zip(ours, theirs, torch.autograd.grad(exact, leaves(*exact_inputs)), strict=True):
        assert_as_good_as_stock(one, other, reference)


# --- against TRL's own ---


@pytest.mark.skipif(INTERPRETED, reason="TRL's own kernels would be interpreted too")
@transforms
@trained
@pytest.mark.parametrize("with_entropy", [False, True], ids=["log_probs", "log_probs and entropy"])
def test_equals_trls_own_function(transform: dict[str, Any], trained: bool, with_entropy: bool) -> None:
    kernels = pytest.importorskip("trl.kernels")
    if torch.cuda.is_available() is False and not hasattr(kernels.chunked_logprob, "_use_triton"):
        pytest.skip("trl 1.15 runs its function on CUDA only")
    x, weight, bias, targets = make_inputs(37, 16, 97, trained=trained, biased=True, ignored=False)
    call = (transform.get("temperature", 1.0), transform.get("softcap"), transform.get("logit_scale", 1.0))
    ours = linear_log_probs(x, weight, bias, targets, *call, ALL_OUTPUTS)
    theirs = kernels.ChunkedLogProbFunction.apply(
        x, weight, bias, targets, call[0], 32, call[1], call[2], ALL_OUTPUTS[1:]
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=5e-6, atol=5e-6)
    assert [t.requires_grad for t in ours] == [True, True, False, False, False]
    grads = [torch.randn(37) for _ in range(1 + with_entropy)]
    results = (torch.autograd.grad(o[: len(grads)], leaves(x, weight, bias), grads) for o in (ours, theirs))
    for one, other in zip(*results, strict=True):
        assert ((one - other).norm() / other.norm()) <= 5e-6


def test_outputs_are_those_asked_for() -> None:
    x, weight, _, targets = make_inputs(ignored=False)
    log_probs, entropy, *others = linear_log_probs(x, weight, None, targets, outputs=("log_probs",))
    assert entropy is None
    assert others == [None] * 3
    both = linear_log_probs(x, weight, None, targets, outputs=("is_top1", "mean_logits"))
    logits = full_logits(x, weight, None)
    assert torch.equal(both[0], log_probs)
    assert torch.equal(both[4], logits.argmax(-1) == targets)
    torch.testing.assert_close(both[3], logits.mean(-1).detach())
    with pytest.raises(ValueError, match="unknown outputs \\['perplexity'\\]"):
        linear_log_probs(x, weight, None, targets, outputs=("perplexity",))


def test_of_equal_logits_the_lowest_index_is_top1() -> None:
    x, targets = torch.ones(3, 2), torch.tensor([1, 2, 0])
    weight = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert linear_log_probs(x, weight, None, targets, outputs=("is_top1",))[4].tolist() == [True, False, False]


def test_no_rows() -> None:
    """TRL hands over no rows at all when a batch has no valid label."""
    x, weight, bias, targets = make_inputs(0, trained=True, biased=True)
    log_probs, entropy, *others = linear_log_probs(x, weight, bias, targets, outputs=ALL_OUTPUTS)
    assert [t.shape for t in (log_probs, entropy, *others)] == [(0,)] * 5
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves(x, weight, bias))
    assert [torch.count_nonzero(g) for g in gradients] == [0, 0, 0]
    assert [g.shape for g in gradients] == [x.shape, weight.shape, bias.shape]


# --- cases ---


@pytest.mark.parametrize("count", [None, 7, 0], ids=["no count", "count 7", "count 0"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@trained
def test_all_labels_ignored_c01(count: int | None, reduction: Any, trained: bool) -> None:
    """C01: exactly 0, joined to the graph; zero gradients on all that trains; one warning with the usual causes."""
    if count is not None and reduction != "mean":
        pytest.skip("a count belongs to the mean")
    x, weight, bias, labels = make_inputs(trained=trained, biased=True)
    labels[:] = -100
    with pytest.warns(UserWarning, match="no supervised tokens.*truncation.*markers"):
        loss = linear_cross_entropy(x, weight, labels, bias=bias, reduction=reduction, num_items_in_batch=count)
    assert loss.requires_grad
    assert torch.equal(loss, torch.zeros_like(loss))
    for gradient, leaf in zip(
        torch.autograd.grad(loss.sum(), leaves(x, weight, bias)), leaves(x, weight, bias), strict=True
    ):
        assert gradient.shape == leaf.shape
        assert torch.count_nonzero(gradient) == 0


def test_an_empty_batch_can_be_counted_instead_of_warned_about() -> None:
    x, weight, _, labels = make_inputs()
    seen: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in (labels, torch.full_like(labels, -100)):
            linear_cross_entropy(x, weight, batch, on_empty=lambda: seen.append(1))
    assert seen == [1]


@pytest.mark.parametrize("sequence", [1, 9], ids=["one token", "only the first position has a label"])
@pytest.mark.filterwarnings("ignore:fastft. a batch had no supervised tokens")
def test_nothing_left_after_the_shift_c02(sequence: int) -> None:
    """C02: (a) only position 0 has a label, (b) sequence length 1: as C01."""
    x = torch.randn(2, sequence, 8, requires_grad=True)
    _, weight, _, _ = make_inputs()
    labels = torch.full((2, sequence), -100)
    labels[:, 0] = 5
    loss = linear_cross_entropy(x, weight, F.pad(labels[:, 1:], (0, 1), value=-100))
    assert loss.item() == 0
    assert torch.count_nonzero(torch.autograd.grad(loss, x)[0]) == 0
    empty = linear_cross_entropy(x[:, 1:1], weight, labels[:, 1:1])
    assert empty.item() == 0
    assert torch.count_nonzero(torch.autograd.grad(empty, x)[0]) == 0


@trained
def test_accumulation_equals_one_batch_c03(trained: bool) -> None:
    """C03: a row with 8 targets and one with 2: sums over a common count, not a mean of means."""
    x, weight, _, labels = make_inputs(18, trained=trained, ignored=False)
    labels[8] = labels[11:] = -100  # row A: 0..7; row B: 9, 10
    full = linear_cross_entropy(x, weight, labels)
    parts = [linear_cross_entropy(x[s], weight, labels[s], num_items_in_batch=10) for s in (slice(0, 9), slice(9, 18))]
    torch.testing.assert_close(parts[0] + parts[1], full, rtol=1e-6, atol=0)
    inputs = leaves(x, weight)
    gradients = zip(torch.autograd.grad(sum(parts), inputs), torch.autograd.grad(full, inputs), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    means = [linear_cross_entropy(x[s], weight, labels[s]) for s in (slice(0, 9), slice(9, 18))]
    assert abs((means[0] + means[1]).item() / 2 - full.item()) > 1e-3


@pytest.mark.parametrize(
    "count",
    [
        16,
        16.0,
        torch.tensor(16),
        torch.tensor([16]),
        torch.tensor(16.0, dtype=torch.float64),
        torch.tensor(16, dtype=torch.int32),
        torch.tensor(16.0, dtype=torch.bfloat16),
    ],
    ids=repr,
)
def test_the_count_may_be_a_tensor_c06(count: Any) -> None:
    """C06: the same loss, to the bit, whatever holds the count."""
    x, weight, _, labels = make_inputs()
    expected = linear_cross_entropy(x, weight, labels, num_items_in_batch=16)
    loss = linear_cross_entropy(x, weight, labels, num_items_in_batch=count)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    total = F.cross_entropy(full_logits(x, weight, None), labels, reduction="sum")
    torch.testing.assert_close(loss, total / 16)


@pytest.mark.parametrize(("label", "place"), [(23, 0), (-1, 3), (10**9, 5), (-2, 12)])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_bad_labels_are_named_c08(label: int, place: int, grad: bool) -> None:
    """C08: the error names the value, the vocabulary's size, and what to do."""
    x, weight, _, labels = make_inputs()
    labels[place] = label
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=rf"label {label} .* 23 rows.*\[0, 22\].*-100"):
        linear_cross_entropy(x, weight, labels)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=rf"label {label} .* 23 rows"):
        linear_log_probs(x, weight, None, labels.masked_fill(labels == -100, 0))


def test_another_ignore_index() -> None:
    x, weight, _, labels = make_inputs()
    expected = linear_cross_entropy(x, weight, labels)
    assert torch.equal(
        linear_cross_entropy(x, weight, labels.masked_fill(labels == -100, -1), ignore_index=-1), expected
    )
    inside = labels.masked_fill(labels == 4, 5).masked_fill(labels == -100, 4)
    theirs = F.cross_entropy(full_logits(x, weight, None), inside, ignore_index=4)
    torch.testing.assert_close(linear_cross_entropy(x, weight, inside, ignore_index=4), theirs)


def test_nothing_is_added_by_default_c16() -> None:
    """C16: default settings are plain cross-entropy."""
    x, weight, _, labels = make_inputs()
    theirs = F.cross_entropy(full_logits(x, weight, None), labels)
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels), theirs, rtol=1e-6, atol=1e-6)


@trained
def test_per_token_weights_c19(trained: bool) -> None:
    """C19: weights of 0, 0.5 and 1 through reduction="none"; all ones is the unweighted loss."""
    x, weight, _, labels = make_inputs(trained=trained)
    weights = torch.tensor([0.0, 0.5, 1.0]).repeat(5)[:13]
    ours = (linear_cross_entropy(x, weight, labels, reduction="none") * weights).sum()
    theirs = (F.cross_entropy(full_logits(x, weight, None), labels, reduction="none") * weights).sum()
    torch.testing.assert_close(ours, theirs)
    inputs = leaves(x, weight)
    for one, other in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    ones = linear_cross_entropy(x, weight, labels, reduction="none").sum()
    torch.testing.assert_close(ones, linear_cross_entropy(x, weight, labels, reduction="sum"))


def test_label_smoothing_c21() -> None:
    """C21: never silently ignored."""
    x, weight, _, labels = make_inputs()
    ours = linear_cross_entropy(x, weight, labels, label_smoothing=0.1)
    theirs = F.cross_entropy(full_logits(x, weight, None), labels, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    assert abs(ours.item() - linear_cross_entropy(x, weight, labels).item()) > 1e-3


# --- contracts ---


@pytest.mark.parametrize("reduction", ["mean", "none"])
@trained
def test_the_loss_is_bit_equal_without_grad(reduction: Any, trained: bool) -> None:
    x, weight, bias, labels = make_inputs(50, trained=trained, biased=True)

    def both() -> list[torch.Tensor | None]:
        loss = linear_cross_entropy(x, weight, labels, bias=bias, reduction=reduction)
        clamped = labels.clamp(min=0)
        return [loss, *linear_log_probs(x, weight, bias, clamped, outputs=ALL_OUTPUTS)]

    with_grad = both()
    with torch.no_grad():
        without = both()
    with torch.inference_mode():
        inference = both()
    for a, b, c in zip(with_grad, without, inference, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert not any(t.requires_grad for t in (*without, *inference))


@trained
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_runs_and_two_backwards_are_bit_equal(trained: bool, reduction: Any) -> None:
    x, weight, bias, labels = make_inputs(50, trained=trained, biased=True)
    inputs = leaves(x, weight, bias)
    first, second = (linear_cross_entropy(x, weight, labels, bias=bias, reduction=reduction) for _ in range(2))
    assert torch.equal(first, second)
    grads = torch.rand_like(first)
    runs = [torch.autograd.grad(loss, inputs, grads, retain_graph=True) for loss in (first, first, second)]
    for a, b, c in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    other = torch.autograd.grad(first, inputs, grads * -2)  # not what the first backward left behind
    for a, b in zip(runs[0], other, strict=True):
        torch.testing.assert_close(b, a * -2)


def test_hidden_of_any_shape_and_stride() -> None:
    base = torch.randn(3, 7, 8, requires_grad=True)
    _, weight, _, _ = make_inputs()
    labels = torch.randint(0, 23, (3, 7))
    labels[1] = -100
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:, :-1],
        lambda t: t.transpose(0, 1),
        lambda t: t.reshape(3, 7, 2, 4).transpose(2, 3).reshape(3, 7, 8),
        lambda t: t[:, 2],
    ]
    for view in views:
        x, y = view(base), (view(labels[..., None].expand(3, 7, 8))[..., 0])
        theirs = F.cross_entropy(full_logits(x, weight, None).flatten(0, -2), y.flatten())
        ours = linear_cross_entropy(x, weight, y)
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(value, base)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
        per_token = linear_cross_entropy(x, weight, y, reduction="none")
        assert per_token.shape == y.shape


def test_a_weight_that_is_a_slice_of_another() -> None:
    """An output embedding may be a view: columns of a wider matrix, rows of a padded one."""
    x, _, _, labels = make_inputs()
    storage = torch.randn(40, 20)
    for weight in (storage[:23, 3:11], storage[1:24, ::2][:, :8], storage.t()[:8, :23].t()):
        theirs = F.cross_entropy(full_logits(x, weight, None), labels)
        ours = linear_cross_entropy(x, weight, labels)
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(value, x)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_a_weight_changed_between_forward_and_backward_raises_where_it_is_read() -> None:
    x, weight, _, labels = make_inputs(trained=True)
    loss = linear_cross_entropy(x, weight, labels, reduction="none").sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_other_integer_types(dtype: torch.dtype) -> None:
    x, weight, _, labels = make_inputs(ignored=False)
    assert torch.equal(linear_cross_entropy(x, weight, labels.to(dtype)), linear_cross_entropy(x, weight, labels))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(12, dtype=torch.int64)}, r"labels \(12,\) must have hidden's shape \(13, 8\)"),
        ({"labels": torch.zeros(13)}, "labels must be integers, not torch.float32"),
        ({"weight": torch.zeros(23, 9)}, r"weight must be \[vocabulary, 8\]"),
        ({"bias": torch.zeros(22)}, r"bias must be \[23\]"),
        ({"reduction": "batchmean"}, "reduction must be"),
        ({"reduction": "sum", "num_items_in_batch": 3}, "num_items_in_batch belongs to reduction='mean'"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"label_smoothing": 1.5}, "label_smoothing must lie"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_it_refuses(change: dict[str, Any], message: str) -> None:
    x, weight, _, labels = make_inputs()
    arguments: dict[str, Any] = {"hidden": x, "weight": weight, "labels": labels, **change}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


def test_statics_are_pure_data() -> None:
    """A plan for a call must pickle and deepcopy: it will be an argument of a compiler operator."""
    statics = module.Statics(-100, ("entropy",), False, torch.bfloat16, True, False, False, 1.0, None, 1.0, 0.0)
    assert pickle.loads(pickle.dumps(statics)) == copy.deepcopy(statics) == statics


# --- memory ---


class Allocations(TorchDispatchMode):
    """Storages made inside: sizes, and the most bytes alive at once. Inputs and views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.peak = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.alive:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.sizes.append(storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def allocations(
    rows: int, hidden: int, vocabulary: int, *, trained: bool = False, reduction: Any = "mean"
) -> Allocations:
    """What forward and backward allocate."""
    x, weight, _, labels = make_inputs(rows, hidden, vocabulary, trained=trained, ignored=False)
    with Allocations() as seen:
        loss = linear_cross_entropy(x, weight, labels, reduction=reduction)
        gradients = torch.autograd.grad(loss.sum(), leaves(x, weight))
    assert all(g.isfinite().all() for g in gradients)
    return seen


def test_the_tracker_sees_full_logits() -> None:
    """What the memory tests look through must be able to see what they deny."""
    x, weight, _, labels = make_inputs(256, 16, 1000)
    with Allocations() as seen:
        F.cross_entropy(full_logits(x, weight, None), labels).backward()
    assert max(seen.sizes) == 256 * 1000 * 4
    assert seen.peak >= 2 * 256 * 1000 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_costs_no_gradient_buffer_c13(reduction: Any) -> None:
    """C13: hidden 256, vocabulary 50,021: a frozen head's weight gets no [vocabulary, hidden], a trained one's does."""
    hidden, vocabulary = (64, 5003) if INTERPRETED else (256, 50_021)
    weight_bytes = hidden * vocabulary * 4
    assert weight_bytes not in allocations(32, hidden, vocabulary, reduction=reduction).sizes
    assert weight_bytes in allocations(32, hidden, vocabulary, trained=True, reduction=reduction).sizes


@pytest.mark.skipif(INTERPRETED, reason="the chunk is chosen on the host: nothing of it is the kernel's")
def test_logits_are_never_materialized_c14() -> None:
    """C14: vocabulary 131,072 is served by one chunk; the loss is the unchunked one, also off the chunk's multiple."""
    x, weight, _, labels = make_inputs(517, 8, 131_072, ignored=False)
    with Allocations() as seen:
        loss = linear_cross_entropy(x, weight, labels)
        loss.backward()
    chunk = max(seen.sizes)
    assert chunk <= 256 * 131_072 * 4
    logits = full_logits(x.detach(), weight, None)
    torch.testing.assert_close(loss.detach(), F.cross_entropy(logits, labels), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="the chunk is chosen on the host: nothing of it is the kernel's")
def test_memory_grows_by_two_hidden_buffers_with_tokens_and_by_a_chunk_with_the_vocabulary_c14() -> None:
    """C14, and the contract: doubling tokens adds at most 1.05 × two [tokens, hidden], doubling V at most one chunk."""
    tokens, hidden, vocabulary = 2048, 256, 2048
    peak = allocations(tokens, hidden, vocabulary).peak
    doubled = allocations(2 * tokens, hidden, vocabulary).peak
    assert doubled - peak <= 1.05 * 2 * tokens * hidden * 4
    assert doubled - peak >= tokens * hidden * 4  # a tracker that sees nothing grow would prove nothing
    wider = allocations(tokens, hidden, 2 * vocabulary)
    assert wider.peak - peak <= max(wider.sizes)


def test_no_gradient_rows_are_built_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad, or for a hidden that needs none, there is no second product."""
    calls: list[int] = []
    monkeypatch.setattr(module, "project_back", lambda *_: calls.append(1))
    x, weight, _, labels = make_inputs()
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels)
        linear_log_probs(x, weight, None, labels.clamp(min=0))
    linear_cross_entropy(x.detach(), weight, labels)
    linear_cross_entropy(x.detach(), weight.detach().requires_grad_(), labels).backward()
    assert not calls
    linear_cross_entropy(x, weight, labels)
    assert calls


def test_vocabulary_products_are_as_many_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two for a frozen head, also per token; three for a trained one whose loss is reduced here; else four."""
    counted: dict[str, int] = {}

    def counting(where: Any, name: str) -> None:
        original = getattr(where, name)

        def wrapper(*arguments: Any) -> Any:
            counted[name] = counted.get(name, 0) + 1
            return original(*arguments)

        monkeypatch.setattr(where, name, wrapper)

    for where, name in ((module, "project"), (module, "project_back"), (head_products, "add_product")):
        counting(where, name)

    def products(trained: bool, reduction: Any) -> int:
        counted.clear()
        x, weight, _, labels = make_inputs(trained=trained)
        linear_cross_entropy(x, weight, labels, reduction=reduction).sum().backward()
        return sum(counted.values())

    assert products(False, "mean") == products(False, "none") == 2
    assert products(True, "mean") == 3
    assert products(True, "none") == 4
    counted.clear()
    x, weight, _, targets = make_inputs(ignored=False)
    log_probs, entropy, *_ = linear_log_probs(x, weight, None, targets, outputs=ALL_OUTPUTS)
    log_probs.sum().backward(retain_graph=True)
    assert sum(counted.values()) == 2  # an unused entropy costs no product
    entropy.sum().backward()
    assert sum(counted.values()) == 4
