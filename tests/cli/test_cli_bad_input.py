"""Bad input, end to end on the real engine: one line, exit code 2 or 3, no arena, no file touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import oracle

from page4 import cli
from page4.cache.storage import Arena

VOCABULARY = 256
MAX_POSITIONS = 4096
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.random_checkpoint(tmp_path_factory.mktemp("sharded"), seed=1, max_shard_bytes=1 << 20)


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may break."""
    return Path(shutil.copytree(sharded, tmp_path / "checkpoint"))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `page4 generate` and returns its one line; fails when an arena was made or a file changed."""

    def no_arena(*_: Any, **__: Any) -> None:
        raise AssertionError("an arena was allocated")

    monkeypatch.setattr(Arena, "__init__", no_arena)

    def run(folder: Path, *flags: str, ids: Any = (1, 2, 3), code: int) -> str:
        prompts = folder.parent / "ids.json"
        prompts.write_text(json.dumps(ids))
        before = tree(folder.parent)
        got = cli.main(["generate", str(folder), "--prompt-token-ids", str(prompts), *flags])
        captured = capsys.readouterr()
        assert captured.err.startswith("page4: error: ")
        assert captured.err.count("\n") == 1
        assert (got, captured.out) == (code, "")
        assert tree(folder.parent) == before
        return captured.err

    return run


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (os.lstat(path).st_mtime_ns, os.lstat(path).st_size) for path in folder.rglob("*")}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


SHARDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "one byte short": lambda path: cut(path, 1),
    "4096 bytes short": lambda path: cut(path, 4096),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "lfs pointer": lambda path: path.write_bytes(LFS_POINTER),
    "no json": lambda path: path.write_bytes(b"\x08" + b"\0" * 7 + b"not json"),
}


@pytest.mark.parametrize("damage", SHARDS.values(), ids=SHARDS)
def test_damaged_shards(folder: Path, refused: Callable[..., str], damage: Callable[[Path], object]) -> None:
    victim = shards(folder)[1]
    damage(victim)
    assert victim.name in refused(folder, code=3)


def test_index_naming_a_tensor_that_its_shard_lacks(folder: Path, refused: Callable[..., str]) -> None:
    index = folder / "model.safetensors.index.json"
    edit(index, lambda value: value["weight_map"].update({"model.layers.0.made_up.weight": shards(folder)[0].name}))
    assert "made_up" in refused(folder, code=3)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/hostname", "a/../../x.safetensors", "C:\\x", "", ".", 5, "x\0y"]
)
def test_index_that_leads_outside(folder: Path, refused: Callable[..., str], name: Any) -> None:
    index = folder / "model.safetensors.index.json"
    edit(index, lambda value: value["weight_map"].update({"lm_head.weight": name}))
    refused(folder, code=3)


def test_a_link_to_a_file_outside(folder: Path, refused: Callable[..., str]) -> None:
    victim = shards(folder)[1]
    outside = folder.parent / "outside.safetensors"
    victim.rename(outside)
    victim.symlink_to(outside)
    assert victim.name in refused(folder, code=3)


CONFIGS: dict[str, dict[str, Any]] = {
    "architecture": {"model_type": "llama"},
    "heads that kv heads do not divide": {"num_key_value_heads": 3, "num_attention_heads": 4},
    "negative width": {"hidden_size": -1},
    "no layers": {"num_hidden_layers": 0},
    "text as a number": {"head_dim": "64"},
    "budget that blocks do not divide": {"indexer_budget": 66},
    "compress ratio": {"indexer_compress_ratio": 8},
    "unknown layer type": {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
    "wrong count of layer types": {"layer_types": ["linear_attention"] * 3},
    "hidden size that the tensors do not have": {"hidden_size": 64},
    "vocabulary that the tensors do not have": {"vocab_size": 512},
    "more experts than the tensors have": {"num_experts": 8},
}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_impossible_configs(folder: Path, refused: Callable[..., str], fields: dict[str, Any]) -> None:
    edit(folder / "config.json", lambda value: value.update(fields))
    refused(folder, code=3)


def test_config_that_is_no_json(folder: Path, refused: Callable[..., str]) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json" in refused(folder, code=3)


def test_prompt_longer_than_the_limit(sharded: Path, refused: Callable[..., str]) -> None:
    assert "64" in refused(sharded, "--max-model-len", "64", ids=[5] * 65, code=2)
    assert str(MAX_POSITIONS) in refused(sharded, ids=[5] * (MAX_POSITIONS + 1), code=2)


@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**63])
def test_token_id_out_of_range(sharded: Path, refused: Callable[..., str], token: int) -> None:
    line = refused(sharded, ids=[[1, 2], [3, token]], code=2)
    assert str(token) in line
    assert "255" in line


@pytest.mark.parametrize(
    "config",
    [
        '{"method":"mtp","num_speculative_tokens":8}',
        '{"method":"mtp","num_speculative_tokens":-1}',
        '{"method":"mtp","num_speculative_tokens":"3"}',
        '{"method":"mtp","num_speculative_tokens":2.5}',
        '{"method":"mtp","num_speculative_tokens":true}',
        '{"method":"mtp"}',
        '{"method":"ngram","num_speculative_tokens":3}',
        '{"method":"mtp","num_speculative_tokens":3,"num_drafts":3}',
    ],
)
def test_speculative_configs(sharded: Path, refused: Callable[..., str], config: str) -> None:
    refused(sharded, "--speculative-config", config, code=2)


def test_drafts_without_an_mtp_head(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = oracle.random_checkpoint(tmp_path / "plain", seed=2, mtp=False)
    refused(folder, "--speculative-config", '{"method":"mtp","num_speculative_tokens":3}', code=2)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--max-model-len 5000", 2),
        ("--max-model-len 0", 2),
        ("--max-tokens 0", 2),
        ("--temperature -1", 2),
        ("--temperature nan", 2),
        ("--top-p 0", 2),
        ("--top-p 1.5", 2),
        ("--top-k -2", 2),
        ("--min-p 2", 2),
        ("--n 0", 2),
        ("--logprobs 1000", 2),
        ("--min-tokens 20 --max-tokens 10", 2),
        ("--block-size 6", 3),
        ("--block-size 0", 2),
        ("--max-num-seqs 0", 2),
        ("--max-num-batched-tokens 0", 2),
        ("--kv-cache-memory-bytes 1K", 3),
        ("--kv-cache-memory-bytes 0", 2),
        ("--kv-cache-dtype fp8", 3),
        ("--stop-token-ids 256", 2),
    ],
)
def test_flags_out_of_range(sharded: Path, refused: Callable[..., str], flags: str, code: int) -> None:
    refused(sharded, *flags.split(), code=code)


def test_text_without_a_tokenizer(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["generate", str(sharded), "some text"])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (3, "", 1)
    assert "tokenizer.json" in captured.err
