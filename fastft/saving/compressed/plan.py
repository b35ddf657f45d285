"""What a compression will do, decided before anything is merged: which layers, by which rounding, on which data.

Rounding is to nearest where there is no data. With data the integer formats get GPTQ, which moves what rounding loses
in one column into the columns not rounded yet; INT8 gets SmoothQuant before it, which moves outliers of the activations
into the weights (a norm's scale is divided by what the columns after it are multiplied by). Those are llm-compressor's
own recipes. SmoothQuant is used where the norms are known to feed the projections directly. In Gemma they do not, and
llm-compressor's own table treats it as if they did: logits of a small Gemma are then off by 0.8 of their size, against
0.02 without.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fastft.saving.compressed.calibration import calibration_rows
from fastft.saving.compressed.schemes import Scheme, resolve_scheme

__all__ = ["Algorithm", "Plan", "plan_compression"]

logger = logging.getLogger(__name__)

Algorithm = Literal["rtn", "gptq"]
_SMOOTHED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
_AFTER_INPUT_NORM = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_AFTER_SECOND_NORM = ("gate_proj", "up_proj", "gate_up_proj")
_GROUP_SIZES = (128, 64, 32)  # that the serving kernels for W4A16 have


@dataclass(frozen=True)
class Plan:
    """A compression before it is run.

    Attributes:
        scheme: the format.
        algorithm: how weights are rounded: to nearest, or GPTQ.
        group_size: weights that share a scale; None if the scheme has no groups.
        smoothing: SmoothQuant's strength; None: not smoothed.
        ignore: layers that stay as they are, by llm-compressor's rules.
        targets: module name → (out, in) of the layers that are quantized.
        smoothed: weight name → name of the norm weight that smoothing scales against it.
        rows: calibration, token ids [1, length] each; empty: none.
        bytes: of the compressed tensors, a few percent too many.
    """

    scheme: Scheme
    algorithm: Algorithm
    group_size: int | None
    smoothing: float | None
    ignore: tuple[str, ...]
    targets: dict[str, tuple[int, int]]
    smoothed: dict[str, str] = field(default_factory=dict)
    rows: list[Tensor] = field(default_factory=list)
    bytes: int = 0


def plan_compression(
    model_class: Any,
    config: Any,
    tokenizer: Any,
    dtype: torch.dtype,
    *,
    scheme: str,
    calibration: Iterable[Any] | None = None,
    algorithm: Algorithm | None = None,
    group_size: int | None = None,
    smoothing_strength: float | None = 0.8,
    ignore: Sequence[str] = ("lm_head",),
    max_calibration_samples: int = 512,
    max_seq_length: int = 2048,
) -> Plan:
    """Decide and refuse; nothing of the model is read but its configuration.

    Args:
        model_class: of the plain model.
        config: of the plain model.
        tokenizer: for calibration texts.
        dtype: of the plain model, and of what stays uncompressed.
        scheme, calibration, algorithm, group_size, smoothing_strength, ignore, max_calibration_samples,
            max_seq_length: as `save_compressed`.

    Raises:
        ValueError: an unknown scheme or option; data that is missing or cannot be read; layers the format cannot take.
    """
    resolved = resolve_scheme(scheme)
    _check_options(resolved, calibration, algorithm, group_size, smoothing_strength)
    if resolved.only_bfloat16 and dtype != torch.bfloat16:
        raise ValueError(
            f"scheme={resolved.preset.lower()!r} goes with bfloat16 alone, and this is {dtype}: compressed-tensors "
            "loads these weights as bfloat16. Save with dtype='bfloat16'."
        )
    with torch.device("meta"):
        plain = model_class(copy.deepcopy(config))
    group = group_size or (resolved.group if isinstance(resolved.group, int) else None)
    targets = _targets(plain, ignore)
    _check_groups(resolved, group, targets)
    rows: list[Tensor] = []
    if calibration is not None:
        rows = calibration_rows(
            calibration, tokenizer, vocabulary=plain.get_input_embeddings().weight.shape[0],
            max_samples=max_calibration_samples, max_length=max_seq_length,
        )  # fmt: skip
    if algorithm is None:
        algorithm = "gptq" if rows and resolved.rounds_by_data else "rtn"
    smooths = resolved.preset == "W8A8" and algorithm == "gptq" and smoothing_strength is not None
    smoothed = _smoothed(plain) if smooths else {}
    if rows and algorithm == "rtn" and not resolved.needs_calibration:
        logger.warning(
            "fastft: calibration makes no difference to %s rounded to nearest: its scales come from the weights, and "
            "from each token while serving. algorithm='gptq' would use it.", resolved.preset,
        )  # fmt: skip
        rows = []
    return Plan(
        scheme=resolved, algorithm=algorithm, group_size=group, smoothing=smoothing_strength if smoothed else None,
        ignore=tuple(ignore), targets=targets, smoothed=smoothed, rows=rows,
        bytes=_bytes(plain, resolved, group, targets, dtype.itemsize),
    )  # fmt: skip


def _check_options(
    scheme: Scheme, calibration: Any, algorithm: str | None, group_size: int | None, smoothing: float | None
) -> None:
    name = scheme.preset.lower()
    if algorithm not in (None, "rtn", "gptq"):
        raise ValueError(f"algorithm={algorithm!r} is not known: 'rtn' (to nearest), 'gptq', or None (the usual one).")
    if calibration is None and scheme.needs_calibration:
        without = {"FP8": "fp8_dynamic", "NVFP4": "nvfp4a16"}[scheme.preset]
        raise ValueError(
            f"scheme={name!r} stores scales of the activations, which only data can tell: pass calibration=texts (a "
            f"few hundred like those the model will see), or take {without!r}, which needs none."
        )
    if calibration is None and algorithm == "gptq":
        raise ValueError("algorithm='gptq' rounds by data: pass calibration=texts, or take algorithm='rtn'.")
    if group_size is not None and scheme.preset != "W4A16":
        raise ValueError(f"group_size goes with 'w4a16'; the groups of {name!r} are part of the format.")
    if group_size is not None and group_size not in _GROUP_SIZES:
        raise ValueError(f"group_size={group_size!r}: {', '.join(map(str, _GROUP_SIZES))} are what can be served.")
    if smoothing is not None and not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing_strength={smoothing!r} is not between 0 and 1; None is no smoothing.")


def _targets(plain: Any, ignore: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Linear layers that `ignore` leaves, by compressed-tensors' own matching of names, classes and expressions."""
    from compressed_tensors.utils import match_named_modules

    if isinstance(ignore, str):
        raise ValueError(f"ignore is a list of names: [{ignore!r}].")
    unknown = [entry for entry in ignore if not any(True for _ in match_named_modules(plain, [entry]))]
    if unknown:
        raise ValueError(
            f"ignore={unknown} matches no module of {type(plain).__name__}. Give whole names "
            "('model.layers.0.mlp.up_proj'), or 're:' and a regular expression ('re:.*down_proj')."
        )
    targets = {name: module.weight for name, module in match_named_modules(plain, ["Linear"], list(ignore))}
    if not targets:
        raise ValueError(f"{type(plain).__name__} has no Linear layer outside ignore={list(ignore)}: nothing to do.")
    experts = [name for name, module in plain.named_modules() if type(module).__name__.endswith("Experts")]
    if experts:
        raise ValueError(
            f"{type(plain).__name__} has experts ({experts[0]}, …), whose weights are no Linear layers: they would "
            "stay uncompressed. Mixtures of experts are not supported here; llm-compressor has recipes for them."
        )
    return {name: (weight.shape[0], weight.shape[1]) for name, weight in targets.items()}


def _check_groups(scheme: Scheme, group: int | None, targets: dict[str, tuple[int, int]]) -> None:
    """Rows must be whole groups: neither compressed-tensors nor the serving kernels have a group that is cut short."""
    if group is None:
        return
    cut = {name: columns for name, (_, columns) in targets.items() if columns % group}
    if not cut:
        return
    layer, columns = next(iter(cut.items()))
    fitting = [size for size in _GROUP_SIZES if all(columns % size == 0 for _, columns in targets.values())]
    if scheme.preset == "W4A16" and fitting:
        advice = f"Pass group_size={fitting[0]}"
    else:
        kinds = sorted({name.rpartition(".")[2] for name in cut})
        advice = "Leave them as they are: ignore=" + str(["lm_head", *(f"re:.*{kind}$" for kind in kinds)])
    raise ValueError(
        f"scheme={scheme.preset.lower()!r} has one scale for {group} weights of a row, and the rows of {len(cut)} "
        f"layers are no multiple of that ({layer}: {columns}, …). {advice}, or choose a scheme without groups "
        "('fp8_dynamic', 'int8')."
    )


def _smoothed(plain: Any) -> dict[str, str]:
    """Projection's weight → norm's weight, in families whose norms feed the projections directly."""
    if plain.config.model_type not in _SMOOTHED_FAMILIES:
        return {}
    found = {}
    for name, _ in plain.named_modules():
        above, _, last = name.rpartition(".")
        layer = above.rpartition(".")[0]
        if last in _AFTER_INPUT_NORM:
            found[f"{name}.weight"] = f"{layer}.input_layernorm.weight"
        elif last in _AFTER_SECOND_NORM:
            found[f"{name}.weight"] = f"{layer}.post_attention_layernorm.weight"
    return found


def _bytes(
    plain: Any, scheme: Scheme, group: int | None, targets: dict[str, tuple[int, int]], element_size: int
) -> int:
    quantized = sum(math.prod(shape) for shape in targets.values())
    seen = {id(parameter): parameter.numel() for parameter in plain.parameters()}
    per_weight = scheme.bits / 8 + (2 / group if group else 0.01)
    return int(quantized * per_weight * 1.05) + (sum(seen.values()) - quantized) * element_size
