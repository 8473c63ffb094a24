"""Prompts of the benchmarks: token windows of a text of our own, which no checkpoint was trained on."""

from __future__ import annotations

from pathlib import Path

from page4.assets import held_out_text

TEXT = held_out_text()


def tokens(folder: Path) -> list[int]:
    """The text in the ids of a checkpoint's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids)


def window(ids: list[int], length: int, *, start: int = 0) -> list[int]:
    """`length` ids from `start` on; the text begins again where it ends."""
    return [ids[(start + offset) % len(ids)] for offset in range(length)]


def windows(ids: list[int], length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` ids, spread evenly over the text."""
    return [window(ids, length, start=number * len(ids) // count) for number in range(count)]
