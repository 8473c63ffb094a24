"""A minimal loop over Model and Arena for the tests: no scheduler, no engine, always a poisoned arena."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.conftest import poison_byte
from torch import Tensor

from page4.cache.layout import CacheLayout
from page4.cache.pages import PageAllocator
from page4.cache.storage import Arena
from page4.codec import Scale
from page4.model.batch import RowSpan, StepBatch
from page4.model.decoder import Model, StepOutput
from page4.model.weights import load_model


@functools.lru_cache(maxsize=32)
def cached_model(folder: Path, dtype: torch.dtype) -> Model:
    return load_model(folder, dtype)


@dataclass
class Sequence:
    """One request: its tokens so far, of which the first `done` have been committed."""

    owner: str
    slot: int
    pages: list[int]
    ids: list[int] = field(default_factory=list)
    done: int = 0


class Lane:
    """Model and arena of a checkpoint folder; pages are handed out in a shuffled order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        scales: dict[int, tuple[Scale, Scale]] | None = None,
        tokens: int = 1024,
        states: int = 5,
        byte: int | None = None,
        seed: int = 0,
    ) -> None:
        self.model = cached_model(folder, dtype)
        self.geometry = self.model.geometry
        kv = kv_dtype or dtype
        layout = CacheLayout.of(
            self.geometry,
            dtype=dtype,
            kv_dtype=kv,
            draft_kv_dtype=kv,
            page_tokens=16,
            with_draft=self.model.draft is not None,
        )
        self.byte = poison_byte() if byte is None else byte
        num_pages = layout.pages_per_state * (states + 1) + tokens // 16 + 1
        self.arena = Arena(layout, num_pages, "cpu", self.byte, scales)
        self.allocator = PageAllocator(num_pages, layout.pages_per_state, self.arena.poison_pages)
        self.random = random.Random(seed)
        self.count = 0

    def add(self, capacity: int = 320) -> Sequence:
        owner = f"r{self.count}"
        self.count += 1
        state = self.allocator.allocate_state(owner)
        pages = self.allocator.allocate_pages(owner, -(-capacity // 16))
        assert state is not None and pages is not None
        self.random.shuffle(pages)
        self.arena.zero_state(state.slot)
        return Sequence(owner, state.slot, pages)

    def free(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.owner)

    def span(self, sequence: Sequence, tokens: list[int]) -> RowSpan:
        first = sequence.done
        return RowSpan(tokens, first, sequence.pages, sequence.slot, sequence.ids[max(0, first - 5) : first])

    def forward(self, parts: list[tuple[Sequence, list[int]]]) -> tuple[StepBatch, StepOutput]:
        batch = StepBatch.build([self.span(s, tokens) for s, tokens in parts], self.geometry)
        return batch, self.model.forward(batch, self.arena)

    def step(self, parts: list[tuple[Sequence, list[int]]], accepted: list[int] | None = None) -> list[Tensor]:
        """Runs and commits; returns the logits [rows, V] of each part. `parts` carry the tokens after `done`."""
        batch, output = self.forward(parts)
        counts = [len(tokens) for _, tokens in parts] if accepted is None else accepted
        self.model.commit(batch, output.pending, self.arena, torch.tensor(counts))
        for (sequence, tokens), count in zip(parts, counts, strict=True):
            sequence.ids[sequence.done :] = tokens[:count]
            sequence.done += count
        logits = self.model.logits(output.streams)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def run(self, sequence: Sequence, ids: list[int], chunks: list[int]) -> Tensor:
        """Feeds `ids` in chunks; returns logits [len(ids), V]."""
        assert sum(chunks) == len(ids)
        out, start = [], 0
        for chunk in chunks:
            out += self.step([(sequence, ids[start : start + chunk])])
            start += chunk
        return torch.cat(out)

    def greedy(self, sequence: Sequence, last: Tensor, count: int) -> list[int]:
        """`count` argmax tokens, the first from logits `last`: [V]."""
        tokens = [int(last.argmax())]
        while len(tokens) < count:
            (logits,) = self.step([(sequence, tokens[-1:])])
            tokens.append(int(logits[-1].argmax()))
        return tokens

    def state(self, sequence: Sequence) -> dict[str, Tensor]:
        """Copies of every recurrent, conv and PLE state of a request."""
        views: dict[str, Any] = {}
        for layer in self.geometry.gdn_layers:
            views[f"recurrent {layer}"] = self.arena.recurrent(layer)
            views[f"conv {layer}"] = self.arena.conv(layer)
        for layer in self.geometry.ple.layers if self.geometry.ple else ():
            views[f"ple {layer}"] = self.arena.ple(layer)
        return {name: view[sequence.slot].clone() for name, view in views.items()}


CHUNKS = (1, 2, 3, 5, 7, 15, 16, 17, 40, 64, 65)


def ragged(total: int, rng: random.Random, choices: tuple[int, ...] = CHUNKS) -> list[int]:
    """Random chunk lengths that sum to `total`."""
    chunks: list[int] = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, rng.choice(choices)))
    return chunks
