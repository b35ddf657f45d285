"""Running llm-compressor over a plain model: the recipe, the run, the compressed file.

The model is one that transformers loaded from a merged checkpoint. Never the live one: that has adapters and patched
layers, and llm-compressor traces what it is given, hooks it and rounds its weights in place.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.patching.registry import stock_only
from fastft.saving.check import ask
from fastft.saving.compressed.environment import llmcompressor_session
from fastft.saving.compressed.plan import Plan

__all__ = ["quantize_into"]

_FAILURES = (ValueError, RuntimeError, TypeError, AttributeError, LookupError)


def quantize_into(
    model: Any, tokenizer: Any, folder: Path, plan: Plan, tokens: Tensor, max_shard_size: int | str
) -> Tensor:
    """Quantize `model`, in place, and write it compressed.

    Args:
        model: plain, from a checkpoint's folder; of no use afterwards.
        tokenizer: llm-compressor looks one up by itself where there is none.
        folder: where to write.
        plan: what to do.
        tokens: [rows, length], to ask the quantized model before it is written.

    Returns:
        Its logits, float32 on the CPU, [rows, length, vocabulary].

    Raises:
        ImportError: llm-compressor cannot be imported.
        OSError: writing failed.
        RuntimeError: llm-compressor failed; what it said is in the message and is the cause.
    """
    with llmcompressor_session(), torch.random.fork_rng(devices=[]), stock_only():
        from llmcompressor import oneshot

        options: dict[str, Any] = {}
        if plan.rows:
            options["dataset"] = _loader(plan.rows)
        vectors = _vectors(model, plan)
        try:
            # Anything but None stops the search for a tokenizer by the model's name; rows are token ids already.
            oneshot(model=model, recipe=_recipe(plan), processor=tokenizer or object(), **options)
        except _FAILURES as error:
            raise RuntimeError(
                f"llm-compressor failed on {type(model).__name__} with scheme {plan.scheme.preset}, and nothing was "
                f"saved: {type(error).__name__}: {error}"
            ) from error
        _put_back(model, vectors)
        with torch.no_grad():
            logits = ask(model.eval(), tokens)
        with warnings.catch_warnings():
            # Every model that compressed-tensors has held says so, on a CPU too, where nothing is offloaded.
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            model.save_pretrained(folder, save_compressed=True, max_shard_size=max_shard_size)
    return logits


def _loader(rows: list[Tensor]) -> Any:
    # Its own generator: a DataLoader draws a seed from the process's otherwise, also where nothing is shuffled.
    return torch.utils.data.DataLoader(
        [{"input_ids": row} for row in rows],  # type: ignore[arg-type]
        batch_size=None,
        generator=torch.Generator(),
    )


def _vectors(model: Any, plan: Plan) -> dict[str, Tensor]:
    """Copies of the norms and biases that must come out as they went in."""
    scaled = set(plan.smoothed.values())
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 1 and n not in scaled}


def _put_back(model: Any, vectors: dict[str, Tensor]) -> None:
    """llm-compressor turns Gemma's norms of 1 + w into plain ones and back, which rounds w as coarsely as 1 + w is."""
    from compressed_tensors.offload import update_offload_parameter

    for name, vector in vectors.items():
        path, _, attribute = name.rpartition(".")
        update_offload_parameter(model.get_submodule(path), attribute, vector)


def _recipe(plan: Plan) -> list[Any]:
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme = preset_name_to_scheme(plan.scheme.preset, ["Linear"])
    if plan.group_size is not None and scheme.weights is not None:
        scheme.weights.group_size = plan.group_size
    modifier = GPTQModifier if plan.algorithm == "gptq" else QuantizationModifier
    recipe: list[Any] = [modifier(config_groups={"group_0": scheme}, ignore=list(plan.ignore))]
    if plan.smoothing is not None:
        recipe.insert(0, SmoothQuantModifier(smoothing_strength=plan.smoothing))
    return recipe
