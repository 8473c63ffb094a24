"""What goes wrong ends the requests that it concerns, by name, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.lanes import E4M3, assert_idle, make_llm, prompt_of, tokens, with_scales

from page4 import SamplingParams

PROMPT = prompt_of(20, 41)


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
    return with_scales(folder, tmp_path_factory.mktemp("broken_e4m3"))


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_request_with_values_that_are_not_finite_faults_alone(broken: Path, k: int, kv: str) -> None:
    """Long prompts too, where the indexer refuses to rank NaN; the others go on as if they were alone."""
    options = {**E4M3, "kv_cache_dtype": kv}
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
            assert "K, V or index scores of the token at position" in output.error
    assert_idle(llm)
    assert tokens(llm, good[1], 8, **NEVER_5) == alone[1]


def test_a_refused_draft_that_is_not_finite_harms_nobody(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target never says token 5; a draft that does is refused, and what its row computed is nobody's."""
    for kv in ("auto", "fp8_e4m3"):
        options = {**E4M3, "kv_cache_dtype": kv}
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
