"""Values of flags, where prompts come from, which folder MODEL is."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import typer

from page4.cli import flags, models, prompts
from page4.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1_500),
        ("25.6k", 25_600),
        ("0.5K", 512),
        ("3m", 3_000_000),
        ("3M", 3_145_728),
        ("2g", 2_000_000_000),
        ("2G", 2_147_483_648),
        ("1T", 1_099_511_627_776),
    ],
)
def test_human_numbers(text: str, value: int) -> None:
    assert flags.human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "0x10", "1.5", "1.0001k", "32 k", "32kb", "32KiB", "nan", "٣"])
def test_human_numbers_refuse(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        flags.human_int(text)


def test_speculative_config() -> None:
    assert flags.speculative_config(None) is None
    text = '{"method": "mtp", "num_speculative_tokens": 3}'
    assert flags.speculative_config(text) == {"method": "mtp", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "null", '"mtp"', "{", "{'method': 'mtp'}", '{"num_speculative_tokens": }']
)
def test_speculative_config_must_be_an_object(text: str) -> None:
    with pytest.raises(UsageError, match="--speculative-config: expected a JSON object"):
        flags.speculative_config(text)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> None:
    """Standard input is a pipe with `data`, or a terminal when None."""
    stream = io.TextIOWrapper(io.BytesIO(data or b""))
    monkeypatch.setattr(stream, "isatty", lambda: data is None)
    monkeypatch.setattr(sys, "stdin", stream)


def test_prompts_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "from the pipe é\n".encode())
    (tmp_path / "a.txt").write_bytes(b"from a file\r\n")
    (tmp_path / "ids.json").write_text("[[5, 6], [7]]")
    found = prompts.collect(["one", "-", "two"], [tmp_path / "a.txt"], tmp_path / "ids.json")
    assert found == ["one", "from the pipe é\n", "two", "from a file\r\n", [5, 6], [7]]


def test_a_pipe_is_read_only_when_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"piped")
    assert prompts.collect([], [], None) == ["piped"]
    stdin(monkeypatch, b"piped")
    assert prompts.collect(["given"], [], None) == ["given"]
    stdin(monkeypatch, b"piped")
    assert prompts.collect([], [Path("-")], None) == ["piped"]


@pytest.mark.parametrize("data", [None, b""])
def test_no_prompt_is_refused(monkeypatch: pytest.MonkeyPatch, data: bytes | None) -> None:
    stdin(monkeypatch, data)
    with pytest.raises(UsageError, match="prompt"):
        prompts.collect([], [], None)


def test_an_empty_prompt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="prompt 1: expected at least one token"):
        prompts.collect(["x", ""], [], None)


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"abc\xff")
    with pytest.raises(UsageError, match="byte 0xFF at offset 3"):
        prompts.collect([], [], None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ("{}", "a list of token ids"),
        ("[]", "an empty list"),
        ("[[1], []]", "list 1"),
        ("[1, [2]]", "entry 1"),
        ("[[1, 2], [3, -4]]", "list 1 entry 1"),
        ("[1.0]", "1.0"),
        ("[true]", "true"),
        ('["1"]', '"1"'),
        ("[" * 100_000, "JSON"),
    ],
)
def test_token_id_files_are_checked(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        prompts.collect([], [], tmp_path / "ids.json")
    assert word in str(caught.value)
    assert "--prompt-token-ids" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--prompt-file: .*gone\.txt \(No such file"):
        prompts.collect([], [tmp_path / "gone.txt"], None)


def test_model_is_the_embedded_one_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert models.resolve("./tiny") == Path("tiny")
    assert (models.resolve("tiny") / "tokenizer.json").is_file()
    assert models.resolve("tiny") != Path("tiny")


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "/a/b", "a/b/c", "~/x/y", "a/b@", ""])
def test_model_that_is_neither_folder_nor_hub_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="MODEL"):
        models.resolve(name)


def test_model_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.resolve(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the file"):
        models.resolve(str(tmp_path / "file"))


def test_revision_belongs_to_hub_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        models.resolve("tiny", "main")
    with pytest.raises(UsageError, match="--revision"):
        models.resolve("org/name@v1", "v2")


def make_hub_cache(cache: Path) -> Path:
    """A hub cache with one model, laid out as huggingface_hub does it; returns the snapshot."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "b1").write_text(json.dumps({"model_type": "qwen4_exp"}))
    (snapshot / "config.json").symlink_to("../../blobs/b1")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (os.lstat(path).st_mtime_ns, os.lstat(path).st_size) for path in sorted(folder.rglob("*")) if path
    }


def test_hub_model_offline_comes_from_the_cache_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    snapshot = make_hub_cache(tmp_path)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    before = tree(tmp_path)
    assert models.resolve("org/name") == snapshot
    assert models.resolve("org/name@main") == snapshot
    assert models.resolve(f"org/name@{snapshot.name}") == snapshot
    assert tree(tmp_path) == before
    with pytest.raises(CheckpointError, match="MODEL org/other: expected a hub model") as caught:
        models.resolve("org/other")
    assert "\n" not in str(caught.value)


def test_hub_model_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'page4\[hub\]'"):
        models.resolve("org/name")
