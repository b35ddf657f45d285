"""Step 5: Nsight Compute's output is read, and its absence never blocks."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from fastft.bench.validate.context import ExitCode, StepError
from fastft.bench.validate.profile import COMPUTE, MEMORY, OCCUPANCY, Launch, Profile, parse_raw_page
from tests.bench.validate.bed import SIZES, Bed

# `ncu --csv --page raw` as it is printed: its own lines around the table, units below the header, thousands separated.
RAW_PAGE = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "_swiglu_kernel": 0%....50%....100% - 2 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","%","ns","%","%"
"0","4711","python3.12","127.0.0.1","_swiglu_kernel","1","7","(256, 1, 1)","(28672, 1, 1)","0","9.0",\
"90.50","30,000","41.25","80"
"1","4711","python3.12","127.0.0.1","void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor>\
(int, T2, T3)","1","7","(128, 1, 1)","(1024, 1, 1)","0","9.0","60.50","10,000","11.25","n/a"
"""
SOURCE = pathlib.Path("ncu.csv")


def test_the_raw_page_is_read() -> None:
    ours, theirs = parse_raw_page(RAW_PAGE, SOURCE)
    assert ours == Launch("_swiglu_kernel", 30.0, occupancy=80.0, memory=90.5, compute=41.25)
    assert theirs.kernel.startswith("void at::native::vectorized_elementwise_kernel<(int)4")
    assert theirs.occupancy is None


def test_means_are_weighted_by_time() -> None:
    profile = Profile("fastft", tuple(parse_raw_page(RAW_PAGE, SOURCE)))
    assert profile.microseconds == 40.0
    assert profile.mean("memory") == pytest.approx((30 * 90.5 + 10 * 60.5) / 40)
    assert profile.mean("occupancy") == 80.0, "a launch without the figure has no say"
    assert Profile("fastft", ()).mean("memory") is None


@pytest.mark.parametrize(("unit", "microseconds"), [("nsecond", 30), ("us", 30e3), ("msecond", 30e6), ("second", 30e9)])
def test_every_unit_of_time_is_understood(unit: str, microseconds: float) -> None:
    assert parse_raw_page(RAW_PAGE.replace('"ns"', f'"{unit}"'), SOURCE)[0].microseconds == microseconds


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("==PROF== No kernels were profiled.\n", "saw no kernel"),
        (RAW_PAGE.replace(MEMORY, "other"), f"printed no {MEMORY}"),
        (RAW_PAGE.replace('"ns"', '"cycle"'), "'cycle'"),
    ],
)
def test_a_page_that_cannot_be_read_is_an_error(text: str, complaint: str) -> None:
    with pytest.raises(StepError, match=complaint):
        parse_raw_page(text, SOURCE)


def test_profiles_are_taken_only_on_request(bed: Bed) -> None:
    bed.validate()
    assert not bed.programs.ran("/bin/ncu")
    bed.programs.ncu_log = RAW_PAGE
    assert bed.validate(ncu=True) is ExitCode.PASSED
    ours, torch = bed.programs.ran("/bin/ncu")
    assert f"{OCCUPANCY},{MEMORY},{COMPUTE}" in ours
    assert ours.endswith(f"double fastft tiny {SIZES.tokens[0]}")
    assert torch.endswith(f"double torch tiny {SIZES.tokens[0]}")
    report = (bed.root / ".fastft/validate/double/report.md").read_text()
    assert "| fastft | 2 | 40.0 | 80.0 | 83.0 | 33.8 |" in report
    assert "| torch | 2 | 40.0 | 80.0 | 83.0 | 33.8 |" in report


def test_without_ncu_the_report_says_so(bed: Bed) -> None:
    bed.context = replace(bed.context, find_program=lambda name: None)
    assert bed.validate(ncu=True) is ExitCode.PASSED
    assert "No Nsight Compute figures: ncu is not on PATH" in bed.printed


def test_without_a_gpu_ncu_is_not_run(bed: Bed) -> None:
    bed.context = replace(bed.context, on_gpu=False)
    assert bed.validate(ncu=True) is ExitCode.PASSED
    assert not bed.programs.ran("/bin/ncu")
    assert "No Nsight Compute figures: no CUDA device" in bed.printed


def test_ncu_without_permission_does_not_block(bed: Bed) -> None:
    bed.programs.ncu_status, bed.programs.ncu_log = 1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    assert bed.validate(ncu=True) is ExitCode.PASSED
    assert "may not read the GPU's performance counters" in bed.printed
