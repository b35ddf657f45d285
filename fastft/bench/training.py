"""What a worker does for `fastft bench step` and `fastft bench sft`: one training run of one provider, timed.

The batches are random tokens, full rows as after packing, the same for every provider. Times are wall clock around a
step with the device waited for at both ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastft.bench.machine import device_facts
from fastft.bench.providers import Settings, import_provider, load_adapted, load_base, lora_config

__all__ = ["train"]

_LEARNING_RATE = 1e-4
_LOSSES = 6  # the first ones are reported


def train(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run it.

    Args:
        request: `settings`, the fields of `Settings`.

    Returns:
        The device's facts, `steps_ms` (all of them, warm-up first), `losses`, `import_s`, `load_s`, `base_bytes` before
        the first step and `peak_bytes` (None on a CPU). Out of memory is a status; other errors end the process, whose
        last words the parent reads.
    """
    settings = Settings(**request["settings"])
    import_s = import_provider(settings.provider)
    import torch

    facts = device_facts()
    try:
        run = _sft if settings.kind == "sft" else _steps
        measured = run(settings, facts["device"])
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "note": str(error).splitlines()[0][:200], "import_s": import_s, **facts}
    return {"status": "ok", "import_s": import_s, **facts, **measured}


def _steps(settings: Settings, device: str) -> dict[str, Any]:
    """Forward, backward and optimizer by hand."""
    import torch

    start = time.perf_counter()
    model, _ = load_adapted(settings)
    _wait(device)
    load_s = time.perf_counter() - start
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)
    loss_of = _loss_function(model, settings)
    autocast = (
        contextlib.nullcontext
        if settings.dtype == "float32"
        else lambda: torch.autocast(device, dtype=getattr(torch, settings.dtype))
    )
    clock = _Clock(device)
    losses = []
    for ids in _batches(settings, model.config.vocab_size, settings.warmup + settings.steps):
        ids = ids.to(device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        with clock.step():
            with autocast():
                loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return {"load_s": load_s, "losses": losses[:_LOSSES], **clock.measured()}


def _loss_function(model: Any, settings: Settings) -> Callable[[dict[str, Any]], Any]:
    """From a batch to the mean loss, through the provider's head."""
    if settings.provider == "trl":
        return lambda batch: model(**batch, fused_lm_head=True).loss
    if settings.provider != "cce":
        return lambda batch: model(**batch).loss
    import torch

    dtype = getattr(torch, settings.dtype)
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    causal_lm = model.get_base_model()

    def loss(batch: dict[str, Any]) -> Any:
        output = causal_lm.base_model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        )
        head = causal_lm.get_output_embeddings().weight.to(dtype)  # PEFT keeps it in float32 under QLoRA
        return linear_cross_entropy(output.last_hidden_state.to(dtype), head, batch["labels"], shift=True)

    return loss


def _sft(settings: Settings, device: str) -> dict[str, Any]:
    """The user's own path. What the trainer adds (collation, metrics, logging, clipping) is part of the work."""
    from datasets import Dataset
    from transformers import TrainerCallback

    trl = importlib.import_module("trl")

    start = time.perf_counter()
    stock = settings.provider not in ("fastft", "unsloth")
    model, tokenizer = load_base(settings) if stock else load_adapted(settings)
    if settings.provider == "fastft":
        import fastft

        fastft.patch(model, run_comfort=False)  # what is printed is the worker's result
    _wait(device)
    load_s = time.perf_counter() - start
    steps = settings.warmup + settings.steps
    rows = [row for ids in _batches(settings, 256, steps) for row in ids.tolist()]
    clock = _Clock(device)

    class StepClock(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **more: Any) -> None:
            clock.begin()

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            clock.end()

    with tempfile.TemporaryDirectory(prefix="fastft-bench-sft-") as folder:
        config = trl.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=settings.batch,
            max_steps=steps,
            max_length=settings.length,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            bf16=settings.dtype == "bfloat16",
            fp16=settings.dtype == "float16",
            use_cpu=device == "cpu",
            gradient_checkpointing=settings.checkpointing != "keep",
            learning_rate=_LEARNING_RATE,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            callbacks=[StepClock()],
            peft_config=lora_config(settings) if stock else None,
        )
        clock.count_memory()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"load_s": load_s, "losses": losses[:_LOSSES], **clock.measured()}


def _batches(settings: Settings, vocabulary: int, count: int) -> Iterator[Any]:
    """`count` batches of ids [batch, length]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(0, vocabulary, (settings.batch, settings.length), generator=generator)


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


class _Clock:
    """Wall time of each step, and the peak of allocated memory from `count_memory` (or the first step) on."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._steps_ms: list[float] = []
        self._base: int | None = None
        self._start = 0.0

    def count_memory(self) -> None:
        import torch

        if self._device == "cuda" and self._base is None:
            gc.collect()
            self._base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        self.count_memory()
        _wait(self._device)
        self._start = time.perf_counter()

    def end(self) -> None:
        _wait(self._device)
        self._steps_ms.append((time.perf_counter() - self._start) * 1e3)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step, timed."""
        self.begin()
        yield
        self.end()

    def measured(self) -> dict[str, Any]:
        import torch

        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else None
        return {"steps_ms": self._steps_ms, "base_bytes": self._base, "peak_bytes": peak}
