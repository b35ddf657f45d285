"""`fastft demo`, start to finish: load in 4 bits, measure, fine-tune through TRL, save, measure again, show.

The adapter is on disk the moment training ends, before anything that could still fail; metrics.json follows when all is
measured, the plot last. Written under the output folder:

    adapter/        PEFT's own files: loads in plain PEFT without fastft
    metrics.json    every figure printed, the loss curve, versions
    loss.png        the curve
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import math
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastft.demo.model_source import ModelSource
from fastft.demo.results import DemoResult, pick_samples, score_sets, show_result
from fastft.demo.rows import Row, TaskData

MAX_SEQ_LENGTH = 2048
ROWS_PER_STEP = 8
MOST_DEFAULT_STEPS = 300
LEARNING_RATE = 2e-3
RANK = 16
LORA_ALPHA = 32
SEED = 3407
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes")


class DemoError(Exception):
    """Something a person can mend: a model that is not there or cannot be used, a folder that cannot be written."""


def run_demo(source: ModelSource, data: TaskData, *, steps: int | None, output: Path, console: Console) -> DemoResult:
    """Run the demo and write its files under `output` (made if missing).

    Args:
        source: the model to load.
        data: rows to train on and held-out sets, already checked.
        steps: optimizer steps of 8 rows; None: `data.passes` passes over the rows, at most 300 steps.
        output: folder for the files; an adapter in it is overwritten.
        console: where everything is shown.

    Raises:
        DemoError: the model cannot be loaded or does not fit the rows, or `output` cannot be made; its cause is kept.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"cannot make the output folder {output}: {error.strerror}") from error
    clock = _Clock()
    with console.status("Importing torch, transformers, peft and trl"), clock("import"):
        import torch
        from trl import SFTTrainer  # noqa: F401  (a slow import, which belongs to this line of the timings)

        import fastft
        from fastft.demo.answering import answer_length

    with _quiet_libraries():
        console.print(f"Loading [bold]{escape(source.description)}[/] in 4 bits")
        with clock("load"):
            model, tokenizer = _load(source, data)
        longest = _longest_row(tokenizer, data.train, console)
        on_gpu = next(model.parameters()).device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        limit = answer_length(tokenizer, [*data.train, *(row for rows in data.held_out.values() for row in rows)])
        with clock("answers before"):
            before = _answer_all("Asking before training", model, tokenizer, data, limit, longest, console)

        model = fastft.FastModel.get_peft_model(
            model, r=RANK, lora_alpha=LORA_ALPHA, use_gradient_checkpointing=longest > 512, random_state=SEED
        )
        steps = steps or min(math.ceil(data.passes * len(data.train) / ROWS_PER_STEP), MOST_DEFAULT_STEPS)
        trainer = _build_trainer(model, tokenizer, data, steps, longest, output, on_gpu)
        loss_before = trainer.evaluate()["eval_loss"]
        console.print(f"Training {steps} steps of {ROWS_PER_STEP} rows")
        with _progress(console) as progress, clock("training"):
            trainer.add_callback(_progress_callback(progress, steps, console))
            trainer.train()
        adapter = output / "adapter"
        model.save_pretrained(adapter)
        tokenizer.save_pretrained(adapter)
        console.print(f"Adapter saved in [bold]{escape(str(adapter))}[/]")

        loss_after = trainer.evaluate()["eval_loss"]
        report = fastft.report(model)
        with clock("answers after"):
            after = _answer_all("Asking after training", model, tokenizer, data, limit, longest, console)

    log = trainer.state.log_history
    tokens = int(max((entry["num_tokens"] for entry in log if "num_tokens" in entry and "loss" in entry), default=0))
    peak, peak_kind = _peak_memory(on_gpu)
    result = DemoResult(
        model=source.description,
        device=torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        dtype=str(model.dtype).removeprefix("torch."),
        steps=steps,
        rows_per_step=ROWS_PER_STEP,
        training_rows=len(data.train),
        trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        losses=[(int(entry["step"]), float(entry["loss"])) for entry in log if "loss" in entry],
        held_out_loss=(loss_before, loss_after),
        sets=score_sets(data, before, after),
        samples=pick_samples(data, before, after),
        tokens=tokens,
        tokens_per_second=tokens / clock.seconds["training"],
        peak_memory=peak,
        peak_memory_kind=peak_kind,
        seconds=clock.finish(),
        versions={
            "fastft": fastft.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in LIBRARIES},
        },
    )
    (output / "metrics.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    show_result(result, console)
    _save_plot(result, output / "loss.png", console)
    return result


def _build_trainer(
    model: Any, tokenizer: Any, data: TaskData, steps: int, longest: int, output: Path, on_gpu: bool
) -> Any:
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    import fastft

    rows = _rows_per_batch(longest)
    config = SFTConfig(
        output_dir=str(output),
        max_steps=steps,
        # Batches at random: grouped by length they would be grouped by command too, and the loss jumps between groups.
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=ROWS_PER_STEP // rows,
        per_device_eval_batch_size=rows,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=steps // 12,
        weight_decay=0.0,
        max_length=MAX_SEQ_LENGTH,
        gradient_checkpointing=longest > 512,
        bf16=on_gpu and model.dtype == torch.bfloat16,
        fp16=on_gpu and model.dtype == torch.float16,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=SEED,
    )
    first_set = next(iter(data.held_out.values()))
    fastft.patch(model, run_comfort=False)  # the demo has a banner and a bar of its own
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([row.for_trainer() for row in data.train]),
        eval_dataset=Dataset.from_list([row.for_trainer() for row in first_set]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    for parameter in model.parameters():
        # TRL rounds the adapter of a 4-bit model to bfloat16, whose eight bits lose the small updates late in training.
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def _rows_per_batch(longest: int) -> int:
    """Rows of one forward pass, so that about 2,048 tokens (or one row) are in flight; a divisor of ROWS_PER_STEP."""
    return next((rows for rows in (8, 4, 2) if rows * longest <= 2048), 1)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


def _progress_callback(progress: Progress, steps: int, console: Console) -> Any:
    """A trainer callback: the bar on a terminal, elsewhere about ten lines in all."""
    from transformers import TrainerCallback

    class ShowProgress(TrainerCallback):
        def __init__(self) -> None:
            self._task = progress.add_task("step", total=steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" not in logs:
                return
            loss = float(logs["loss"])
            progress.update(self._task, completed=state.global_step, description=f"loss {loss:.3f}")
            every = max(1, steps // 10)
            if not console.is_terminal and (state.global_step % every == 0 or state.global_step == 1):
                console.print(f"  step {state.global_step}/{steps}: loss {loss:.3f}")

    return ShowProgress()


def _answer_all(
    title: str, model: Any, tokenizer: Any, data: TaskData, limit: int, longest: int, console: Console
) -> dict[str, list[str]]:
    from fastft.demo.answering import answer

    batch_size = 10 * _rows_per_batch(longest)
    answers = {}
    if not console.is_terminal:
        console.print(f"{title}: {', '.join(f'{len(rows)} {name}' for name, rows in data.held_out.items())}")
    with _progress(console) as progress:
        for name, rows in data.held_out.items():
            task = progress.add_task(f"{title}: {name}", total=len(rows))

            def advance(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            answers[name] = answer(
                model, tokenizer, rows, max_new_tokens=limit, batch_size=batch_size, on_batch=advance
            )
    return answers


def _load(source: ModelSource, data: TaskData) -> tuple[Any, Any]:
    import fastft

    try:
        # No limit on the model: the trainer cuts rows at MAX_SEQ_LENGTH, and a held-out question may be longer.
        model, tokenizer = fastft.FastModel.from_pretrained(
            source.name, max_seq_length=None, load_in_4bit=True, gguf_file=source.gguf_file
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise DemoError(f"{source.name} cannot be loaded. {type(error).__name__}: {error}") from error
    if not isinstance(data.train[0].prompt, str) and tokenizer.chat_template is None:
        raise DemoError(
            f"the rows are messages, and the tokenizer of {source.name} has no chat template to write them with; "
            "use an instruct model, or rows with 'prompt' and 'completion'"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _longest_row(tokenizer: Any, rows: list[Row], console: Console) -> int:
    """Tokens of the longest training row, at most MAX_SEQ_LENGTH; says so where rows will be cut."""
    from fastft.demo.answering import prompt_ids

    lengths = [
        len(prompt_ids(tokenizer, row)) + len(tokenizer(row.completion, add_special_tokens=False)["input_ids"]) + 1
        for row in rows
    ]
    too_long = [row.line for row, length in zip(rows, lengths, strict=True) if length > MAX_SEQ_LENGTH]
    if too_long:
        console.print(
            f"[yellow]{len(too_long)} rows are longer than {MAX_SEQ_LENGTH} tokens and will be cut "
            f"(the first is line {too_long[0]})[/]"
        )
    return min(max(lengths), MAX_SEQ_LENGTH)


def _peak_memory(on_gpu: bool) -> tuple[int | None, str]:
    if on_gpu:
        import torch

        return torch.cuda.max_memory_allocated(), "allocated on the GPU"
    try:
        import resource
    except ImportError:  # Windows
        return None, "unknown"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak, "of the process"


def _save_plot(result: DemoResult, path: Path, console: Console) -> None:
    """Draw the loss curve. A plot that fails costs the plot, not the run."""
    try:
        from fastft.demo.plot import plot_losses

        plot_losses(result.losses, path, title=f"{result.model}\n{result.steps} steps of {result.rows_per_step} rows")
    except ImportError:
        console.print("No loss plot: matplotlib is not installed (pip install 'fastft[demo]')")
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        console.print(f"[yellow]No loss plot:[/] {escape(str(error))}")
    else:
        console.print(f"Loss curve in [bold]{escape(str(path))}[/]")


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """The libraries' own progress bars and two notes nobody here can act on: off inside, as they were afterwards.

    The notes: bitsandbytes on a CPU kernel it would take from another package, transformers on an argument's new name
    that TRL still uses under the old one.
    """
    import datasets
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    maps = datasets.are_progress_bars_disabled()
    bitsandbytes_logger = logging.getLogger("bitsandbytes")
    level = bitsandbytes_logger.level
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    bitsandbytes_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*deprecated", category=FutureWarning)
            yield
    finally:
        bitsandbytes_logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
        if not maps:
            datasets.enable_progress_bars()


class _Clock:
    """Seconds of each named part, and of everything since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        return self.seconds | {"total": time.perf_counter() - self._start}
