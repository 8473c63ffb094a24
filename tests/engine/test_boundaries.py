"""Length limits inside a window, drafts of any quality, requests that share a step (cases B30 and B33)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.engine.lanes import assert_idle, collect, make_llm, prompt_of, tokens

from page4 import LLM, SamplingParams
from page4.engine.drafting import CatchUp, Drafter, Drafts

MOST = 96


@pytest.mark.parametrize("length", range(88, 97))
def test_drafts_never_pass_the_model_length(small: Path, length: int) -> None:
    prompt = prompt_of(length, 5)
    plain, drafting = (make_llm(small, k, max_model_len=MOST) for k in (0, 3))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want, got = (llm.generate([prompt], params)[0] for llm in (plain, drafting))
    output = got.outputs[0]
    assert output.token_ids == want.outputs[0].token_ids
    assert len(output.token_ids) == MOST - length
    assert output.finish_reason == want.outputs[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (length, MOST - length)
    assert len(tokens(drafting, prompt_of(10, 6), 5)) == 5, "the engine lives on"
    assert_idle(drafting)


def test_one_request_at_the_limit_and_one_in_the_middle(small: Path) -> None:
    prompts = [prompt_of(95, 7), prompt_of(40, 8)]
    alone = [tokens(make_llm(small, 0, max_model_len=MOST), prompt, 20) for prompt in prompts]
    llm = make_llm(small, 3, max_model_len=MOST, max_num_batched_tokens=256)
    results = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [result.outputs[0].token_ids for result in results] == alone
    assert [len(found) for found in alone] == [1, 20]


def test_a_last_chunk_of_one_token_beside_a_window(small: Path) -> None:
    """The prompt's last token comes alone while another request verifies drafts: its state is that of the solo run."""
    short, long = prompt_of(6, 9), prompt_of(41, 10)
    alone = [tokens(make_llm(small, 0), prompt, 16) for prompt in (short, long)]
    llm = make_llm(small, 3, max_num_batched_tokens=14)
    found: dict[str, list[int]] = {}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    llm.add_request("short", short, params)
    collect(llm.step(), found, {})
    llm.add_request("long", long, params)
    while llm.has_unfinished():
        collect(llm.step(), found, {})
    assert [found["short"], found["long"]] == alone


class _Stub:
    """In place of the draft head: what it proposes is a function of the request's tokens so far."""

    def __init__(self, propose: Callable[[list[int], int], list[int]]) -> None:
        self._propose = propose

    def run(self, streams: torch.Tensor, work: Sequence[CatchUp]) -> dict[str, Drafts]:
        return {e.request.owner: Drafts(self._propose(e.request.token_ids, e.wants), None) for e in work if e.wants}


def _with_stub(llm: LLM, propose: Callable[[list[int], int], list[int]], monkeypatch: pytest.MonkeyPatch) -> LLM:
    assert isinstance(llm.core._drafter, Drafter)
    monkeypatch.setattr(llm.core, "_drafter", _Stub(propose))
    return llm


@pytest.mark.parametrize("kind", ["right", "wrong", "alternating", "right3of4"])
def test_drafts_of_any_quality_give_the_same_tokens(small: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, count = prompt_of(33, 21), 64
    plain = make_llm(small, 0)
    truth = [*prompt, *tokens(plain, prompt, count)]

    def propose(so_far: list[int], wants: int) -> list[int]:
        assert so_far == truth[: len(so_far)]
        right = (truth[len(so_far) :] + [0] * wants)[:wants]
        wrong = [(token + 1) % 24 for token in right]
        if kind == "right":
            return right
        if kind == "wrong":
            return wrong
        period = 2 if kind == "alternating" else 4
        return [w if (len(so_far) + i) % period == 0 else r for i, (r, w) in enumerate(zip(right, wrong, strict=True))]

    llm = _with_stub(make_llm(small, 3), propose, monkeypatch)
    assert tokens(llm, prompt, count) == truth[len(prompt) :]
    metrics = llm.metrics
    if kind == "right":
        assert metrics.accepted == metrics.drafted
    if kind == "wrong":
        assert metrics.accepted == 0
        assert metrics.drafted > 0
    assert_idle(llm)


def test_acceptance_of_a_stub_that_is_right_three_times_of_four(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With k = 1 every draft is verified on its own, so the measured acceptance is exactly 3 of 4 (case B14)."""
    prompt, count = prompt_of(20, 22), 58
    truth = [*prompt, *tokens(make_llm(small, 0), prompt, count)]
    drafted = 0

    def propose(so_far: list[int], wants: int) -> list[int]:
        nonlocal drafted
        drafted += 1
        right = truth[len(so_far)]
        return [right if drafted % 4 else (right + 1) % 24][:wants]

    llm = _with_stub(make_llm(small, 1), propose, monkeypatch)
    assert tokens(llm, prompt, count) == truth[len(prompt) :]
    assert llm.metrics.drafted == 32
    assert llm.metrics.accepted == 0.75 * llm.metrics.drafted


def test_states_after_rejections_are_those_of_the_accepted_tokens(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent, conv and PLE state of a run whose drafts were all refused: bit for bit where the sums are the same."""
    prompt = prompt_of(25, 23)
    truth = [*prompt, *tokens(make_llm(small, 0), prompt, 12)]
    llm = _with_stub(
        make_llm(small, 3),
        lambda so_far, wants: [(truth[len(so_far)] + 1) % 24, 3, 4][:wants],
        monkeypatch,
    )
    plain = make_llm(small, 0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for engine in (llm, plain):
        engine.add_request("r", prompt, params)
    while plain.core.scheduler.has_unfinished():
        llm.step(), plain.step()
        running = [engine.core.scheduler.running for engine in (llm, plain)]
        if not running[0]:
            break
        assert [r[0].token_ids for r in running] == [truth[: running[0][0].num_tokens]] * 2
        slots = [r[0].slot for r in running]
        assert slots[0] is not None and slots[1] is not None
        arenas = [engine.core.arena for engine in (llm, plain)]
        for layer in llm.geometry.gdn_layers:
            for view in ("recurrent", "conv", *(["ple"] if layer in arenas[0].layout.ple else [])):
                mine, theirs = (
                    getattr(arena, view)(layer)[slot.slot].double() for arena, slot in zip(arenas, slots, strict=True)
                )
                assert (mine - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))
