"""`python -m tests.faults`: plant every fault of the table, one at a time, and see its test go red.

A test that stays green over a fault made for it proves nothing, so that fails the run; so does a fault whose old text
is not found exactly once. Four workers (worker.py), two at a time, share the table: Triton kernels are judged in
Triton's interpreter, which is a process's choice.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.faults.table import FAULTS, Fault

NOT_RUN = {"verdict": "broken", "seconds": 0.0, "error": "not run"}
ROOT = pathlib.Path(__file__).parents[2]
PARTS = (("0", "0::2"), ("0", "1::2"), ("1", "0::2"), ("1", "1::2"))  # TRITON_INTERPRET, and which of those faults
STYLES = {
    "red": "[red]red[/red]",
    "green": "[bold green]GREEN[/bold green]",
    "broken": "[bold yellow]BROKEN[/bold yellow]",
}


def main() -> int:
    """Exit status: 0 if every fault turned its test red."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    misplaced = [f"{fault.file}: {fault.what}: {problem}" for fault in FAULTS if (problem := misplacement(fault))]
    if misplaced:
        console.print("\n".join(misplaced), markup=False, highlight=False)
        console.print(f"[bold]{len(misplaced)} faults do not fit the code any more: write them anew.[/bold]")
        return 1
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = [result for part in pool.map(run_worker, PARTS) for result in part]
    by_index = {result["index"]: result for result in results if "index" in result}
    console.print(table(by_index))
    baselines = [result for result in results if "baseline" in result]
    bad = [i for i in range(len(FAULTS)) if by_index.get(i, {}).get("verdict") != "red"]
    for baseline in baselines:
        if baseline["verdict"] != "green":
            console.print(f"[bold]without a fault the tests are not green:[/bold] {baseline['error']}", highlight=False)
    for i in bad:
        result = by_index.get(i, NOT_RUN)
        line = f"{result['verdict'].upper()} {FAULTS[i].file}: {FAULTS[i].what}: {FAULTS[i].test} {result['error']}"
        console.print(line, markup=False, highlight=False)
    red = len(FAULTS) - len(bad)
    console.print(f"{red} of {len(FAULTS)} faults turned their test red in {time.perf_counter() - start:.0f} s")
    clean = len(baselines) == len(PARTS) and all(baseline["verdict"] == "green" for baseline in baselines)
    return 0 if clean and not bad else 1


def misplacement(fault: Fault) -> str | None:
    """Why the fault cannot be planted, or None."""
    path = ROOT / "fastft" / fault.file
    if not path.is_file():
        return "there is no such file"
    count = path.read_text(encoding="utf-8").count(fault.old)
    if count != 1:
        return f"the old text occurs {count} times, not once: {fault.old!r}"
    return None if fault.old != fault.new else "old and new text are the same"


def run_worker(part: tuple[str, str]) -> list[dict[str, Any]]:
    """Results of one worker, an error line of its own if it died."""
    interpret, which = part
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": interpret}
    process = subprocess.run(
        [sys.executable, "-m", "tests.faults.worker", which],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode:
        results.append({"baseline": True, "verdict": "broken", "error": process.stderr.strip()[-2000:]})
    return results


def table(by_index: dict[int, dict[str, Any]]) -> Table:
    """fault → test → verdict, in the table's order."""
    shown = Table(title="planted faults", title_justify="left")
    for heading in ("file", "fault", "test", "verdict", "s"):
        shown.add_column(heading, overflow="fold")
    for index, fault in enumerate(FAULTS):
        result = by_index.get(index, NOT_RUN)
        test = fault.test.rpartition("::")[2].replace("[", r"\[")
        shown.add_row(fault.file, fault.what, test, STYLES[result["verdict"]], f"{result['seconds']:.1f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
