"""What test_compile.py compiles: per kernel file, calls of its launchers over meta tensors (shapes, no memory).

The launcher's own arguments, shape table and settings are what gets compiled, so this table cannot drift from them.
To add a kernel file, write a function `dtype -> list of Launch` and enter it in TABLE. The first launch of each kernel
(in the order written) is compiled for every GPU and dtype, the others in fp16 for a T4 and in bf16 for a Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fastft.kernels.nf4 import QuantizedWeight

TOKENS = 4096


@dataclass(frozen=True)
class Launch:
    """One call of a launcher; `wide`: its kernels must load and store 128 bits an instruction."""

    name: str
    call: Callable[[], object]
    wide: bool = True


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rms_norm_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.rms_norm import rms_norm, rms_norm_backward

    def arguments(hidden: int, weight_dtype: torch.dtype = dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return meta(2, TOKENS // 2, hidden, dtype=dtype), meta(hidden, dtype=weight_dtype)

    def forward(hidden: int, mode: str, residual: bool, weight_dtype: torch.dtype = dtype) -> Callable[[], object]:
        x, weight = arguments(hidden, weight_dtype)
        return lambda: rms_norm(x, weight, 1e-6, mode=mode, residual=torch.empty_like(x) if residual else None)

    def backward(hidden: int, mode: str, residual: bool, weight_grad: bool) -> Callable[[], object]:
        x, weight = arguments(hidden)
        return lambda: rms_norm_backward(
            torch.empty_like(x),
            x,
            weight,
            meta(TOKENS, dtype=torch.float32),
            mode=mode,
            residual_grad=torch.empty_like(x) if residual else None,
            needs_weight_grad=weight_grad,
        )

    return [
        Launch("forward llama 4096 residual", forward(4096, "llama", True)),
        Launch("backward llama 4096 residual", backward(4096, "llama", True, False)),
        Launch("forward gemma 576", forward(576, "gemma", False)),
        Launch("forward fp32 2048, fp32 weight", forward(2048, "fp32", False, torch.float32)),
        Launch("forward llama head 64", forward(64, "llama", False)),
        Launch("forward llama odd width", forward(97, "llama", True), wide=False),
        Launch("forward llama widest", forward(32768, "llama", True), wide=False),
        Launch("backward llama 4096, weight gradient", backward(4096, "llama", True, True)),
        Launch("backward gemma 576, weight gradient", backward(576, "gemma", False, True)),
        Launch("backward llama widest, weight gradient", backward(32768, "llama", True, True), wide=False),
    ]


def rope_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.rope import rope

    def call(q_heads: int, k_heads: int, head: int, rotary: int, inverse: bool, angles: torch.dtype = dtype):
        q = meta(2, TOKENS // 2, q_heads, head, dtype=dtype)
        k = meta(2, TOKENS // 2, k_heads, head, dtype=dtype) if k_heads else None
        cos, sin = meta(1, TOKENS // 2, rotary, dtype=angles), meta(1, TOKENS // 2, rotary, dtype=angles)
        return lambda: rope(q, k, cos, sin, inverse=inverse, out=(q, k))

    return [
        Launch("32 + 8 heads of 128", call(32, 8, 128, 128, False)),
        Launch("32 + 8 heads of 128, inverse", call(32, 8, 128, 128, True)),
        Launch("9 + 3 heads of 64, fp32 angles", call(9, 3, 64, 64, False, torch.float32)),
        Launch("16 heads of 96, 32 rotary, no keys", call(16, 0, 96, 32, False), wide=False),
        Launch("128 + 128 heads of 256", call(128, 128, 256, 256, False), wide=False),
    ]


def swiglu_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.swiglu import swiglu, swiglu_backward

    def tensors(width: int, count: int) -> list[torch.Tensor]:
        return [meta(2, TOKENS // 2, width, dtype=dtype) for _ in range(count)]

    halves = meta(TOKENS, 2 * 8192, dtype=dtype).chunk(2, dim=-1)
    in_place = tensors(14336, 3)
    return [
        Launch("forward 14336", lambda: swiglu(*tensors(14336, 2))),
        Launch("backward 14336 in place", lambda: swiglu_backward(*in_place, out=tuple(in_place))),
        Launch("forward halves of 16384", lambda: swiglu(*halves)),
        Launch("forward odd width", lambda: swiglu(*tensors(173, 2)), wide=False),
        Launch("backward 1536 without product", lambda: swiglu_backward(*tensors(1536, 3), needs_product=False)),
    ]


def dropout_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.dropout import dropout

    seed = meta(1, dtype=torch.int64)
    room = meta(TOKENS, 4096 + 32, dtype=dtype)[:, :4096]
    return [
        Launch("4096", lambda: dropout(meta(TOKENS, 4096, dtype=dtype), 0.1, seed, stream=3)),
        Launch(
            "4096 of a room, a later tile, in place",
            lambda: dropout(room, 0.1, seed, stream=1, first_row=2048, out=room),
        ),
        Launch("odd width", lambda: dropout(meta(TOKENS, 173, dtype=dtype), 0.5, seed), wide=False),
    ]


def quantized(rows: int, columns: int, blocksize: int, nested: bool, dtype: torch.dtype) -> QuantizedWeight:
    """A 4-bit weight without memory."""
    blocks = -(-rows * columns // blocksize)
    return QuantizedWeight(
        packed=meta((rows * columns + 1) // 2, 1, dtype=torch.uint8),
        absmax=meta(blocks, dtype=torch.uint8 if nested else torch.float32),
        code=meta(16, dtype=torch.float32),
        blocksize=blocksize,
        shape=(rows, columns),
        dtype=dtype,
        absmax_code=meta(256, dtype=torch.float32) if nested else None,
        absmax_scale=meta(-(-blocks // 256), dtype=torch.float32) if nested else None,
        offset=meta(dtype=torch.float32) if nested else None,
    )


def nf4_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.nf4 import dequantize

    def call(*weight: int) -> Callable[[], object]:
        return lambda: dequantize(quantized(*weight, dtype))

    return [
        Launch("4096 x 14336 nested", call(4096, 14336, 64, True)),
        Launch("4096 x 14336 not nested", call(4096, 14336, 64, False)),
        Launch("odd elements, blocks of 32", call(97, 13, 32, True), wide=False),
        Launch("blocks of 4096", call(1536, 576, 4096, False)),
    ]


def joined(
    dtype: torch.dtype,
    rows: tuple[int, ...],
    columns: int,
    rank: int,
    adapter_dtype: torch.dtype = torch.float32,
    blocksize: int = 64,
    nested: bool = True,
    fold: bool = False,
) -> Callable[[], object]:
    from fastft.kernels.join import Adapter, join

    def run() -> object:
        weights = [quantized(count, columns, blocksize, nested, dtype) for count in rows]
        adapters = [
            Adapter(meta(rank, columns, dtype=adapter_dtype), meta(count, rank, dtype=adapter_dtype), 2.0)
            if rank
            else None
            for count in rows
        ]
        return join(weights, adapters, dtype, fold)

    return run


def fold_launches(dtype: torch.dtype) -> list[Launch]:
    """By the kernel of join.py, whose tile it is."""
    return [
        Launch("query, key, value", joined(dtype, (4096, 1024, 1024), 4096, 16, fold=True)),
        Launch("down, rank 128, 16-bit adapters", joined(dtype, (4096,), 14336, 128, dtype, fold=True), wide=False),
    ]


def join_launches(dtype: torch.dtype) -> list[Launch]:
    call = partial(joined, dtype)
    return [
        Launch("query, key, value of an 8B model", call((4096, 1024, 1024), 4096, 16)),
        Launch("gate and up of an 8B model, 16-bit adapters", call((14336, 14336), 4096, 16, dtype)),
        Launch("down of an 8B model, rank 128, not nested", call((4096,), 14336, 128, nested=False)),
        Launch("no adapters", call((2048, 512, 512), 2048, 0)),
        Launch("rows that blocks do not divide", call((97, 13), 90, 3), wide=False),
    ]


def cross_entropy_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.cross_entropy import OPTIONAL_OUTPUTS, cross_entropy, cross_entropy_backward

    def chunk(vocabulary: int, rows: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
        return meta(rows, vocabulary, dtype=dtype), meta(rows, dtype=torch.int64)

    def forward(vocabulary: int, **options: object) -> Callable[[], object]:
        logits, targets = chunk(vocabulary)
        return lambda: cross_entropy(logits, targets, **options)

    def backward(vocabulary: int, entropy: bool, **options: object) -> Callable[[], object]:
        logits, targets = chunk(vocabulary)
        row, statistics = meta(2048, dtype=torch.float32), meta(7, 2048, dtype=torch.float32)
        extra = {"grad_entropy": row} if entropy else {}
        return lambda: cross_entropy_backward(logits, targets, statistics, grad_log_probs=row, **extra, **options)

    # The forward's loads are asynchronous copies of 16 bytes, which `wide` does not look at.
    everything = {"softcap": 30.0, "logit_scale": 0.5, "temperature": 0.7, "label_smoothing": 0.1}
    return [
        Launch("128256 for SFT", forward(128256, outputs=("entropy", "is_top1")), wide=False),
        Launch("128256 backward", backward(128256, False)),
        Launch("49152 without gradient", forward(49152, write_gradient=False), wide=False),
        Launch("256000 with everything", forward(256000, outputs=OPTIONAL_OUTPUTS, **everything), wide=False),
        Launch("256000 backward with everything", backward(256000, True, **everything)),
        Launch("odd vocabulary", forward(50257), wide=False),
        Launch("odd vocabulary backward", backward(97, True), wide=False),
    ]


def sparse_product_launches(dtype: torch.dtype) -> list[Launch]:
    from fastft.kernels.sparse_product import THRESHOLD, Tile, sparse_product, tile_for

    hopper = tile_for(dtype, (9, 0)) if dtype == torch.bfloat16 else None  # no T4 is given a Hopper's tile

    def call(tile: Tile | None, weight_dtype: torch.dtype = dtype) -> Callable[[], object]:
        gradient, out = meta(2048, 128256, dtype=dtype), meta(2048, 4096, dtype=dtype)
        weight = meta(128256, 4096, dtype=weight_dtype)
        return lambda: sparse_product(gradient, weight, THRESHOLD, out=out, tile=tile)

    # Wide loads of the product are asynchronous copies of 16 bytes, which `wide` does not look at.
    return [
        Launch("4096 x 128256, any GPU's tile", call(None), wide=False),
        Launch("4096 x 128256, Hopper's tile", call(hopper), wide=False),
        Launch("4096 x 128256, Hopper's tile, float32 head", call(hopper, torch.float32), wide=False),
    ]


TABLE: dict[str, Callable[[torch.dtype], list[Launch]]] = {
    "rms_norm": rms_norm_launches,
    "rope": rope_launches,
    "swiglu": swiglu_launches,
    "dropout": dropout_launches,
    "nf4": nf4_launches,
    "join": join_launches,
    "fold": fold_launches,
    "cross_entropy": cross_entropy_launches,
    "sparse_product": sparse_product_launches,
}
