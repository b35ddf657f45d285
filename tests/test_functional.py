"""The public kernel functions: derivatives, agreement with stock modules, and what they must leave untouched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fastft import functional

Tensors = tuple[torch.Tensor, ...]


def doubles(*shapes: tuple[int, ...]) -> Tensors:
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def angles(batch: int, sequence: int, rotary: int, dtype: torch.dtype = torch.float64) -> Tensors:
    return torch.randn(2, batch, sequence, rotary, dtype=dtype).unbind(0)


@pytest.mark.parametrize("mode", ["llama", "fp32", "gemma"])
def test_rms_norm_gradcheck(mode: str) -> None:
    x, weight = doubles((2, 3, 7), (7,))
    assert torch.autograd.gradcheck(lambda x, weight: functional.rms_norm(x, weight, 1e-5, mode), (x, weight))


def test_swiglu_gradcheck() -> None:
    assert torch.autograd.gradcheck(functional.swiglu, doubles((2, 3, 5), (2, 3, 5)))


@pytest.mark.parametrize(("batch", "rotary"), [(1, 6), (2, 6), (2, 4)], ids=["shared angles", "per row", "partial"])
def test_rope_gradcheck(batch: int, rotary: int) -> None:
    q, k = doubles((2, 3, 4, 6), (2, 1, 4, 6))
    cos, sin = angles(batch, 4, rotary)
    assert torch.autograd.gradcheck(lambda q, k: functional.rope(q, k, cos, sin), (q, k))


def test_gradcheck_sees_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: with rope's backward turned the wrong way they do."""
    true_rope = functional.rope_kernels.rope
    monkeypatch.setattr(functional.rope_kernels, "rope", lambda *a, inverse=False, **k: true_rope(*a, **k))
    q, k = doubles((1, 1, 2, 4), (1, 1, 2, 4))
    cos, sin = angles(1, 2, 4)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda q, k: functional.rope(q, k, cos, sin), (q, k))


def test_agrees_with_stock() -> None:
    """transformers' layout and argument order, fp32."""
    x, gate, up = torch.randn(3, 2, 5, 16).unbind(0)
    norm = LlamaRMSNorm(16, eps=1e-5)
    norm.weight.data.normal_()
    torch.testing.assert_close(functional.rms_norm(x, norm.weight, 1e-5), norm(x))
    torch.testing.assert_close(functional.swiglu(gate, up), ACT2FN["silu"](gate) * up)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = angles(2, 5, 8, torch.float32)
    for ours, theirs in zip(functional.rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs)


def calls() -> dict[str, tuple[Callable[..., object], Tensors]]:
    """Each differentiable function with tensors for it, all of which require gradients."""
    x, gate, up = torch.randn(3, 4, 8).unbind(0)
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 8)
    cos, sin = angles(1, 4, 8, torch.float32)
    functions = {
        "rms_norm": (lambda x, weight: (functional.rms_norm(x, weight),), (x, torch.randn(8))),
        "swiglu": (lambda gate, up: (functional.swiglu(gate, up),), (gate, up)),
        "rope": (lambda q, k: functional.rope(q, k, cos, sin), (q, k)),
    }
    return {
        name: (function, tuple(t.clone().requires_grad_() for t in t_s)) for name, (function, t_s) in functions.items()
    }


names = pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])


@names
def test_inputs_and_incoming_gradients_are_left_as_they_were(name: str) -> None:
    function, inputs = calls()[name]
    before = [tensor.detach().clone() for tensor in inputs]
    outputs = function(*inputs)
    results = [output.detach().clone() for output in outputs]
    grads = [torch.randn_like(output) for output in outputs]
    grads_before = [grad.clone() for grad in grads]
    torch.autograd.grad(outputs, inputs, grads)
    for tensor, copy in zip([*inputs, *outputs, *grads], [*before, *results, *grads_before], strict=True):
        assert torch.equal(tensor, copy)


@names
def test_a_frozen_input_gets_no_gradient_and_changes_no_other(name: str) -> None:
    function, inputs = calls()[name]
    grads = [torch.randn_like(output) for output in function(*inputs)]
    expected = torch.autograd.grad(function(*inputs), inputs, grads)
    for trained in range(len(inputs)):
        some = [tensor.detach().requires_grad_(i == trained) for i, tensor in enumerate(inputs)]
        outputs = [output for output in function(*some) if output.requires_grad]
        torch.autograd.backward(outputs, grads[: len(outputs)])
        assert torch.equal(some[trained].grad, expected[trained])
        assert [tensor.grad is None for tensor in some] == [i != trained for i in range(len(inputs))]


def test_rope_with_a_gradient_for_keys_alone() -> None:
    function, (q, k) = calls()["rope"]
    _, turned = function(q, k)
    turned.sum().backward()
    assert q.grad is None
    assert k.grad is not None
    assert k.grad.abs().sum() > 0


@names
def test_double_backward_raises(name: str) -> None:
    function, inputs = calls()[name]
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(function(*inputs)[0].sum(), inputs[0], create_graph=True)


def test_no_graph_is_kept_without_grad() -> None:
    function, inputs = calls()["rms_norm"]
    with torch.no_grad():
        assert function(*inputs)[0].grad_fn is None


def test_dequantize_takes_a_bitsandbytes_parameter() -> None:
    import bitsandbytes as bnb

    dense = torch.randn(24, 64)
    for quant_type, nested in (("nf4", True), ("fp4", False)):
        weight = bnb.nn.Params4bit(
            dense.clone(), requires_grad=False, quant_type=quant_type, compress_statistics=nested
        ).to("cpu")
        ours = functional.dequantize(weight)
        assert torch.equal(ours, bnb.functional.dequantize_4bit(weight.data, weight.quant_state))
        assert functional.dequantize(weight, torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: functional.rms_norm(torch.ones(2, 4), torch.ones(4), mode="t5"), ValueError, "mode is 't5'"),
        (lambda: functional.rms_norm(torch.ones(2, 4), torch.ones(3)), ValueError, r"needs \[4\]"),
        (lambda: functional.swiglu(torch.ones(2, 4), torch.ones(2, 3)), ValueError, "must agree"),
        (lambda: functional.swiglu(torch.ones(2), torch.ones(2).half()), ValueError, "must agree"),
        (
            lambda: functional.rope(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), *torch.ones(2, 1, 3, 3)),
            ValueError,
            "do not fit",
        ),
        (
            lambda: functional.rope(torch.ones(2, 2, 3, 4), torch.ones(2, 1, 3, 4), *torch.ones(2, 3, 3, 4)),
            ValueError,
            "do not fit",
        ),
        (lambda: functional.dequantize(torch.ones(4, 4)), TypeError, "quant_state"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_works_without_triton_c54() -> None:
    """C54: a machine with no Triton runs the twins."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fastft import functional as F\n"
        "from fastft.kernels.backend import HAS_TRITON\n"
        "x = torch.randn(2, 8, requires_grad=True)\n"
        "y = F.swiglu(F.rms_norm(x, torch.ones(8)), x)\n"
        "q, k = F.rope(y.view(1, 1, 2, 8), y.view(1, 1, 2, 8), *torch.randn(2, 1, 2, 8))\n"
        "(q.sum() + k.sum()).backward()\n"
        "print(HAS_TRITON, x.grad.abs().sum().item() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["False", "True"], done.stderr
