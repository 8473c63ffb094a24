"""Prompts as token ids, checked against config.json and the tokenizer before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from page4.cli.prompts import Prompt
from page4.engine.admission import check_prompt, check_token_ids
from page4.engine.tokenizer import Tokenizer
from page4.errors import CheckpointError, UsageError, message
from page4.geometry import Geometry


def as_token_ids(
    folder: Path, prompts: Sequence[Prompt], *, chat: bool, max_model_len: int | None, stop_ids: Sequence[int]
) -> list[list[int]]:
    """Token ids of every prompt. Raises `RequestError` for one that no engine on this folder would take."""
    geometry = Geometry.from_folder(folder)
    check_token_ids("--stop-token-ids entry", stop_ids, geometry.vocab_size)
    limit = min(max_model_len or geometry.max_positions, geometry.max_positions)
    tokenizer = Tokenizer.from_folder(folder)
    found: list[list[int]] = []
    for prompt in prompts:
        ids = encode(prompt, tokenizer, chat=chat)
        check_prompt(ids, vocab_size=geometry.vocab_size, max_model_len=limit)
        found.append(ids)
    return found


def encode(prompt: Prompt, tokenizer: Tokenizer | None, *, chat: bool) -> list[int]:
    """Token ids of one prompt; with `chat`, of a conversation whose one user message it is."""
    if not isinstance(prompt, str):
        if chat:
            do = "leave out --chat or give text"
            raise UsageError(message("--chat", allowed="text prompts", got="--prompt-token-ids", do=do))
        return prompt
    if tokenizer is None:
        do = "give --prompt-token-ids or add the file"
        raise CheckpointError(message("text prompt", allowed="tokenizer.json in MODEL", got="none", do=do))
    if not chat:
        return tokenizer.encode(prompt)
    ids: list[int] = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return ids
