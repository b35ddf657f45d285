"""What the benchmarks of peers share: the same QLoRA model through each, and one JSON line of what was measured.

A peer that patches at import must come first, so nothing here is imported before it is used: a script imports its peer,
then what it needs itself, then calls.
"""

import json
from typing import Any

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def nested_nf4(dtype: Any) -> Any:
    """A `BitsAndBytesConfig`: NF4, its scales quantized too, computing in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def load_stock(model: str, *, bits: int = 4, dtype: Any = None, device_map: int | str = 0) -> Any:
    """The model by transformers alone, in nested NF4 or in `dtype` (None: bfloat16)."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype or torch.bfloat16
    quantization = nested_nf4(dtype) if bits == 4 else None
    return AutoModelForCausalLM.from_pretrained(
        model, quantization_config=quantization, dtype=dtype, device_map=device_map, attn_implementation="sdpa"
    )


def stock_lora(rank: int = 16, dropout: float = 0.0) -> Any:
    """PEFT's configuration of the adapters that `load_fast` makes."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=rank, lora_dropout=dropout, target_modules=TARGETS, task_type="CAUSAL_LM")


def load_fast(
    impl: str,
    model: str,
    *,
    max_seq_length: int,
    checkpointing: bool | str,
    bits: int = 4,
    rank: int = 16,
    dropout: float = 0.0,
    memory_budget: str | None = None,
) -> tuple[Any, Any]:
    """The model with adapters, and its tokenizer, by Unsloth's or fastft's `FastLanguageModel`.

    Args:
        impl: "unsloth" or "fastft".
        model: a folder.
        max_seq_length: of a row.
        checkpointing: whether there is any; for fastft also a level for all layers.
        bits: 4 or 16.
        rank: of the adapters; alpha is the same.
        dropout: of the adapters.
        memory_budget: fastft's.
    """
    import torch

    if impl == "unsloth":
        from unsloth import FastLanguageModel as Fast

        options = {"use_gradient_checkpointing": "unsloth" if checkpointing else False}
    else:
        from fastft import FastLanguageModel as Fast

        options = {"use_gradient_checkpointing": checkpointing, "memory_budget": memory_budget}
    base, tokenizer = Fast.from_pretrained(
        model, max_seq_length=max_seq_length, load_in_4bit=bits == 4, dtype=torch.bfloat16
    )
    adapted = Fast.get_peft_model(
        base,
        r=rank,
        lora_alpha=rank,
        lora_dropout=dropout,
        target_modules=TARGETS,
        bias="none",
        random_state=0,
        **options,
    )
    return adapted, tokenizer


def say(row: dict[str, Any], out: str | None) -> None:
    """Print `row` as a line of JSON, and add it to the file `out`, if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")
