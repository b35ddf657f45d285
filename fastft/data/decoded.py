"""Token ids as text, with the characters each token stands for.

Where an answer begins is a fact about text; what is trained is tokens. Searching marker *ids* in a row's ids fails as
soon as a marker is tokenized differently in its context ("\\n" and "\\n\\n" are two tokens; "Response" and "
Response" too). Tokenizing the decoded text again for its offsets fails on rows that were cut, and on tokenizers that
add a space. So each token is spelled once, behind an ordinary token (a first token may lose its space), and a row's
text is the spellings in a row: the positions are exact whatever produced the ids. Bytes that are no character alone
are spelled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what decoding makes of bytes that are not a whole character

Spelled = tuple[str, list[tuple[int, int]]]


class Speller:
    """Spells ids with one tokenizer; pickles with it (its cache stays behind).

    Args:
        tokenizer: any Hugging Face tokenizer, fast or not.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._anchor: list[int] = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._pieces: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pieces": {}}  # also keeps a dataset's fingerprint the same after use

    def __call__(self, input_ids: Sequence[int]) -> Spelled:
        """The text of `input_ids`, and for each of them where its characters begin and end in it.

        The tokens of one character that is spread over several all get that character's place.
        """
        parts: list[str] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        waiting: list[int] = []  # ids whose bytes are no whole character yet

        def emit(text: str, count: int) -> None:
            nonlocal position
            parts.append(text)
            offsets.extend([(position, position + len(text))] * count)
            position += len(text)

        for token in input_ids:
            piece = self._piece(token)
            if INCOMPLETE in piece:
                waiting.append(token)
                together = self._behind_anchor(waiting)
                if not together.endswith(INCOMPLETE):
                    emit(together, len(waiting))
                    waiting = []
                continue
            if waiting:
                emit(self._behind_anchor(waiting), len(waiting))
                waiting = []
            emit(piece, 1)
        if waiting:
            emit(self._behind_anchor(waiting), len(waiting))
        return "".join(parts), offsets

    def round_trip(self, text: str) -> str:
        """`text` as it reads in a row: what its own ids spell, spaces at the ends left off."""
        return self(self.tokenizer.encode(text, add_special_tokens=False))[0].strip(" ")

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._behind_anchor([token])
        return piece

    def _behind_anchor(self, tokens: list[int]) -> str:
        text = self._decode(self._anchor + tokens)
        if self._anchor and text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
