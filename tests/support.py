"""What the tests build: tiny models of each family, adapters, batches and a tokenizer, from seeds and no files.

Nothing here imports transformers, peft or bitsandbytes until it is called: tests of import order import this too.

Sizes are multiples of 64 where bitsandbytes quantizes: its CPU dequantization is wrong for some other widths.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = 128

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, the test's own stream untouched outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """Config of a two-layer model: hidden 64, intermediate 128, 4 query and 2 key heads of 16, vocabulary 128.

    The initializer is wide (0.1): at the usual 0.02 the attention scores of so small a model are nearly equal, and a
    test would hardly see attention at all.
    """
    from transformers import AutoConfig

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(family, **(settings | overrides))


def build_model(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    attn_implementation: str = "sdpa",
    **overrides: Any,
) -> Any:
    """Random causal LM of `family` on the CPU, in training mode; the same seed gives the same weights in every dtype.

    Norm weights and biases are drawn too: at their usual ones and zeros, code that drops them would pass every test.
    """
    from transformers import AutoModelForCausalLM

    with seeded(seed):
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **overrides), dtype=torch.float32, attn_implementation=attn_implementation
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif name.endswith(".bias"):
                    parameter.normal_(std=0.1)
    return model.to(dtype).train()


def add_lora(model: Any, *, seed: int = 1, r: int = 4, target_modules: Any = PROJECTIONS, **lora_settings: Any) -> Any:
    """PeftModel around `model`, both halves of every adapter random: with B = 0, as PEFT starts, A has no gradient."""
    from peft import LoraConfig, get_peft_model

    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(r=r, target_modules=targets, task_type="CAUSAL_LM", **({"lora_alpha": 2 * r} | lora_settings))
    with seeded(seed):
        peft_model = get_peft_model(model, config)
        randomize_adapters(peft_model, seed)
    return peft_model.train()


def randomize_adapters(model: torch.nn.Module, seed: int = 1) -> None:
    """Draw every LoRA matrix of `model` anew, at a size at which the adapter moves the output."""
    with seeded(seed), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)


def load_4bit(
    model: Any,
    folder: pathlib.Path,
    *,
    quant_type: Literal["nf4", "fp4"] = "nf4",
    nested: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """`model` saved to `folder` and loaded again with 4-bit projections, as a user's checkpoint would be."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(folder)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization)
    for module in loaded.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            # In evaluation bitsandbytes repacks a CPU weight in place where the processor has AVX512-BF16, and training
            # on it afterwards is wrong: a stock model must not do that while it serves as the reference.
            module.support_avx512bf16_for_cpu = False
    return loaded.train()


def random_batch(
    seed: int = 0, *, rows: int = 2, length: int = 13, vocabulary: int = VOCABULARY, padded: bool = False
) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` [rows, length], a third of the labels ignored; `padded` adds a right-padded mask."""
    with seeded(seed):
        input_ids = torch.randint(3, vocabulary, (rows, length))
        ignored = torch.rand(rows, length) < 0.3
    labels = input_ids.masked_fill(ignored, -100)
    if not padded:
        return {"input_ids": input_ids, "labels": labels}
    attention_mask = torch.ones_like(input_ids)
    for row in range(1, rows):  # row 0 stays full
        attention_mask[row, max(2, length - 3 * row) :] = 0
    is_padding = attention_mask == 0
    return {
        "input_ids": input_ids.masked_fill(is_padding, 0),
        "attention_mask": attention_mask,
        "labels": labels.masked_fill(is_padding, -100),
    }


def trainable_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradient of every trainable parameter, copied; a missing or zero one fails, since comparing it proves nothing."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.count_nonzero() > 0, f"{name} has a gradient of zeros"
        gradients[name] = parameter.grad.detach().clone()
    assert gradients, "the model has no trainable parameter"
    return gradients


def build_tokenizer() -> Any:
    """Tokenizer of 128 ids over printable ASCII and newline: any such text goes to ids and back unchanged.

    Ids 0 to 3 are <pad>, <bos>, <eos> and <unk>, as `tiny_config` has them. It adds no special token by itself; its
    chat template writes one <bos> and marks the assistant's words for `assistant_only_loss`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    pairs = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng ou".split()
    tokens = [*special, *characters, *pairs]
    assert len(tokens) == VOCABULARY
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(pair[0], pair[1]) for pair in pairs],
            unk_token="<unk>",
        )
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
