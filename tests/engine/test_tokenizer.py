"""Tokenizers and chat templates of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from page4 import embedded_checkpoint
from page4.engine.detokenize import Detokenizer
from page4.engine.tokenizer import Tokenizer
from page4.errors import CheckpointError, UsageError


def write(folder: Path, template: str | None = None, config: dict[str, Any] | None = None) -> Path:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "<s>": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected a JSON object, got list"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="valid Jinja"):
        Tokenizer.from_folder(write(tmp_path, "{% if %}"))


def test_template_gets_messages_tools_and_special_tokens(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}> {% endif %}"
    )
    tokenizer = load(write(tmp_path, template, {"bos_token": {"content": "<s>"}}))
    messages = [{"role": "user", "content": "héllo <b>"}]
    text = tokenizer.apply_chat_template(messages, tools=[{"name": "é"}], tokenize=False)
    assert text == '<s>user: héllo <b>\n[{"name": "é"}]> '
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False) == "<s>user: héllo <b>\n"
    )
    ids = tokenizer.apply_chat_template([{"role": "hello", "content": "world"}], add_generation_prompt=False)
    assert ids.count(3) == 1 and ids[0] == 3


def test_template_of_the_config_and_named_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    one = load(write(tmp_path, None, {"chat_template": "one"}))
    assert one.apply_chat_template(messages, tokenize=False) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert (
        load(write(tmp_path, None, {"chat_template": named})).apply_chat_template(messages, tokenize=False) == "three"
    )
    assert (
        load(write(tmp_path, "file", {"chat_template": "one"})).apply_chat_template(messages, tokenize=False) == "file"
    )


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (None, [{"role": "user"}], "expected one in the checkpoint"),
        ("x", [], "at least one"),
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user"}], "no attribute 'content'"),
        ("{{ messages.append(1) }}", [{"role": "user"}], "unsafe"),
        ("{{ messages.__class__.__mro__ }}", [{"role": "user"}], "unsafe"),
    ],
)
def test_refusals_say_why(tmp_path: Path, template: str | None, messages: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load(write(tmp_path, template)).apply_chat_template(messages)


def test_the_embedded_template(tmp_path: Path) -> None:
    tokenizer = load(embedded_checkpoint())
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"
    )


def test_a_tokenizer_that_is_not_byte_level_streams_the_text_of_decode(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "!": 3, "<s>": 4}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert not tokenizer.is_byte_level
    ids = [0, 1, 2, 3, 0, 0, 1, 3, 2]
    pieces = Detokenizer(tokenizer, skip_special_tokens=True)
    streamed = [pieces.push(t) for t in ids]
    assert "".join(streamed) == tokenizer.decode(ids) and streamed[1] == " cat"


def test_bytes_that_a_fallback_decoder_shows_as_broken_wait(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": i for i, byte in enumerate("€".encode())} | {"a": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.ByteFallback()
    backend.save(str(tmp_path / "tokenizer.json"))
    pieces = Detokenizer(load(tmp_path), skip_special_tokens=True)
    assert [pieces.push(t) for t in (3, 0, 1, 2, 3)] == ["a", "", "", "€", "a"]
