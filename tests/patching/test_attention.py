"""Which of SDPA's backends is tried first, by device and shape."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from fastft.patching import attention


def query(length: int, *, batch: int = 2, heads: int = 32, width: int = 128, dtype: Any = torch.bfloat16) -> Any:
    """What the choice looks at of a tensor [batch, heads, length, width] on a GPU."""
    shape, device = (batch, heads, length, width), types.SimpleNamespace(index=0)
    return types.SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=device)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """There is no GPU on which PyTorch could choose; the devices on which it was asked to."""
    asked: list[int] = []
    monkeypatch.setattr(attention, "_have_pytorch_choose", asked.append)
    return asked


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize(
    ("length", "first"),
    [
        (2048, SDPBackend.CUDNN_ATTENTION),
        (2047, SDPBackend.FLASH_ATTENTION),
        (1, SDPBackend.FLASH_ATTENTION),
        (16_001, SDPBackend.CUDNN_ATTENTION),
    ],
    ids=["a multiple of 128", "ragged", "one token", "so long that a plan pays for one step"],
)
def test_cudnn_is_first_where_a_plan_is_used_again_or_pays_at_once(
    length: int,
    first: SDPBackend,
    capability: tuple[int, int],
    no_device: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_capability", lambda _: capability)
    order = attention._backends(query(length))
    assert order is not None
    assert order[0] == first
    assert set(order) == set(attention._FLASH_FIRST), "none is left out"
    assert no_device == [0], "its first choice in a process would set its own order over ours"


@pytest.mark.parametrize(
    ("capability", "given"),
    [((8, 0), {}), ((12, 0), {}), ((9, 0), {"dtype": torch.float32}), ((9, 0), {"width": 256})],
    ids=["A100", "5090", "float32", "wide heads"],
)
def test_elsewhere_the_order_is_pytorchs(
    capability: tuple[int, int], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_capability", lambda _: capability)
    assert attention._backends(query(2047, **given)) is None
