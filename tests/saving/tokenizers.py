"""Small tokenizers of the kinds that GGUF knows, built from no files."""

from __future__ import annotations

from typing import Any, Literal

VOCABULARY = 320
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"\p{N}" + _REST,
    "unknown": r"\p{L}+|\p{N}{1,4}",
}


def byte_level(split: Literal["gpt-2", "smollm", "llama-bpe", "qwen2", "unknown"] = "gpt-2") -> Any:
    """Byte-level BPE: <s>, </s>, <pad> at 0 to 2, then 256 bytes and a few merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("e", "r"), ("Ġ", "the")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*special, *alphabet, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    steps = []
    if split == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split != "gpt-2":
        steps = [pre_tokenizers.Split(Regex(SPLITS[split]), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    return tokenizer


def sentencepiece_like() -> Any:
    """BPE with byte fallback and a space put before the text, as converted SentencePiece models have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("t", "h"), ("▁", "th"), ("th", "e"), ("▁th", "e"), ("i", "n")]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *letters, *("".join(merge) for merge in merges)]
    tokens = list(dict.fromkeys(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
