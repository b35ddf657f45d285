"""Does each written weight do what its live layer does? Asked layer by layer, where the logits cannot tell.

In a deep 16-bit model the logits are rounded so often that a whole projection's update can be missing without anyone
seeing it (32 layers in bfloat16: one of 224 updates dropped moves the logits by less than rounding does). So every
layer with an adapter, a trained copy or a quantized weight is asked alone. A copy of the live layer answers random
inputs in float32 (over 4-bit weights: what they compute in), through PEFT's and bitsandbytes' own forward, with its
adapters (y) and without them (y₀); the weight read back from the file answers the same (z). The roundings of other
layers are not in the way, so two things can be asked of each:

- z ≈ y, to a rounding to the saved dtype, or to that which 4-bit weights compute in;
- what z has more than y₀ is the adapter's work d = y − y₀, and not more or less of it. The part of d that is in z − y₀,

      c = ⟨z − y₀, d⟩ / ⟨d, d⟩,

  is the share of the update that outlived rounding (`shards.py` counts it among the weights), to a standard error that
  is measured too. This sees an update that is smaller than the rounding of a single weight, because rounding is no part
  of d.

All other tensors must be the live ones bit by bit. Merged into the original checkpoint, z differs from y by the
quantization error that was lost, so only the second is asked, with the original's own answer as y₀. Weights in
bitsandbytes' 8 bits are left to the logits: their forward rounds its input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastft.patching.bitsandbytes import is_linear4bit
from fastft.saving.check import SaveCheckError, adapters_disabled, evaluating, relative
from fastft.saving.fold import base_module, is_quantized
from fastft.saving.layout import Layout, owner
from fastft.saving.original import OriginalCheckpoint

__all__ = ["probe_layers"]

_ROWS = 16  # inputs that each layer is asked


def probe_layers(
    inner: Any, layout: Layout, written: OriginalCheckpoint, shares: Mapping[str, float],
    original: OriginalCheckpoint | None,
) -> int:  # fmt: skip
    """Compare every tensor of a merged checkpoint with the live model, which is not changed.

    Args:
        inner: the transformers model under any PEFT wrapper.
        layout: what was to be written.
        written: the checkpoint.
        shares: tensor name → share of its update that outlived rounding, as it was written; 1 if it is not there.
        original: the checkpoint that quantized weights were replaced from, if they were.

    Returns:
        How many layers were asked.

    Raises:
        SaveCheckError: a tensor that is not what the live layer has, by name.
    """
    with torch.device("meta"):
        plain = layout.model_class(copy.deepcopy(layout.config))
    embedding = next(name for name, module in plain.named_modules() if module is plain.get_input_embeddings())
    generator, asked = torch.Generator().manual_seed(0), 0
    with evaluating(inner):
        for path, module in plain.named_modules():
            # A tied head is in the file under the embedding's name.
            names = {a: f"{path}.{a}" if f"{path}.{a}" in layout.tensors else f"{embedding}.{a}" for a in _own(module)}
            if not names or not all(name in layout.tensors for name in names.values()):
                continue
            live = owner(inner, f"{path}.weight")[0]
            if base_module(live) is live and not is_quantized(live):
                _compare_bits(live, names, layout, written)
            elif _can_be_asked(module, live):
                _Probe(module, live, names, written, generator).check(shares, original, layout)
                asked += 1
    return asked


def _own(module: nn.Module) -> list[str]:
    """Names of the module's own parameters and saved buffers."""
    buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    return [name for name in (*module._parameters, *buffers) if getattr(module, name) is not None]


def _compare_bits(live: nn.Module, names: Mapping[str, str], layout: Layout, written: OriginalCheckpoint) -> None:
    for attribute, name in names.items():
        expected = getattr(live, attribute).detach().to(layout.tensors[name].dtype)
        if not torch.equal(expected.cpu(), written.tensor(name)):
            raise SaveCheckError(f"{name} was not written as it is in the live model. Nothing was saved.")


def _can_be_asked(module: nn.Module, live: nn.Module) -> bool:
    """Whether it is plain what the layer is fed; convolutions are left to the logits, and 8 bits."""
    known = isinstance(module, (nn.Linear, nn.Embedding)) or getattr(module, "weight", None) is not None
    return known and not isinstance(module, nn.modules.conv._ConvNd) and (
        is_linear4bit(base_module(live)) or not is_quantized(live)
    )  # fmt: skip


class _Probe:
    """One layer: what it, and the weights in the file that take its place, answer to the same inputs in float32."""

    def __init__(
        self, module: nn.Module, live: Any, names: Mapping[str, str], written: OriginalCheckpoint,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.module, self.names = module, names
        self.quantized, self.rounding = is_quantized(live), _rounding(live)
        self.device = next(live.parameters()).device
        self.inputs = _inputs(module, live, generator).to(self.device)
        alone = copy.deepcopy(live).float()
        with torch.autocast(self.device.type, enabled=False):
            self.product_error = _product_error(self.device)
            self.live = alone(self.inputs)
            with adapters_disabled(alone):
                self.without = alone(self.inputs)
            del alone
            self.written = self.answers(written)

    def answers(self, checkpoint: OriginalCheckpoint) -> Tensor:
        """Of the plain layer with a checkpoint's weights."""
        weights = {a: checkpoint.tensor(name).to(self.device).float() for a, name in self.names.items()}
        result: Tensor = torch.func.functional_call(self.module, weights, (self.inputs,))
        return result

    def check(self, shares: Mapping[str, float], original: OriginalCheckpoint | None, layout: Layout) -> None:
        """Compare.

        Raises:
            SaveCheckError: the written layer is another one.
        """
        name = self.names.get("weight") or next(iter(self.names.values()))
        replaced = original is not None and self.quantized
        difference, allowed = relative(self.written - self.live, self.live), self.allowed(layout.tensors[name].dtype)
        if not replaced and not difference <= allowed:
            raise SaveCheckError(
                f"{name}: the written layer is not the live one: asked alone, its answers differ by {difference:.3g} "
                f"of their size, and rounding allows {allowed:.3g}. Nothing was saved. Please report this with "
                "fastft.report(model); until then save the adapter alone."
            )
        with torch.autocast(self.device.type, enabled=False):
            without = self.answers(original) if original is not None and self.quantized else self.without
        found, error = _part_of(self.written - without, self.live - self.without)
        # In another base DoRA's norms are others, and so is its update.
        expected, margin = shares.get(name, 1.0), (0.5 if replaced else 0.02) + 6 * error
        if not abs(found - expected) <= margin:
            raise SaveCheckError(
                f"{name}: the written layer holds {found:.3g} of its adapter's update, and {expected:.3g} was expected "
                f"(within {margin:.2g}). Nothing was saved. Please report this with fastft.report(model); until then "
                "save the adapter alone."
            )

    def allowed(self, dtype: torch.dtype) -> float:
        """Relative difference that rounding the weights, and the order and precision of float32 sums, may make."""
        size = float(self.live.double().square().mean().sqrt().clamp_min(1e-30))
        numbers = torch.finfo(dtype)
        smallest = numbers.smallest_normal * numbers.eps * math.sqrt(self.inputs.shape[-1])
        sums = math.sqrt(self.inputs.shape[-1]) * torch.finfo(torch.float32).eps
        return max(numbers.eps, self.rounding) + 4 * max(sums, self.product_error) + smallest / size


def _inputs(module: nn.Module, live: Any, generator: torch.Generator) -> Tensor:
    """Random rows; of an embedding also the rows that were trained alone."""
    if isinstance(module, nn.Embedding):
        rows = torch.randint(0, module.num_embeddings, (4 * _ROWS,), generator=generator)
        trained = getattr(getattr(live, "token_adapter", None), "token_indices", None) or {}
        return torch.cat([rows, *(torch.tensor(list(indices)) for indices in trained.values())])
    weight: Any = module.weight
    # transformers' Conv1D (GPT-2) has its weight the other way around.
    width = module.in_features if isinstance(module, nn.Linear) else weight.shape[0]
    return torch.randn(_ROWS, width, generator=generator)


def _rounding(live: nn.Module) -> float:
    """Spacing of what 4-bit weights are made dense in and multiplied in, which is theirs whatever they are fed."""
    base: Any = base_module(live)
    if not is_linear4bit(base):
        return 0.0
    dtypes = {base.weight.quant_state.dtype, getattr(base, "compute_dtype", None) or torch.float32}
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _product_error(device: torch.device) -> float:
    """Relative error of a float32 product on this device as torch is set; TF32, say, makes it a thousand times more."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    return relative((x @ y).cpu().double() - x.cpu().double() @ y.cpu().double(), (x @ y).cpu())


def _part_of(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """How much of `expected` is in `found`, and the standard error of that; (1, ∞) if nothing is expected."""
    found, expected = found.double(), expected.double()
    size = float(expected.square().sum())
    if size == 0:
        return 1.0, math.inf
    part = float((found * expected).sum()) / size
    rest = float((found - part * expected).square().sum())
    return part, math.sqrt(rest / size / found.numel())
