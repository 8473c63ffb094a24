"""Text to token ids and back: `tokenizer.json` by the tokenizers library, chat by the checkpoint's template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from page4.engine.chat import ChatTemplate
from page4.errors import CheckpointError, UsageError, message


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, backend: Any, config: dict[str, Any], template: ChatTemplate | None) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `config` is tokenizer_config.json."""
        self._backend = backend
        self._config = config
        self._template = template

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None when it has no tokenizer.json. Raises `CheckpointError` when it is broken."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            do = "download the file again"
            raise CheckpointError(message("tokenizer.json", allowed="a tokenizers file", got=error, do=do)) from error
        config = read_json(folder / "tokenizer_config.json")
        return cls(backend, config, ChatTemplate.from_folder(folder, config))

    @property
    def vocab_size(self) -> int:
        """Token ids that have a text, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` itself."""
        return self._backend

    @property
    def template_source(self) -> str | None:
        """The chat template as it stands in the checkpoint, None without one."""
        return None if self._template is None else self._template.source

    def special_token(self, name: str) -> str | None:
        """The text of `bos_token`, `eos_token`, .. in tokenizer_config.json."""
        value = self._config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which text leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token is a fixed string of bytes, so that text can be decoded byte by byte."""
        return type(self._backend.decoder).__name__ == "ByteLevel"

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level tokenizer; nothing for an id without text."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_char()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode()

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Token ids of a conversation (list[int]), or its text with `tokenize=False`.

        The template writes the special tokens itself, so none are added. Raises `UsageError` when the checkpoint has
        no template or the template refuses the messages.
        """
        if self._template is None:
            do = "send a text or token ids instead"
            raise UsageError(message("chat template", allowed="one in the checkpoint", got="none", do=do))
        special = {name: self.special_token(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        known = {name: value for name, value in special.items() if value is not None}
        text = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **{**known, **variables}
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when the file is missing. Raises `CheckpointError` when it is no object."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        do = "download the file again"
        raise CheckpointError(message(file.name, allowed="JSON", got=error, do=do)) from error
    if not isinstance(value, dict):
        do = "download the file again"
        raise CheckpointError(message(file.name, allowed="a JSON object", got=type(value).__name__, do=do))
    return value


_TABLE: dict[str, int] = {}


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table, inverted).

    Printable Latin-1 bytes stand for themselves; the other bytes, in order, are the characters from U+0100 on.
    """
    if not _TABLE:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        _TABLE.update({chr(byte): byte for byte in printable})
        _TABLE.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return _TABLE
