"""Real training runs of the tiny model, in this process: the work is the same for all, and so are the losses."""

from __future__ import annotations

import pathlib
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fastft.bench import checkpoint
from fastft.bench.providers import TRAINERS, Settings
from fastft.bench.registry import find_model, shape_of_folder
from fastft.bench.training import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    reply = checkpoint.write({"shape": asdict(find_model("tiny")), "folder": str(path), "dtype": "float32"})
    assert reply["parameters"] > 0
    return path


def run(folder: pathlib.Path, provider: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kind": "step",
        "batch": 2,
        "steps": 2,
        "warmup": 1,
        "bits": 16,
        "rank": 4,
        "checkpointing": "auto",
        "memory_budget": "",
        "dtype": "float32",
        "provider": provider,
        "folder": str(folder),
        "length": 32,
    }
    return train({"settings": asdict(Settings(**(values | changes)))})


def test_a_checkpoint_has_the_sizes_asked_for_and_a_tokenizer(folder: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    found, wanted = shape_of_folder(folder), find_model("tiny")
    assert {**asdict(found), "rope_theta": 0} == {**asdict(wanted), "rope_theta": 0}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("héllo")["input_ids"]
    assert tokenizer.decode(ids) == "héllo"
    assert tokenizer.pad_token_id == 258


@pytest.mark.parametrize("bits", [16, 4])
def test_a_step_is_the_same_work_for_fastft_and_hugging_face(folder: pathlib.Path, bits: int) -> None:
    replies = {provider: run(folder, provider, bits=bits) for provider in ("fastft", "hf")}
    for reply in replies.values():
        assert reply["status"] == "ok"
        assert len(reply["steps_ms"]) == 3
        assert len(reply["losses"]) == 3
        assert reply["load_s"] > 0
    assert replies["fastft"]["losses"] == pytest.approx(replies["hf"]["losses"], rel=1e-4)
    assert len(set(replies["hf"]["losses"])) == 3, "every step has its own batch"


def test_a_step_learns(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is part of the work: over one batch the loss falls."""
    from fastft.bench import training

    ids = torch.randint(0, 512, (2, 32))
    monkeypatch.setattr(training, "_batches", lambda settings, vocabulary, count: [ids] * count)
    monkeypatch.setattr(training, "_LEARNING_RATE", 1e-2)
    losses = run(folder, "hf", steps=5)["losses"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.trl
def test_trls_head_gives_the_same_losses(folder: pathlib.Path) -> None:
    assert run(folder, "trl")["losses"] == pytest.approx(run(folder, "hf")["losses"], rel=1e-4)


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")
def test_the_trainers_run_is_timed_step_by_step(folder: pathlib.Path) -> None:
    replies = {provider: run(folder, provider, kind="sft") for provider in ("fastft", "hf")}
    for reply in replies.values():
        assert len(reply["steps_ms"]) == 3
        assert len(reply["losses"]) == 3
    assert replies["fastft"]["losses"] == pytest.approx(replies["hf"]["losses"], rel=1e-3)


def test_what_fastft_keeps_is_passed_on(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastft.model import FastModel

    told: list[dict[str, Any]] = []
    original = FastModel.get_peft_model

    def watched(model: Any, **options: Any) -> Any:
        told.append(options)
        return original(model, **{name: value for name, value in options.items() if name != "memory_budget"})

    monkeypatch.setattr(FastModel, "get_peft_model", staticmethod(watched))
    run(folder, "fastft", checkpointing="keep")
    run(folder, "fastft", checkpointing="recompute", memory_budget="1GiB")
    assert [options["use_gradient_checkpointing"] for options in told] == [False, "recompute"]
    assert "memory_budget" not in told[0]
    assert told[1]["memory_budget"] == "1GiB"


def test_out_of_memory_is_an_answer(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastft.bench import training

    def hungry(settings: Settings) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nmore")

    monkeypatch.setattr(training, "load_adapted", hungry)
    reply = run(folder, "hf")
    assert (reply["status"], reply["note"]) == ("out of memory", "CUDA out of memory. Tried to allocate 8.00 GiB.")


def test_random_state_is_left_alone(folder: pathlib.Path) -> None:
    state = torch.get_rng_state()
    run(folder, "hf")
    assert torch.equal(torch.get_rng_state(), state)


def test_every_trainer_names_its_library() -> None:
    assert set(TRAINERS) >= {"fastft", "hf", "liger", "unsloth", "trl", "cce", "torch.compile"}
