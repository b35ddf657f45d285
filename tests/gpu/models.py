"""QLoRA models on the GPU for the tests here, their float64 references, and what they measured."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastft.patching import registry
from tests import support

DEVICE = "cuda"
TINY: dict[str, Any] = {}
MIDDLE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "initializer_range": 0.03,
}


def load_qlora(
    folder: pathlib.Path,
    dtype: torch.dtype,
    *,
    family: str = "llama",
    adapter_dtype: torch.dtype = torch.float32,
    nested: bool = True,
    **config: Any,
) -> Any:
    """A random model of `family` in NF4 on the GPU, random adapters of rank 8 on the seven projections.

    Args:
        folder: where the 16-bit checkpoint is written before it is loaded in 4 bits.
        dtype: of everything that is not 4-bit; also bitsandbytes' compute dtype.
        family: see `support.FAMILIES`.
        adapter_dtype: PEFT's own default is float32.
        nested: double quantization.
        config: overrides of `support.tiny_config`.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    support.build_model(family, **config).save_pretrained(folder)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization, device_map={"": DEVICE}, attn_implementation="sdpa"
    )
    model = support.add_lora(model.train(), r=8)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    return model


class _WideNorm(nn.Module):
    """RMSNorm in the dtype it is given; transformers' own would compute the reference in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def float64_reference(model: Any, family: str = "llama", **config: Any) -> Any:
    """The same network in float64, over the base weights as bitsandbytes dequantizes them (rounding included)."""
    import bitsandbytes

    reference = support.add_lora(support.build_model(family, **config), r=8).to(DEVICE).double()
    for module in reference.modules():
        for child, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, child, _WideNorm(norm))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameters[name].shape == parameter.shape:
                parameter.copy_(parameters[name])
        for name, module in model.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                reference.get_submodule(name).weight.copy_(weight)
    return reference


def copy_adapters(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the adapters of `source`."""
    theirs = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora_" in name:
                parameter.copy_(theirs[name])


def on_gpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch where the model is."""
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def loss_and_gradients(model: Any, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """`loss`, and the gradient of every trainable parameter of scale · loss, by name; all non-zero."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    (loss * scale).backward()
    return {"loss": loss.detach()} | support.trainable_gradients(model)


def wide_loss_and_gradients(reference: Any, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    """As `loss_and_gradients`, with the loss in float64 too: transformers' own is computed in float32."""
    reference.zero_grad(set_to_none=True)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = reference(**inputs).logits
    assert logits.dtype == torch.float64
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    (loss * scale).backward()
    return {"loss": loss.detach()} | support.trainable_gradients(reference)


def assert_ran_fast(model: Any) -> None:
    """Every decoder layer, the loss and the final norm ran on our parts, and nothing of them ran stock."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    sites = [site for module in inner.modules() if (site := registry.site_of(module)) is not None]
    used = [s for s in sites if s.part in ("decoder layer", "loss") or s.path.endswith("model.norm")]
    assert used, "the model is not planned"
    stock = [f"{s.path}: {s.last_reason}" for s in used if s.stock_runs]
    assert stock == []
    assert [s.path for s in used if not s.fast_runs] == []
