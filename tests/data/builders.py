"""Tokenizers for the data tests, of each kind that spells text differently, built from a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LINES = (
    "The capital of France is Paris.\n\nuser assistant system model\n",
    "### Instruction:\nWrite a Response.\n\n### Response:\nUSER: ASSISTANT: 42",
)
# Every token the formats under test use; in one vocabulary, so that one tokenizer does for all of them.
SPECIAL = (
    "<pad> <s> </s> <|im_start|> <|im_end|> <|im_sep|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|>"
).split()
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4.\n\nReally: four"},
    {"role": "user", "content": "Sure,\nassistant?"},
    {"role": "assistant", "content": "Yes — ünï 你好."},
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, special: Sequence[str] = SPECIAL, *, adds_bos: bool = False, **settings: Any
) -> Any:
    """Byte-level BPE (GPT-2's kind); Chinese characters take several tokens."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    layers = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _built(models.BPE(), trainer, layers, chat_template, special, adds_bos, settings)


def metaspace_tokenizer(chat_template: str | None = CHATML, special: Sequence[str] = SPECIAL) -> Any:
    """BPE over words with a leading "▁" and no other way to spell an unknown character than bytes (Llama-2's kind)."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_as_tokens], show_progress=False)
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    layers = pre_tokenizers.Metaspace(), decoder
    model = models.BPE(byte_fallback=True, unk_token="<unk>")
    return _built(model, trainer, layers, chat_template, special, False, {"unk_token": "<unk>"})


def _built(
    model: Any, trainer: Any, layers: Any, chat_template: Any, special: Any, adds_bos: bool, settings: Any
) -> Any:
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = layers
    backend.train_from_iterator(LINES, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    names = {name: token for name, token in names.items() if token in special} | settings
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = chat_template
    return tokenizer


def word_tokenizer() -> Any:
    """Whole words, joined by spaces when decoded: white space is lost."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = "<pad> <bos> <eos> <unk> <user> <bot> a hello there world who is it me again".split()
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:6]])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<user> {{ message.content }} "
        "{% else %}<bot> {{ message.content }} {{ eos_token }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot> {% endif %}"
    )
    return tokenizer


def trained_text(tokenizer: Any, row: Any) -> list[str]:
    """The runs of trained tokens of a row, decoded."""
    runs: list[list[int]] = []
    previous = -100
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        if label != -100:
            assert label == token
            if previous == -100:
                runs.append([])
            runs[-1].append(token)
        previous = label
    return [tokenizer.decode(run) for run in runs]
