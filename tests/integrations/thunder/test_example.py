"""examples/litgpt_pretrain.py: plain, and DDP and FSDP in two processes over gloo, with the same losses."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "litgpt_pretrain.py"


def run(*arguments: str) -> str:
    """What the example prints; it has to end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    common = ("--steps", "3", "--layers", "1", "--executors", "sdpa,fastft,nvfuser,torch")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *common, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def losses(output: str) -> list[str]:
    """Loss and gradient norm of each step."""
    return re.findall(r"loss ([\d.]+, gradient norm [\d.]+)", output)


@pytest.mark.slow
def test_distributed_strategies_agree_and_run_our_operators() -> None:
    ddp, fsdp = (run("--devices", "2", "--strategy", name) for name in ("ddp", "fsdp"))
    assert len(losses(ddp)) == 3
    assert losses(ddp) == losses(fsdp)
    assert len(set(losses(ddp))) == 3  # it learns
    for output in (ddp, fsdp):
        assert "'fastft_rms_norm_backward': 3" in output


@pytest.mark.slow
def test_one_process_cannot_be_two() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--devices", "2", "--strategy", "plain"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert "choose ddp or fsdp" in done.stderr
