"""Where prompts come from: arguments, files, standard input, lists of token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from page4.errors import UsageError, message

Prompt = str | list[int]
STDIN = "-"


def collect(arguments: Sequence[str], files: Sequence[Path], ids_file: Path | None) -> list[Prompt]:
    """All prompts of one call, in the order arguments, files, token ids; standard input when there is nothing else.

    Text is taken as it stands, a newline at its end included.
    """
    prompts: list[Prompt] = [read_stdin() if text == STDIN else text for text in arguments]
    prompts += [read_stdin() if str(path) == STDIN else read_text(path, "--prompt-file") for path in files]
    if ids_file is not None:
        prompts += read_token_ids(ids_file)
    if not prompts:
        if sys.stdin.isatty():
            raise UsageError(
                message("prompt", allowed="at least one", got="none", do="give PROMPT, --prompt-file or a pipe")
            )
        prompts = [read_stdin()]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(
                message(f"prompt {number}", allowed="at least one token", got="nothing", do="give some text")
            )
    return prompts


def read_stdin() -> str:
    """All of standard input as UTF-8."""
    return decode(sys.stdin.buffer.read(), "standard input")


def read_text(path: Path, flag: str) -> str:
    """A UTF-8 file as it stands."""
    try:
        return decode(path.read_bytes(), f"{flag} {path}")
    except OSError as error:
        raise UsageError(
            message(flag, allowed="a readable file", got=f"{path} ({error.strerror})", do="check it")
        ) from None


def decode(data: bytes, source: str) -> str:
    """UTF-8 bytes as text, or a refusal that names the source and the offset."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02X} at offset {error.start}"
        raise UsageError(message(source, allowed="UTF-8 text", got=got, do="convert it to UTF-8")) from None


def read_token_ids(path: Path) -> list[Prompt]:
    """Prompts from a JSON file: one list of ids, or a list of such lists."""
    flag = "--prompt-token-ids"
    try:
        value = json.loads(read_text(path, flag))
    except (ValueError, RecursionError) as error:
        raise UsageError(message(f"{flag} {path}", allowed="JSON", got=str(error), do="write a list of ids")) from None
    lists = value if isinstance(value, list) and value and all(isinstance(item, list) for item in value) else [value]
    for number, ids in enumerate(lists):
        if not isinstance(ids, list) or not ids:
            got = "an empty list" if ids == [] else type(ids).__name__
            raise UsageError(
                message(f"{flag} list {number}", allowed="a list of token ids", got=got, do="write [1, 2, 3]")
            )
        for place, token in enumerate(ids):
            if type(token) is not int or token < 0:
                what = f"{flag} list {number} entry {place}"
                raise UsageError(message(what, allowed="an integer >= 0", got=json.dumps(token), do="write token ids"))
    return [list(ids) for ids in lists]
