"""k = 0..7 give the same greedy tokens: alone, interleaved, through preemption and aborts, in poisoned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.lanes import E4M3, assert_idle, collect, make_llm, prompt_of, tokens
from tests.oracle import oracle_greedy

from page4 import SamplingParams, embedded_checkpoint
from page4.geometry import Geometry

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, 3, 4, 17, 31, 36, 50, 70), start=1)]
COUNT = 24


@pytest.fixture(scope="module")
def expected(small: Path) -> list[list[int]]:
    """transformers' greedy tokens of every prompt."""
    return [oracle_greedy(small, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("k", range(8))
def test_every_k_gives_the_oracles_tokens_alone(small: Path, expected: list[list[int]], k: int) -> None:
    llm = make_llm(small, k)
    assert [tokens(llm, prompt, COUNT) for prompt in PROMPTS] == expected
    assert_idle(llm)
    metrics = llm.metrics
    assert metrics.decode_tokens == (COUNT - 1) * len(PROMPTS)
    # A window emits its own token and what it accepted; drafts that could pass the length limit are never made.
    assert metrics.windows + metrics.accepted == metrics.decode_tokens
    assert sum(metrics.accepted_per_position) == metrics.accepted
    assert all(metrics.accepted_per_position[i] >= metrics.accepted_per_position[i + 1] for i in range(k - 1))
    if k:
        assert 0 < metrics.accepted < metrics.drafted, "the test must see acceptance and rejection"


@pytest.mark.parametrize("poison", ["0x7F", "0xFF"])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_eight_requests_with_aborts_and_preemption(
    small: Path, expected: list[list[int]], k: int, poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE4_POISON", poison)
    roomy = make_llm(small, k, block_size=4)
    page_bytes = roomy.core.arena.layout.page_bytes
    sizes = roomy.core.scheduler.sizes
    # States of three requests leave too few pages for their K/V, so that windows have to preempt.
    pages = 4 * sizes.pages_per_state + 2
    memory = pages * page_bytes
    llm = make_llm(small, k, block_size=4, max_model_len=100, kv_cache_memory_bytes=memory)
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    found: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(f"keep{number}", prompt, params)
        llm.add_request(f"drop{number}", prompt[::-1], params)
    step = 0
    while llm.has_unfinished():
        collect(llm.step(), found, ends)
        llm.abort(f"drop{step % 8}")
        step += 1
        assert step < 2000
    assert [found[f"keep{number}"] for number in range(8)] == expected
    assert {ends[f"keep{number}"] for number in range(8)} == {"length"}
    assert {ends[f"drop{number}"] for number in range(8)} <= {"abort", "length"}
    assert "abort" in ends.values()
    assert llm.metrics.preemptions > 0, "the test must see preemption"
    assert llm.metrics.failed_steps == 0
    assert_idle(llm)


@pytest.mark.parametrize("k", [0, 2, 5])
def test_two_kv_heads_and_two_sparse_layers(small_two_heads: Path, k: int) -> None:
    llm = make_llm(small_two_heads, k)
    prompts = PROMPTS[3:]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    together = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    assert together == [oracle_greedy(small_two_heads, prompt, 16) for prompt in prompts]
    assert_idle(llm)


@pytest.mark.parametrize("chunk", [5, 16, 48])
def test_the_chunk_size_changes_nothing(small: Path, expected: list[list[int]], chunk: int) -> None:
    llm = make_llm(small, 3, max_num_batched_tokens=chunk)
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    results = llm.generate(PROMPTS, params)
    assert [result.outputs[0].token_ids for result in results] == expected


def test_the_embedded_checkpoint_agrees_with_itself_and_with_the_oracle() -> None:
    folder = embedded_checkpoint()
    plain, drafting = make_llm(folder, 0, max_model_len=512), make_llm(folder, 3, max_model_len=512)
    assert plain.tokenizer is not None
    ids = plain.tokenizer.encode(
        "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n" * 12
    )
    assert len(ids) > Geometry.from_folder(folder).index.budget_tokens + 3, "something must be pruned"
    first = tokens(plain, ids, 48)
    assert tokens(drafting, ids, 48) == first
    assert oracle_greedy(folder, ids, 48) == first
    assert drafting.metrics.accepted > 0


@pytest.mark.parametrize("k", [1, 4])
def test_e4m3_keys_and_values_do_not_depend_on_k(small_e4m3: Path, k: int) -> None:
    plain = make_llm(small_e4m3, 0, **E4M3)
    drafting = make_llm(small_e4m3, k, **E4M3)
    for prompt in PROMPTS[3:]:
        assert tokens(drafting, prompt, COUNT) == tokens(plain, prompt, COUNT)
    assert_idle(drafting)
    geometry = plain.geometry
    for llm, layers in ((plain, geometry.qsa_layers), (drafting, (*geometry.qsa_layers, geometry.draft_layer))):
        counted = llm.metrics.kv
        assert [(entry.layer, entry.side) for entry in counted] == [(layer, side) for layer in layers for side in "kv"]
        assert sum(entry.clipped for entry in counted) > 0 and not any(entry.nonfinite for entry in counted)
