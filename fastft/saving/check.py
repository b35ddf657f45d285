"""Does the saved model answer as the live one? Asked of the files, after writing and before they take their place.

Fixed pseudo-random tokens go through the live model and through the checkpoint loaded again by transformers alone. Both
are rounded: to the dtype that the live model computes in, and to the one that was saved. A rounding to `eps` a layer
adds up like a random walk, and so do the float32 sums inside of a product, whose order differs (W x + s·B(A x) against
(W + s·B·A) x). So the relative difference (root mean square over all logits) may be

    allowed = √(2 · layers) · (2 · eps + √width · eps₃₂),   eps the coarser of the two dtypes'

A wrong fold (a transposed factor, a lost scale, one adapter of two) is off by the adapter's own effect, which is stated
beside it. Where that effect is below what rounding allows, the logits cannot tell; then the share of the update that is
in the written weights decides (`shards.py`).

Merged into the original checkpoint, a model differs from the live one by the quantization error it no longer has. There
the adapter's effect is compared instead: what it moves in the original must look like what it moves in the live model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastft.autograd.autocast import AutocastState
from fastft.patching.bitsandbytes import is_linear4bit
from fastft.patching.registry import stock_only

__all__ = [
    "LiveAnswers",
    "SaveCheckError",
    "adapters_disabled",
    "allowed_difference",
    "ask",
    "evaluating",
    "live_answers",
    "probe_tokens",
    "relative",
    "reload_answers",
    "reload_model",
]


class SaveCheckError(RuntimeError):
    """The written checkpoint is not the live model; it was removed again."""


@dataclass(frozen=True)
class LiveAnswers:
    """Logits of the live model, float32 on the CPU, [rows, length, vocabulary].

    Attributes:
        tokens: [rows, length].
        logits: with the adapters in use.
        without: with the adapters disabled; None if there are none.
        eps: spacing of the coarsest dtype that the live model computes in.
    """

    tokens: Tensor
    logits: Tensor
    without: Tensor | None
    eps: float


def relative(difference: Tensor, scale: Tensor) -> float:
    """Root mean square of `difference` over that of `scale`."""
    return float(difference.double().square().mean().sqrt() / scale.double().square().mean().sqrt().clamp_min(1e-30))


def allowed_difference(config: Any, *eps: float) -> float:
    """Relative difference that rounding may make in a model of `config`: see the top of this file."""
    text = config.get_text_config(decoder=True)
    layers, width = getattr(text, "num_hidden_layers", 1), getattr(text, "hidden_size", 1024)
    sums = math.sqrt(width) * torch.finfo(torch.float32).eps
    return math.sqrt(2 * max(layers, 1)) * (2 * max(eps) + sums)


def live_answers(inner: Any, *, has_adapter: bool) -> LiveAnswers:
    """Ask the live model; it is as before afterwards (modes, adapters, generators, 4-bit weights)."""
    tokens = probe_tokens(inner)
    with evaluating(inner):
        logits = ask(inner, tokens)
        without = None
        if has_adapter:
            with adapters_disabled(inner):
                without = ask(inner, tokens)
    return LiveAnswers(tokens, logits, without, _coarsest(inner))


def probe_tokens(model: Any) -> Tensor:
    """The tokens that the model and its files are asked, [2, 24] or as long as the model's window."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    window = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 32
    return torch.randint(0, vocabulary, (2, min(24, window)), generator=generator)


def ask(model: Any, tokens: Tensor) -> Tensor:
    """Logits for `tokens`, float32 on the CPU."""
    device = model.get_input_embeddings().weight.device  # "meta" if the weights are left in the file
    logits: Tensor = model(input_ids=tokens if device.type == "meta" else tokens.to(device), use_cache=False).logits
    return logits.float().cpu()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, stock, without gradients; everything as before afterwards."""
    training = [(module, module.training) for module in model.modules()]
    # On some CPUs bitsandbytes repacks a 4-bit weight at the first evaluation, which corrupts later training.
    repacking = [(m, m.support_avx512bf16_for_cpu) for m in model.modules() if is_linear4bit(m)]
    try:
        model.eval()
        for module, _ in repacking:
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        with torch.no_grad(), stock_only():
            yield
    finally:
        for module, mode in training:
            module.training = mode
        for module, flag in repacking:
            module.support_avx512bf16_for_cpu = flag


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """As PEFT's `disable_adapter`, by its flag alone: what requires a gradient stays as it is."""
    flagged: list[Any] = [m for m in model.modules() if "_disable_adapters" in m.__dict__]
    before = [m._disable_adapters for m in flagged]
    try:
        for module in flagged:
            # A merged layer would unmerge itself, in place; it stays, and the comparison is the weaker for it.
            module._disable_adapters = not getattr(module, "merged", False)
        yield
    finally:
        for module, value in zip(flagged, before, strict=True):
            module._disable_adapters = value


def _coarsest(model: nn.Module) -> float:
    dtypes: set[torch.dtype] = {p.dtype for p in model.parameters() if p.is_floating_point()}
    quantized: list[Any] = [module for module in model.modules() if is_linear4bit(module)]
    for module in quantized:
        dtypes |= {getattr(module, "compute_dtype", None) or torch.float32, module.weight.quant_state.dtype}
    # Both sides are asked under the caller's autocast: a model of several dtypes may not run without.
    autocast = AutocastState.current(next(model.parameters()).device.type)
    dtypes |= {autocast.compute_dtype(dtype) for dtype in dtypes}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)


@contextmanager
def _left_in_the_file() -> Iterator[None]:
    """Without accelerate's warning that weights are on the meta device: that is what was asked for."""

    def drop(record: logging.LogRecord) -> bool:
        return "on the meta device" not in record.getMessage()

    logger = logging.getLogger("accelerate.big_modeling")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def reload_answers(folder: Path, model_class: Any, config: Any, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """Logits of the checkpoint in `folder`, as `reload_model` loads it.

    Where the family can be split (all the usual ones can), transformers leaves the weights in the file and reads each
    module's when it is its turn: memory holds one module and not the model.
    """
    device_map = {"": "disk"} if getattr(model_class, "_no_split_modules", None) else None
    with _left_in_the_file():
        model = reload_model(folder, model_class, config, dtype, device_map=device_map)
    with torch.no_grad(), stock_only():
        return ask(model, tokens)


def reload_model(
    folder: Path, model_class: Any, config: Any, dtype: torch.dtype, *, device_map: dict[str, str] | None = None
) -> Any:
    """The checkpoint in `folder`, loaded by transformers alone, on the CPU, without the network; in evaluation mode.

    Args:
        config: of the live model, whose way of attention is used.
        device_map: transformers' own; None loads into memory.

    Raises:
        SaveCheckError: it does not load, or not completely.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            model, found = model_class.from_pretrained(
                folder, dtype=dtype, device_map=device_map, local_files_only=True, output_loading_info=True,
                attn_implementation=getattr(config, "_attn_implementation", None) or "sdpa",
            )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise SaveCheckError(f"the written checkpoint does not load: {error}") from error
    wrong = {
        kind: sorted(map(str, found[kind]))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if found.get(kind)
    }
    if wrong:
        raise SaveCheckError(f"the written checkpoint does not fit its own model: {wrong}")
    return model.eval()
