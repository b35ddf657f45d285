"""Ctrl-C in a run: the step is finished, a checkpoint that resumes is saved, and the interrupt is raised."""

from __future__ import annotations

import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import fastft
from tests import support
from tests.trainers.cases import plain

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100, "logging_steps": 100}


def planned(seed: int = 1) -> Any:
    return fastft.patch(support.add_lora(support.build_model(), seed=seed, lora_dropout=0.1))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Pressing(TrainerCallback):
    """Presses Ctrl-C `times` times in the middle of step 2, or at another event."""

    def __init__(self, event: str = "on_pre_optimizer_step", times: int = 1, step: int = 1) -> None:
        def press(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        setattr(self, event, press)


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """Every test begins with Python's handler and must leave it in place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


def build(folder: pathlib.Path, *pressing: Any, model: Any = None, **settings: Any) -> Any:
    model = planned() if model is None else model
    return plain(trainer={"callbacks": list(pressing)}, **(SAVING | settings))(model, folder)


def test_the_checkpoint_of_an_interrupt_resumes_to_the_straight_run(tmp_path: pathlib.Path, capfd: Any) -> None:
    straight = build(tmp_path / "straight")
    straight.train()
    interrupted = build(tmp_path / "run", Pressing())
    with pytest.raises(KeyboardInterrupt, match=r"after step 2; saved as .*checkpoint-2\. trainer\.train\(resume"):
        interrupted.train()
    assert "The step is being finished" in capfd.readouterr().err
    assert (tmp_path / "run" / "checkpoint-2" / "fastft.json").is_file()
    run = fastft.report(interrupted.model).run
    assert run.interrupted
    assert run.steps == 2
    resumed = build(tmp_path / "run", model=planned(seed=2))
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [2]  # the interrupted step's
    assert resumed.state.global_step == 4
    again = weights(resumed.model)
    for name, weight in weights(straight.model).items():
        assert torch.equal(again[name], weight), name


def test_an_interrupt_in_an_evaluation_does_not_wait_for_its_end(tmp_path: pathlib.Path) -> None:
    seen: list[int] = []

    class Watching(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)

    trainer = build(tmp_path, Pressing("on_prediction_step", step=2), Watching(), eval_strategy="steps", eval_steps=2)
    with pytest.raises(KeyboardInterrupt, match="after step 2; saved as"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
    assert seen == [2]


def test_twice_stops_at_once_and_saves_nothing(tmp_path: pathlib.Path) -> None:
    trainer = build(tmp_path, Pressing(times=2))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not list(tmp_path.glob("checkpoint-*"))


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_a_save_that_fails_does_not_hide_the_interrupt(tmp_path: pathlib.Path) -> None:
    """The error is its cause; of the checkpoint nothing is left that could be taken for one."""
    trainer = build(tmp_path, Pressing(), save_steps=1)
    save = trainer._save_optimizer_and_scheduler
    trainer._save_optimizer_and_scheduler = lambda folder: (
        save(folder) if folder.endswith("-1") else _raise(OSError("disk full"))()
    )
    with pytest.raises(KeyboardInterrupt, match=r"no checkpoint could be saved as .*checkpoint-2: disk full") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, OSError)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_ctrl_c_while_saving_leaves_no_half_of_a_checkpoint(tmp_path: pathlib.Path) -> None:
    trainer = build(tmp_path, Pressing())
    trainer._save_rng_state = lambda folder: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_callback_that_fails_after_the_save_leaves_the_checkpoint(tmp_path: pathlib.Path) -> None:
    class Failing(TrainerCallback):
        on_save = staticmethod(_raise(ValueError("no")))

    trainer = build(tmp_path, Pressing(), Failing())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


def test_an_interrupt_at_the_very_end_is_raised_and_the_run_is_whole(tmp_path: pathlib.Path) -> None:
    trainer = build(tmp_path, Pressing("on_save", step=4))
    with pytest.raises(KeyboardInterrupt, match="the run is complete"):
        trainer.train()
    assert (tmp_path / "checkpoint-4" / "fastft.json").is_file()
    assert not fastft.report(trainer.model).run.interrupted


def test_a_trainer_whose_log_tells_nobody_is_stopped_at_the_next_step(tmp_path: pathlib.Path) -> None:
    trainer = build(tmp_path, Pressing())
    trainer.log = lambda *args, **kwargs: None
    with pytest.raises(KeyboardInterrupt, match="after step 2; saved as"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


@pytest.mark.parametrize("how", ["argument", "strategy", "comfort"])
def test_where_it_is_switched_off_the_interrupt_is_pythons_own(how: str, tmp_path: pathlib.Path) -> None:
    model = planned()
    extra: list[Any] = [fastft.RunCallback(save_on_interrupt=False)] if how == "argument" else []
    if how == "comfort":
        fastft.patch(model, run_comfort=False)
    settings = {"save_strategy": "no"} if how == "strategy" else {}
    trainer = build(tmp_path, Pressing(), *extra, model=model, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not list(tmp_path.glob("checkpoint-*"))


def test_somebody_elses_handler_stays(tmp_path: pathlib.Path) -> None:
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    build(tmp_path, Pressing()).train()
    assert heard == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_outside_of_the_main_thread_no_signal_is_touched(tmp_path: pathlib.Path) -> None:
    trainer = build(tmp_path, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1
    assert fastft.report(trainer.model).run.steps == 1


def test_after_a_run_that_broke_off_the_first_ctrl_c_is_pythons_own(tmp_path: pathlib.Path) -> None:
    class Failing(TrainerCallback):
        on_step_end = staticmethod(_raise(ValueError("no")))

    trainer = build(tmp_path, Failing())
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
