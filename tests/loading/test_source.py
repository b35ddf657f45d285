"""What a name is found to be, and what is said when it is nothing."""

from __future__ import annotations

import json
import pathlib

import pytest

from fastft.loading.source import adapter_base, has_tokenizer, resolve_source


def write(folder: pathlib.Path, *names: str, content: str = "{}") -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that knows no adapter."""
    monkeypatch.setattr("transformers.utils.find_adapter_config_file", lambda *args, **kwargs: None)


@pytest.mark.parametrize("name", ["mistral-qwen 7B (v2)", "gpt2", "a.gguf", "..hidden"])
def test_a_folder_is_a_model_by_what_is_in_it(tmp_path: pathlib.Path, name: str) -> None:
    """C56: whatever it is called."""
    folder = write(tmp_path / name, "config.json")
    source = resolve_source(folder)
    assert (source.kind, source.name, source.local) == ("model", str(folder), True)


def test_a_relative_folder_is_found_before_the_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "owner" / "name", "config.json")
    monkeypatch.chdir(tmp_path)
    assert resolve_source("owner/name").local


def test_a_folder_with_an_adapter_alone(tmp_path: pathlib.Path) -> None:
    assert resolve_source(write(tmp_path, "adapter_config.json")).kind == "adapter"
    assert resolve_source(write(tmp_path, "config.json")).kind == "adapter"  # TRL may leave one, without weights


def test_a_folder_that_could_be_either_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "adapter_config.json", "config.json", "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"both a whole checkpoint \(model-00001-of-.*\) and an adapter"):
        resolve_source(tmp_path)


def test_a_gguf_file_by_path_or_by_name(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, "weights.gguf") / "weights.gguf"
    assert resolve_source(path).gguf_path == path
    assert resolve_source(tmp_path, gguf_file="weights.gguf").gguf_path == path
    with pytest.raises(FileNotFoundError, match=r"'other.gguf' is not in .*holds weights.gguf"):
        resolve_source(tmp_path, gguf_file="other.gguf")


def test_a_folder_of_gguf_files_says_how_to_load_one(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "weights.gguf")
    with pytest.raises(FileNotFoundError, match=r"pass gguf_file='weights\.gguf'"):
        resolve_source(tmp_path)


def test_a_folder_that_holds_no_model_is_listed(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "trainer_state.json")
    with pytest.raises(FileNotFoundError, match=r"neither a model nor an adapter.*trainer_state.json.*checkpoint-"):
        resolve_source(tmp_path)


@pytest.mark.parametrize("name", ["./out/model", "../model", "/no/such/folder", "~/no-such", "a/b/c", "out/", "x.gguf"])
def test_a_missing_path_is_called_a_missing_path(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="looks like a path on this machine"):
        resolve_source(name)


def test_a_missing_path_names_the_part_that_exists(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"the part that exists is {tmp_path}\\)"):
        resolve_source(tmp_path / "no" / "such")


@pytest.mark.usefixtures("empty_hub")
@pytest.mark.parametrize("name", ["gpt2", "owner/name", "owner/Name-7B.v1"])
def test_a_hub_name(name: str) -> None:
    source = resolve_source(name, token="t", revision=None)
    assert (source.kind, source.name, source.local, source.hub) == ("model", name, False, {"token": "t"})


def test_a_gguf_that_the_hub_does_not_give_keeps_the_hubs_error() -> None:
    with pytest.raises(OSError, match="taken as a name on the Hugging Face hub") as caught:
        resolve_source("owner/name", gguf_file="x.gguf", local_files_only=True)
    assert isinstance(caught.value.__cause__, OSError)


def adapter_of(folder: pathlib.Path, base: object) -> pathlib.Path:
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "base_model_name_or_path": base}
    return write(folder, "adapter_config.json", content=json.dumps(settings))


def test_the_base_of_an_adapter(tmp_path: pathlib.Path) -> None:
    base = write(tmp_path / "base", "config.json")
    source = resolve_source(adapter_of(tmp_path / "adapter", str(base)))
    assert adapter_base(source).name == str(base)


def test_an_adapter_that_names_no_base(tmp_path: pathlib.Path) -> None:
    source = resolve_source(adapter_of(tmp_path, None))
    with pytest.raises(ValueError, match="does not say which model it was trained on"):
        adapter_base(source)


def test_an_adapter_whose_base_has_moved(tmp_path: pathlib.Path) -> None:
    source = resolve_source(adapter_of(tmp_path, "/no/such/base"))
    with pytest.raises(FileNotFoundError, match=r"was trained on '/no/such/base'.*base_model_name_or_path") as caught:
        adapter_base(source)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_whether_a_tokenizer_lies_beside(tmp_path: pathlib.Path) -> None:
    source = resolve_source(write(tmp_path, "config.json"))
    assert not has_tokenizer(source)
    write(tmp_path, "tokenizer_config.json")
    assert has_tokenizer(source)
