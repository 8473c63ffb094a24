"""The chat template of a checkpoint: Jinja in a sandbox that can change nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from page4.errors import CheckpointError, UsageError, message


class ChatTemplate:
    """A compiled template; the filters and globals are those that transformers gives to templates."""

    def __init__(self, source: str) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            do = "download the checkpoint again"
            raise CheckpointError(message("chat template", allowed="valid Jinja", got=error, do=do)) from error
        self.source = source

    @classmethod
    def from_folder(cls, folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
        """chat_template.jinja, else that of tokenizer_config.json (a string, or a list with one `default`)."""
        file = folder / "chat_template.jinja"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8"))
        found = config.get("chat_template")
        if isinstance(found, list):
            found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get(
                "default"
            )
        return cls(found) if isinstance(found, str) else None

    def render(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The text of a conversation. Raises `UsageError` with the template's own words when it refuses."""
        if not messages:
            raise UsageError(message("messages", allowed="at least one", got="none", do="send a message"))
        try:
            return self._template.render(messages=list(messages), **variables)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            do = "send messages as {'role': .., 'content': ..}"
            got = str(error) or type(error).__name__
            raise UsageError(message("messages", allowed="what the chat template takes", got=got, do=do)) from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)
