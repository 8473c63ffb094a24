"""Calibration samples as a JSONL file states them: a text, a conversation or token ids on each line, checked."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from page4.errors import UsageError, message

CONTENT_KEYS = ("text", "messages", "prompt_token_ids")
KEYS = (*CONTENT_KEYS, "tools", "kind")
_KIND = re.compile(r"[a-z][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class RawSample:
    """One line: `where` names it in messages, `kind` is what it is counted as."""

    where: str
    kind: str
    fields: Mapping[str, Any]


def read_samples(path: Path) -> list[RawSample]:
    """Every line of a UTF-8 JSONL file but the empty ones. Raises `UsageError` naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            message("--prompts", allowed="a readable file", got=f"{path} ({error.strerror})", do="check it")
        ) from None
    except UnicodeDecodeError as error:
        got = f"{path}, byte 0x{error.object[error.start]:02X} at offset {error.start}"
        raise UsageError(message("--prompts", allowed="UTF-8 text", got=got, do="convert it to UTF-8")) from None
    samples = list(_parse_lines(path.name, text))
    if not samples:
        _refuse(str(path), "at least one sample", "an empty file", 'write lines like {"text": "..."}')
    return samples


def _parse_lines(name: str, text: str) -> Iterator[RawSample]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse(f"{name} line {number}", line)


def _parse(where: str, line: str) -> RawSample:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        _refuse(where, "one JSON object a line", str(error), 'write {"text": "..."}')
    if not isinstance(fields, dict):
        _refuse(where, "a JSON object", type(fields).__name__, 'write {"text": "..."}')
    for key in fields:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            _refuse(where, f"the keys {', '.join(KEYS)}", repr(key), f"did you mean {near[0]}?" if near else "drop it")
    given = [key for key in CONTENT_KEYS if key in fields]
    if len(given) != 1:
        _refuse(where, f"one of {', '.join(CONTENT_KEYS)}", " and ".join(given) or "none", "split it or fill it in")
    _check_content(where, given[0], fields)
    return RawSample(where, _kind(where, given[0], fields), fields)


def _check_content(where: str, key: str, fields: Mapping[str, Any]) -> None:
    value: Any = fields[key]
    tools: Any = fields.get("tools")
    if not value or not isinstance(value, str if key == "text" else list):
        allowed = "a text" if key == "text" else "a list that is not empty"
        _refuse(f"{where} {key}", allowed, repr(value), "give it some content")
    if tools is not None and (key != "messages" or not isinstance(tools, list)):
        _refuse(f"{where} tools", "a list beside messages", repr(tools), "move it beside messages")
    for entry in value if key == "messages" else []:
        _check_message(where, entry)


def _check_message(where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        _refuse(f"{where} messages", "objects with role and content", repr(entry), "write {'role': .., 'content': ..}")
    content = entry.get("content")
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            do = "leave image, audio and video samples out: page4 runs the text model only"
            _refuse(f"{where} content", "text parts", repr(kind), do)


def _kind(where: str, key: str, fields: Mapping[str, Any]) -> str:
    """What the line says, else text, chat, tool (it has tools, or a message of one) or tokens."""
    if "kind" in fields:
        kind = fields["kind"]
        if not isinstance(kind, str) or _KIND.fullmatch(kind) is None or kind in ("image", "long"):
            allowed = "a word such as chat or code (long is counted by length; images are not supported)"
            _refuse(f"{where} kind", allowed, repr(kind), "leave it out or rename it")
        return kind
    if key != "messages":
        return "text" if key == "text" else "tokens"
    uses_tools = fields.get("tools") or any(
        entry.get("role") == "tool" or "tool_calls" in entry for entry in fields[key]
    )
    return "tool" if uses_tools else "chat"


def _refuse(what: str, allowed: str, got: str, do: str) -> NoReturn:
    raise UsageError(message(what, allowed=allowed, got=got, do=do))
