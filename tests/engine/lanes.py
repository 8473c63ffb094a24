"""Engines of the end-to-end tests, and what must hold of them whenever they are idle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from page4 import LLM, SamplingParams
from page4.engine.output import StreamChunk
from page4.geometry import Geometry

E4M3: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "e4m3_mtp": True}


def make_llm(folder: Path, k: int, **options: Any) -> LLM:
    """A small engine with k drafts."""
    speculative = {"method": "mtp", "num_speculative_tokens": k} if k else None
    settings = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 8, **options}
    return LLM(folder, speculative_config=speculative, **settings)


def with_scales(folder: Path, out: Path, *, draft: bool = True, skip: tuple[str, ...] = ()) -> Path:
    """A copy of a single-file checkpoint with a scale of its own for each QSA layer and side, but for names in `skip`.

    Some values of a random model clip at these scales, and all are rounded.
    """
    shutil.copytree(folder, out, dirs_exist_ok=True)
    owners = [f"model.layers.{layer}" for layer in Geometry.from_folder(folder).qsa_layers]
    owners += ["mtp.layers.0"] if draft else []
    names = [f"{owner}.self_attn.{side}_scale" for owner in owners for side in "kv"]
    scales = {name: torch.tensor(0.0047 + 0.0009 * n) for n, name in enumerate(names) if name not in skip}
    save_file(load_file(out / "model.safetensors") | scales, out / "model.safetensors", metadata={"format": "pt"})
    return out


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
