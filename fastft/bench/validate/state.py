"""What is remembered about a kernel between runs, as one JSON file.

An attempt is a run of the tests on changed code. The file holds every verdict under the hash of the code and of what
checked it, the distinct code that failed since the last green run, and that run's source, for the diff. The failed are
counted by code alone: changing a test runs it again, but is not an attempt.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastft.bench.validate.context import StepError

FORMAT = 1
ATTEMPTS = 3
VERDICTS_KEPT = 50


@dataclass(frozen=True)
class Failure:
    """One failing test: its pytest id, the pass it failed in, and pytest's own message, uncut."""

    test: str
    during: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """What the tests said about one version of the code.

    Attributes:
        source: hash of the kernel's source files.
        checks: hash of the test files, passes and versions that judged it.
        date: ISO 8601, UTC.
        passed: how many tests passed in each pass.
        failures: empty if green.
    """

    source: str
    checks: str
    date: str
    passed: dict[str, int]
    failures: list[Failure] = field(default_factory=list)

    @property
    def green(self) -> bool:
        return not self.failures


@dataclass
class State:
    """Verdicts oldest first, hashes that failed since the last green run, and the source (text by path) of that run."""

    verdicts: list[Verdict] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    green_source: dict[str, str] = field(default_factory=dict)
    green_date: str = ""

    @property
    def locked(self) -> bool:
        return len(self.failed) >= ATTEMPTS

    def find(self, source: str, checks: str) -> Verdict | None:
        """The verdict recorded for this code under these checks."""
        same = [verdict for verdict in self.verdicts if (verdict.source, verdict.checks) == (source, checks)]
        return same[-1] if same else None

    def record(self, verdict: Verdict, source: dict[str, str]) -> None:
        """Take in a verdict of tests that ran on `source` (text by path)."""
        self.verdicts = [*self.verdicts, verdict][-VERDICTS_KEPT:]
        if verdict.green:
            self.failed, self.green_source, self.green_date = [], source, verdict.date
        elif verdict.source not in self.failed:
            self.failed.append(verdict.source)

    def reset(self) -> None:
        """Forget attempts and verdicts, so that the same code is tested again; the last green source stays."""
        self.failed, self.verdicts = [], []


def load_state(path: Path) -> State:
    """The state in `path`; a new one if there is no such file.

    Raises:
        StepError: the file is not one of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError) as error:
        raise StepError(f"cannot read the state file {path}: {error}. Delete it to start anew.") from error
    try:
        if content.pop("format") != FORMAT:
            raise ValueError(f"another format than {FORMAT}")
        verdicts = [
            Verdict(**{**verdict, "failures": [Failure(**failure) for failure in verdict["failures"]]})
            for verdict in content.pop("verdicts")
        ]
        return State(verdicts=verdicts, **content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StepError(
            f"the state file {path} was not written by this version: {error!r}. Delete it to start anew."
        ) from error


def save_state(state: State, path: Path) -> None:
    """Write `path` in one piece: an interrupted run leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1), encoding="utf-8")
    os.replace(draft, path)
