"""Steps 3 and 4: what is asked of the benchmark, and what its figures are taken to say."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from fastft.bench.validate.context import ExitCode, StepError
from fastft.bench.validate.measure import Comparison, assess, read_rows
from tests.bench.validate.bed import Bed, bench_row


def comparison(
    mode: str = "full", ours: float = 1.0, torch: float = 1.0, mib: tuple[float, float] = (9, 9)
) -> Comparison:
    return Comparison(mode, "tiny", "64", ours, torch, *mib)


def test_the_benchmark_is_asked_for_this_kernel_and_these_sizes(bed: Bed) -> None:
    bed.validate()
    (line,) = bed.programs.ran("fastft.cli bench kernels")
    assert line.startswith("fastft.cli bench kernels double --csv ")
    assert line.endswith("--model tiny --provider fastft --provider torch --bt 64 --samples 20")


def test_last_runs_figures_are_not_this_runs(bed: Bed) -> None:
    bed.validate()
    bed.programs.bench_status = 1
    with pytest.raises(StepError, match="what bench printed"):
        bed.validate()
    assert not (bed.root / ".fastft/validate/double/bench.csv").exists()


def test_a_benchmark_without_our_figures_stops_with_what_it_said(bed: Bed) -> None:
    bed.programs.rows = [
        bench_row("fastft", "full", "", "", status="skipped", note="too large"),
        bench_row("torch", "full", "", "", status="skipped", note="too large"),
    ]
    with pytest.raises(StepError, match="fastft full: skipped too large"):
        bed.validate()


def test_other_columns_than_the_ones_read_are_named(bed: Bed) -> None:
    path = bed.root / "other.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["name", "mode", "provider", "model", "tokens", "milliseconds"])
    with pytest.raises(StepError, match="extra_mib, ms_50, note, status"):
        read_rows(path)


def test_rows_are_paired_by_mode_and_length(bed: Bed) -> None:
    bed.programs.rows = [
        bench_row("fastft", "forward", 1.0, 0),
        bench_row("torch", "forward", 3.0, 0),
        bench_row("liger", "forward", 9.0, 0),
        bench_row("fastft", "full", 4.0, 0),
        bench_row("torch", "full", 4.0, 0),
        bench_row("fastft", "full", 5.0, 0, tokens="128"),
        bench_row("torch", "full", 7.5, 0, tokens="128"),
    ]
    bed.validate()
    report = (bed.root / ".fastft/validate/double/report.md").read_text()
    for row in ("forward | 64 | 1 | 3 | 3.00 ×", "full | 64 | 4 | 4 | 1.00 ×", "full | 128 | 5 | 7.5 | 1.50 ×"):
        assert row in report
    assert "9" not in report.split("**Benchmark")[1].split("\n\n")[1].replace("−", "")


@pytest.mark.parametrize(
    ("comparisons", "sentence"),
    [
        ([comparison(ours=1, torch=2, mib=(50, 100))], "Speed and memory improved."),
        ([comparison(ours=1, torch=2)], "Speed improved. Memory stayed level."),
        ([comparison(mib=(50, 100))], "Speed stayed level. Memory improved."),
        ([comparison(ours=1.2, mib=(50, 100))], "Speed got worse. Memory improved."),
        ([comparison(ours=1.02)], "Speed and memory stayed level."),
        (
            [comparison("forward", torch=2), comparison("backward", ours=1.5)],
            "Speed improved in some modes and got worse in others. Memory stayed level.",
        ),
        ([Comparison("full", "tiny", "64", 1.0, 2.0)], "Speed improved. Memory was not measured."),
    ],
)
def test_the_assessment_names_what_improved(comparisons: list[Comparison], sentence: str) -> None:
    assert assess(comparisons, on_gpu=True).sentence == sentence


@pytest.mark.parametrize(
    ("bad", "alarm"),
    [
        (comparison(ours=2.0), "full at 64 tokens: 2.0 × torch's time"),
        (comparison(mib=(200, 100)), "full at 64 tokens: 200 MiB where torch adds 100 MiB"),
        (comparison(mib=(200, 0)), "full at 64 tokens: 200 MiB where torch adds 0 MiB"),
        (Comparison("full", "tiny", "64", trouble="wrong: error 0.3"), "full at 64 tokens: wrong: error 0.3"),
    ],
)
def test_what_is_twice_as_bad_is_a_catastrophe(bad: Comparison, alarm: str) -> None:
    (found,) = assess([comparison("forward", torch=9), bad], on_gpu=True).alarms
    assert alarm in found


@pytest.mark.parametrize("good", [comparison(ours=1.95), comparison(mib=(195, 100)), comparison(mib=(0.9, 0))])
def test_what_is_less_than_twice_as_bad_is_none(good: Comparison) -> None:
    assert not assess([good], on_gpu=True).alarms


def test_without_a_gpu_figures_mean_nothing_and_only_a_wrong_result_counts() -> None:
    slow = comparison(ours=9.0)
    assert assess([slow], on_gpu=False).alarms == ()
    assert "say nothing" in assess([slow], on_gpu=False).sentence
    assert assess([replace(slow, trouble="wrong: error 0.3")], on_gpu=False).alarms


def test_a_loss_that_computes_its_gradient_in_the_forward_is_judged_by_both(bed: Bed) -> None:
    bed.context = replace(bed.context, kernel=replace(bed.context.kernel, name="cross_entropy"))
    bed.programs.rows = [
        bench_row("fastft", "forward", 9.0, 0),
        bench_row("torch", "forward", 2.0, 0),
        bench_row("fastft", "full", 9.0, 0),
        bench_row("torch", "full", 12.0, 0),
    ]
    assert bed.validate() is ExitCode.PASSED
    assert "Speed improved." in bed.printed
    assert "Not judged: forward." in bed.printed


def test_a_catastrophe_is_loud_and_ends_with_four(bed: Bed) -> None:
    bed.programs.rows = [bench_row("fastft", "full", 9.0, 50), bench_row("torch", "full", 2.0, 100)]
    assert bed.validate() is ExitCode.CATASTROPHE == 4
    assert "CATASTROPHICALLY WORSE" in bed.printed
    report = (bed.root / ".fastft/validate/double/report.md").read_text()
    assert "- **CATASTROPHICALLY WORSE**: full at 64 tokens: 4.5 × torch's time" in report


@pytest.mark.parametrize("status", ["wrong", "error", "out of memory"])
def test_no_result_where_torch_has_one_ends_with_four(bed: Bed, status: str) -> None:
    bed.programs.rows = [
        bench_row("fastft", "full", "", "", status=status, note="what happened"),
        bench_row("torch", "full", 2.0, 100),
    ]
    assert bed.validate() is ExitCode.CATASTROPHE
    assert f"full at 64 tokens: {status}: what happened" in bed.printed
    assert status.upper() in bed.printed


def test_where_torch_fails_too_the_other_modes_are_judged(bed: Bed) -> None:
    bed.programs.rows = [
        bench_row("fastft", "forward", 1.0, 0),
        bench_row("torch", "forward", 2.0, 0),
        bench_row("fastft", "full", "", "", status="out of memory"),
        bench_row("torch", "full", "", "", status="out of memory"),
    ]
    assert bed.validate() is ExitCode.PASSED
    assert "Speed improved." in bed.printed


def test_plots_that_fail_do_not_block_and_the_report_says_why(bed: Bed) -> None:
    bed.programs.plot_status = 1
    assert bed.validate() is ExitCode.PASSED
    assert "No plots: no matplotlib" in (bed.root / ".fastft/validate/double/report.md").read_text()
