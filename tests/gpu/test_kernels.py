"""Each kernel on the GPU against float64, beside the stock code in the same dtype: at most 1.5 times its error.

The floor of two fp32 ulps is for fp32 arithmetic with differently approximated exp and rsqrt; to a 16-bit result it
means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastft import functional
from fastft.kernels import nf4
from fastft.kernels.backend import uses_triton
from tests.contract import Run, assert_contract

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOOR = 2 * torch.finfo(torch.float32).eps
SEEDS = (0, 1, 2)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal numbers on the GPU, as a leaf with a gradient."""
    return (torch.randn(shape, device="cuda", dtype=torch.float64) * scale).to(dtype).requires_grad_()


def gradients_of(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and input gradients; the incoming gradients are the same for every dtype."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    outputs = function(*inputs)
    generator = torch.Generator("cuda").manual_seed(7)
    incoming = [torch.randn(y.shape, device="cuda", dtype=torch.float64, generator=generator) for y in outputs]
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(incoming, outputs, strict=True)])
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"gradient {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}


def compare(
    fast: Callable[..., Sequence[Tensor]],
    stock: Callable[..., Sequence[Tensor]],
    draw_inputs: Callable[[], Sequence[Tensor]],
    wide: Callable[..., Sequence[Tensor]] | None = None,
) -> None:
    """The contract for outputs and gradients; the reference is `wide`, or `stock` itself, on float64 inputs."""
    runs = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        inputs = draw_inputs()
        assert uses_triton(inputs[0]), "this would test the twin"
        upcast = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        reference = gradients_of(wide or stock, upcast)
        runs.append(Run(gradients_of(fast, inputs), gradients_of(stock, inputs), reference))
    assert runs[0].fast["output 0"].dtype == runs[0].stock["output 0"].dtype
    assert_contract(runs, torch.float32, floor=FLOOR)


def plain_rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    """transformers' LlamaRMSNorm.forward; statistics in float64 for float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (weight * wide.to(x.dtype),)


@each_dtype
@pytest.mark.parametrize("shape", [(1023, 1000), (333, 4096), (2, 65, 5120), (257, 8, 128)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def draw_inputs() -> list[Tensor]:
        return [draw(*shape, dtype=dtype), (1 + 0.1 * draw(shape[-1], dtype=dtype)).detach().requires_grad_()]

    compare(lambda x, w: (functional.rms_norm(x, w, 1e-5),), plain_rms_norm, draw_inputs)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rms_norm_with_a_weight_of_another_dtype(dtype: torch.dtype) -> None:
    """C18: 16-bit rows, fp32 weight: an fp32 result, as stock's."""

    def draw_inputs() -> list[Tensor]:
        return [draw(100, 2048, dtype=dtype), draw(2048, dtype=torch.float32)]

    compare(lambda x, w: (functional.rms_norm(x, w, 1e-5),), plain_rms_norm, draw_inputs)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' apply_rotary_pos_emb for x [batch, heads, sequence, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


@each_dtype
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (14, 2, 96)], ids=str)
def test_rope(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    query_heads, key_heads, width = heads

    def draw_inputs() -> list[Tensor]:
        angles = torch.rand(2, 77, width // 2, device="cuda", dtype=torch.float64).mul(6.3).repeat(1, 1, 2)
        q, k = (draw(2, 77, n, width, dtype=dtype) for n in (query_heads, key_heads))
        return [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]

    def fast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return functional.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    def stock(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)

    compare(fast, stock, draw_inputs)


@each_dtype
@pytest.mark.parametrize("shape", [(1023, 1000), (2, 65, 8192), (5, 11008)], ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(
        lambda gate, up: (functional.swiglu(gate, up),),
        lambda gate, up: (F.silu(gate) * up,),
        lambda: [draw(*shape, dtype=dtype, scale=2.0), draw(*shape, dtype=dtype)],
    )


@each_dtype
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy(reduction: str, trained: bool, dtype: torch.dtype) -> None:
    """C15: an odd vocabulary and odd rows, a third of them ignored; stock upcasts whole logits to fp32."""
    rows, width, vocabulary = 1001, 512, 32003
    generator = torch.Generator("cuda").manual_seed(3)
    labels = torch.randint(0, vocabulary, (rows,), device="cuda", generator=generator)
    labels[torch.rand(rows, device="cuda", generator=generator) < 0.3] = -100

    def draw_inputs() -> list[Tensor]:
        weight = draw(vocabulary, width, dtype=dtype, scale=0.1).detach()
        return [draw(rows, width, dtype=dtype), weight.requires_grad_(trained)]

    def fast(hidden: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.linear_cross_entropy(hidden, weight, labels, reduction=reduction),)

    def stock(hidden: Tensor, weight: Tensor) -> tuple[Tensor]:
        logits = hidden @ weight.t()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (F.cross_entropy(wide, labels, ignore_index=-100, reduction=reduction),)

    compare(fast, stock, draw_inputs)


@pytest.mark.parametrize("label", [32003, -1])
def test_a_label_outside_the_vocabulary_is_an_error_and_no_read(label: int) -> None:
    """C08 on the GPU: named in the message, and the device is unharmed afterwards."""
    hidden, weight = draw(8, 64, dtype=torch.bfloat16), draw(32003, 64, dtype=torch.bfloat16).detach()
    labels = torch.full((8,), label, device="cuda")
    with pytest.raises(ValueError, match=f"{label}.*32003"):
        functional.linear_cross_entropy(hidden, weight, labels)
    torch.cuda.synchronize()


@each_dtype
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("shape", "blocksize"), [((512, 1408), 64), ((33, 96), 64), ((128, 4096), 128), ((64, 64), 256)]
)
def test_dequantization_is_bitsandbytes_own(
    shape: tuple[int, int], blocksize: int, quant_type: str, nested: bool, dtype: torch.dtype
) -> None:
    """The same numbers, bit for bit: code times scale in fp32, one rounding."""
    import bitsandbytes.functional as bnb

    dense = torch.randn(shape, device="cuda").to(dtype)
    packed, state = bnb.quantize_4bit(dense, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested)
    inner = state.state2 if nested else None
    weight = nf4.QuantizedWeight(
        packed=packed.view(torch.uint8),
        absmax=state.absmax,
        code=state.code,
        blocksize=blocksize,
        shape=shape,
        dtype=dtype,
        absmax_code=inner.code if nested else None,
        absmax_scale=inner.absmax if nested else None,
        absmax_blocksize=inner.blocksize if nested else 256,
        offset=state.offset if nested else None,
    )
    out = torch.full(shape, float("nan"), device="cuda", dtype=dtype)
    result = nf4.dequantize(weight, out=out)
    assert result is out
    assert torch.equal(result, bnb.dequantize_4bit(packed, state))
    assert torch.equal(result, nf4.dequantize_torch(weight, dtype))
