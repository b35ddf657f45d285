"""An adapter alone as GGUF, for `llama-cli --lora` and what is built on it: one file of the base, and small ones.

The file holds A and B of every adapted matrix under the base tensor's GGUF name with `.lora_a` and `.lora_b`, and one
number alpha. llama.cpp computes W x + (alpha / r)·B(A x), with r from the matrix itself. PEFT's scale can be another
one (rsLoRA, rank and alpha patterns); what differs goes into B. Rows of B are in the order of the base tensor's rows,
which for q and k of Llama and Mistral is not Hugging Face's (`gguf_model.reordered`).

That is all the format can say. DoRA's magnitudes, trained biases, whole trained modules and tokens have no place in it;
such an adapter is refused, because without them it would answer like no model that was trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fastft.autograd.autocast import suspended_everywhere
from fastft.patching.plan import inner_model
from fastft.saving.adapter import check_adapter_target
from fastft.saving.check import SaveCheckError
from fastft.saving.folder import replacing
from fastft.saving.gguf_model import reordered, require_architecture
from fastft.saving.gguf_tensors import gguf_names
from fastft.saving.gguf_write import add_tensor_info
from fastft.saving.quantizers import quantize

__all__ = ["SavedGgufAdapter", "save_gguf_adapter"]

_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
_OTHERWISE = "Save it merged (save_merged, save_gguf), or as PEFT's own files (save_adapter)."


@dataclass(frozen=True)
class SavedGgufAdapter:
    """An adapter saved as GGUF that reads back as it is.

    Attributes:
        file: the GGUF.
        matrices: how many base matrices it adapts.
        alpha: as the file says it.
        largest_error: of any matrix's update, relative to the live one's.
    """

    file: Path
    matrices: int
    alpha: float
    largest_error: float


@dataclass(frozen=True)
class _Pair:
    """One adapted matrix: its GGUF name, A [r, in] and B [out, r] in GGUF's order, and PEFT's scale."""

    name: str
    a: Tensor
    b: Tensor
    scaling: float


def save_gguf_adapter(
    model: Any, folder: str | os.PathLike[str], *, adapter: str | None = None, dtype: str = "f32"
) -> SavedGgufAdapter:
    """Save one LoRA adapter of a PeftModel as GGUF; the base model, as GGUF, is another file.

    Args:
        model: a PeftModel over Llama, Mistral, Qwen2 or Qwen3; it is not changed.
        folder: replaced as a whole if it holds an earlier save; the file in it is called after it.
        adapter: its name; None: the active one.
        dtype: "f32", "f16" or "bf16".

    Raises:
        ImportError: the `gguf` package is not installed.
        TypeError: `model` is no PeftModel.
        ValueError: several adapters are active and none is named; an adapter with more than A and B, on other modules
            than matrices of the layers and an untied head, or that changes nothing; an unknown dtype; a folder that
            should not be replaced.
        OSError: no permission, no space, or a write failed. What was in `folder` is as before.
        SaveCheckError: the file does not hold what the model holds.
    """
    from peft import PeftModel

    if find_spec("gguf") is None:
        raise ImportError("save_gguf_adapter needs the gguf package: pip install 'fastft[gguf]'")
    if not isinstance(model, PeftModel):
        raise TypeError(f"{type(model).__name__} is no PeftModel, so it has no adapter. save_gguf saves whole models.")
    if dtype not in _TYPES:
        raise ValueError(f"dtype={dtype!r} is not known here: {', '.join(_TYPES)}.")
    adapter = _named(model, adapter)
    config: Any = model.peft_config[adapter]
    _refuse_more_than_lora(adapter, config)
    inner = inner_model(model)
    require_architecture(inner.config)
    pairs = list(_pairs(inner, adapter))
    if not any(bool(pair.a.any()) and bool(pair.b.any()) for pair in pairs):
        raise ValueError(f"the adapter {adapter!r} changes nothing: it is not trained (B is zero), or on no matrix.")
    alpha = float(config.lora_alpha)
    path = check_adapter_target(folder, [config.base_model_name_or_path])
    size = 4 * sum(pair.a.numel() + pair.b.numel() for pair in pairs)
    with replacing(path, size) as temporary:
        file = temporary / f"{path.name}-lora.gguf"
        _write(file, pairs, alpha, inner.config, dtype, path.name)
        largest = _compare(file, pairs, alpha, dtype)
    return SavedGgufAdapter(path / file.name, len(pairs), alpha, largest)


def _named(model: Any, adapter: str | None) -> str:
    """The adapter to save.

    Raises:
        ValueError: none, several, or one that the model does not have.
    """
    if adapter is None:
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"{len(active)} adapters are active ({', '.join(active)}): say which, adapter='…'.")
        return str(active[0])
    if adapter not in model.peft_config:
        raise ValueError(f"the model has no adapter {adapter!r}; it has {', '.join(model.peft_config)}.")
    return adapter


def _refuse_more_than_lora(adapter: str, config: Any) -> None:
    """The adapter's configuration must promise nothing but B·A.

    Raises:
        ValueError: it does; what, and what to do instead.
    """
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        raise ValueError(f"the adapter {adapter!r} is {config.peft_type}, and GGUF knows LoRA only. {_OTHERWISE}")
    more = [
        option
        for option in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias", "layer_replication")
        if getattr(config, option, None)
    ]
    if config.bias != "none":
        more.append(f"bias={config.bias!r}")
    if more:
        raise ValueError(
            f"the adapter {adapter!r} is more than B·A ({', '.join(more)}), and a GGUF adapter has no place for that. "
            f"{_OTHERWISE}"
        )


def _pairs(inner: Any, adapter: str) -> Iterator[_Pair]:
    """Every matrix that has the adapter, in GGUF's order.

    Raises:
        ValueError: an adapter on something that is no matrix of the layers, or another kind than plain LoRA.
    """
    from peft.tuners.lora import Linear, LoraLayer

    layers: dict[str, Any] = {
        f"{name}.weight": module
        for name, module in inner.named_modules()
        if isinstance(module, LoraLayer) and adapter in {**module.lora_A, **module.lora_embedding_A}
    }
    for name, layer in layers.items():
        kind = type(layer.lora_variant[adapter]).__name__ if adapter in layer.lora_variant else None
        plain = isinstance(layer, Linear) or type(layer).__name__ in ("Linear4bit", "Linear8bitLt")
        if kind is not None or not plain or layer.lora_A[adapter].weight.ndim != 2:
            raise ValueError(f"{name}: {kind or type(layer).__name__} cannot be in a GGUF adapter. {_OTHERWISE}")
        if layer is inner.get_output_embeddings() and inner.config.tie_word_embeddings:
            raise ValueError(
                f"{name}: the output is tied to the embedding, and GGUF has one tensor for both, so it cannot have an "
                f"adapter as output alone. {_OTHERWISE}"
            )
    for target, name in gguf_names(layers, inner.config).items():
        layer = layers[name]
        a, b = (part[adapter].weight.detach().float().cpu() for part in (layer.lora_A, layer.lora_B))
        yield _Pair(target, a, reordered(name, b, inner.config), float(layer.scaling[adapter]))


def _write(file: Path, pairs: list[_Pair], alpha: float, config: Any, dtype: str, name: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(None, require_architecture(config))
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[_TYPES[dtype]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for pair in pairs:
            add_tensor_info(writer, f"{pair.name}.lora_a", tuple(pair.a.shape), dtype)
            add_tensor_info(writer, f"{pair.name}.lora_b", tuple(pair.b.shape), dtype)
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for pair in pairs:
            applied = alpha / pair.a.shape[0]  # what llama.cpp multiplies with
            writer.write_tensor_data(quantize(pair.a, dtype))
            writer.write_tensor_data(quantize(pair.b * (pair.scaling / applied), dtype))
    finally:
        writer.close()


@suspended_everywhere()
def _compare(file: Path, pairs: list[_Pair], alpha: float, dtype: str) -> float:
    """Largest relative error of an update, as llama.cpp makes it from the file, on random inputs.

    Raises:
        SaveCheckError: more than the dtype allows.
    """
    import gguf

    stored = {
        tensor.name: torch.from_numpy(numpy.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(file).tensors
    }
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for pair in pairs:
        a, b = (stored[f"{pair.name}.lora_{part}"] for part in "ab")
        x = torch.randn(pair.a.shape[1], 4, generator=generator)
        expected = pair.scaling * (pair.b @ (pair.a @ x))
        found = alpha / len(a) * (b.view(pair.b.shape) @ (a.view(pair.a.shape) @ x))
        error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= (allowed := {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2}[dtype]):
            raise SaveCheckError(
                f"{pair.name}: the update read back differs by {error:.3g} of its size, and {dtype} allows {allowed}. "
                "Nothing was saved; dtype='f32' holds what the others cannot."
            )
        largest = max(largest, error)
    return largest
