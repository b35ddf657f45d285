"""The callback that a planned model gives its trainer: what is printed, counted and kept, and that it goes away."""

from __future__ import annotations

import pathlib
import signal
from typing import Any

import pytest
import torch

import fastft
from fastft.training.banner import facts
from fastft.training.meter import Meter
from fastft.training.run import RunCallback
from tests import support
from tests.trainers.cases import dpo, plain, sft

STEPS = 4


def planned(**patching: Any) -> Any:
    return fastft.patch(support.add_lora(support.build_model()), **patching)


def callbacks(trainer: Any) -> list[RunCallback]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, RunCallback)]


def real_tokens(trainer: Any, steps: int = STEPS) -> int:
    """Tokens of the first batches as the collator makes them, by the attention mask; the same seed, the same order."""
    torch.manual_seed(trainer.args.seed)
    loader = iter(trainer.get_train_dataloader())
    return sum(
        int(next(loader)["attention_mask"].sum()) for _ in range(steps * trainer.args.gradient_accumulation_steps)
    )


def test_an_unchanged_trainer_gets_one_banner_and_one_report(tmp_path: pathlib.Path, capsys: Any) -> None:
    model = planned()
    trainer = plain(max_steps=STEPS, gradient_accumulation_steps=2)(model, tmp_path)
    assert callbacks(trainer) == []
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("─ fastft ") == 1
    for said in (
        "8,192 trained (8.31%)",
        "2 of 2 decoder layers",
        "padding",
        "CPU",
        "2 layers at level keep",
        "× 2 accum",
    ):
        assert said in out
    assert "Ctrl-C" not in out  # save_strategy="no"
    assert out.count("fastft: trained 4 steps") == 1
    assert len(callbacks(trainer)) == 1
    trainer.train()  # again: one each, not two
    out = capsys.readouterr().out
    assert (out.count("─ fastft "), out.count("fastft: trained 4 steps"), len(callbacks(trainer))) == (1, 1, 1)
    trainer.remove_callback(RunCallback)  # the user's word
    trainer.train()
    assert callbacks(trainer) == []
    assert "fastft" not in capsys.readouterr().out


@pytest.mark.parametrize("padding_free", [True, False])
def test_tokens_are_the_real_ones(padding_free: bool, tmp_path: pathlib.Path, capsys: Any) -> None:
    """Whether padding runs or not, and over accumulation; evaluation is not counted."""
    model = planned(padding_free=padding_free)
    trainer = plain(max_steps=STEPS, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2)(
        model, tmp_path
    )
    trainer.train()
    run = fastft.report(model).run
    assert run.tokens == real_tokens(trainer)
    assert f"{run.tokens:,} tokens, padding not counted" in capsys.readouterr().out
    assert (run.steps, run.batches, run.batches_without_labels) == (4, 8, 0)
    assert run.tokens_per_second > 0
    assert 0 < run.first_step_seconds < run.seconds
    assert 0 < run.paused_seconds < run.seconds
    assert run.peak_bytes is None  # no device
    assert str(run) in str(fastft.report(model))


def test_batches_without_labels_are_counted(tmp_path: pathlib.Path, capsys: Any) -> None:
    model = planned()
    trainer = plain(max_steps=STEPS)(model, tmp_path)
    collate, calls = trainer.data_collator, iter(range(100))

    def some_without(rows: Any) -> Any:
        batch = collate(rows)
        if next(calls) % 4 == 1:
            batch["labels"][:, 1:] = -100  # the first label of a row is never a target
        return batch

    trainer.data_collator = some_without
    with pytest.warns(UserWarning, match="no supervised token"):
        trainer.train()
    run = fastft.report(model).run
    assert (run.batches, run.batches_without_labels) == (4, 1)
    assert "1 of 4 batches had no label to train on" in capsys.readouterr().out


def test_nothing_is_added_to_what_is_logged(tmp_path: pathlib.Path) -> None:
    logs = []
    for name, patching in (("with", {}), ("without", {"run_comfort": False})):
        trainer = plain(max_steps=STEPS)(planned(**patching), tmp_path / name)
        trainer.train()
        assert len(callbacks(trainer)) == (name == "with")
        logs.append(trainer.state.log_history)
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]]
    assert [entry.get("loss") for entry in logs[0]] == [entry.get("loss") for entry in logs[1]]


def test_it_can_be_switched_off_and_undone(tmp_path: pathlib.Path, capsys: Any) -> None:
    model = planned()
    trainer = plain(max_steps=1)(model, tmp_path)
    trainer.train()
    fastft.patch(model, run_comfort=False)
    assert callbacks(trainer) == []
    assert not model.get_base_model()._load_state_dict_pre_hooks
    capsys.readouterr()
    trainer.train()
    assert "fastft" not in capsys.readouterr().out
    fastft.patch(model, run_comfort=True)
    trainer.train()
    assert "─ fastft " in capsys.readouterr().out
    fastft.unpatch(model)
    assert callbacks(trainer) == []
    assert not model.get_base_model()._load_state_dict_pre_hooks


def test_the_users_own_callback_is_the_one_used(tmp_path: pathlib.Path, capsys: Any) -> None:
    mine = fastft.RunCallback(banner=False, report=False)
    model = planned()
    trainer = plain(max_steps=2, trainer={"callbacks": [mine]})(model, tmp_path)
    trainer.train()
    assert callbacks(trainer) == [mine]
    assert "fastft" not in capsys.readouterr().out
    assert fastft.report(model).run.steps == 2
    trainer.remove_callback(mine)
    trainer.train()
    assert callbacks(trainer) == []


def test_a_run_that_ended_by_an_error_leaves_the_next_one_whole(tmp_path: pathlib.Path, capsys: Any) -> None:
    """The same model under another trainer, and under the same one: neither is taken for the run that broke off."""
    from transformers import TrainerCallback

    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ValueError("out of luck")

    handler = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in a shell's background
    model, failing = planned(), Failing()
    first = plain(max_steps=STEPS, trainer={"callbacks": [failing]})(model, tmp_path / "first")
    second = plain(max_steps=STEPS)(model, tmp_path / "second")
    with pytest.raises(ValueError, match="out of luck"):
        first.train()
    assert fastft.report(model).run is None
    first.remove_callback(failing)
    for trainer in (second, first):
        capsys.readouterr()
        trainer.train()
        assert capsys.readouterr().out.count("─ fastft ") == 1
        assert fastft.report(model).run.tokens == real_tokens(trainer)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_hand_written_loop_is_left_alone(capsys: Any) -> None:
    model = planned()
    model(**support.random_batch()).loss.backward()
    assert capsys.readouterr().out == ""
    assert fastft.report(model).run is None


def test_the_bar_shows_tokens_per_second(tmp_path: pathlib.Path, capsys: Any) -> None:
    trainer = plain(max_steps=STEPS, disable_tqdm=False)(planned(), tmp_path)
    trainer.train()
    captured = capsys.readouterr()
    assert "tokens/s]" in captured.err
    assert "─ fastft " in captured.out


def test_a_notebooks_bar_shows_them_too(tmp_path: pathlib.Path) -> None:
    """transformers' notebook callback has a tracker with a prefix instead of a bar."""
    from types import SimpleNamespace

    from transformers import TrainerCallback

    class Notebook(TrainerCallback):
        training_tracker = SimpleNamespace(prefix="")

    plain(max_steps=STEPS, trainer={"callbacks": [Notebook()]})(planned(), tmp_path).train()
    assert Notebook.training_tracker.prefix.endswith(" tokens/s ")


def test_only_the_main_process_speaks(tmp_path: pathlib.Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = planned()
    trainer = plain(max_steps=2)(model, tmp_path)
    monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
    trainer.train()
    assert "fastft" not in capsys.readouterr().out
    assert fastft.report(model).run.steps == 2


def test_the_banner_names_what_runs_stock_and_how_padding_is_kept(tmp_path: pathlib.Path) -> None:
    model = planned(padding_free=False)
    inner = model.get_base_model()
    inner.model.layers[1].mlp.down_proj.base_layer.register_forward_hook(lambda *_: None)
    trainer = plain(max_steps=1, gradient_accumulation_steps=2)(model, tmp_path)
    site = inner.model.__dict__["_fastft"]
    said = facts(trainer, inner.model, site, (2, 10))
    assert any(name == "stock" and "down_proj's base layer has a hook" in value for name, value in said), said
    assert ("padding", "runs as it is: padding_free=False") in said
    assert ("tokens", "40 in the first step: 2 × 10 × 2 accumulated") in said
    site.max_seq_length = 16
    assert ("tokens", "at most 64 a step: 2 × 16 × 2 accumulated") in facts(trainer, inner.model, site, (2, 10))


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.parametrize("make", [sft, dpo], ids=["sft", "dpo"])
def test_trl_trainers_are_found_too(make: Any, tmp_path: pathlib.Path, capsys: Any) -> None:
    model = planned()
    trainer = make(max_steps=2)(model, tmp_path)
    trainer.train()
    assert capsys.readouterr().out.count("─ fastft ") == 1
    run = fastft.report(model).run
    assert run.steps == 2
    if make is sft:  # TRL's own count
        assert run.tokens == [e["num_tokens"] for e in trainer.state.log_history if "num_tokens" in e][-1]
        assert run.batches == 2


@pytest.mark.trl
@pytest.mark.slow
def test_the_banner_does_not_call_a_loss_stock_that_trl_asks_for(tmp_path: pathlib.Path, capsys: Any) -> None:
    """A hook on the head is nothing that the model's own fast loss would call, and nothing that TRL ever calls."""
    model = fastft.patch(support.add_lora(support.build_model()))
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    sft(max_steps=1)(model, tmp_path).train()
    assert "lm_head + loss, where TRL does not bring its own" in " ".join(capsys.readouterr().out.split())
    (loss,) = [row for row in fastft.report(model).rows if row.site == "lm_head + loss"]
    assert (loss.runs, loss.stock_runs) == ("fast", 0)


def test_pauses_and_the_first_step_are_no_part_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: 5 s for the first step, 3 s of evaluation, then 2 s for 100 tokens."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    meter = Meter(0.0)
    meter.count_tokens(1000, None)
    clock[0] = 5.0
    meter.step_ended(torch.device("cpu"))
    clock[0] = 8.0
    meter.pause_continues()
    meter.pause_ended()
    meter.count_tokens(128, torch.tensor([[1] * 60 + [0] * 4, [1] * 40 + [0] * 24]))
    clock[0] = 10.0
    meter.step_ended(torch.device("cpu"))
    clock[0] = 30.0
    assert (meter.first_step_seconds, meter.paused, meter.seconds) == (5.0, 3.0, 30.0)
    assert meter.mean_rate() == meter.recent_rate() == 50.0
    assert meter.recent_rate() is None  # nothing since


def test_runs_of_one_step_and_devices_are_said_as_they_are() -> None:
    from fastft.training.run_report import RunReport

    run = RunReport(1, 7500.0, 1000.0, 7400.0, 10, 2.5, 3 << 30, True, 1, 0, processes=4, interrupted=True)
    assert str(run) == (
        "fastft: interrupted after 1 step in 2 h 05 min; the first took 2 h 03 min\n"
        "        of that, 16 min 40 s logging, evaluating and saving\n"
        "        10 tokens, padding not counted in this process, one of 4, 2 a second\n"
        "        peak memory at most 3.00 GiB"
    )
