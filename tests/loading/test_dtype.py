"""Which dtype is chosen on which hardware (C55); explicit ones are taken or refused, never exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastft.loading.dtype import choose_dtype, parse_dtype

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OLD_GPU = torch.device("cuda", 1)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, tuple[int, int]]:
    """Compute capabilities that torch reports; the test fills them in."""
    reported: dict[torch.device, tuple[int, int]] = {}
    monkeypatch.setattr(torch.cuda, "get_device_capability", reported.__getitem__)
    return reported


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("BF16", torch.bfloat16),
        ("float16", torch.float16),
        ("torch.float16", torch.float16),
        ("half", torch.float16),
        ("fp32", torch.float32),
        (torch.float64, torch.float64),
        (None, None),
    ],
)
def test_names_of_a_dtype(spelling: Any, dtype: torch.dtype | None) -> None:
    assert parse_dtype(spelling) is dtype


@pytest.mark.parametrize("wrong", ["bfloat", "int8", "auto", "", torch.int8])
def test_a_wrong_dtype_is_an_error_that_names_the_accepted_ones(wrong: Any) -> None:
    with pytest.raises(ValueError, match="'bfloat16', 'bf16', 'float16'") as caught:
        parse_dtype(wrong)
    assert str(wrong) in str(caught.value)


def test_a_thing_that_is_no_dtype_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="not int"):
        parse_dtype(16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reported", "chosen"),
    [
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_none_chooses_by_capability(capability: dict, reported: tuple[int, int], chosen: torch.dtype) -> None:
    """C55."""
    capability[GPU] = reported
    assert choose_dtype(None, [GPU]) is chosen


def test_none_is_float32_on_the_cpu() -> None:
    assert choose_dtype(None, [CPU]) is torch.float32


@pytest.mark.parametrize("reported", [(7, 5), (8, 0)])
@pytest.mark.parametrize("explicit", ["float16", "float32"])
def test_an_explicit_dtype_is_never_overridden(capability: dict, reported: tuple[int, int], explicit: str) -> None:
    """C55: float32 stays float32, float16 stays float16, on any GPU."""
    capability[GPU] = reported
    assert choose_dtype(explicit, [GPU]) is getattr(torch, explicit)


def test_bfloat16_is_refused_below_capability_8(capability: dict) -> None:
    """C55: the message says what the device has, what is needed and what to pass."""
    capability[GPU] = (7, 5)
    with pytest.raises(ValueError, match=r"cuda:0 has compute capability 7\.5 .* needs 8\.0 .* dtype='float16'"):
        choose_dtype("bfloat16", [GPU])
    capability[GPU] = (8, 0)
    assert choose_dtype("bfloat16", [GPU]) is torch.bfloat16


def test_the_weakest_device_of_several_decides(capability: dict) -> None:
    capability.update({GPU: (9, 0), OLD_GPU: (7, 5)})
    assert choose_dtype(None, [GPU, OLD_GPU, CPU]) is torch.float16
