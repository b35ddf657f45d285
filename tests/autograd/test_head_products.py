"""The head's products in chunks: every row once, within a budget, and sums that are not rounded on the way."""

from __future__ import annotations

import pytest
import torch

from fastft.autograd import head_products as module
from tests.autograd.pieces import name_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name_of)
def test_products_are_added_up_unrounded(dtype: torch.dtype) -> None:
    """Head gradients are sums over chunks: rounding each chunk's product to 16 bits first would bias training."""
    a, b, total = torch.randn(9, 33).to(dtype), torch.randn(33, 7).to(dtype), torch.randn(9, 7)
    expected = total.double() + a.double() @ b.double()
    module.add_product(total, a, b)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("vocabulary", [97, 32_000, 49_152, 131_072, 256_000])
def test_chunks_cover_every_row_once_within_their_budget(device: str, vocabulary: int) -> None:
    """ "meta" stands for any accelerator here."""
    budget = module._CPU_CHUNK_BYTES if device == "cpu" else module._CUDA_CHUNK_BYTES
    for count in (0, 1, 127, 1000, 4096, 4097, 20_011):
        found = list(module.chunks(count, vocabulary, torch.bfloat16, torch.device(device)))
        assert [start for start, _, _ in found] == [0, *(end for _, end, _ in found[:-1])][: len(found)]
        assert (found[-1][1] if found else 0) == count
        for start, end, logits in found:
            assert logits.shape == (end - start, vocabulary)
            assert logits.stride(0) % 64 == 0
            assert logits.stride(0) * logits.shape[0] * 2 <= max(budget, 256 * (vocabulary + 64) * 2)
        sizes = [end - start for start, end, _ in found]
        assert not sizes or max(sizes) - min(sizes) <= 128 * len(sizes)
