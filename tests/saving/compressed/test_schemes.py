"""Names, and rounding by the formats' definitions."""

from __future__ import annotations

import pytest
import torch

from fastft.saving.compressed.schemes import resolve_scheme, rounding_error

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("fp8_dynamic", "FP8_DYNAMIC"), ("FP8-Dynamic", "FP8_DYNAMIC"), ("fp8", "FP8"), ("INT8", "W8A8"),
        ("w8a8", "W8A8"), ("w4a16", "W4A16"), ("NVFP4", "NVFP4"), ("nvfp4a16", "NVFP4A16"), ("mxfp4", "MXFP4"),
    ],
)  # fmt: skip
def test_names_of_the_field_are_known(name: str, preset: str) -> None:
    assert resolve_scheme(name).preset == preset


def test_an_unknown_name_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'fp9' is not known here; .*'fp8_dynamic'.*'mxfp4'.*'int8'"):
        resolve_scheme("fp9")


@pytest.mark.parametrize(
    ("name", "expected"),
    # Of a normal distribution: what llm-compressor's own rounding of such weights was measured to lose.
    [("fp8_dynamic", 0.026), ("fp8", 0.026), ("int8", 0.0077), ("w4a16", 0.111), ("nvfp4", 0.095), ("mxfp4", 0.114)],
)
def test_the_error_is_the_formats_own(name: str, expected: float) -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    assert rounding_error(weight, resolve_scheme(name)) == pytest.approx(expected, rel=0.06)


def test_what_lies_on_the_grid_is_not_rounded() -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    row = torch.tensor(FP4).repeat(4) * signs
    for name, scale in (("mxfp4", 2.0**-7), ("nvfp4", 0.013)):
        assert rounding_error((scale * row).repeat(3, 2), resolve_scheme(name)) < 1e-6
    integers = torch.arange(-8, 8).float().repeat(1, 8) + 0.5  # symmetric: largest is 7.5
    assert rounding_error(integers * 0.3, resolve_scheme("w4a16")) > 0.01
    assert rounding_error(torch.arange(-128, 128).float()[None] * 0.3, resolve_scheme("fp8_dynamic")) > 0.01


def test_groups_are_rounded_each_by_itself() -> None:
    """Squared errors of parts that share no scale add up; of parts that share one they do not."""
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    weight[3, 7] = 100.0

    def squares(part: torch.Tensor, name: str, group_size: int | None = None) -> float:
        return (rounding_error(part, resolve_scheme(name), group_size) * float(part.norm())) ** 2

    for name, group in (("nvfp4", 16), ("mxfp4", 32), ("w4a16", 128)):
        parts = squares(weight[:, :group], name) + squares(weight[:, group:], name)
        assert squares(weight, name) == pytest.approx(parts, rel=1e-4)
    assert squares(weight, "w4a16", 32) < 0.9 * squares(weight, "w4a16")
    for name in ("int8", "fp8_dynamic"):
        rows = squares(weight[:4], name) + squares(weight[4:], name)
        assert squares(weight, name) == pytest.approx(rows, rel=1e-4)
    assert squares(weight, "int8") > 2 * (squares(weight[:, :16], "int8") + squares(weight[:, 16:], "int8"))
    assert squares(weight * 3, "fp8") == pytest.approx(9 * squares(weight, "fp8"), rel=1e-3)
