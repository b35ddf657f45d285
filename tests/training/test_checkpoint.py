"""`fastft.json`: what a checkpoint says of itself, and what is said when a run resumes from it."""

from __future__ import annotations

import json
import pathlib
import warnings
from typing import Any

import pytest
import torch

import fastft
from tests import support
from tests.trainers.cases import plain

SETTINGS = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


def planned(model: Any = None, **patching: Any) -> Any:
    return fastft.patch(support.add_lora(support.build_model()) if model is None else model, **patching)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The first of two checkpoints of a run with adapters."""
    folder = tmp_path_factory.mktemp("run")
    plain(**SETTINGS)(planned(), folder).train()
    return folder / "checkpoint-1"


def edited(run: pathlib.Path, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A copy of the checkpoint with other words in its `fastft.json`."""
    import shutil

    copy = folder / "checkpoint-1"
    shutil.copytree(run, copy)
    said = json.loads((copy / "fastft.json").read_text())
    for part, value in changes.items():
        said[part] = said[part] | value if isinstance(value, dict) else value
    (copy / "fastft.json").write_text(json.dumps(said))
    return copy


def resume(model: Any, checkpoint: pathlib.Path, folder: pathlib.Path, **settings: Any) -> list[str]:
    """fastft's warnings while a run resumes."""
    trainer = plain(**(SETTINGS | settings))(model, folder / "resumed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2
    return [str(w.message) for w in caught if "fastft: resuming" in str(w.message)]


def test_every_checkpoint_says_what_wrote_it(run: pathlib.Path) -> None:
    for folder in (run, run.parent / "checkpoint-2"):
        said = json.loads((folder / "fastft.json").read_text())
        assert said["fastft"] == fastft.__version__
        assert said["libraries"]["torch"] == torch.__version__
        assert said["loss"]["num_items_in_batch"] is True
        assert "num_items_in_batch" in said["loss"]["convention"]
        assert said["arithmetic"] == {"approximations": [], "padding_free": True}
        assert len(said["trainable"]) == 28
        assert said["trainable"]["base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"] == "4x128"


def test_resuming_under_the_same_terms_says_nothing(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert resume(planned(), run, tmp_path) == []


def test_what_differs_is_said(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = edited(run, tmp_path, fastft="0.0.1", loss={"num_items_in_batch": False})
    model = planned(approximations=["skip_probabilities"])
    (said,) = resume(model, checkpoint, tmp_path, label_smoothing_factor=0.1)
    assert str(checkpoint) in said
    assert f"fastft was 0.0.1 and is {fastft.__version__}" in said
    assert "num items in batch was False and is True" in said
    assert "label smoothing factor was 0.0 and is 0.1" in said
    assert "approximations was [] and is ['skip_probabilities']" in said
    assert "padding" not in said


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        ({"target_modules": ["q_proj"]}, r"only in the checkpoint: \S+k_proj\S+, .* and 18 more\."),
        (
            {"target_modules": [*support.PROJECTIONS, "lm_head"]},
            r"only in this run: base_model\.model\.lm_head\.lora_A",
        ),
        ({"r": 8}, r"of another shape: \S+q_proj.lora_A.default.weight was 4x64, is 8x64"),
    ],
    ids=["fewer", "more", "another rank"],
)
def test_another_trainable_set_is_named_before_anything_is_loaded_c51(
    adapter: dict[str, Any], named: str, run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    model = planned(support.add_lora(support.build_model(), seed=5, **adapter))
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=named):
        resume(model, run, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_another_trainable_set_of_a_full_run_is_named_c51(tmp_path: pathlib.Path) -> None:
    """Where the weights would load without a word: the moments belong to other weights."""
    plain(**SETTINGS)(planned(support.build_model()), tmp_path / "run").train()
    model = planned(support.build_model())
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"only in the checkpoint: lm_head\.weight"):
        resume(model, tmp_path / "run" / "checkpoint-1", tmp_path)


def test_another_order_is_an_error_too(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    trainable = json.loads((run / "fastft.json").read_text())["trainable"]
    checkpoint = edited(run, tmp_path)
    said = json.loads((checkpoint / "fastft.json").read_text())
    (checkpoint / "fastft.json").write_text(json.dumps(said | {"trainable": dict(reversed(trainable.items()))}))
    with pytest.raises(ValueError, match="the same ones in another order"):
        resume(planned(), checkpoint, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"trainable": 3}'])
def test_a_file_that_cannot_be_read_says_what_to_do(text: str, run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = edited(run, tmp_path)
    (checkpoint / "fastft.json").write_text(text)
    with pytest.raises(ValueError, match="delete that file"):
        resume(planned(), checkpoint, tmp_path)


def test_a_stock_checkpoint_resumes_as_ever(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = edited(run, tmp_path)
    (checkpoint / "fastft.json").unlink()
    assert resume(planned(), checkpoint, tmp_path) == []


def test_loading_an_adapter_by_hand_asks_nothing(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = edited(run, tmp_path)
    (checkpoint / "fastft.json").write_text("{")
    planned().load_adapter(str(checkpoint), "other")


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_on_sigterm_is_stamped_too(event: str, tmp_path: pathlib.Path) -> None:
    """transformers' own (`enable_jit_checkpoint`) saves at these events and calls no `on_save`."""
    from transformers import TrainerCallback

    def save(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if trainer.accelerator.sync_gradients and state.global_step == 2:
            trainer._save_checkpoint(trainer.model, trial=None)
            control.should_training_stop = True

    terminated = TrainerCallback()
    setattr(terminated, event, save)
    (tmp_path / "checkpoint-3").mkdir()  # somebody else's, and no checkpoint
    trainer = plain(max_steps=4, trainer={"callbacks": [terminated]})(planned(), tmp_path)
    trainer.train()
    assert [path.parent.name for path in tmp_path.glob("*/fastft.json")] == ["checkpoint-2"]
