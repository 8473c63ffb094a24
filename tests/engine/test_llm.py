"""`LLM`: refusals before anything is allocated, streams, faults that end one request, and stops at any k (case B38)."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.lanes import assert_idle, collect, make_llm, prompt_of, tokens
from tests.oracle import random_checkpoint

from page4 import LLM, SamplingParams, embedded_checkpoint
from page4.engine import llm as llm_module
from page4.errors import CacheError, ConfigError, Page4Error, RequestError, ScaleError, ShardError, UsageError
from page4.model.weights import load_model

PROMPT = prompt_of(20, 41)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Generator[None, None, None]:
    """As `one_thread`, for the fixtures of the module too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    ({"kv_cache_dtype": "fp8"}, ScaleError, 3, ("scale",)),
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


@pytest.mark.parametrize("k", [0, 3])
def test_a_stream_is_generate_in_pieces(small: Path, k: int) -> None:
    llm = make_llm(small, k)
    params = SamplingParams(max_tokens=15, ignore_eos=True, logprobs=1, n=2, temperature=0.8, seed=4)
    [want] = llm.generate([PROMPT], params)
    chunks = list(llm.stream(PROMPT, params))
    for index, output in enumerate(want.outputs):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert [entry for chunk in mine for entry in chunk.logprobs or ()] == output.logprobs
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].usage.completion_tokens == len(output.token_ids)
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert_idle(llm)


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_a_stream_frees_everything(small: Path, taken: int) -> None:
    llm = make_llm(small, 3)
    stream = llm.stream(prompt_of(60, 42), SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=0))
    for _ in range(taken):
        next(stream)
    stream.close()
    assert_idle(llm)
    assert list(stream) == []
    forgotten = llm.stream(PROMPT)
    del forgotten
    assert_idle(llm)


def test_streams_and_calls_share_an_engine(small: Path) -> None:
    """Whoever steps the engine, each chunk reaches the one who asked for it."""
    llm = make_llm(small, 2)
    prompts = [prompt_of(length, 43) for length in (9, 14, 22, 30)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    alone = [tokens(make_llm(small, 0), prompt, 10) for prompt in prompts]
    llm.add_request("mine", prompts[3], params)
    streams = [llm.stream(prompt, params) for prompt in prompts[:2]]
    found: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    assert llm.generate([prompts[2]], params)[0].outputs[0].token_ids == alone[2]
    for mine, stream in zip(found, streams, strict=True):
        for chunk in stream:
            mine.extend(chunk.token_ids)
    low: dict[str, list[int]] = {}
    while llm.has_unfinished():
        collect(llm.step(), low, {})
    assert [*found, alone[2], low["mine"]] == alone
    assert set(low) == {"mine"}
    assert_idle(llm)


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_time(small: Path, steps: int) -> None:
    """Waiting, half a prompt, first token, mid-window: all is free at once, and the others do not notice."""
    llm = make_llm(small, 3, max_num_seqs=2, max_num_batched_tokens=24)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for number in range(4):
        llm.add_request(str(number), prompt_of(40, 50 + number), params)
    found: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for _ in range(steps):
        collect(llm.step(), found, ends)
    for name in ("0", "2", "3", "3", "nobody"):
        llm.abort(name)
    held = {owner.split(":")[1] for owner in llm.core.allocator.owners}
    assert held <= {"1"}
    while llm.has_unfinished():
        collect(llm.step(), found, ends)
    assert ends == {"0": "abort", "1": "length", "2": "abort", "3": "abort"}
    assert found["1"] == tokens(make_llm(small, 0), prompt_of(40, 51), 12)
    assert_idle(llm)


@pytest.mark.parametrize("part", ["forward", "commit", "logits"])
def test_a_step_that_raises_ends_its_requests_only(small: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(small, 3)
    want = tokens(make_llm(small, 0), PROMPT, 8)
    original, calls = getattr(llm.core.model, part), 0

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is gone")
        return original(*args, **kwargs)

    monkeypatch.setattr(llm.core.model, part, once)
    results = llm.generate([PROMPT, prompt_of(9, 44)], SamplingParams(max_tokens=8, ignore_eos=True))
    for result in results:
        [output] = result.outputs
        assert output.finish_reason == "error"
        assert output.error is not None
        assert "RuntimeError: the device is gone" in output.error
        assert result.request_id in output.error
        assert 0 < len(output.token_ids) == result.usage.completion_tokens < 8
    assert results[0].outputs[0].token_ids == want[: len(results[0].outputs[0].token_ids)]
    assert llm.metrics.failed_steps == 1
    assert_idle(llm)
    assert tokens(llm, PROMPT, 8) == want


def test_tokens_emitted_before_a_failure_in_drafting_are_delivered(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request ends in the very step whose drafts fail for the other: its last chunk must not be lost."""
    llm = make_llm(small, 3)
    drafter = llm.core._drafter
    assert drafter is not None
    original = drafter.run

    def run(streams: torch.Tensor, work: Any) -> Any:
        if calls == [1]:
            raise RuntimeError("no drafts today")
        calls.append(1)
        return original(streams, work)

    calls: list[int] = []
    monkeypatch.setattr(drafter, "run", run)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 30)]
    short, long = llm.generate([PROMPT, prompt_of(9, 45)], params)
    want = tokens(make_llm(small, 0), PROMPT, 2)
    assert (short.outputs[0].token_ids, short.outputs[0].finish_reason) == (want, "length")
    assert long.outputs[0].finish_reason == "error"
    assert len(long.outputs[0].token_ids) == long.usage.completion_tokens > 1
    assert_idle(llm)


# The target may not say token 5 itself: it is a stop id before min_tokens.
NEVER_5: dict[str, Any] = {"min_tokens": 8, "stop_token_ids": [5]}


@pytest.fixture(scope="module")
def broken(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small`, but the embedding of token 5 is infinite: whoever has it computes NaN from there on."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(small, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_request_with_values_that_are_not_finite_faults_alone(broken: Path, k: int, kv: str) -> None:
    """Long prompts too, where the indexer refuses to rank NaN; the others go on as if they were alone."""
    options = {"kv_cache_dtype": kv, "allow_unit_scales": True}
    good = [[t if t != 5 else 6 for t in prompt_of(length, 46)] for length in (12, 44, 70)]
    bad = [[*good[0][:7], 5, *good[0][7:]], [*good[2][:60], 5, *good[2][60:]]]
    params = SamplingParams(max_tokens=8, ignore_eos=True, **NEVER_5)
    alone = [tokens(make_llm(broken, k, **options), prompt, 8, **NEVER_5) for prompt in good]
    llm = make_llm(broken, k, **options)
    results = llm.generate([good[0], bad[0], good[1], bad[1], good[2]], params)
    assert [results[n].outputs[0].token_ids for n in (0, 2, 4)] == alone
    assert [len(found) for found in alone] == [8, 8, 8]
    for n in (1, 3):
        [output] = results[n].outputs
        assert (output.token_ids, output.finish_reason) == ([], "error")
        assert output.error is not None
        assert results[n].request_id in output.error
        if kv == "fp8_e4m3" and n == 1:  # the indexer refuses the long one before that
            assert "K or V of the token at position" in output.error
    assert_idle(llm)
    assert tokens(llm, good[1], 8, **NEVER_5) == alone[1]


def test_a_refused_draft_that_is_not_finite_harms_nobody(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target never says token 5; a draft that does is refused, and what its row computed is nobody's."""
    for kv in ("auto", "fp8_e4m3"):
        options = {"kv_cache_dtype": kv, "allow_unit_scales": True}
        prompts = [[t if t != 5 else 6 for t in prompt_of(length, 47)] for length in (12, 70)]
        alone = [tokens(make_llm(broken, 0, **options), prompt, 8, **NEVER_5) for prompt in prompts]
        assert [len(found) for found in alone] == [8, 8]
        llm = make_llm(broken, 3, **options)
        drafter = llm.core._drafter
        assert drafter is not None
        monkeypatch.setattr(drafter, "_pick", _always(5))
        params = SamplingParams(max_tokens=8, ignore_eos=True, **NEVER_5)
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == alone
        assert_idle(llm)


def _always(token: int) -> Any:
    def pick(logits: torch.Tensor, entries: Any, step: int, found: dict[str, Any]) -> list[int]:
        for entry in entries:
            found[entry.request.owner][0].append(token)
        return [token] * len(entries)

    return pick


TEXT = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef main():\n"


@pytest.fixture(scope="module")
def engines() -> list[LLM]:
    """The embedded checkpoint (byte-level tokenizer, trained) with k = 0..3; they share its weights."""
    loaded = load_model(embedded_checkpoint(), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load_model", lambda *args, **kwargs: loaded)
        return [make_llm(embedded_checkpoint(), k, max_model_len=192, max_num_batched_tokens=256) for k in range(4)]


@pytest.fixture(scope="module")
def greedy_tokens(engines: list[LLM]) -> list[int]:
    return engines[0].generate(TEXT, SamplingParams(max_tokens=24, ignore_eos=True))[0].outputs[0].token_ids


def _stops(llm: LLM, greedy: list[int]) -> list[SamplingParams]:
    """Stops at every kind of place in the greedy continuation: inside a token, across tokens, on an id, never."""
    assert llm.tokenizer is not None
    pieces = [llm.tokenizer.decode([token]) for token in greedy]
    text = "".join(pieces)
    across = pieces[5][-1] + pieces[6][0]
    base = SamplingParams(max_tokens=24, ignore_eos=True)
    return [
        base,
        dataclasses.replace(base, max_tokens=7),
        dataclasses.replace(base, stop=[across]),
        dataclasses.replace(base, stop=[text[9:14]], include_stop_str_in_output=True),
        dataclasses.replace(base, stop=[text[30:32], text[12:13], "never there"]),
        dataclasses.replace(base, stop=[across], min_tokens=12),
        dataclasses.replace(base, stop_token_ids=[greedy[6]]),
        dataclasses.replace(base, stop_token_ids=[greedy[6]], min_tokens=8),
        dataclasses.replace(base, stop=["never there"], stop_token_ids=[greedy[10]], max_tokens=11),
        dataclasses.replace(base, ignore_eos=False, min_tokens=24),
    ]


def test_stops_are_those_of_one_token_at_a_time(engines: list[LLM], greedy_tokens: list[int]) -> None:
    """Text, ids, reason and usage are the same for k = 0..3, alone, together and streaming."""
    assert engines[3].tokenizer is not None
    cases = _stops(engines[0], greedy_tokens)
    want = [engines[0].generate(TEXT, params)[0] for params in cases]
    reasons = [result.outputs[0].finish_reason for result in want]
    assert reasons[:3] == ["length", "length", "stop"]
    assert reasons.count("stop") >= 5
    for result, params in zip(want, cases, strict=True):
        [output] = result.outputs
        assert len(output.token_ids) == result.usage.completion_tokens >= min(params.min_tokens, 24)
        assert result.usage.prompt_tokens == len(result.prompt_token_ids)
        if isinstance(output.stop_reason, str) and params.min_tokens == 0:
            assert params.include_stop_str_in_output == (output.stop_reason in output.text)
            full = engines[0].tokenizer.decode(output.token_ids)  # type: ignore[union-attr]  # asserted in _stops
            assert full.startswith(output.text)
            assert output.stop_reason in full
        elif isinstance(output.stop_reason, int):
            assert output.token_ids[-1] == output.stop_reason
    for llm in engines[1:]:
        for got, truth in zip(llm.generate([TEXT] * len(cases), cases), want, strict=True):
            assert got.outputs == truth.outputs
            assert got.usage == truth.usage
        assert llm.metrics.accepted > 0
        assert_idle(llm)
    for params, truth in zip(cases, want, strict=True):
        chunks = list(engines[3].stream(TEXT, params))
        assert "".join(chunk.text for chunk in chunks) == truth.outputs[0].text
        assert [token for chunk in chunks for token in chunk.token_ids] == truth.outputs[0].token_ids
        assert chunks[-1].finish_reason == truth.outputs[0].finish_reason
        assert chunks[-1].stop_reason == truth.outputs[0].stop_reason
        assert chunks[-1].usage == truth.usage
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert_idle(engines[3])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_end_of_text_inside_a_window(small: Path, k: int) -> None:
    """A token that the model says often is made the end of text: it ends the output and is counted, at any place."""
    prompts = [prompt_of(length, 48) for length in (6, 18, 40, 41)]
    free = [tokens(make_llm(small, 0), prompt, 24) for prompt in prompts]
    for eos in {found[9] for found in free}:
        llm = make_llm(small, k)
        llm.core._eos_ids = frozenset({eos})
        for found, result in zip(free, llm.generate(prompts, SamplingParams(max_tokens=24)), strict=True):
            [output] = result.outputs
            cut = found.index(eos) + 1 if eos in found else 24
            assert output.token_ids == found[:cut]
            assert output.finish_reason == ("stop" if eos in found else "length")
            assert output.stop_reason is None
            assert result.usage.completion_tokens == cut
        assert_idle(llm)


def test_a_batch_with_a_mixture_of_parameters(small: Path) -> None:
    """Greedy, sampled, scored, stopped and repeated requests in one call equal their own calls."""
    each = [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=1.3, seed=7, ignore_eos=True, n=3),
        SamplingParams(max_tokens=12, temperature=0.5, top_k=5, min_p=0.02, seed=8, logprobs=2),
        SamplingParams(max_tokens=None, stop_token_ids=[9, 10], min_tokens=3, prompt_logprobs=0),
        SamplingParams(max_tokens=1, ignore_eos=True),
    ]
    prompts = [prompt_of(length, 49) for length in (3, 38, 20, 50, 11)]
    llm = make_llm(small, 3, max_model_len=96)
    seen: list[str] = []
    together = llm.generate(prompts, each, on_chunk=lambda chunk: seen.append(chunk.request_id))
    assert {result.request_id for result in together} == set(seen)
    for prompt, params, result in zip(prompts, each, together, strict=True):
        [alone] = make_llm(small, 3, max_model_len=96).generate([prompt], params)
        assert [o.token_ids for o in result.outputs] == [o.token_ids for o in alone.outputs]
        assert [(o.finish_reason, o.stop_reason) for o in result.outputs] == [
            (o.finish_reason, o.stop_reason) for o in alone.outputs
        ]
        assert result.usage == alone.usage
        assert len(result.outputs) == params.n
        assert (result.prompt_logprobs is None) == (params.prompt_logprobs is None)
        assert all((o.logprobs is None) == (params.logprobs is None) for o in result.outputs)
    assert llm.generate([], SamplingParams()) == []
    assert_idle(llm)
