"""The sparse product on the GPU: against float64, bit-equal from run to run, and in milliseconds beside cuBLAS.

The milliseconds are printed, not judged: `python3 -m pytest tests/gpu/test_sparse_product.py -q -s`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastft import functional
from fastft.kernels import sparse_product as module
from fastft.kernels.backend import uses_triton
from fastft.kernels.sparse_product import ROW_BLOCK, THRESHOLD, Tile, kept_columns, sparse_product
from tests.kernels.reference import relative_error

KEPT = 0.15
CHUNK = 2048
HOPPER_TILES = (  # what the default was chosen from
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 64, 8, 7),
    Tile(128, 256, 64, 8, 5),
    Tile(128, 128, 64, 8, 5),
    Tile(128, 128, 64, 4, 5),
    Tile(128, 128, 32, 8, 5),
)


def empty_rows(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Rows on 128-byte boundaries as the operator's buffer has them, NaN in the padding and everywhere."""
    stride = -(-vocabulary // 64) * 64
    return torch.full((rows, stride), float("nan"), dtype=dtype, device="cuda")[:, :vocabulary]


def peaked_gradient(rows: int, vocabulary: int, dtype: torch.dtype, kept: float = KEPT) -> Tensor:
    """As the operator's buffer holds it: small everywhere, large in eight rows of `kept` of each block's columns."""
    gradient = empty_rows(rows, vocabulary, dtype)
    for block in gradient.split(ROW_BLOCK):
        block.copy_((torch.rand(block.shape, device="cuda") * 2 - 1) * THRESHOLD / 2)
        columns = torch.randperm(vocabulary, device="cuda")[: int(kept * vocabulary)]
        peaks = torch.randint(block.shape[0], (8, columns.shape[0]), device="cuda")
        block[peaks, columns.expand_as(peaks)] = (torch.rand(peaks.shape, device="cuda") * 2.0**-7 + 2.0**-12).to(dtype)
    return gradient


def kept_part(gradient: Tensor) -> Tensor:
    """Zeros where a column is left out."""
    part = torch.zeros_like(gradient)
    for block, target in zip(gradient.split(ROW_BLOCK), part.split(ROW_BLOCK), strict=True):
        columns = kept_columns(block, THRESHOLD)
        target[:, columns] = block[:, columns]
    return part


@pytest.mark.parametrize("tile", [None, HOPPER_TILES[2], HOPPER_TILES[-1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "hidden", "vocabulary"), [(1001, 576, 32003), (512, 2048, 49152), (130, 1000, 50257)], ids=str
)
def test_as_good_as_cublas_on_the_kept_columns(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, tile: Tile | None
) -> None:
    if tile is not None and (dtype == torch.float32 or torch.cuda.get_device_capability()[0] not in (9, 10)):
        pytest.skip("a tile for 16 bits on Hopper and later")
    gradient = peaked_gradient(rows, vocabulary, dtype)
    weight = (torch.randn(vocabulary, hidden, device="cuda") * 0.02).to(dtype)
    part = kept_part(gradient)
    reference, stock = part.double() @ weight.double(), part @ weight
    copy = empty_rows(rows, vocabulary, dtype).copy_(gradient)
    assert uses_triton(gradient), "this would test the twin"
    outs = [torch.full((rows, hidden), float("nan"), device="cuda", dtype=dtype) for _ in range(2)]
    for source, out in zip((gradient, copy), outs, strict=True):
        sparse_product(source, weight, THRESHOLD, out=out, tile=tile)
    assert torch.equal(*outs), "two runs differ"
    bound = max(
        1.5 * relative_error(stock, reference), 16 * torch.finfo(torch.float32).eps
    )  # of float32 sums in another order
    assert relative_error(outs[0], reference) <= bound


def test_all_or_nothing_kept() -> None:
    gradient = torch.randn(3 * ROW_BLOCK, 32003, device="cuda").bfloat16()
    gradient[ROW_BLOCK : 2 * ROW_BLOCK] = 0
    weight = torch.randn(32003, 512, device="cuda").bfloat16()
    expected, out = gradient @ weight, torch.empty(3 * ROW_BLOCK, 512, device="cuda", dtype=torch.bfloat16)
    sparse_product(gradient, weight, 0.0, out=out)
    assert relative_error(out, expected) < 5e-3
    assert torch.count_nonzero(out[ROW_BLOCK : 2 * ROW_BLOCK]) == 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_through_the_operator(reduction: str) -> None:
    """Several chunks, ignored rows, an odd vocabulary: the gradient is the whole one, to what was left out."""
    hidden = torch.randn(9001, 512, device="cuda").bfloat16()
    weight = (torch.randn(32003, 512, device="cuda") * 0.35).bfloat16()
    labels = (hidden @ weight.t()).argmax(-1)
    labels[::3] = -100
    labels[1::3] = torch.randint(32003, labels[1::3].shape, device="cuda")
    gradients = []
    for skip_below in (None, THRESHOLD):
        x = hidden.clone().requires_grad_()
        loss = functional.linear_cross_entropy(x, weight, labels, reduction=reduction, skip_below=skip_below)
        loss.sum().backward()
        gradients.append(x.grad)
    assert 1e-5 < relative_error(gradients[1], gradients[0]) < 1.5e-2
    assert torch.count_nonzero(gradients[1][::3]) == 0


def test_nothing_waits_for_the_device() -> None:
    gradient, weight = peaked_gradient(512, 32003, torch.bfloat16), torch.randn(32003, 512, device="cuda").bfloat16()
    out = torch.empty(512, 512, device="cuda", dtype=torch.bfloat16)
    sparse_product(empty_rows(512, 32003, torch.bfloat16).copy_(gradient), weight, THRESHOLD, out=out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse_product(gradient, weight, THRESHOLD, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(call: Callable[[], object], prepare: Callable[[], object] = lambda: None, repeats: int = 12) -> float:
    """Median time of `call` on the device, `prepare` before each not counted."""
    times = []
    for _ in range(repeats + 3):
        prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


@pytest.mark.parametrize(("rows", "hidden"), [(8192, 4096), (16384, 2048)], ids=["8192 x 4096", "16384 x 2048"])
def test_milliseconds_beside_the_dense_product(rows: int, hidden: int) -> None:
    """Chunks of 2,048 rows of 128,256 columns, as the operator has them; the time of all of them."""
    vocabulary, chunks = 128256, rows // CHUNK
    weight = (torch.randn(vocabulary, hidden, device="cuda") * 0.02).bfloat16()
    out = torch.empty(CHUNK, hidden, device="cuda", dtype=torch.bfloat16)
    blocks = CHUNK // ROW_BLOCK
    print()
    for kept in (0.05, KEPT, 0.3, 0.5):
        source = peaked_gradient(CHUNK, vocabulary, torch.bfloat16, kept)
        gradient = peaked_gradient(CHUNK, vocabulary, torch.bfloat16, kept)
        share = sum(len(kept_columns(block, THRESHOLD)) for block in source.split(ROW_BLOCK)) / blocks / vocabulary
        assert share == pytest.approx(kept, rel=0.01)

        def refill(gradient: Tensor = gradient, source: Tensor = source) -> None:
            gradient.copy_(source)

        dense = milliseconds(lambda source=source: torch.mm(source, weight, out=out))
        lists = milliseconds(lambda source=source: module._kept_lists(source, THRESHOLD, blocks))
        print(f"{rows} x {hidden} x {vocabulary}, {share:.0%} kept: dense {dense * chunks:.2f} ms", end="")
        print(f", of the sparse ones flags and lists {lists * chunks:.2f} ms")
        for tile in (None, *(HOPPER_TILES if torch.cuda.get_device_capability()[0] in (9, 10) else ())):
            sparse = milliseconds(
                lambda gradient=gradient, tile=tile: sparse_product(gradient, weight, THRESHOLD, out=out, tile=tile),
                refill,
            )
            name = "default" if tile is None else "x".join(map(str, tile))
            print(f"    sparse {name}: {sparse * chunks:.2f} ms, {dense / sparse:.2f} times as fast")
