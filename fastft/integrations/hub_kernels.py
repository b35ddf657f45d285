"""fastft's RMSNorm and rotation as a mapping for Hugging Face's `kernels`, with no hub and no download.

transformers marks exchangeable parts by name ("RMSNorm", "rotary_pos_emb"); `kernels.kernelize` gives each a forward
out of a mapping. A mapping's value may be any object with `load()`, so ours names classes that are here already.

What is marked is little: MLP and loss are not, so `fastft.patch` does more. The two do not add up. A planned model is
left alone here, because its layers run as one node and would fall back to their parts around an exchanged norm. A model
loaded with `use_kernels=True` carries the hub's kernels: `fastft.patch` leaves those alone and reports it. And a model
kernelized here and then patched runs its norms from here and the rest from the plan, reported part by part. No part is
ever computed by both.

One trap is `kernels`' own: the rotation is a single object for each modeling file, so exchanging it in one model does
so in all models of that family in the process. It is left out unless asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastft import functional
from fastft.patching import registry
from fastft.patching.families import FAMILIES
from fastft.patching.plan import inner_model

__all__ = ["FastftRMSNorm", "FastftRotary", "Kernelized", "kernelize", "mapping"]


class FastftRMSNorm(nn.Module):
    """Forward of the "RMSNorm" layers: the host module's `weight` and `variance_epsilon`, transformers' rounding."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon, "llama")  # type: ignore[arg-type]


class FastftRotary(nn.Module):
    """Forward of "rotary_pos_emb"."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 2:  # [B, S, heads, D]
            q, k = functional.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            return q.transpose(1, 2), k.transpose(1, 2)
        return functional.rope(q, k, cos, sin)


@dataclass(frozen=True, slots=True)
class _Here:
    """What `kernels` takes for a repository: hashable, with `load()`."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


@dataclass(frozen=True, slots=True)
class Kernelized:
    """What `kernelize` did.

    Args:
        norms: RMSNorm modules that run our kernel now.
        rotary: whether the family's rotation does.
        skipped: why nothing was exchanged, or None.
    """

    norms: int
    rotary: bool
    skipped: str | None = None


def mapping(*, rotary: bool = True, devices: tuple[str, ...] = ("cuda", "rocm", "cpu")) -> dict[str, Any]:
    """The mapping, for `kernels.use_kernel_mapping` or `register_kernel_mapping`.

    Args:
        rotary: with "rotary_pos_emb"; see the trap above.
        devices: device types it serves; on the CPU it is the plain-torch twins.

    Raises:
        ImportError: where `kernels` is not installed.
    """
    kernels = _kernels()
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    layers: dict[str, type[nn.Module]] = {"RMSNorm": FastftRMSNorm}
    if rotary:
        layers["rotary_pos_emb"] = FastftRotary
    return {
        name: {
            device: {mode: _Here(layer), kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE: _Here(layer)}
            for device in devices
        }
        for name, layer in layers.items()
    }


def kernelize(model: nn.Module, *, rotary: bool = False) -> Kernelized:
    """Exchange the marked parts of one model for ours, for training and generation.

    Args:
        model: a transformers or PEFT model.
        rotary: exchange the rotation too, in every model of the family (see above).

    Returns:
        What was exchanged, or why nothing was.

    Raises:
        ImportError: where `kernels` is not installed.
        TypeError: `model` is not a transformers model.
    """
    inner: Any = inner_model(model)
    if not isinstance(inner, nn.Module) or not hasattr(inner, "config"):
        raise TypeError(f"kernelize takes a transformers or PEFT model, got {type(model).__name__}.")
    kernels = _kernels()
    reason = _reason(inner)
    if reason is not None:
        return Kernelized(0, False, reason)
    config: Any = inner.config
    family = FAMILIES[config.model_type]
    with _only(mapping(rotary=rotary)):
        kernels.kernelize(inner, mode=kernels.Mode.TRAINING)
    norms = sum(
        getattr(module.__dict__.get("forward"), "__func__", None) is FastftRMSNorm.forward
        for module in inner.modules()
        if type(module).__name__ == f"{family.prefix}RMSNorm"
    )
    return Kernelized(norms, rotary)


def _reason(inner: Any) -> str | None:
    """Why `inner` is left alone, or None."""
    if any(registry.site_of(module) is not None for module in inner.modules()):
        return "planned by fastft.patch, whose layers hold these kernels already"
    if getattr(inner, "_use_kernels", False):
        return "loaded with use_kernels=True: the hub's kernels are in place"
    family = FAMILIES.get(str(inner.config.model_type))
    if family is None or family.norm_mode != "llama":
        return f"model_type {inner.config.model_type!r} has no family declaration: its norm may round elsewhere"
    return None


@contextlib.contextmanager
def _only(layers: dict[str, Any]) -> Iterator[None]:
    """`layers` as the whole mapping: nothing of the hub's is looked up."""
    with _kernels().use_kernel_mapping(layers, inherit_mapping=False):
        yield


def _kernels() -> Any:
    try:
        import kernels
    except ImportError as error:
        raise ImportError(
            "fastft.integrations.hub_kernels needs Hugging Face's `kernels`, which is not installed. Install the "
            "version that your transformers asks for (transformers.utils.import_utils.KERNELS_MIN_VERSION)."
        ) from error
    return kernels
