"""Each operation under Thunder: claimed by name in the right trace, and eager's values and gradients.

With TRITON_INTERPRET=1 the same tests run the true Triton kernels through Thunder, on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastft.integrations.thunder as fastft_thunder
from fastft import functional, operators
from fastft.integrations.thunder import repeat
from fastft.kernels.backend import interpreting, uses_triton
from tests.integrations.thunder.harness import DEVICE, assert_same, backward_names, forward_names, jit, leaf
from tests.operators.test_operators import quantized

import thunder  # isort: skip  (ours knows how to import it)

ROWS, VOCABULARY, HIDDEN = 6, 11, 64
CE = {"forward": {"cross_entropy": 1}, "backward": {"cross_entropy_backward": 1}}
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def nothing_declined_yet() -> None:
    fastft_thunder.executor.clear()


def targets(masked: int | None = -100, rows: int = ROWS) -> torch.Tensor:
    """Class indices below 7; three quarters of the first four are `masked`."""
    made = torch.randint(0, 7, (rows,), device=DEVICE)
    if masked is not None:
        made[:3] = masked
    return made


def tolerance(dtype: torch.dtype) -> float:
    return 2e-2 if dtype == torch.bfloat16 else 1e-5


@pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 runs the kernels on the CPU")
def test_here_the_triton_kernels_run() -> None:
    assert uses_triton(leaf(2, 2))


@FLOATS
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_any_reduction_and_ignore_index(reduction: str, ignore_index: int, dtype: Any) -> None:
    def loss(logits: Any, target: Any) -> Any:
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    assert_same(loss, leaf(ROWS, VOCABULARY, dtype=dtype), targets(ignore_index), tolerance=tolerance(dtype), **CE)


def test_cross_entropy_as_a_module_and_without_gradients() -> None:
    assert_same(nn.CrossEntropyLoss(), leaf(ROWS, VOCABULARY), targets(), **CE)
    assert_same(F.cross_entropy, leaf(ROWS, VOCABULARY, needs=False), targets(), forward=CE["forward"], backward={})


def test_the_gradient_of_a_masked_mean_divides_by_the_labels_that_count() -> None:
    """The fault of litgpt's executor: it divides by all rows, so of 48 masked rows in 64 it makes a quarter of it."""
    logits, target = leaf(64, VOCABULARY), targets(None, rows=64)
    target[:48] = -100
    F.cross_entropy(logits, target).backward()
    true, logits.grad = logits.grad, None
    jit(F.cross_entropy)(logits, target).backward()
    assert true is not None
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, true)
    assert logits.grad.norm() > 0.9 * true.norm()


def test_labels_that_are_all_masked_give_zero_and_zero_gradients() -> None:
    logits = leaf(ROWS, VOCABULARY)
    loss = jit(F.cross_entropy)(logits, torch.full((ROWS,), -100, device=DEVICE))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("label smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)),
        ("class weights", lambda x, t: F.cross_entropy(x, t, weight=torch.ones(x.shape[1], device=x.device))),
        ("probabilities", lambda x, t: F.cross_entropy(x, torch.softmax(x.detach() * 0.5, 1))),
    ],
)
def test_what_is_not_ours_falls_back_and_says_so(what: str, call: Any) -> None:
    assert_same(call, leaf(ROWS, VOCABULARY), targets(None), forward={}, backward={}, tolerance=1e-4)
    reasons = fastft_thunder.executor.declined["cross_entropy"]
    assert any(what in reason for reason in reasons)


def test_logits_with_further_dimensions_fall_back_and_say_so() -> None:
    """Forward only: Thunder 0.2.6 cannot differentiate its own decomposition of these."""
    logits = leaf(2, VOCABULARY, 3, needs=False)
    assert_same(F.cross_entropy, logits, targets(None).view(2, 3), forward={}, backward={})
    assert "3 dimensions" in " ".join(fastft_thunder.executor.declined["cross_entropy"])


def _twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a + b) * 2 + a


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_16_bit_sum_is_one_kernel_each_way(dtype: torch.dtype) -> None:
    """torch's own sum, so the same bits, and no casts between; a tensor added to itself has both gradients."""
    a, b = leaf(4, 8, dtype=dtype), leaf(4, 8, dtype=dtype)
    jitted = assert_same(lambda a, b: a + b, a, b, forward={"add": 1}, backward={}, tolerance=0.0)
    for trace in (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]):
        assert "to" not in {symbol.sym.name for symbol in trace.bound_symbols}
    assert_same(lambda a: a + a, a, forward={"add": 1}, backward={"add": 1}, tolerance=0.0)
    assert_same(_twice, a, b, forward={"add": 2}, backward={"add": 1}, tolerance=tolerance(dtype))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a + 1.5,
        lambda a: a + a[:1],
        lambda a: a.float() + a.float(),
        lambda a: torch.add(a, a, alpha=2),
    ],
    ids=["a number", "broadcast", "float32", "alpha"],
)
def test_other_sums_are_left_to_thunder(call: Any) -> None:
    jitted = jit(call)
    a = leaf(4, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(jitted(a), call(a))
    assert "add" not in forward_names(jitted)


def test_a_sum_that_a_fused_region_would_take_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    jitted = jit(_twice, "fastft", "torchcompile", "torch")
    jitted(leaf(4, 8, dtype=torch.bfloat16), leaf(4, 8, dtype=torch.bfloat16))
    assert "add" not in forward_names(jitted)


@FLOATS
@pytest.mark.parametrize("shape", [(HIDDEN,), (3, HIDDEN), (2, 3, HIDDEN)], ids=["1-D", "2-D", "3-D"])
def test_swiglu_of_any_rank(shape: tuple[int, ...], dtype: Any) -> None:
    assert_same(
        functional.swiglu,
        leaf(*shape, dtype=dtype),
        leaf(*shape, dtype=dtype),
        forward={"swiglu": 1},
        backward={"swiglu_backward": 1},
        tolerance=tolerance(dtype),
    )


NORM: dict[str, dict[str, int]] = {"forward": {"rms_norm": 1}, "backward": {"rms_norm_backward": 1}}


@FLOATS
@pytest.mark.parametrize("mode", ["llama", "fp32", "gemma"])
def test_rms_norm_in_each_rounding_with_its_weight_gradient(mode: Any, dtype: Any) -> None:
    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, weight, 1e-5, mode)

    assert_same(norm, leaf(2, 3, HIDDEN, dtype=dtype), leaf(HIDDEN, dtype=dtype), tolerance=tolerance(dtype), **NORM)


@FLOATS
@pytest.mark.parametrize("eps", [1e-5, None])
def test_torchs_own_rms_norm(eps: float | None, dtype: Any) -> None:
    def norm(x: Any, weight: Any) -> Any:
        return F.rms_norm(x, (HIDDEN,), weight, eps)

    assert_same(norm, leaf(2, 3, HIDDEN, dtype=dtype), leaf(HIDDEN, dtype=dtype), tolerance=tolerance(dtype), **NORM)


def test_a_frozen_norm_weight_gets_no_gradient_and_an_intermediate_one_does() -> None:
    jitted = assert_same(functional.rms_norm, leaf(3, HIDDEN), leaf(HIDDEN, needs=False), **NORM)
    assert jitted is not None
    assert_same(lambda x, w: functional.rms_norm(x * 2, w * 2), leaf(3, HIDDEN), leaf(HIDDEN), **NORM)


def test_rms_norm_without_a_weight_falls_back() -> None:
    assert_same(lambda x: F.rms_norm(x, (HIDDEN,)), leaf(3, HIDDEN), forward={}, backward={})
    assert fastft_thunder.executor.declined["rms_norm"] == {"no weight"}


@FLOATS
@pytest.mark.parametrize("angles", [1, 2], ids=["one for all", "per batch element"])
@pytest.mark.parametrize("rotary", [8, 4], ids=["whole", "partial"])
def test_rope_with_angles_per_batch_element_and_partial_rotation(rotary: int, angles: int, dtype: Any) -> None:
    cos, sin = (torch.randn(angles, 5, rotary, device=DEVICE).to(dtype) for _ in range(2))

    def turn(x: Any, y: Any) -> Any:  # as projections leave them: transposed views
        q, k = x.transpose(1, 2), y.transpose(1, 2)
        return functional.rope(q, k, cos, sin)

    assert_same(
        turn,
        leaf(2, 5, 4, 8, dtype=dtype),
        leaf(2, 5, 2, 8, dtype=dtype),
        forward={"rope": 1},
        backward={"rope_backward": 1},
        tolerance=tolerance(dtype),
    )


def test_rope_of_shapes_that_do_not_fit_is_refused_while_tracing() -> None:
    with pytest.raises(ValueError, match="rope: cos of shape"):
        jit(functional.rope)(leaf(2, 4, 5, 8), leaf(2, 2, 5, 8), leaf(3, 5, 8), leaf(3, 5, 8))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trains", [True, False], ids=["trained head", "frozen head"])
def test_head_and_loss_are_one_operator(reduction: Any, trains: bool) -> None:
    hidden, weight, bias = leaf(2, 3, HIDDEN), leaf(VOCABULARY, HIDDEN, needs=trains), leaf(VOCABULARY, needs=trains)
    target = targets().view(2, 3)

    def loss(h: Any, w: Any, b: Any, t: Any) -> Any:
        return functional.linear_cross_entropy(h, w, t, bias=b, reduction=reduction, softcap=20.0)

    if reduction == "none" and trains:
        with pytest.raises(NotImplementedError, match="freeze the head"):
            jit(loss)(hidden, weight, bias, target)
        return
    jitted = assert_same(
        loss,
        hidden,
        weight,
        bias,
        target,
        forward={"linear_cross_entropy": 1},
        backward={"linear_cross_entropy_backward": 1},
    )
    assert fastft_thunder.executor.declined == {}
    assert jitted is not None


def test_head_and_loss_divide_by_the_items_of_the_whole_batch() -> None:
    def loss(h: Any, w: Any, t: Any) -> Any:
        return functional.linear_cross_entropy(h, w, t, num_items_in_batch=16)

    names = {"forward": {"linear_cross_entropy": 1}, "backward": {"linear_cross_entropy_backward": 1}}
    assert_same(loss, leaf(ROWS, HIDDEN), leaf(VOCABULARY, HIDDEN), targets(), **names)


def test_what_a_trace_has_no_place_for_is_refused() -> None:
    for option in ({"on_empty": print}, {"skip_below": 1e-5}, {"on_skip": print}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} cannot be traced"):
            jit(lambda h, w, t, o=option: functional.linear_cross_entropy(h, w, t, **o))(
                leaf(ROWS, HIDDEN), leaf(VOCABULARY, HIDDEN), targets()
            )


class QuantizedLinear(nn.Module):
    """LoRA over a 4-bit weight held in buffers."""

    def __init__(self, nested: bool, bias: bool) -> None:
        super().__init__()
        weight = quantized(nested)
        for name in ("packed", "absmax", "code", "absmax_code", "absmax_scale", "offset"):
            self.register_buffer(name, getattr(weight, name))
        self.lora_a, self.lora_b = (nn.Parameter(torch.randn(*shape)) for shape in ((4, HIDDEN), (32, 4)))
        self.bias = nn.Parameter(torch.randn(32)) if bias else None
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.packed, self.absmax, self.code, self.absmax_code, self.absmax_scale, self.offset)
        return operators.lora_linear_4bit_flat(x, *weight, self.lora_a, self.lora_b, self.bias, 32, 64, 0.5)


@pytest.mark.parametrize(("nested", "bias"), [(True, False), (False, True)], ids=["nested", "plain, with a bias"])
def test_lora_over_a_packed_4_bit_weight(nested: bool, bias: bool) -> None:
    module, x = QuantizedLinear(nested, bias), leaf(2, 3, HIDDEN)
    jitted = jit(module)
    results = []
    for run in (module, jitted):
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
    for theirs, ours in zip(*results, strict=True):
        assert theirs.count_nonzero()
        torch.testing.assert_close(ours, theirs)
    assert forward_names(jitted) == {"lora_linear_4bit": 1}
    assert backward_names(jitted) == {"lora_linear_4bit_backward": 1}


ATTENTION = {"forward": {"attention": 1, "kept": 2}, "backward": {"attention_backward": 1}}
HEAD = 16  # of attention's tensors [2, heads, 12, HEAD]
ON_CPU = pytest.mark.skipif(DEVICE == "cuda", reason="32 bits are Thunder's on a GPU")


def heads(count: int, dtype: torch.dtype = torch.float32, length: int = 12) -> torch.Tensor:
    """[2, count, length, HEAD], a transposed view as projections give it."""
    return leaf(2, length, count, HEAD, dtype=dtype).transpose(1, 2).detach().requires_grad_()


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("settings", [{"is_causal": True}, {}, {"is_causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=ON_CPU), torch.bfloat16], ids=str)
def test_attention_over_grouped_queries(dtype: torch.dtype, settings: dict[str, Any], groups: int) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **settings)

    tensors = heads(4, dtype), heads(groups, dtype), heads(groups, dtype)
    assert_same(attend, *tensors, tolerance=tolerance(dtype), **ATTENTION)
    assert fastft_thunder.executor.declined == {}


@ON_CPU
def test_attention_without_gradients_keeps_nothing() -> None:
    tensors = [heads(4).detach() for _ in "qkv"]
    assert_same(F.scaled_dot_product_attention, *tensors, forward={"attention": 1}, backward={})


MASK = torch.ones(12, 12, dtype=torch.bool).tril()
DECLINED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a mask": ({"attn_mask": MASK}, 12, "a mask"),
    "more keys than queries": ({"is_causal": True}, 16, "not the queries' own"),
}


@ON_CPU
@pytest.mark.parametrize("case", DECLINED)
def test_attention_that_is_not_ours_repeats_keys_and_says_why(case: str) -> None:
    settings, length, reason = DECLINED[case]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **settings)

    tensors = heads(4), heads(2, length=length), heads(2, length=length)
    backward = {"repeat": 1}  # written out, it reads the values again and the keys only scaled
    assert_same(attend, *tensors, forward={"kept": 2, "repeat": 2}, backward=backward)
    assert reason in " ".join(fastft_thunder.executor.declined["scaled_dot_product_attention"])


def written_after_they_were_repeated(q: Any, k: Any, v: Any) -> Any:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    k.mul_(2)
    v[:, :, 0] = 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def repeated_then_written(q: Any, k: Any, v: Any) -> Any:
    k, v = k * 1, v * 1
    k_repeated, v_repeated = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    k.mul_(2)
    v.add_(1)
    return F.scaled_dot_product_attention(q, k_repeated, v_repeated, is_causal=True)


def written_after_attention(q: Any, k: Any, v: Any) -> Any:
    k, v = k * 1, v * 1
    output = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    return output, k.mul_(2) + v.add_(1)


def longer_by_repetition(q: Any, k: Any, v: Any) -> Any:
    k, v = (x.repeat_interleave(2, 1).repeat_interleave(3, -2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def keys_alone_repeated(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), torch.cat((v, v), 1))


REPEATED = [
    written_after_they_were_repeated,
    repeated_then_written,
    written_after_attention,
    longer_by_repetition,
    keys_alone_repeated,
]


@ON_CPU
@pytest.mark.parametrize("program", REPEATED, ids=lambda program: program.__name__)
def test_attention_over_keys_and_values_that_a_program_repeats(program: Any) -> None:
    """What was repeated is taken only where it is what attention would have seen."""
    tensors = heads(4), heads(2), heads(2)
    results = []
    for run in (program, jit(program)):
        outputs = run(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results.append([*outputs, *torch.autograd.grad(sum(o.square().sum() for o in outputs), tensors)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@ON_CPU
def test_no_gradient_goes_round_copies_made_without_one() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = heads(4), heads(2), heads(2)
    jit(attend)(*tensors).sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [False, True, True]


@ON_CPU
def test_under_checkpointing_nothing_is_repeated_either() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def program(q: Any, k: Any, v: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)

    assert_same(program, heads(4), heads(2), heads(2), **ATTENTION)


@ON_CPU
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.float32, torch.bfloat16)], ids=str)
def test_attention_under_autocast_runs_in_its_dtype(dtypes: tuple[torch.dtype, ...]) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)

    tensors = [heads(count, dtype) for count, dtype in zip((4, 2, 2), dtypes, strict=True)]
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_same(attend, *tensors, tolerance=3e-2, **ATTENTION)
    assert fastft_thunder.executor.declined == {}


@ON_CPU
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (4, 0), (0, 4)])
def test_attention_over_nothing_is_left_to_thunder(queries: int, keys: int) -> None:
    """torch's kernel for the CPU divides by these lengths, and takes the process with it."""
    tensors = heads(4, length=queries), heads(4, length=keys), heads(4, length=keys)
    ours = jit(F.scaled_dot_product_attention)(*tensors)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*tensors), equal_nan=True)
    assert "nothing" in " ".join(fastft_thunder.executor.declined["scaled_dot_product_attention"])


def test_attention_of_shapes_alone_asks_for_no_gpu() -> None:
    q, k = (torch.empty(2, count, 12, HEAD, dtype=torch.bfloat16, device="meta") for count in (4, 2))
    ours = jit(functools.partial(F.scaled_dot_product_attention, enable_gqa=True))(q, k, k)
    assert ours.shape == q.shape
    assert fastft_thunder.executor.declined["scaled_dot_product_attention"] == {"tensors on meta"}


@ON_CPU
@pytest.mark.parametrize("groups", [(2, 4), (4, 1)], ids=str)
def test_keys_and_values_of_different_heads(groups: tuple[int, int]) -> None:
    tensors = heads(4), *map(heads, groups)
    ours = jit(functools.partial(F.scaled_dot_product_attention, enable_gqa=True))(*tensors)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*tensors, enable_gqa=True))


@pytest.mark.parametrize(("queries", "groups"), [(4, 3), (1, 4)])
def test_heads_that_do_not_divide_the_queries_are_an_error(queries: int, groups: int) -> None:
    attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    with pytest.raises(RuntimeError, match=f"{queries} heads of queries over {groups}"):
        jit(attend)(heads(queries), heads(groups), heads(groups))


def test_keys_and_values_are_copied_where_they_are_part_of_something_larger() -> None:
    """Kept, a view would keep all of it; and a tensor of its own needs no copy."""
    whole = torch.randn(2, 12, 96, device=DEVICE)
    part = whole[..., 64:].view(2, 12, 2, HEAD).transpose(1, 2)
    copy = repeat._kept_run(part)
    assert copy.untyped_storage().nbytes() == part.numel() * part.element_size()
    assert copy.stride() == part.contiguous().transpose(1, 2).contiguous().transpose(1, 2).stride()
    alone = torch.randn(2, 12, 2, HEAD, device=DEVICE).transpose(1, 2)
    assert repeat._kept_run(alone) is alone
    spread = torch.randn(2, 12, 1, HEAD, device=DEVICE).transpose(1, 2).expand(2, 4, 12, HEAD)
    assert repeat._kept_run(spread) is spread
    query = whole[..., :32].view(2, 12, 2, HEAD).transpose(1, 2)
    assert repeat._kept_run(part, query) is part  # all of it is kept for the query
    assert repeat._kept_run(alone, None, True) is not alone  # somebody may write to it
