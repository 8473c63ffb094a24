"""Text of a growing list of tokens, in pieces that never end inside a character."""

from __future__ import annotations

import codecs

from page4.engine.tokenizer import Tokenizer

# A character has at most 4 bytes, so a decoder that still shows U+FFFD after this many tokens will not resolve it.
_MAX_HELD_TOKENS = 8


class Detokenizer:
    """Turns one token at a time into text; a part of a character waits for the rest, and is dropped if none comes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Only for tokenizers that are not byte-level: tokens whose text is out, and tokens not yet out.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that is complete with this token, often empty."""
        if token_id in self._skipped:
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.bytes_of(token_id))
        return self._push_by_difference(token_id)

    def _push_by_difference(self, token_id: int) -> str:
        # Decoders may look at neighbours (spaces before words), so text is what one more token adds to some context.
        self._held.append(token_id)
        before = self._decode(self._context)
        after = self._decode([*self._context, *self._held])
        if len(after) <= len(before) or (after.endswith("\ufffd") and len(self._held) <= _MAX_HELD_TOKENS):
            return ""
        self._context, self._held = self._held[-4:], []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
