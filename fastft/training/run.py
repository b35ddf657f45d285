"""`RunCallback`: banner, progress, report, a checkpoint on Ctrl-C, and `fastft.json`, as one `TrainerCallback`.

A planned model adds it to the trainer that trains it (watch.py), in the first training forward; whoever wants it
otherwise passes their own, `SFTTrainer(..., callbacks=[fastft.RunCallback(banner=False)])`, and that one is used. It
adds nothing to the logged metrics: a fast run logs what a stock run logs.

The callback holds model and trainer by weak references, because both hold it.
"""

from __future__ import annotations

import pathlib
import shutil
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from fastft.patching import levels, registry
from fastft.training import checkpoint
from fastft.training.banner import banner
from fastft.training.interrupt import InterruptGuard
from fastft.training.meter import Meter
from fastft.training.run_report import RunReport

__all__ = ["RunCallback"]


class RunCallback(TrainerCallback):
    """What a training run says and leaves behind.

    Args:
        banner: draw a box at the first step: model, device, what is fast, memory plan, tokens a step.
        progress: show real tokens per second in the trainer's own progress bar, which has the time left already.
        report: print a summary at the end; it is kept as `fastft.report(model).run` either way.
        save_on_interrupt: the first Ctrl-C ends the step, saves a checkpoint and raises KeyboardInterrupt. Only in a
            single process, and not with `save_strategy="no"`.
    """

    def __init__(
        self, *, banner: bool = True, progress: bool = True, report: bool = True, save_on_interrupt: bool = True
    ) -> None:
        self.banner = banner
        self.progress = progress
        self.report = report
        self.save_on_interrupt = save_on_interrupt
        self._began: float | None = None  # when on_train_begin came, if it came
        self._began_at = 0.0  # by the clock that dates files
        self._meter: Meter | None = None
        self._guard: InterruptGuard | None = None
        self._stopping = False
        self._drawn = False
        self._site: registry.Site | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._backbone: weakref.ref[nn.Module] | None = None
        self._peaks: dict[torch.device, int] = {}

    @property
    def running(self) -> bool:
        """Whether a run is being watched: from its first training forward to its end."""
        return self._meter is not None

    def begin(self, trainer: Any, backbone: nn.Module, site: registry.Site) -> None:
        """The first training forward of a run begins."""
        self._meter = Meter(time.perf_counter() if self._began is None else self._began)
        self._began_at = time.time()
        self._trainer, self._backbone, self._site = weakref.ref(trainer), weakref.ref(backbone), site
        self._stopping = self._drawn = False
        self._peaks = {device: torch.cuda.max_memory_allocated(device) for device in _cuda_devices(backbone)}
        if self.banner and trainer.is_world_process_zero():
            levels.announce_elsewhere(backbone, site)
        arguments = trainer.args
        saves = arguments.save_strategy != "no" and arguments.world_size == 1 and trainer.hp_search_backend is None
        if self.save_on_interrupt and saves:
            guard = InterruptGuard(trainer)
            self._guard = guard if guard.install() else None

    def before_layers(self, shape: tuple[int, int], count: int, mask: Tensor | None) -> None:
        """A training forward is planned and about to run its layers.

        Args:
            shape: `[rows, length]` of the batch as the collator made it.
            count: tokens that the layers will see.
            mask: `[rows, length]`, 0 where one of these is padding; None where none is.
        """
        assert self._meter is not None
        self._meter.count_tokens(count, mask)
        if self._drawn:
            return
        self._drawn = True
        trainer, backbone = self._alive()
        if self.banner and trainer.is_world_process_zero():
            assert self._site is not None
            self._say(banner(trainer, backbone, self._site, shape, saves_on_interrupt=self._guard is not None))

    def count_labels(self, labels: Tensor) -> None:
        """A training batch came with `labels` `[rows, length]`."""
        assert self._meter is not None
        self._meter.count_labels(labels)

    def detach(self) -> None:
        """Leave the trainer: the undoing of all this."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None and self in trainer.callback_handler.callbacks:
            trainer.remove_callback(self)
        self._leave()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run begins; an earlier one that ended by an error is forgotten."""
        self._leave()
        self._began = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step's batches are there."""
        if self._stopping:  # a trainer whose `log` tells nobody
            self._save_and_stop(state, control)
        if self._meter is not None:
            self._meter.pause_ended()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped; an interrupt is acted on when the step's metrics are in the history."""
        if self._meter is not None:
            self._meter.step_ended(args.device)
        if self._guard is not None and self._guard.requested:
            self._stopping = control.should_log = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation and saving may follow."""
        if self._meter is not None:
            self._meter.pause_begins()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has waited for its loss: a good moment to read the counters."""
        if self._meter is None:
            return
        self._meter.pause_continues()
        if self._stopping:
            self._save_and_stop(state, control)
        if self.progress and state.is_world_process_zero:
            self._show_rate(self._meter.recent_rate())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation may be long, and the weights in it are those of a step's end."""
        if self._guard is not None and self._guard.requested:
            self._save_and_stop(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation is no part of tokens per second."""
        if self._meter is not None:
            self._meter.pause_continues()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written: `fastft.json` goes into it."""
        if self._meter is None:
            return
        self._stamp(self._folder(state.global_step))
        self._meter.pause_continues()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run is over."""
        if self._meter is None:
            return
        # transformers' own checkpoint on SIGTERM is announced to nobody, and may be of the step before.
        for folder in (self._folder(state.global_step - 1), self._folder(state.global_step)):
            if _is_complete(folder) and (folder / TRAINER_STATE_NAME).stat().st_mtime >= self._began_at:
                self._stamp(folder)
        requested = self._guard is not None and self._guard.requested
        self._finish(interrupted=False)
        if requested:
            raise KeyboardInterrupt("interrupted while the last step was being finished: the run is complete")

    def _alive(self) -> tuple[Any, nn.Module]:
        """Trainer and backbone of the run: alive, since one of them is calling."""
        assert self._trainer is not None
        assert self._backbone is not None
        trainer, backbone = self._trainer(), self._backbone()
        assert trainer is not None
        assert backbone is not None
        return trainer, backbone

    def _folder(self, step: int) -> pathlib.Path:
        trainer, _ = self._alive()
        return pathlib.Path(trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def _stamp(self, folder: pathlib.Path) -> None:
        """Write `fastft.json` into a checkpoint that has none."""
        trainer, _ = self._alive()
        if not trainer.args.should_save or not folder.is_dir() or (folder / checkpoint.FILE_NAME).exists():
            return
        from fastft.patching.plan import inner_model

        assert self._site is not None
        checkpoint.write(folder, checkpoint.describe(trainer, inner_model(trainer.model), self._site))

    def _save_and_stop(self, state: Any, control: Any) -> None:
        """Save a checkpoint here, then raise the interrupt; a save that fails is its cause and does not hide it.

        Raises:
            KeyboardInterrupt: always.
        """
        trainer, _ = self._alive()
        folder = self._folder(state.global_step)
        try:
            if not _is_complete(folder):
                trainer._save_checkpoint(trainer.model_wrapped, trial=None)
                trainer.callback_handler.on_save(trainer.args, state, control)
        except BaseException as error:
            if folder.is_dir() and not _is_complete(folder):
                # resume_from_checkpoint=True takes the last folder there is: it must not be half of one
                shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            raise KeyboardInterrupt(
                f"interrupted after step {state.global_step}, and no checkpoint could be saved as {folder}: {error}"
            ) from error
        finally:
            self._finish(interrupted=True)
        raise KeyboardInterrupt(
            f"interrupted after step {state.global_step}; saved as {folder}. "
            "trainer.train(resume_from_checkpoint=True) goes on from there."
        )

    def _finish(self, *, interrupted: bool) -> None:
        """Keep the report, print it, and let go of the run."""
        trainer, _ = self._alive()
        assert self._site is not None
        self._site.run = self._summary(trainer.args.world_size, interrupted)
        self._leave()
        if self.report and trainer.is_world_process_zero():
            self._say(str(self._site.run))

    def _summary(self, processes: int, interrupted: bool) -> RunReport:
        meter = self._meter
        assert meter is not None
        tokens, without_labels = meter.read()
        peaks = {device: torch.cuda.max_memory_allocated(device) for device in self._peaks}
        fullest = max(peaks, key=peaks.__getitem__, default=None)
        return RunReport(
            steps=meter.steps,
            seconds=meter.seconds,
            paused_seconds=meter.paused,
            first_step_seconds=meter.first_step_seconds,
            tokens=tokens,
            tokens_per_second=meter.mean_rate(),
            peak_bytes=None if fullest is None else peaks[fullest],
            peak_is_bound=fullest is not None and peaks[fullest] == self._peaks[fullest],
            batches=meter.batches,
            batches_without_labels=without_labels,
            processes=processes,
            interrupted=interrupted,
        )

    def _leave(self) -> None:
        if self._guard is not None:
            self._guard.remove()
        self._guard = self._meter = self._began = None
        self._stopping = False

    def _show_rate(self, rate: float | None) -> None:
        """Put tokens per second beside the steps, in a terminal's bar or a notebook's."""
        if rate is None:
            return
        trainer, _ = self._alive()
        text = f"{rate:,.0f} tokens/s"
        for callback in trainer.callback_handler.callbacks:
            bar, tracker = getattr(callback, "training_bar", None), getattr(callback, "training_tracker", None)
            if bar is not None:
                bar.set_postfix_str(text)
            elif tracker is not None:
                tracker.prefix = f"{text} "

    def _say(self, text: str) -> None:
        """Print between the lines of a progress bar that is in use, as the trainer's own callback does."""
        trainer, _ = self._alive()
        for callback in trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.write(text)
                return
        from rich.console import Console

        Console(soft_wrap=True).print(text, markup=False, highlight=False)


def _cuda_devices(backbone: nn.Module) -> set[torch.device]:
    return {p.device for p in backbone.parameters() if p.device.type == "cuda"}


def _is_complete(folder: pathlib.Path) -> bool:
    """Whether a checkpoint is whole: its trainer state is written last."""
    return (folder / TRAINER_STATE_NAME).is_file()
