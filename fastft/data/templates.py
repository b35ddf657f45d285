"""Chat templates by name, for base models that come without one.

A tokenizer's own template is the one its model was trained with, so it comes first: a name is for a model that has
none, or that is to be taught another format. The templates are ours, written from the published formats, and every
one marks the answers with `{% generation %}`, which is what TRL's `assistant_only_loss` reads. A template is text and
nothing more: no token is added, and neither EOS nor the padding token changes unless it is asked for. Where the
template ends an answer with something else than EOS, generation would run on past the answer, so that is said.
"""

from __future__ import annotations

import copy
import warnings
from importlib import resources
from typing import Any

# What ends an answer, and what else a model should know as one token. None: the tokenizer's own EOS.
_END: dict[str, str | None] = {
    "alpaca": None,
    "chatml": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "llama-2": None,
    "llama-3": "<|eot_id|>",
    "mistral": None,
    "phi-3": "<|end|>",
    "phi-4": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "vicuna": None,
    "zephyr": None,
}
_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>",),
    "gemma": ("<start_of_turn>",),
    "llama-3": ("<|start_header_id|>", "<|end_header_id|>"),
    "phi-3": ("<|user|>", "<|assistant|>"),
    "phi-4": ("<|im_start|>", "<|im_sep|>"),
    "qwen2.5": ("<|im_start|>",),
}
CHAT_TEMPLATES = tuple(_END)


def get_chat_template(tokenizer: Any, name: str | None = None, *, set_eos_token: bool = False) -> Any:
    """A copy of `tokenizer` that renders conversations in the format `name`.

    Args:
        tokenizer: any Hugging Face tokenizer; it is not changed.
        name: one of `fastft.data.templates.CHAT_TEMPLATES`. None keeps the tokenizer's own template.
        set_eos_token: also make the template's end of turn the copy's EOS token.

    Returns:
        The copy. Use it from here on, for training and for generation. With `name=None` it has its own template still.

    Raises:
        ValueError: the name is not known, there is no template of its own to keep, or `set_eos_token` asks for a token
            the vocabulary does not have.

    Warns:
        UserWarning: answers end with something else than EOS, or the format's markers are no tokens of this vocabulary.
    """
    if name is None:
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer has no chat template of its own. Name one of {', '.join(CHAT_TEMPLATES)}.")
        return copy.deepcopy(tokenizer)
    if name not in _END:
        raise ValueError(
            f"no chat template is called {name!r}; there are {', '.join(CHAT_TEMPLATES)}. A template of your own is "
            "set "
            "with tokenizer.chat_template = text."
        )
    vocabulary = tokenizer.get_vocab()
    end = _END[name] or tokenizer.eos_token
    if end is None:
        raise ValueError(f"the format {name} ends answers with EOS, and the tokenizer has no eos_token. Set one first.")
    if set_eos_token and end not in vocabulary:
        raise ValueError(
            f"the format {name} ends answers with {end!r}, which is no token of this vocabulary, so it cannot become "
            "EOS. "
            f"Add it first: tokenizer.add_special_tokens({{'additional_special_tokens': [{end!r}]}}), and resize the "
            "model's embeddings."
        )
    result = copy.deepcopy(tokenizer)
    result.chat_template = resources.files("fastft.data").joinpath(f"chat_templates/{name}.jinja").read_text("utf-8")
    if set_eos_token:
        result.eos_token = end
    _warn(name, end, result, [token for token in (*_TOKENS.get(name, ()), end) if token not in vocabulary])
    return result


def _warn(name: str, end: str, tokenizer: Any, missing: list[str]) -> None:
    """Say what the format needs and this tokenizer does not have."""
    if missing:
        warnings.warn(
            f"fastft: the format {name} uses {', '.join(map(repr, missing))}, which this vocabulary spells in pieces. "
            "It "
            "works, but a format whose markers the model has as tokens is learned better.",
            stacklevel=3,
        )
    if end != tokenizer.eos_token:
        warnings.warn(
            f"fastft: the format {name} ends answers with {end!r}; the tokenizer's EOS is {tokenizer.eos_token!r} and "
            "was "
            "left so. For generation to stop, pass set_eos_token=True (the tokenizer's EOS changes) or add the token "
            "to "
            "model.generation_config.eos_token_id.",
            stacklevel=3,
        )
