"""TRL's fused head, with our loss behind it.

TRL ≥ 1.15 never calls a model's own loss: its patched forward runs the backbone and hands hidden states and the
head's weight to `trl.trainer.utils._ChunkedLogProbFunction.apply`. That name is the one thing exchanged here. What
takes its place acts only when the weight it is given *is* the output-embedding weight of a live planned model, looked
up at call time; every other call goes to TRL's own class. So models that fastft never touched train as without it, in
the same process.

fastft never imports trl: `install` acts when the module is already in `sys.modules`, and planned models call it from
their forward, so trl may be imported first, last or never.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

from torch import Tensor

from fastft.patching import registry
from fastft.patching.approximations import skip_arguments

__all__ = ["LogProbFunction", "install", "installed", "uninstall"]

_MODULE = "trl.trainer.utils"
_NAME = "_ChunkedLogProbFunction"
_ARGUMENTS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class LogProbFunction:
    """Stands where `trl.trainer.utils._ChunkedLogProbFunction` stood; `original` is what stood there."""

    original: Any = None

    @staticmethod
    def apply(
        hidden: Tensor,  # [rows, hidden]
        weight: Tensor,  # [vocabulary, hidden]
        bias: Tensor | None,
        targets: Tensor,  # [rows]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS[1:],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Log-probabilities and statistics, by our operator for a planned model's head, by TRL's for any other.

        Grad mode is read inside `linear_log_probs`, before its Function's forward turns it off. `chunk_size` is TRL's
        tile width; ours chooses its own chunks.
        """
        site = _loss_site(weight)
        if not _runs_fast(weight, site):
            return LogProbFunction.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
        from fastft.autograd.linear_cross_entropy import linear_log_probs  # loads Triton: not at import

        return linear_log_probs(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            final_logit_softcapping,
            logit_scale,
            outputs,
            **skip_arguments(site),
        )


def install() -> str | None:
    """Puts `LogProbFunction` in place; safe to call any number of times.

    Returns:
        None when it is in place, else why it is not: trl is not imported, or its fused head is not the one we know.
        The loss then stays TRL's own.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return "trl is not imported"
    if installed():
        return None
    current = getattr(module, _NAME, None)
    reason = _mismatch(module, current)
    if reason is not None:
        return f"{reason}; the loss stays TRL's own"
    LogProbFunction.original = current
    setattr(module, _NAME, LogProbFunction)
    return None


def uninstall() -> bool:
    """Puts TRL's class back, if what stands there is ours. Returns whether it did."""
    module = sys.modules.get(_MODULE)
    if module is None or not installed():
        return False
    setattr(module, _NAME, LogProbFunction.original)
    return True


def installed() -> bool:
    """Whether `LogProbFunction` is in place now."""
    return getattr(sys.modules.get(_MODULE), _NAME, None) is LogProbFunction


def _runs_fast(weight: Tensor, site: registry.Site | None) -> bool:
    """Whether this call is a planned model's and ours to answer; counted at the model's loss site if it is planned."""
    if site is None and not any(getattr(head, "weight", None) is weight for head in registry.planned_heads()):
        return False
    reason = None if site is None else site.reason
    if registry.runs_stock_only():
        reason = registry.DISABLED
    elif hasattr(weight, "ds_id"):
        # the weight is whole only inside TRL's gathering context: its backward gathers again, ours cannot
        reason = "lm_head is partitioned by DeepSpeed ZeRO-3"
    if site is not None:
        if reason is None:
            site.ran_fast()
        else:
            site.ran_stock(reason)
    return reason is None


def _loss_site(weight: Tensor) -> registry.Site | None:
    """The plan of the model whose output embedding has this weight now (resizing the vocabulary makes a new one)."""
    for model in registry.planned_models():
        if getattr(model.get_output_embeddings(), "weight", None) is weight:  # type: ignore[operator]
            return registry.site_of(model)
    return None


def _mismatch(module: Any, function: Any) -> str | None:
    """How TRL's function differs from the nine arguments and five outputs we stand in for; None if it does not."""
    version = getattr(sys.modules.get("trl"), "__version__", "of unknown version")
    if function is None:
        return f"trl {version} has no usable {_MODULE}.{_NAME} (it needs trl >= 1.15, and Triton on trl 1.15)"
    try:
        parameters = inspect.signature(function.forward).parameters
    except (AttributeError, TypeError, ValueError) as error:
        return f"{_MODULE}.{_NAME} of trl {version} has no readable forward ({error})"
    arguments = tuple(parameters)[1:]  # less ctx
    if arguments != _ARGUMENTS:
        return f"{_MODULE}.{_NAME}.forward of trl {version} takes {arguments}, not {_ARGUMENTS}"
    optional = parameters["outputs"].default
    if not isinstance(optional, tuple) or set(optional) != set(_OUTPUTS[1:]):
        return f"{_MODULE}.{_NAME} of trl {version} can give {optional}, not {_OUTPUTS[1:]}"
    output_type = getattr(module, "FusedCausalLMOutput", None)
    fields = dataclasses.fields(output_type) if dataclasses.is_dataclass(output_type) else ()
    if not {field.name for field in fields}.issuperset(_OUTPUTS):
        return f"{_MODULE}.FusedCausalLMOutput of trl {version} has not the fields {_OUTPUTS}"
    return None
