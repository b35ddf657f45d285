"""Worker processes: answers, ends, silence, and what a peer's process must not have seen."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from fastft.bench import processes, worker
from fastft.bench.processes import ProcessWorker, WorkerError, is_installed

# A stand-in for worker.py: it does what its request says, without importing anything heavy.
STAND_IN = """
import json, os, sys, time
pipe = os.fdopen(int(sys.argv[2]), "w")
for line in sys.stdin:
    request = json.loads(line)
    print("a library prints this")
    print("a library complains", file=sys.stderr)
    if request["do"] == "exit":
        sys.exit(3)
    if request["do"] == "sleep":
        time.sleep(60)
    keys = ("PYTHONPATH", "TRITON_CACHE_DIR", "HF_HUB_OFFLINE")
    pipe.write(json.dumps({"do": request["do"], "folder": os.getcwd(), **{key: os.environ.get(key) for key in keys}}))
    pipe.write("\\n")
    pipe.flush()
"""


@pytest.fixture
def stand_in(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    monkeypatch.setattr(processes, "_WORKER", path)


@pytest.mark.usefixtures("stand_in")
def test_questions_and_answers_and_a_clean_end() -> None:
    process = ProcessWorker("torch")
    first, second = process.ask({"do": "one"}), process.ask({"do": "two"})
    assert (first["do"], second["do"]) == ("one", "two")
    assert first["HF_HUB_OFFLINE"] == "1"
    assert os.path.isdir(first["folder"])
    process.close()
    process.close()
    assert process._process.returncode == 0
    assert not os.path.exists(first["folder"])


@pytest.mark.usefixtures("stand_in")
def test_an_end_is_reported_with_the_last_words() -> None:
    process = ProcessWorker("liger")
    with pytest.raises(WorkerError, match=r"liger: the process ended \(exit status 3\).*a library complains"):
        process.ask({"do": "exit"})
    with pytest.raises(WorkerError, match="exit status 3"):
        process.ask({"do": "one"})
    process.close()


@pytest.mark.usefixtures("stand_in")
def test_silence_ends_the_process() -> None:
    process = ProcessWorker("liger", timeout=0.3)
    with pytest.raises(WorkerError, match="no answer"):
        process.ask({"do": "sleep"})
    assert process._process.wait(timeout=5) == -9
    process.close()


@pytest.mark.usefixtures("stand_in")
def test_import_paths_are_absolute_and_caches_cold_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["here", "/there"]))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    warm, cold = ProcessWorker("torch"), ProcessWorker("torch", cold_cache=True)
    reply = warm.ask({"do": "one"})
    assert reply["PYTHONPATH"] == os.pathsep.join([os.path.abspath("here"), "/there"])
    assert reply["TRITON_CACHE_DIR"] is None
    reply = cold.ask({"do": "one"})
    assert reply["TRITON_CACHE_DIR"].startswith(reply["folder"])
    warm.close()
    cold.close()


ISOLATED = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
import worker
worker.make_package_importable()
from fastft.bench.kernel_session import KernelSession
before = sorted({name.partition(".")[0] for name in sys.modules})
statuses = [KernelSession(provider).handle({"do": "open"})["status"] for provider in sys.argv[2:]]
after = [name for name in sys.modules if name.startswith(("fastft.patching", "transformers"))]
print(json.dumps({"before": before, "statuses": statuses, "after": after}))
"""


def isolated(*providers: str) -> dict[str, list[str]]:
    import json

    folder = str(pathlib.Path(worker.__file__).parent)
    command = [sys.executable, "-P", "-c", ISOLATED, folder, *providers]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    outcome: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return outcome


def test_a_peers_process_has_not_seen_fastft() -> None:
    seen = isolated("torch")
    assert seen["statuses"] == ["ok"]
    assert seen["after"] == []
    assert "torch" not in seen["before"], "the import of the library must be the first, and be timed"


def test_is_installed() -> None:
    assert is_installed("torch")
    assert not is_installed("no_such_package_anywhere")
