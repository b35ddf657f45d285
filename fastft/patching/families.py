"""What each model family is, as data. Adding a family is adding a declaration here; there is no code per family.

A declaration says which classes of a transformers module play which part and which of the few variations they have.
What a declaration cannot express runs stock. Sources: the modeling files of transformers 5.17 to 5.24, compared class
by class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastft.kernels.rms_norm import NormMode


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Args:
        model_type: `config.model_type`.
        module: the transformers modeling module.
        prefix: class name prefix: `<prefix>RMSNorm`, `<prefix>MLP`, `<prefix>Attention`, `<prefix>DecoderLayer`,
            `<prefix>ForCausalLM`.
        norm_mode: rounding mode of its RMSNorm (kernels/rms_norm.py).
        head_norms: Q and K are normalized over head_dim (`q_norm`, `k_norm`).
        attention_arguments: further keywords its attention passes to the attention interface, as a path from the
            attention module ("sliding_window", "config.sliding_window").
        masks_by_layer_type: its backbone makes a mask for each of `config.layer_types` (and takes a mapping of them),
            instead of one for all layers, windowed by `config.sliding_window` where that is set.
    """

    model_type: str
    module: str
    prefix: str
    norm_mode: NormMode = "llama"
    head_norms: bool = False
    attention_arguments: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    masks_by_layer_type: bool = False


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("llama", "transformers.models.llama.modeling_llama", "Llama"),
            Family(
                "mistral",
                "transformers.models.mistral.modeling_mistral",
                "Mistral",
                attention_arguments=MappingProxyType({"sliding_window": "config.sliding_window"}),
            ),
            Family(
                "qwen2",
                "transformers.models.qwen2.modeling_qwen2",
                "Qwen2",
                attention_arguments=MappingProxyType({"sliding_window": "sliding_window"}),
                masks_by_layer_type=True,
            ),
            Family(
                "qwen3",
                "transformers.models.qwen3.modeling_qwen3",
                "Qwen3",
                head_norms=True,
                attention_arguments=MappingProxyType({"sliding_window": "sliding_window"}),
                masks_by_layer_type=True,
            ),
        )
    }
)
