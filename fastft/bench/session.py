"""What the commands share: workers to start, the machine and versions to name, ceilings to hold figures against, rows
to keep. The parent process never touches the device: it would take memory from those that are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastft.bench.machine import commit_name, installed_versions
from fastft.bench.processes import ProcessWorker, Worker, WorkerError, is_installed
from fastft.bench.results import ResultsFile, Row
from fastft.bench.roofline import Ceilings, ceilings_of, limit_rows

__all__ = ["BenchError", "Session", "choose_providers"]

DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


class BenchError(RuntimeError):
    """The benchmark cannot run as asked."""


def choose_providers(asked: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The providers to use: those asked for, or all that are known.

    Raises:
        BenchError: an unknown one.
    """
    unknown = sorted(set(asked or ()) - set(known))
    if unknown:
        raise BenchError(f"no provider {', '.join(unknown)} here; there are {', '.join(known)}.")
    return [provider for provider in known if not asked or provider in asked]


@dataclass
class Session:
    """One run of a command.

    Attributes:
        results: where rows go.
        commit: of the code measured; None: git's.
        start: makes a worker for a provider. Tests put their own here.
        tell: says what happens.
        facts: of the device, once a worker has told them (`machine.device_facts`).
    """

    results: ResultsFile
    commit: str | None = None
    start: Callable[[str], Worker] = ProcessWorker
    tell: Callable[[str], None] = lambda text: None
    facts: dict[str, Any] = field(default_factory=dict)

    def blank_row(self) -> Row:
        """A row that says when, where and of what code."""
        versions: dict[str, Any] = installed_versions()
        if self.facts.get("torch"):
            versions["torch"] = self.facts["torch"]  # with its build: 2.11.0+cu130
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return Row(date=date, commit=self.commit or commit_name(), gpu=self.facts.get("gpu", ""), **versions)

    def dtype(self, asked: str | None) -> str:
        """The dtype asked for, or the device's usual one."""
        return asked or DEFAULT_DTYPE[self.facts["device"]]

    def open_workers(
        self, providers: Sequence[str], libraries: Mapping[str, str]
    ) -> tuple[dict[str, Worker], dict[str, tuple[str, str]]]:
        """Start a process for each provider that is installed (all at once), and learn about the device.

        Returns:
            The workers, and (status, note) of the providers that cannot be used.

        Raises:
            BenchError: not one of them can be used.
        """
        unavailable = missing(providers, libraries)
        started = {provider: self.start(provider) for provider in providers if provider not in unavailable}
        workers: dict[str, Worker] = {}
        for provider, worker in started.items():
            self.tell(f"importing {libraries[provider]} for {provider}")
            try:
                reply = worker.ask({"do": "open"})
            except WorkerError as error:
                reply = {"status": "error", "note": str(error)}
            if reply["status"] == "ok":
                workers[provider] = worker
                self.facts = self.facts or reply
            else:
                worker.close()
                unavailable[provider] = (reply["status"], f"cannot be used here: {reply['note']}")
        if not workers:
            reasons = "; ".join(f"{provider}: {status}, {note}" for provider, (status, note) in unavailable.items())
            raise BenchError(f"none of the providers can be used. {reasons}")
        return workers, unavailable

    def reopen(self, provider: str) -> Worker:
        """A fresh worker, opened.

        Raises:
            WorkerError: it does not start.
        """
        worker = self.start(provider)
        reply = worker.ask({"do": "open"})
        if reply["status"] != "ok":
            worker.close()
            raise WorkerError(reply["note"])
        return worker

    def learn(self) -> None:
        """Find out about the device, if no worker has told yet.

        Raises:
            BenchError: torch does not start.
        """
        if self.facts:
            return
        worker = self.start("torch")
        try:
            self.facts = worker.ask({"do": "open"})
        except WorkerError as error:
            raise BenchError(f"torch does not start: {error}") from error
        finally:
            worker.close()

    def measure_limits(self, dtype: str | None, samples: int) -> list[Row]:
        """The machine's ceilings, measured in a process of their own and kept. `dtype` None: the device's usual one.

        Raises:
            BenchError: they cannot be measured.
        """
        self.learn()
        worker = self.start("torch")
        try:
            self.tell("measuring the machine's ceilings")
            reply = worker.ask({"do": "limit", "dtype": self.dtype(dtype), "samples": samples})
        except WorkerError as error:
            raise BenchError(f"the machine's ceilings cannot be measured: {error}") from error
        finally:
            worker.close()
        rows = limit_rows(reply, self.blank_row())
        self.results.add(rows)
        return rows

    def ceilings(self, dtype: str, samples: int) -> Ceilings | None:
        """The machine's ceilings: from the results if they are there, else measured now."""
        known = ceilings_of(self.results.rows, self.facts["gpu"], dtype)
        return known or ceilings_of(self.measure_limits(dtype, samples), self.facts["gpu"], dtype)


def missing(providers: Sequence[str], libraries: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(status, note) of the providers whose library is not installed."""
    return {
        provider: ("not installed", f"no package {libraries[provider]}")
        for provider in providers
        if not is_installed(libraries[provider])
    }
