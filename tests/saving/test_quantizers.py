"""Block types: the `gguf` library reads what was put in, and no more is lost than by llama.cpp's own quantizer."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fastft.saving import quantizers
from fastft.saving.quantizers import quantize

gguf = pytest.importorskip("gguf")

# type → relative error of ggml_quantize_chunk (llama.cpp of llama-cpp-python 0.3.36) on `matrix()`: plain, and with
# `importance()`, measured with these weights.
LLAMA_CPP = {
    "q2_k": (0.33199, 0.19589),
    "q3_k": (0.16908, 0.13244),
    "q4_k": (0.08203, 0.06202),
    "q5_k": (0.04264, 0.03380),
    "q6_k": (0.02265, 0.01781),
    "q4_0": (0.10596, 0.09000),
    "q4_1": (0.09627, 0.05947),
    "q5_0": (0.05477, 0.04716),
    "q5_1": (0.04417, 0.02902),
}
# The same of ours. The plain types without importance are the gguf library's, which are llama.cpp's.
OURS = {
    "q2_k": (0.28771, 0.18297),
    "q3_k": (0.16373, 0.12922),
    "q4_k": (0.08153, 0.06004),
    "q5_k": (0.04178, 0.03180),
    "q6_k": (0.02211, 0.01737),
    "q4_0": (0.10596, 0.08742),
    "q4_1": (0.09627, 0.05805),
    "q5_0": (0.05477, 0.04549),
    "q5_1": (0.04417, 0.02843),
}
K_QUANTS = tuple(kind for kind in LLAMA_CPP if kind.endswith("k"))


def matrix() -> Tensor:
    """float32 [64, 512]: heavy tails and one outlier."""
    values = numpy.random.RandomState(0).standard_t(5, (64, 512)).astype(numpy.float32) * 0.02
    values[3, 100] = 1.5
    return torch.from_numpy(values)


def importance() -> Tensor:
    """float32 [512]: over two orders of magnitude."""
    return torch.from_numpy(numpy.exp(2 * numpy.random.RandomState(1).standard_normal(512)).astype(numpy.float32))


def read(data: Any, kind: str) -> Tensor:
    return torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind.upper()]))


def relative_error(found: Tensor, expected: Tensor, weight: Tensor | float = 1.0) -> float:
    return float((((found - expected).square() * weight).sum() / (expected.square() * weight).sum()).sqrt())


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_no_more_is_lost_than_by_llama_cpp(kind: str) -> None:
    """Read by the gguf library: a bit in the wrong place would be an error of the order of 1."""
    x = matrix()
    data = quantize(x, kind)
    size, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    assert data.shape == (64, 512 // size * packed)
    error = relative_error(read(data, kind), x)
    assert error <= LLAMA_CPP[kind][0] + 5e-6
    assert error == pytest.approx(OURS[kind][0], rel=1e-3)


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_importance_moves_the_error_to_where_it_costs_less(kind: str) -> None:
    x, weight = matrix(), importance()
    weighted = read(quantize(x, kind, weight), kind)
    assert relative_error(weighted, x, weight) <= LLAMA_CPP[kind][1]
    assert relative_error(weighted, x, weight) == pytest.approx(OURS[kind][1], rel=1e-3)
    plain = read(quantize(x, kind), kind)
    assert relative_error(weighted, x, weight) < 0.99 * relative_error(plain, x, weight)


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_weights_that_lie_on_a_grid_are_found_again(kind: str) -> None:
    """Blocks of random bytes are models of what the type can hold exactly."""
    size, packed = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    raw = numpy.random.RandomState(2).randint(0, 256, (64, packed)).astype(numpy.uint8)
    scales = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_0": (0,), "q5_0": (0,)}.get(kind, (0, 2))
    for offset in scales:
        raw[:, offset : offset + 2] = numpy.array([0.01], numpy.float16).view(numpy.uint8)
    if kind in ("q4_1", "q5_1"):
        raw[:, 2:4] = numpy.array([-0.07], numpy.float16).view(numpy.uint8)
    x = read(raw.reshape(32, -1), kind)
    bound = {"q2_k": 0.06, "q3_k": 0.06}.get(kind, 0.02)
    assert relative_error(read(quantize(x, kind, torch.ones(2 * size)), kind), x) < bound


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_without_a_spread_come_back(kind: str) -> None:
    """Zeros exactly; constants of both signs, tiny and large ones, next to ordinary blocks."""
    x = matrix()[:8]
    x[0] = 0
    for row, value in enumerate((0.3, -0.3, 2e-5, -2e4, 1e-12), start=1):
        x[row] = value
    found = read(quantize(x, kind), kind)
    assert torch.equal(found[0], torch.zeros(512))
    assert bool(torch.isfinite(found).all())
    for row in (1, 2, 4):
        torch.testing.assert_close(found[row], x[row], rtol=0.02, atol=0)
    torch.testing.assert_close(found[3], x[3], rtol=0.2, atol=0)  # d itself would be less than float16's least number
    assert float(found[5].abs().max()) < 1e-6


@pytest.mark.parametrize("kind", K_QUANTS)
def test_pieces_rows_and_dtypes_make_no_difference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix().bfloat16()
    whole = quantize(x, kind, importance())
    monkeypatch.setattr(quantizers, "_PIECE", 1024)
    assert numpy.array_equal(quantize(x.float().view(4, 16, 512), kind, importance()).reshape(64, -1), whole)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_other_types_are_the_gguf_librarys(kind: str) -> None:
    expected = gguf.quantize(matrix().numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert numpy.array_equal(quantize(matrix(), kind), expected)
    assert numpy.array_equal(quantize(matrix(), kind, importance()), expected)


def test_columns_that_are_fed_nothing_are_kept_all_the_same() -> None:
    weight = torch.ones(512)
    weight[::2] = 0
    found = read(quantize(matrix(), "q4_k", weight), "q4_k")
    assert relative_error(found[:, ::2], matrix()[:, ::2]) < 0.5
    assert numpy.array_equal(quantize(matrix(), "q4_k", torch.zeros(512)), quantize(matrix(), "q4_k"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.fill_(torch.inf), w), "inf or NaN"),
        (lambda x, w: (x.mul_(torch.nan), w), "inf or NaN"),
        (lambda x, w: (x.mul_(1e12), w), "scales up to 65504"),
        (lambda x, w: (x[:, :500], None), "multiple of 256"),
        (lambda x, w: (x, w[:-1]), "512 columns"),
        (lambda x, w: (x, w.neg()), "not negative"),
        (lambda x, w: (x, w.mul(torch.inf)), "finite"),
    ],
)
def test_what_a_type_cannot_hold_is_refused(change: Any, message: str) -> None:
    x, weight = change(matrix(), importance())
    for kind in ("q4_k", "q6_k"):
        with pytest.raises(ValueError, match=message):
            quantize(x, kind, weight)
