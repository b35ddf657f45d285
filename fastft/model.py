"""FastModel: load a model, put a LoRA on it, both made fast.

Nothing here replaces Hugging Face: the model is a transformers model, the adapter a PEFT adapter, the tokenizer what
AutoTokenizer gives. This file puts the calls in order; each decision has its file in `loading/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fastft.loading.adapter import (
    check_names,
    enable_checkpointing,
    ignoring_checkpointing_rename,
    keep_existing,
    require_trainable,
    seeded,
)
from fastft.loading.checkpoint import load_config, load_tokenizer, note_native_window, quantization_for
from fastft.loading.device import mapped_devices, resolve_device_map
from fastft.loading.dtype import choose_dtype
from fastft.loading.gguf import dequantized_folder
from fastft.loading.source import HUB_OPTIONS, Source, adapter_base, has_tokenizer, resolve_source
from fastft.patching.plan import inner_model, patch
from fastft.saving.methods import bind

if TYPE_CHECKING:
    from fastft.saving.compressed.checkpoint import SavedCompressed
    from fastft.saving.gguf_file import SavedGguf
    from fastft.saving.gguf_lora import SavedGgufAdapter
    from fastft.saving.importance import Importance
    from fastft.saving.merged import SavedModel

__all__ = ["TARGET_MODULES", "FastLanguageModel", "FastModel", "patch"]

TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# All mean the same today: every layer keeps its input and is run again in the backward pass.
# What `use_gradient_checkpointing` may be, and the level it names; "auto" leaves it to the planner.
_CHECKPOINTING: dict[bool | str, str] = {
    True: "auto",
    "auto": "auto",
    "fastft": "auto",
    "unsloth": "auto",
    False: "keep",
    "keep": "keep",
    "lean": "lean",
    "recompute": "recompute",
    "offload": "offload",
}

# Arguments of peft.get_peft_model itself; every other keyword is a LoraConfig field.
_WRAPPING_OPTIONS = ("adapter_name", "autocast_adapter_dtype", "low_cpu_mem_usage")


class FastModel:
    """Entry points for loading and adapting. `FastLanguageModel` is this same object."""

    @staticmethod
    def from_pretrained(
        model_name: str | os.PathLike[str],
        max_seq_length: int | None = 2048,
        dtype: str | torch.dtype | None = None,
        load_in_4bit: bool = True,
        device_map: Any = None,
        token: str | bool | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        quantization_config: Any = None,
        gguf_file: str | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Load a causal language model and its tokenizer, and make the model fast.

        Args:
            model_name: a local folder, a hub name, an adapter (its base is loaded with it, and it is trainable), an
                already quantized checkpoint (kept as it is), or a .gguf file.
            max_seq_length: longest document the model accepts; longer ones raise. RoPE is not touched. None: no limit.
            dtype: what activations and unquantized weights are in: a torch dtype or its name. None chooses by compute
                capability: bfloat16 from 8.0, float16 below, float32 on the CPU.
            load_in_4bit: quantize a checkpoint that is not quantized yet to nested NF4. False: weights in `dtype`.
            device_map: as in transformers. None: this process's GPU (its local rank's under torchrun), else the CPU.
            token: Hugging Face access token.
            revision: branch, tag or commit on the hub (of the adapter, where `model_name` is one).
            trust_remote_code: allow code that comes with the checkpoint to run.
            attn_implementation: as in transformers.
            quantization_config: a transformers quantization configuration instead of the NF4 one.
            gguf_file: a GGUF file in the folder or repository. It is unpacked once into a 16-bit folder in the cache.
            strict: raise where a part of the model could not be made fast, instead of running it stock.
            **kwargs: passed on to `AutoModelForCausalLM.from_pretrained`.

        Returns:
            (model, tokenizer). The model is in eval mode, as transformers returns it.

        Raises:
            FileNotFoundError: a folder or file that is not there, or a folder that holds no model.
            OSError: the hub does not give the name, or there is no tokenizer beside the model.
            ValueError: a dtype that does not exist or that this GPU does not have; a folder that could mean two things.
            RuntimeError: a CUDA device was asked for that this process cannot use.
            ImportError: bitsandbytes or gguf is needed and not installed.
        """
        if "torch_dtype" in kwargs:  # the name before transformers 5
            legacy = kwargs.pop("torch_dtype")
            dtype = legacy if dtype is None else dtype
        device_map = resolve_device_map(device_map)
        devices = mapped_devices(device_map)
        dtype = choose_dtype(dtype, devices)
        hub = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        source = resolve_source(model_name, gguf_file=gguf_file, token=token, revision=revision, **hub)
        adapter = source if source.kind == "adapter" else None
        if adapter is not None:
            source = adapter_base(adapter)
        if source.gguf_path is not None:
            folder = dequantized_folder(source.gguf_path, trust_remote_code=trust_remote_code)
            source = Source("model", str(folder), local=True)

        config, options = load_config(source, trust_remote_code=trust_remote_code, options=kwargs)
        tokenizer_source = adapter if adapter is not None and has_tokenizer(adapter) else source
        tokenizer = load_tokenizer(tokenizer_source, trust_remote_code=trust_remote_code)
        quantization = quantization_for(config, load_in_4bit=load_in_4bit, requested=quantization_config, dtype=dtype)
        if quantization is not None:
            options["quantization_config"] = quantization
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation

        compiling = compile_during_load(config, dtype, devices)

        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            source.name,
            config=config,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            **source.hub,
            **options,
        )
        note_native_window(config, max_seq_length)
        if adapter is not None:
            model = _with_adapter(model, adapter)
        model = patch(model, strict=strict, max_seq_length=max_seq_length)
        if compiling is not None:
            compiling(inner_model(model))
        return bind(model), tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Sequence[str] | str | None = TARGET_MODULES,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: bool | str = True,
        random_state: int | None = 3407,
        layers_to_transform: int | list[int] | None = None,
        use_rslora: bool = False,
        modules_to_save: list[str] | None = None,
        init_lora_weights: bool | str = True,
        memory_budget: str | int | float | None = None,
        memory_levels: str | Sequence[str] | Mapping[int, str] | None = None,
        **peft_kwargs: Any,
    ) -> Any:
        """Put a LoRA on `model` (PEFT's own objects; files saved from it load in plain PEFT).

        Args:
            model: a model from `from_pretrained` or any transformers model. A PeftModel that already carries this
                adapter is returned as it is, its weights kept.
            r: rank.
            target_modules: names, PEFT's "all-linear", or a regular expression. None means the seven projections.
            lora_alpha: the update is scaled by lora_alpha / r (by lora_alpha / sqrt(r) with `use_rslora`).
            lora_dropout: dropout on the adapter's input.
            bias: "none", "all" or "lora_only", as in PEFT.
            use_gradient_checkpointing: True (or "auto"; "fastft" and "unsloth" say the same) lets the memory planner
                give each layer the fastest level that fits. "keep" (or False), "lean", "recompute" and "offload" mean
                just that for all layers, whatever a trainer's own `gradient_checkpointing` says.
            random_state: seed of the initialization; the process's generators are as before afterwards. None: unseeded.
            layers_to_transform: indices of the layers to adapt; None: all.
            use_rslora: rank-stabilized scaling.
            modules_to_save: modules that are trained in full and saved with the adapter.
            init_lora_weights: PEFT's initialization.
            memory_budget: see `fastft.patch`.
            memory_levels: see `fastft.patch`.
            **peft_kwargs: further fields of `peft.LoraConfig`, or `adapter_name`, `autocast_adapter_dtype`,
                `low_cpu_mem_usage` of `peft.get_peft_model`.

        Returns:
            The PeftModel. Adapter weights are float32 also over a 16-bit model.

        Raises:
            ValueError: a name that matches no module, a layer that is not there, nothing trainable, another adapter
                already on the model, or an unknown `use_gradient_checkpointing`.
            TypeError: a keyword that LoraConfig does not know.
        """
        from peft import LoraConfig, PeftModel, get_peft_model

        level = _level_named(use_gradient_checkpointing)
        wrapping = {name: peft_kwargs.pop(name) for name in _WRAPPING_OPTIONS if name in peft_kwargs}
        targets = TARGET_MODULES if target_modules is None else target_modules
        fields: dict[str, Any] = {
            "task_type": "CAUSAL_LM",
            "r": r,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "lora_alpha": lora_alpha,
            "lora_dropout": lora_dropout,
            "bias": bias,
            "layers_to_transform": layers_to_transform,
            "use_rslora": use_rslora,
            "modules_to_save": modules_to_save,
            "init_lora_weights": init_lora_weights,
        }
        config = LoraConfig(**(fields | peft_kwargs))
        with ignoring_checkpointing_rename():
            if isinstance(model, PeftModel):
                keep_existing(model, config, wrapping.get("adapter_name"))
            else:
                check_names(model, config)
                with seeded(model, random_state):
                    model = get_peft_model(model, config, **wrapping)
        require_trainable(model)
        patch(model, memory_budget=memory_budget, memory_levels=level)
        if memory_levels is not None:  # over what was named for all
            patch(model, memory_levels=memory_levels)
        if level != "keep" or memory_levels is not None:  # after planning: planned layers take it up as their level
            enable_checkpointing(model)
        compile_ahead(model)
        return bind(model)

    @staticmethod
    def save_merged(
        model: Any,
        tokenizer: Any,
        folder: str | os.PathLike[str],
        *,
        base: Literal["dequantized", "original"] = "dequantized",
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> SavedModel:
        """See `fastft.saving.merged.save_merged`; `model.save_pretrained_merged(folder, tokenizer)` is the same."""
        from fastft.saving.merged import save_merged

        return save_merged(model, tokenizer, folder, base=base, dtype=dtype, max_shard_size=max_shard_size)

    @staticmethod
    def save_gguf(
        model: Any,
        tokenizer: Any,
        folder: str | os.PathLike[str],
        *,
        quantization: str = "q8_0",
        size: int | str | None = None,
        calibration: Sequence[str] | Importance | None = None,
        **merge_options: Any,
    ) -> SavedGguf:
        """See `fastft.saving.gguf_file.save_gguf`; `model.save_pretrained_gguf(folder, tokenizer)` is the same."""
        from fastft.saving.gguf_file import save_gguf

        return save_gguf(
            model, tokenizer, folder, quantization=quantization, size=size, calibration=calibration, **merge_options
        )

    @staticmethod
    def save_gguf_adapter(
        model: Any, folder: str | os.PathLike[str], *, adapter: str | None = None, dtype: str = "f32"
    ) -> SavedGgufAdapter:
        """See `fastft.saving.gguf_lora.save_gguf_adapter`; `model.save_pretrained_gguf_adapter(folder)` is the same."""
        from fastft.saving.gguf_lora import save_gguf_adapter

        return save_gguf_adapter(model, folder, adapter=adapter, dtype=dtype)

    @staticmethod
    def save_compressed(
        model: Any,
        tokenizer: Any,
        folder: str | os.PathLike[str],
        *,
        scheme: str = "fp8_dynamic",
        calibration: Iterable[Any] | None = None,
        **options: Any,
    ) -> SavedCompressed:
        """See `fastft.saving.compressed.live.save_compressed`; `model.save_pretrained_compressed` is the same."""
        from fastft.saving.compressed.live import save_compressed

        return save_compressed(model, tokenizer, folder, scheme=scheme, calibration=calibration, **options)

    @staticmethod
    def save_adapter(model: Any, tokenizer: Any, folder: str | os.PathLike[str]) -> Path:
        """See `fastft.saving.adapter.save_adapter`: PEFT's own files, read back and compared, and the tokenizer."""
        from fastft.saving.adapter import save_adapter

        return save_adapter(model, tokenizer, folder)


FastLanguageModel = FastModel  # the name that people who come from Unsloth type


def compile_during_load(
    config: Any, dtype: torch.dtype, devices: Iterable[torch.device]
) -> Callable[[Any], None] | None:
    """Begin compiling the kernels of a model that is about to be read onto a GPU.

    Returns:
        To be called with the transformers model when it is there: its first step then waits for what is still
        compiling. None where nothing has begun.
    """
    device = next((device for device in devices if device.type == "cuda"), None)
    if device is None:
        return None
    from fastft.patching import warm

    return warm.begin(config, dtype, device)


def compile_ahead(model: Any) -> None:
    """Compile the model's kernels in threads, where there is a GPU to run them on."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        from fastft.patching import warm

        warm.start(inner_model(model))


def _level_named(value: bool | str) -> str:
    level = _CHECKPOINTING.get(value) if isinstance(value, bool | str) else None
    if level is None:
        raise ValueError(
            f"use_gradient_checkpointing={value!r} is not known. Give True (the planner decides), False, or a level: "
            "'keep', 'lean', 'recompute', 'offload'."
        )
    return level


def _with_adapter(model: Any, adapter: Source) -> Any:
    from peft import PeftModel

    with ignoring_checkpointing_rename():
        return PeftModel.from_pretrained(model, adapter.name, is_trainable=True, **adapter.hub)
