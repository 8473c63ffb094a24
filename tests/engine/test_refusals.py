"""Every refusal is one line of the right class, before weights are read or an arena is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.lanes import assert_idle, collect, make_llm, prompt_of, tokens
from tests.oracle import random_checkpoint

from page4 import LLM, SamplingParams
from page4.engine import llm as llm_module
from page4.errors import (
    CacheError,
    ConfigError,
    LaneError,
    Page4Error,
    RequestError,
    ShardError,
    UsageError,
)

PROMPT = prompt_of(20, 41)


def _mtp(k: object) -> dict[str, object]:
    return {"method": "mtp", "num_speculative_tokens": k}


def _refused(error: type[Page4Error], exit_code: int, parts: tuple[str, ...], call: Callable[[], object]) -> None:
    """The call raises this very class with one printable line that names what was wrong."""
    with pytest.raises(Page4Error) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is error, text
    assert caught.value.exit_code == exit_code
    assert text.isprintable()
    for part in parts:
        assert part in text


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read or an arena was made before the refusal")

    monkeypatch.setattr(llm_module, "load_model", never)
    monkeypatch.setattr(llm_module, "Arena", never)


OPTIONS: list[tuple[dict[str, Any], type[Page4Error], int, tuple[str, ...]]] = [
    ({"dtype": "float64"}, UsageError, 2, ("dtype", "float64", "bfloat16")),
    ({"kv_cache_dtype": "int8"}, UsageError, 2, ("kv_cache_dtype", "int8", "fp8_e4m3")),
    ({"draft_kv_dtype": "fp4", "speculative_config": _mtp(1)}, UsageError, 2, ("draft_kv_dtype", "fp4")),
    ({"speculative_config": _mtp(8)}, RequestError, 2, ("num_speculative_tokens", "0 to 7", "8")),
    ({"speculative_config": _mtp(-1)}, RequestError, 2, ("num_speculative_tokens", "-1")),
    ({"speculative_config": _mtp("3")}, UsageError, 2, ("num_speculative_tokens", "integer")),
    ({"speculative_config": _mtp(True)}, UsageError, 2, ("num_speculative_tokens", "True")),
    ({"speculative_config": {"method": "mtp"}}, UsageError, 2, ("num_speculative_tokens", "None")),
    ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 1}}, UsageError, 2, ("method", "eagle")),
    ({"speculative_config": {"num_speculative_token": 1}}, UsageError, 2, ("did you mean num_speculative_tokens?",)),
    ({"speculative_config": 3}, UsageError, 2, ("speculative_config", "3")),
    ({"max_model_len": 513}, UsageError, 2, ("max_model_len", "1 to 512", "513")),
    ({"max_model_len": 0}, UsageError, 2, ("max_model_len", "0")),
    ({"max_model_len": "96"}, UsageError, 2, ("max_model_len", "'96'")),
    ({"kv_cache_memory_bytes": 1}, CacheError, 3, ("kv_cache_memory_bytes", "at least", "raise it")),
    ({"kv_cache_memory_bytes": 200_000}, CacheError, 3, ("kv_cache_memory_bytes", "512 tokens", "max_model_len")),
    ({"kv_cache_memory_bytes": 0}, UsageError, 2, ("kv_cache_memory_bytes", "0")),
    ({"block_size": 6}, CacheError, 3, ("6",)),
    ({"block_size": 0}, UsageError, 2, ("block_size", "0")),
    ({"max_num_seqs": 0}, UsageError, 2, ("max_num_seqs", "0")),
    ({"max_num_batched_tokens": 1.5}, UsageError, 2, ("max_num_batched_tokens", "1.5")),
    ({"max_num_batched_tokens": 3, "speculative_config": _mtp(3)}, UsageError, 2, ("max_num_batched_tokens", "4")),
    ({"kv_cache_dtype": "fp8"}, LaneError, 3, ("no layers.3.self_attn.k_scale", "--kv-cache-dtype auto")),
    ({"seed": "x"}, UsageError, 2, ("seed", "'x'")),
    ({"device": "nowhere"}, UsageError, 2, ("device", "nowhere")),
]


@pytest.mark.usefixtures("nothing_is_allocated")
@pytest.mark.parametrize(("options", "error", "exit_code", "parts"), OPTIONS, ids=[str(row[0]) for row in OPTIONS])
def test_options_are_refused(
    small: Path, options: dict[str, Any], error: type[Page4Error], exit_code: int, parts: tuple[str, ...]
) -> None:
    _refused(error, exit_code, parts, lambda: LLM(small, **options))


@pytest.mark.usefixtures("nothing_is_allocated")
@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("PAGE4_POISON", "0x100", ("PAGE4_POISON", "0x100", "0xFF")),
        ("PAGE4_POISON", "yes", ("PAGE4_POISON", "'yes'")),
        ("PAGE4_POISSON", "0x7F", ("PAGE4_POISSON", "did you mean PAGE4_POISON?")),
        ("PAGE4_THREADS", "0", ("PAGE4_THREADS", "'0'")),
        ("PAGE4_KERNELS", "cuda", ("PAGE4_KERNELS", "'cuda'")),
    ],
)
def test_environment_values_are_refused(
    small: Path, name: str, value: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    _refused(UsageError, 2, parts, lambda: LLM(small))


@pytest.mark.usefixtures("nothing_is_allocated")
def test_checkpoints_are_refused(small: Path, tmp_path: Path) -> None:
    _refused(ConfigError, 3, ("config.json",), lambda: LLM(tmp_path / "nothing"))
    bare = random_checkpoint(tmp_path / "bare", seed=3, mtp=False, vocab_size=24)
    _refused(RequestError, 2, ("no MTP head",), lambda: LLM(bare, speculative_config=_mtp(1)))
    cut = shutil.copytree(small, tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    _refused(ShardError, 3, ("model.safetensors",), lambda: LLM(cut))


@pytest.fixture(scope="module")
def plain(small: Path) -> LLM:
    return make_llm(small, 0, max_model_len=64)


@pytest.mark.parametrize(
    ("prompt", "error", "parts"),
    [
        ([], RequestError, ("prompt", "at least one token")),
        ([5] * 65, RequestError, ("at most 64 tokens", "65 tokens")),
        ([5, 24], RequestError, ("prompt token id 1", "0 to 23", "24")),
        ([5, -1], RequestError, ("prompt token id 1", "-1")),
        ([5, 1.5], RequestError, ("prompt token id 1", "1.5")),
        ([5, True], RequestError, ("prompt token id 1", "True")),
        ([5, None], RequestError, ("prompt token id 1", "None")),
        ("some text", UsageError, ("prompt", "without a tokenizer")),
        (7, UsageError, ("prompt", "7")),
        (None, UsageError, ("prompt", "None")),
    ],
)
def test_prompts_are_refused(plain: LLM, prompt: Any, error: type[Page4Error], parts: tuple[str, ...]) -> None:
    _refused(error, 2, parts, lambda: plain.add_request("r", prompt))
    _refused(error, 2, parts, lambda: plain.stream(prompt))
    good: Any = [5, 6]
    _refused(error, 2, parts, lambda: plain.generate([good, prompt]))
    assert_idle(plain)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 1.5},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"n": 0},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"stop": ""},
        {"stop": [3]},
        {"stop_token_ids": [-1]},
        {"seed": "a"},
        {"ignore_eos": 1},
    ],
    ids=str,
)
def test_sampling_values_are_refused(values: dict[str, Any]) -> None:
    name = next(iter(values))
    _refused(UsageError, 2, (name,), lambda: SamplingParams(**values))


def test_requests_are_refused(plain: LLM) -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)  # type: ignore[call-arg]  # the point of the test
    _refused(UsageError, 2, ("stop", "tokenizer"), lambda: plain.generate([PROMPT], SamplingParams(stop=["a"])))
    wrong = SamplingParams(stop_token_ids=[3, 24])
    _refused(RequestError, 2, ("stop token id 1", "24"), lambda: plain.generate([PROMPT], wrong))
    _refused(UsageError, 2, ("params", "one or 2"), lambda: plain.generate([PROMPT] * 2, [SamplingParams()]))
    plain.add_request("twice", PROMPT)
    _refused(UsageError, 2, ("request_id", "'twice'"), lambda: plain.add_request("twice", PROMPT))
    plain.abort("twice")
    plain.add_request("twice", PROMPT)
    plain.abort("twice")
    ends: dict[str, str] = {}
    collect(plain.step(), {}, ends)
    assert ends == {"twice": "abort"}
    assert_idle(plain)


def test_a_request_that_the_arena_cannot_hold_is_refused(small: Path) -> None:
    """The model length was lowered to what the arena holds, so every admitted request can run alone."""
    sizes = make_llm(small, 0).core.scheduler.sizes
    memory = sizes.pages_for_requests(1, 40) * sizes.page_bytes
    llm = make_llm(small, 0, max_model_len=40, kv_cache_memory_bytes=memory)
    _refused(RequestError, 2, ("at most 40 tokens",), lambda: llm.generate([[5] * 41]))
    assert len(tokens(llm, [5] * 20, 60)) == 20
