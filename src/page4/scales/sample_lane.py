"""Requests through the target and its draft head, as serving would run them, but with every position seen by both.

The target prefills a sample in chunks; the draft head follows with the target's streams and the next tokens, at the
last position with the target's own greedy token. So every layer, the draft's too, sees each position exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from page4 import env
from page4.cache.layout import CacheLayout
from page4.cache.pages import PageAllocator
from page4.cache.storage import Arena
from page4.engine.admission import DEFAULT_BATCHED_TOKENS, Sizes
from page4.engine.sampling import greedy
from page4.errors import KernelError, ScaleError, message
from page4.model.batch import RowSpan, StepBatch
from page4.model.decoder import Model
from page4.model.kv_scales import Scales
from page4.scales.samples import Sample

PAGE_TOKENS = 16


@dataclass
class _Request:
    """One sample under way: its first `done` tokens have been run."""

    owner: str
    ids: Sequence[int]
    slot: int
    pages: list[int]
    done: int = 0


class Watch(Protocol):
    """Who looks at the steps of a lane."""

    def step(self, request: str) -> AbstractContextManager[None]:
        """Around one step of the target and its draft; `request` names whose."""

    def nonfinite(self) -> list[str]:
        """Where K or V were no numbers, for the message of a step that failed."""

    def outputs(self, target: Tensor, draft: Tensor | None) -> None:
        """Streams [R, C * hidden] behind the target and the draft head; those of `draft` only for `all_draft_rows`."""


class SampleLane:
    """A model with a cache, for `batch_size` requests of some length.

    The cache keeps K/V as the model computes them, or as E4M3 with `scales`, a pair for each layer of the target and,
    where the draft's K/V are E4M3 too, for the draft.
    `all_draft_rows`: the draft head attends and computes outputs at every position, not at the last alone.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int,
        max_tokens: int,
        step_rows: int = DEFAULT_BATCHED_TOKENS,
        scales: Scales | None = None,
        all_draft_rows: bool = False,
    ) -> None:
        self.model, self._step_rows, self._all_draft_rows = model, step_rows, all_draft_rows
        layout = CacheLayout.of(
            model.geometry,
            dtype=model.dtype,
            kv_dtype=torch.uint8 if scales else model.dtype,
            draft_kv_dtype=torch.uint8 if scales and model.geometry.draft_layer in scales else model.dtype,
            page_tokens=PAGE_TOKENS,
            with_draft=model.draft is not None,
        )
        self._sizes = Sizes(layout.page_bytes, layout.page_tokens, layout.pages_per_state)
        num_pages = self._sizes.pages_for_requests(batch_size, max_tokens) + layout.pages_per_state
        self.arena = Arena(layout, num_pages, model.device, env.get("POISON"), scales)
        self._allocator = PageAllocator(num_pages, layout.pages_per_state, self.arena.poison_pages)

    @torch.inference_mode()
    def run(self, samples: Sequence[Sample], watch: Watch, on_tokens: Callable[[int], None] | None = None) -> None:
        """Run samples together under the eyes of `watch`; `on_tokens` hears of every step's tokens."""
        requests = [self._open(f"sample {sample.digest[:16]} ({n})", sample) for n, sample in enumerate(samples)]
        try:
            while live := [request for request in requests if request.done < len(request.ids)]:
                rows = self._step(live, max(1, self._step_rows // len(live)), watch)
                if on_tokens is not None:
                    on_tokens(rows)
        finally:
            for request in requests:
                self._allocator.free(request.owner)

    def _open(self, owner: str, sample: Sample) -> _Request:
        # The state first: it needs an aligned run of pages, which single pages must not break up.
        state = self._allocator.allocate_state(owner)
        pages = self._allocator.allocate_pages(owner, self._sizes.pages_for_tokens(len(sample.token_ids)))
        assert state is not None and pages is not None, "the arena was sized for this batch"
        self.arena.zero_state(state.slot)
        return _Request(owner, sample.token_ids, state.slot, pages)

    def _step(self, live: list[_Request], share: int, watch: Watch) -> int:
        ends = [min(request.done + share, len(request.ids)) for request in live]
        batch = self._batch(live, [list(r.ids[r.done : end]) for r, end in zip(live, ends, strict=True)])
        names = ", ".join(request.owner for request in live)
        try:
            with watch.step(names):
                output = self.model.forward(batch, self.arena)
                drafted = self._draft(live, ends, batch, output.streams)
            watch.outputs(output.streams, drafted)
        except KernelError as error:
            # A NaN in K or V shows as one in the scores or logits behind it: name where it came from.
            got, do = ", ".join(watch.nonfinite()) or str(error), "check the checkpoint and the dtype"
            raise ScaleError(message(names, allowed="finite K, V and scores", got=got, do=do)) from error
        self.model.commit(batch, output.pending, self.arena, None)
        for request, end in zip(live, ends, strict=True):
            request.done = end
        return batch.num_rows

    def _draft(self, live: list[_Request], ends: list[int], batch: StepBatch, streams: Tensor) -> Tensor | None:
        """The draft head over the same rows: each leaves its K and V; only what leaves the head may be cut down."""
        if self.model.draft is None:
            return None
        drafted = self._batch(live, self._following(live, ends, batch, streams))
        keep = None if self._all_draft_rows else [1] * len(live)
        output = self.model.draft.forward(drafted, streams, self.arena, keep=keep)
        return output.streams if self._all_draft_rows else None

    def _batch(self, live: list[_Request], tokens: list[list[int]]) -> StepBatch:
        geometry = self.model.geometry
        context = geometry.ple.ngram_size - 1 if geometry.ple is not None else 0
        spans = [
            RowSpan(part, r.done, r.pages, r.slot, list(r.ids[max(0, r.done - context) : r.done]))
            for r, part in zip(live, tokens, strict=True)
        ]
        return StepBatch.build(spans, geometry, self.model.device)

    def _following(self, live: list[_Request], ends: list[int], batch: StepBatch, streams: Tensor) -> list[list[int]]:
        """The token after each row; after a sample's last one, what the target would write."""
        found = [list(r.ids[r.done + 1 : end + 1]) for r, end in zip(live, ends, strict=True)]
        ending = [n for n, end in enumerate(ends) if end == len(live[n].ids)]
        if ending:
            rows = torch.tensor([batch.row_starts[n + 1] - 1 for n in ending], device=streams.device)
            tokens, usable = greedy(self.model.logits(streams[rows]))
            for n, token, ok in zip(ending, tokens, usable, strict=True):
                if not ok:
                    do = "check the checkpoint and the dtype"
                    raise KernelError(message(live[n].owner, allowed="finite logits", got="others", do=do))
                found[n].append(token)
        return found
