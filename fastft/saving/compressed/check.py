"""Is the compressed checkpoint the merged one, rounded as its format rounds? Asked of the files, loaded again.

Plain transformers loads what was written (its compressed-tensors integration makes the weights dense and rounds the
activations as the format does, on any device). Then

1. exactly the layers that were meant are quantized, and every other tensor is bit for bit the merged checkpoint's;
2. every quantized weight, made dense, is as near the merged one as rounding it by the format's definition would be
   (`schemes.rounding_error`) times 1.25 for rounding to nearest (up to 1.13 measured). GPTQ gives up nearness of the
   weights for nearness of what they compute: up to 3.1 times was measured, 8 times is allowed, and never 0.9, where a
   weight that is not there, or in another order, would be;
3. the loaded model answers as the quantized model in memory did before it was written, up to the dtype's rounding;
4. its logits are as near the merged model's as errors of that size leave them. With relative errors w in the weights
   and a in the activations they were off by 1.4 to 4.8 times √(w² + a²), in a trained model of 30 layers and in random
   ones of 2; 8 times is allowed, and at most 1. That finds gross faults at 8 bits and little at 4: 2 and 3 carry there;
5. the adapters' update is in what was written: with Δ the update in float32, W the merged and Ŵ the dense weight,
   1 + ⟨Ŵ − W, Δ⟩ / ⟨Δ, Δ⟩ over all weights is 1 if the update is there and 0 if the base was compressed instead. A
   rounding error larger than Δ averages out over many weights, unless they lie on a grid that the rounding finds again:
   of a small update to an NF4 base, rounding to nearest int4 in groups of 64, which are NF4's blocks, left 0.29.

SmoothQuant rescales columns of a weight against the norm before it. Such a weight is compared in the scale it was
rounded in: the merged one times the norms' ratio, column by column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastft.patching.registry import stock_only
from fastft.saving.check import SaveCheckError, allowed_difference, ask, relative, reload_model
from fastft.saving.compressed.plan import Plan
from fastft.saving.compressed.schemes import rounding_error
from fastft.saving.original import OriginalCheckpoint

__all__ = ["Answers", "Measured", "check_compressed"]

_NEAR = {"rtn": 1.25, "gptq": 8.0}  # times the error of rounding to nearest
_LOGITS = 8.0  # times the errors of weights and activations


@dataclass(frozen=True)
class Answers:
    """Logits on the same tokens, float32, [rows, length, vocabulary].

    Attributes:
        tokens: [rows, length].
        merged: of the merged model.
        quantized: of the quantized model in memory, before it was written.
    """

    tokens: Tensor
    merged: Tensor
    quantized: Tensor


@dataclass(frozen=True)
class Measured:
    """What the check found.

    Attributes:
        difference: of the logits from the merged model's, relative.
        allowed: what the format may make of `difference`.
        largest_error: of any quantized weight, relative.
        update_kept: share of the adapters' update in the dense weights; None: it was not asked for.
    """

    difference: float
    allowed: float
    largest_error: float
    update_kept: float | None


def check_compressed(
    written: Path, merged: Path, plan: Plan, answers: Answers, config: Any, dtype: torch.dtype,
    update: Callable[[str], Tensor | None] | None = None,
) -> Measured:  # fmt: skip
    """Compare what was written with the merged checkpoint it was made from.

    Args:
        written: the compressed folder.
        merged: the merged folder.
        plan: what was to be done.
        answers: of the models in memory.
        config: of the models in memory.
        dtype: of the merged checkpoint.
        update: tensor name → what the adapters added to it, float32; None where nothing.

    Raises:
        SaveCheckError: it does not load, or is not what the format makes of the merged checkpoint.
    """
    from transformers import AutoModelForCausalLM

    model = reload_model(written, AutoModelForCausalLM, config, dtype)
    with torch.no_grad(), stock_only():
        logits = ask(model, answers.tokens)  # compressed-tensors makes the weights dense at the first forward
        quantized = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
        if quantized != set(plan.targets):
            raise SaveCheckError(
                f"other layers are quantized than were meant: {sorted(quantized ^ set(plan.targets))[:5]}. It was "
                "removed."
            )
        errors, kept = _compare_weights(model, OriginalCheckpoint(str(merged)), plan, dtype, update)
    eps = torch.finfo(dtype).eps
    _check_reload(relative(logits - answers.quantized, answers.quantized), allowed_difference(config, eps))
    difference = relative(logits - answers.merged, answers.merged)
    allowed = _allowed(config, errors, plan, eps)
    if not difference <= allowed:
        raise SaveCheckError(
            f"the compressed model's logits differ from the merged model's by {difference:.3g} of their size, and "
            f"{plan.scheme.preset} explains {allowed:.3g}. It was removed. Calibrate on data like what the model will "
            "see, try algorithm='gptq', or a format with more bits."
        )
    if kept is not None and not kept > 0.5:
        raise SaveCheckError(
            f"the adapters' change vanished: {kept:.0%} of the update is left after rounding to {plan.scheme.preset}. "
            "The checkpoint was removed. Over a 4-bit base the two grids can pull an update back: use calibration with "
            "algorithm='gptq', base='original', or a format with more bits."
        )
    return Measured(difference, allowed, max(errors), kept)


def _check_reload(difference: float, allowed: float) -> None:
    if not difference <= allowed:
        raise SaveCheckError(
            f"loaded again, the compressed checkpoint answers otherwise than before it was written: logits differ by "
            f"{difference:.3g} of their size, and rounding allows {allowed:.3g}. It was removed. Please report this, "
            "with the versions of llmcompressor, compressed-tensors and transformers."
        )


def _allowed(config: Any, errors: list[float], plan: Plan, eps: float) -> float:
    weights = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return min(1.0, _LOGITS * math.hypot(weights, plan.scheme.activation_error) + allowed_difference(config, eps))


def _compare_weights(
    model: Any,
    merged: OriginalCheckpoint,
    plan: Plan,
    dtype: torch.dtype,
    update: Callable[[str], Tensor | None] | None,
) -> tuple[list[float], float | None]:
    """Relative error of each quantized weight, and the share of the update that is in all of them.

    Raises:
        SaveCheckError: a tensor that is further off than its format explains, or not the merged one where it should be.
    """
    state = model.state_dict()
    norms = set(plan.smoothed.values())
    errors, lost, trained = [], 0.0, 0.0
    for name in merged.files:
        source, found = merged.tensor(name), state.get(name)
        if found is None or found.shape != source.shape:
            raise SaveCheckError(
                f"{name} is missing in the compressed checkpoint, or of another shape. It was removed."
            )
        found = found.cpu()
        ratio = None
        if name in plan.smoothed:
            norm = plan.smoothed[name]
            ratio = merged.tensor(norm).float() / state[norm].cpu().float()  # [in]
        if name.removesuffix(".weight") in plan.targets:
            errors.append(_weight_error(name, found, source, ratio, plan, dtype))
        elif ratio is not None:
            _check_unrounded(name, relative(found.float() - source.float() * ratio, source.float() * ratio), dtype)
        elif name not in norms and not torch.equal(found, source.to(found.dtype)):
            raise SaveCheckError(f"{name} is not quantized, and yet not what was merged. The checkpoint was removed.")
        delta = None if update is None else update(name)
        if delta is not None:
            dense = found.float() if ratio is None else found.float() / ratio
            lost += float((source.float() - dense).mul_(delta).sum(dtype=torch.float64))
            trained += float(delta.square().sum(dtype=torch.float64))
    return errors, None if update is None else (1 - lost / trained if trained else 1.0)


def _weight_error(
    name: str, found: Tensor, source: Tensor, ratio: Tensor | None, plan: Plan, dtype: torch.dtype
) -> float:
    target = source.float() if ratio is None else source.float() * ratio
    error = relative(found.float() - target, target)
    nearest = rounding_error(target, plan.scheme, plan.group_size)
    allowed = min(0.9, _NEAR[plan.algorithm] * nearest + torch.finfo(dtype).eps)
    if not error <= allowed:
        raise SaveCheckError(
            f"{name} made dense again is off by {error:.3g} of its size; {plan.scheme.preset} rounds it to within "
            f"{nearest:.3g}, and {plan.algorithm} may be off by {allowed:.3g}. The checkpoint was removed."
        )
    return error


def _check_unrounded(name: str, difference: float, dtype: torch.dtype) -> None:
    if not difference <= 4 * torch.finfo(dtype).eps:
        raise SaveCheckError(
            f"{name} is not quantized, only rescaled, and is off by {difference:.3g}. The checkpoint was removed."
        )
