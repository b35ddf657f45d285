"""A missing or mismatched llm-compressor is said before any work; one that ran leaves nothing behind."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from fastft import FastModel
from fastft.saving.compressed.environment import require_llmcompressor
from tests import support
from tests.saving.compressed.harness import needs_llmcompressor

VERSIONS = {
    "llmcompressor": "0.14.0.1",
    "compressed-tensors": "0.19.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.17.0",
}
REQUIRES = [
    "torch<=2.14.0,>=2.10.0",
    "transformers<=5.17.0,>=5.15.0",
    "auto-round<=0.15.1,>=0.14.1",
    "compressed-tensors==0.19.0",
    'torch<1; extra == "dev"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as importlib.metadata says it."""
    versions = dict(VERSIONS)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRES)
    return versions


def test_versions_within_the_declared_ranges_pass(installed: dict[str, str]) -> None:
    require_llmcompressor("fp8")


@pytest.mark.parametrize(
    ("package", "version", "wanted"),
    [
        ("transformers", "5.24.0", "<=5.17.0,>=5.15.0"),
        ("torch", "2.15.0", "<=2.14.0,>=2.10.0"),
        ("compressed-tensors", "0.20.1", "==0.19.0"),
    ],
)
def test_a_version_outside_is_named_with_the_range_and_the_way_out(
    package: str, version: str, wanted: str, installed: dict[str, str], tmp_path: pathlib.Path, tokenizer: Any
) -> None:
    installed[package] = version
    with pytest.raises(ImportError) as refused:
        FastModel.save_compressed(support.build_model(), tokenizer, tmp_path / "out", scheme="INT8")
    message = str(refused.value)
    assert f"it wants {package}{wanted}, and {version} is installed" in message
    assert sum(message.count(f"it wants {name}") for name in VERSIONS) == 1
    assert "Nothing was merged" in message
    assert "fastft compress merged OUT --scheme w8a8" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["llmcompressor", "compressed-tensors"])
def test_c50_a_missing_package_names_the_extra_before_merging(
    package: str, installed: dict[str, str], tmp_path: pathlib.Path, tokenizer: Any
) -> None:
    del installed[package]
    with pytest.raises(ImportError, match=r"pip install 'fastft\[compressed\]'"):
        FastModel.save_compressed(support.build_model(), tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# In a fresh process, with loguru used by the application: the import of llm-compressor is what takes sinks away.
TIDY = """
import os, pathlib, sys
from loguru import logger
heard = []
logger.add(heard.append, format="{message}")
environment = dict(os.environ)
import torch
from fastft import FastModel
from tests.saving.compressed.harness import TEXTS, tiny
from tests.saving.tokenizers import byte_level
assert not any(name.partition(".")[0] in ("llmcompressor", "compressed_tensors") for name in sys.modules)
model = tiny()
before, generator = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
os.chdir(sys.argv[1])
FastModel.save_compressed(model, byte_level(), sys.argv[2] + "/out", scheme="int8", calibration=TEXTS)
FastModel.save_compressed(model, byte_level(), sys.argv[2] + "/out", scheme="int8", calibration=TEXTS)  # imported now
assert not list(pathlib.Path().iterdir()), "files in the current directory"
assert torch.equal(torch.get_rng_state(), generator)
assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()) and model.training
changed = {k for k in {**os.environ, **environment} if os.environ.get(k) != environment.get(k)}
assert changed <= {"TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL"}, changed
assert heard == [], heard
logger.info("still here")
assert len(heard) == 1
from llmcompressor import active_session
assert active_session().state.model is None
assert not [name for name in model.__dict__ if name == "save_pretrained"]
"""


@needs_llmcompressor
def test_nothing_is_left_behind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TIDY, str(tmp_path / "here"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "out"]
