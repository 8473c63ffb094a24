"""Engines of the end-to-end tests, and what must hold of them whenever they are idle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page4 import LLM, SamplingParams
from page4.engine.output import StreamChunk


def make_llm(folder: Path, k: int, **options: Any) -> LLM:
    """A small engine with k drafts."""
    speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
    settings = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8, **options}
    return LLM(folder, speculative_config=speculative, **settings)


def tokens(llm: LLM, prompt: list[int], count: int, **params: Any) -> list[int]:
    """Greedy continuation of one prompt, alone."""
    settings = SamplingParams(max_tokens=count, ignore_eos=True, **params)
    return llm.generate([prompt], settings)[0].outputs[0].token_ids


def prompt_of(length: int, seed: int, vocab: int = 24) -> list[int]:
    """Token ids that depend on nothing but the arguments."""
    state, found = seed * 2654435761 % 2**32 or 1, []
    for _ in range(length):
        state = (1103515245 * state + 12345) % 2**31
        found.append(3 + (state >> 16) % (vocab - 3))
    return found


def collect(chunks: list[StreamChunk], into: dict[str, list[int]], ends: dict[str, str]) -> None:
    """Add the chunks' tokens and finish reasons by request."""
    for chunk in chunks:
        into.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            ends[chunk.request_id] = chunk.finish_reason


def assert_idle(llm: LLM) -> None:
    """Every page is back, nobody owns anything, and the null page was never written."""
    allocator, arena = llm.core.allocator, llm.core.arena
    assert allocator.free_pages == allocator.num_usable_pages
    assert allocator.owners == ()
    assert not llm.has_unfinished()
    null_page = arena.bytes[: arena.layout.page_bytes]
    assert bool((null_page == (arena.poison or 0)).all())
