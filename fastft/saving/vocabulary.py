"""A Hugging Face tokenizer as GGUF metadata: the tokens, their kinds, the merges, and how text is split before them.

Two kinds of tokenizer can be written. Byte-level BPE (GPT-2's descendants) needs, beside its merges, the *name* of its
pre-tokenizer: llama.cpp has the split rules built in and a file only names them. The name is found from the rule
itself, never from the model's: a tokenizer whose rule is not in the table is refused, since a wrong name gives wrong
ids on some texts and no error. BPE over characters with byte fallback (SentencePiece's, as Llama 2 and Mistral have it)
is written as "llama"; its merges become scores, the first merge the highest, so that the greedy order is the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Vocabulary", "read_vocabulary"]

# gguf.TokenType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}


@dataclass
class Vocabulary:
    """What a GGUF says about a tokenizer.

    Attributes:
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece).
        pre: name of the pre-tokenizer.
        tokens: by id.
        kinds: gguf.TokenType by id.
        merges: for "gpt2".
        scores: for "llama".
        special: "bos", "eos", "unk", "pad" → id.
        add_bos: whether encoding a text puts a beginning-of-sequence token first.
        add_eos: whether it puts an end-of-sequence token last.
        add_space_prefix: whether a space is put before the text.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


def read_vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary of `tokenizer`, filled up to the model's `rows` embeddings with unused tokens.

    Raises:
        ValueError: a tokenizer that cannot be written as GGUF without changing what it does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.to_str()) if backend is not None else {}
    model = spec.get("model", {})
    if model.get("type") != "BPE":
        raise ValueError(
            f"{type(tokenizer).__name__} ({model.get('type') or 'no fast tokenizer'}) cannot be written as GGUF here: "
            "byte-level BPE and SentencePiece-like BPE (byte_fallback) can. Save merged and convert with llama.cpp."
        )
    pieces = model["vocab"] | {added["content"]: added["id"] for added in spec["added_tokens"]}
    if max(pieces.values()) >= rows:
        raise ValueError(
            f"the tokenizer has ids up to {max(pieces.values())} and the model {rows} embeddings: call "
            "model.resize_token_embeddings(len(tokenizer)) before training."
        )
    tokens, kinds = [f"[PAD{index}]" for index in range(rows)], [_UNUSED] * rows
    for piece, index in pieces.items():
        tokens[index], kinds[index] = piece, _NORMAL
    for added in spec["added_tokens"]:
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        vocabulary = _sentencepiece(spec, tokens, kinds, merges)
    else:
        vocabulary = Vocabulary("gpt2", _split_name(spec), tokens, kinds, merges=[" ".join(merge) for merge in merges])
    for kind in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{kind}_token_id", None)
        if index is not None:
            vocabulary.special[kind] = index
    ids = tokenizer("a")["input_ids"]
    vocabulary.add_bos = bool(ids) and ids[0] == tokenizer.bos_token_id
    vocabulary.add_eos = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return vocabulary


def _sentencepiece(spec: dict[str, Any], tokens: list[str], kinds: list[int], merges: list[Any]) -> Vocabulary:
    rank = {"".join(merge): -float(index) for index, merge in reversed(list(enumerate(merges)))}
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[index] = _BYTE
        elif token == spec["model"].get("unk_token"):
            kinds[index] = _UNKNOWN
    scores = [
        rank.get(token, -float(len(merges)) if kinds[index] == _NORMAL else 0.0) for index, token in enumerate(tokens)
    ]
    rules = json.dumps([spec.get("normalizer"), spec.get("pre_tokenizer")])
    prefix = '"Prepend"' in rules or '"prepend_scheme": "always"' in rules or '"prepend_scheme": "first"' in rules
    return Vocabulary("llama", "default", tokens, kinds, scores=scores, add_space_prefix=prefix)


def _split_name(spec: dict[str, Any]) -> str:
    """llama.cpp's name for the rule by which a byte-level tokenizer splits text.

    Raises:
        ValueError: a rule that has no known name.
    """
    rule = spec.get("pre_tokenizer") or {}
    steps = rule.get("pretokenizers", [rule])
    kinds = [step.get("type") for step in steps]
    if spec.get("normalizer") is None or spec["normalizer"].get("type") == "NFC":
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
            name = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
            if name is not None:
                return name
    raise ValueError(
        f"this tokenizer splits text by a rule that has no known name in GGUF ({json.dumps(rule)[:300]}, normalizer "
        f"{spec.get('normalizer')}). A wrong name would give wrong tokens without an error, so nothing is written; "
        "save merged, and convert with llama.cpp, which may know it."
    )
