"""The compiled kernels and torch give the same greedy tokens, whatever the cache holds and however much is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import E4M3, assert_idle, make_llm, prompt_of
from tests.kernels.cpu_cases import needs_compiler
from tests.oracle import oracle_greedy

from page4 import LLM, SamplingParams, embedded_checkpoint
from page4.attend import route_counts

pytestmark = needs_compiler
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, 5, 36, 70), start=1)]
COUNT = 20


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Of all prompts together, in windows of several requests."""
    results = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    assert_idle(llm)
    return [result.outputs[0].token_ids for result in results]


def compiled_parts(llm: LLM) -> set[bool]:
    """Whether the parts of the layers that may be compiled are."""
    parts = [part for layer in llm.core.model.layers for part in vars(layer).values() if hasattr(part, "kernel")]
    assert {type(part).__name__ for part in parts} == {"Hyper", "Gdn", "Qsa", "Moe"}
    return {part.kernel is not None for part in parts}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, E4M3], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("folder", ["small", "small_two_heads"])
def test_greedy_tokens_are_those_of_torch(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    k: int,
    options: dict[str, Any],
    threads: int,
) -> None:
    path: Path = request.getfixturevalue(f"{folder}_e4m3" if options else folder)
    found = {}
    for kernels in ("auto", "torch"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        before, llm = route_counts["generic"], make_llm(path, k, **options)
        torch.set_num_threads(threads)
        assert compiled_parts(llm) == {kernels == "auto"}
        found[kernels] = greedy(llm, PROMPTS, COUNT)
        assert (route_counts["generic"] > before) == (kernels == "auto"), "the compiled route must be seen"
    assert found["auto"] == found["torch"]
    if not options:
        assert found["auto"] == [oracle_greedy(path, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("k", [0, 3])
def test_the_embedded_checkpoint_gives_the_tokens_of_torch(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    found = []
    for kernels in ("auto", "torch"):
        monkeypatch.setenv("PAGE4_KERNELS", kernels)
        llm = make_llm(embedded_checkpoint(), k, max_model_len=512)
        assert llm.tokenizer is not None and compiled_parts(llm) == {kernels == "auto"}
        texts = ["import os\n\n\ndef walk(path):\n" * 8, "class Reader:\n", "x"]
        found.append(greedy(llm, [llm.tokenizer.encode(text) for text in texts], 24))
    assert found[0] == found[1]
