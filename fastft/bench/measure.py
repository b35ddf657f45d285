"""From a command's options to rows: defaults that depend on the device, workers started and ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fastft.bench.kernel_run import KernelRun, run_kernels
from fastft.bench.kernel_session import LIBRARIES
from fastft.bench.operations import find_operation, operation_names
from fastft.bench.providers import TRAINERS, Settings
from fastft.bench.registry import MODELS, ModelShape, find_model, shape_of_folder
from fastft.bench.results import Row
from fastft.bench.session import BenchError, Session, choose_providers, missing
from fastft.bench.training_run import TrainingRun, checkpoint_folder, run_training

__all__ = ["DEFAULT_TRAINERS", "measure_kernels", "measure_training"]

_DEFAULT_MODEL = {"cuda": "Llama-3.1-8B", "cpu": "tiny"}
_DEFAULT_TRAINED = {"cuda": "Llama-3.2-1B", "cpu": "tiny"}
_SWEPT_TOKENS = {"cuda": [1024 << power for power in range(7)], "cpu": [64, 256]}
_TOKENS_OVER_MODELS = {"cuda": [8192], "cpu": [64]}
_LIMIT_SAMPLES = 25
# torch.compile needs minutes for its first step, CCE is a head alone: when asked for.
DEFAULT_TRAINERS = ("fastft", "hf", "liger", "unsloth", "trl")


def measure_kernels(
    session: Session,
    *,
    names: list[str],
    providers: Sequence[str] | None,
    models: Sequence[str],
    over_models: bool,
    tokens: Sequence[int],
    dtype: str | None,
    samples: int,
) -> Iterator[list[Row]]:
    """`fastft bench kernels`; yields and keeps the rows of one operation at one size at a time.

    Raises:
        BenchError: an unknown operation, provider or model; or no provider can be used.
    """
    try:
        operations = operation_names(names)
        shapes = [find_model(model) for model in models]
    except ValueError as error:
        raise BenchError(str(error)) from error
    offered = dict.fromkeys(name for each in operations for name in find_operation(each).provider_names())
    workers, unavailable = session.open_workers(choose_providers(providers, list(offered)), LIBRARIES)
    try:
        device = session.facts["device"]
        chosen_dtype = session.dtype(dtype)
        default_tokens = (_TOKENS_OVER_MODELS if over_models else _SWEPT_TOKENS)[device]
        run = KernelRun(
            operations=operations,
            shapes=shapes or _default_shapes(device, over_models),
            tokens=sorted(tokens or default_tokens),
            dtype=chosen_dtype,
            samples=samples,
            workers=workers,
            unavailable=unavailable,
            ceilings=session.ceilings(chosen_dtype, _LIMIT_SAMPLES),
            blank=session.blank_row(),
            known=session.results.rows,
            overwrite=session.results.overwrite,
            restart=session.reopen,
            tell=session.tell,
        )
        for rows in run_kernels(run):
            session.results.add(rows)
            yield rows
    finally:
        for worker in workers.values():
            worker.close()


def _default_shapes(device: str, over_models: bool) -> list[ModelShape]:
    if over_models and device == "cuda":
        return [shape for shape in MODELS.values() if shape.name != "tiny"]
    return [find_model(_DEFAULT_MODEL[device])]


def measure_training(
    session: Session,
    template: Settings,
    *,
    providers: Sequence[str] | None,
    models: Sequence[str],
    folder: Path | None,
    lengths: Sequence[int],
    peers_checkpoint: bool,
    rounds: int,
) -> Iterator[list[Row]]:
    """`fastft bench step` and `sft`; yields and keeps the rows of one model at one length at a time.

    Args:
        session: where rows go.
        template: settings of every run; provider, folder and length are filled in here, and dtype where it is "".
        providers: names; None: the usual ones.
        models: names in the registry; none: `folder`'s, or a default.
        folder: of a checkpoint, or where to write one.
        lengths: tokens in a row.
        peers_checkpoint: whether the others use gradient checkpointing.
        rounds: runs of each provider.

    Raises:
        BenchError: an unknown provider or model, a folder that does not fit the models, or no ceilings.
        WorkerError: the checkpoint cannot be written.
    """
    chosen = choose_providers(providers or DEFAULT_TRAINERS, list(TRAINERS))
    unavailable = missing(chosen, TRAINERS)
    if template.kind == "sft":
        unavailable |= dict.fromkeys(("trl", "cce"), ("skipped", "SFTTrainer has its own head: see hf"))
    session.learn()
    template = replace(template, dtype=session.dtype(template.dtype or None))
    ceilings = session.ceilings(template.dtype, _LIMIT_SAMPLES)
    for shape in _trained_shapes(models, folder, session.facts["device"]):
        with checkpoint_folder(shape, folder, dtype=template.dtype, start=session.start) as checkpoint:
            for length in lengths:
                common = replace(template, folder=str(checkpoint.absolute()), length=length)
                run = TrainingRun(
                    shape=shape,
                    settings=[_settings_of(provider, common, peers_checkpoint) for provider in chosen],
                    unavailable=unavailable,
                    blank=session.blank_row(),
                    ceilings=ceilings,
                    start=session.start,
                    rounds=rounds,
                    known=session.results.rows,
                    overwrite=session.results.overwrite,
                    tell=session.tell,
                )
                rows = run_training(run)
                session.results.add(rows)
                yield rows


def _settings_of(provider: str, common: Settings, peers_checkpoint: bool) -> Settings:
    """What concerns fastft's planner is kept from the others."""
    if provider == "fastft":
        return replace(common, provider=provider)
    return replace(common, provider=provider, checkpointing="auto" if peers_checkpoint else "keep", memory_budget="")


def _trained_shapes(models: Sequence[str], folder: Path | None, device: str) -> list[ModelShape]:
    try:
        named = [find_model(model) for model in models]
        if folder is None:
            return named or [find_model(_DEFAULT_TRAINED[device])]
        if len(named) > 1:
            raise BenchError(
                f"--model-dir {folder} holds one model, {len(named)} were named; give one --model, or none."
            )
        if not (folder / "config.json").exists() and named:
            return named
        found = shape_of_folder(folder)
    except ValueError as error:
        raise BenchError(str(error)) from error
    if not named:
        return [found]
    if replace(found, name=named[0].name, rope_theta=named[0].rope_theta) != named[0]:
        raise BenchError(f"{folder} holds a model of other sizes than {named[0].name}; leave --model out, or empty it.")
    return named
