"""The draft side of a step: catch up with what the target accepted, then draft the next window.

The draft layer keeps its own K/V. In the first iteration it runs over every newly accepted position i with the target's
streams h_i and the real token t_{i+1}; the last such row gives the first draft. The following iterations run one row a
request on the draft's own streams and reuse the selection of that last row (case B07: the last accepted row's, looked
up by request). What they write is written again by the next catch-up, with the target's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.cache.storage import Arena
from page4.engine.chance import Purpose, uniform
from page4.engine.request import Request
from page4.engine.sampling import Filters, distribution, draw, greedy
from page4.model.batch import RowSpan, StepBatch
from page4.model.mtp import Draft


@dataclass(frozen=True)
class CatchUp:
    """Newly accepted positions of one request: `stream_row` is the target step's row of `first_position`.

    next_tokens[i] follows position first_position + i. `wants` drafts are made after them.
    """

    request: Request
    first_position: int
    next_tokens: list[int]
    stream_row: int
    wants: int

    @property
    def last_position(self) -> int:
        """Position of the newest accepted row."""
        return self.first_position + len(self.next_tokens) - 1


@dataclass(frozen=True)
class Drafts:
    """Tokens drafted for one request, and their distributions [k, V] when they were sampled."""

    tokens: list[int]
    q: Tensor | None


class Drafter:
    """Runs the draft head over an arena; `pages` gives the pages of a request's owner."""

    def __init__(self, draft: Draft, arena: Arena, pages: Callable[[str], Sequence[int]]) -> None:
        self._draft, self._arena, self._pages = draft, arena, pages

    def run(self, streams: Tensor, work: Sequence[CatchUp]) -> dict[str, Drafts]:
        """Catch up and draft; streams: [R, C * hidden] of the target's step. Returns the drafts by owner."""
        if not work:
            return {}
        batch = self._batch([(entry.request, entry.first_position, entry.next_tokens) for entry in work])
        # Only the last accepted row of a request drafts; the others leave their K, V and index keys.
        output = self._draft.forward(batch, _rows_of(streams, work), self._arena, keep=[1] * len(work))
        active = [(entry, n) for n, entry in enumerate(work) if entry.wants]
        found: dict[str, tuple[list[int], list[Tensor]]] = {entry.request.owner: ([], []) for entry, _ in active}
        if not active:
            return {}
        rows = torch.tensor([row for _, row in active], device=streams.device)
        hidden, selection = output.streams[rows], output.selection.take(rows)
        selected_at = torch.tensor([entry.last_position for entry, _ in active], device=streams.device)
        entries = [entry for entry, _ in active]
        for step in range(1, max(entry.wants for entry in entries) + 1):
            tokens = self._pick(self._draft.logits(hidden), entries, step, found)
            keep = [
                n
                for n, (entry, token) in enumerate(zip(entries, tokens, strict=True))
                if token is not None and step < entry.wants
            ]
            if not keep:
                break
            if len(keep) < len(entries):
                index = torch.tensor(keep, device=streams.device)
                hidden, selection, selected_at = hidden[index], selection.take(index), selected_at[index]
                entries, tokens = [entries[n] for n in keep], [tokens[n] for n in keep]
            batch = self._batch(
                [
                    (entry.request, entry.last_position + step, [token])
                    for entry, token in zip(entries, tokens, strict=True)
                    if token is not None
                ]
            )
            hidden = self._draft.forward(batch, hidden, self._arena, (selection, selected_at)).streams
        return {owner: Drafts(tokens, torch.stack(q) if q else None) for owner, (tokens, q) in found.items()}

    def _batch(self, spans: Sequence[tuple[Request, int, list[int]]]) -> StepBatch:
        rows = []
        for request, position, tokens in spans:
            assert request.slot is not None, "a running request has a slot"
            rows.append(RowSpan(tokens, position, list(self._pages(request.owner)), request.slot.slot))
        return StepBatch.build(rows, self._draft.geometry, self._arena.bytes.device)

    def _pick(
        self,
        logits: Tensor,
        entries: Sequence[CatchUp],
        step: int,
        found: dict[str, tuple[list[int], list[Tensor]]],
    ) -> list[int | None]:
        """Draft `step` of every request; None, and no more drafts, where the logits are no numbers."""
        tokens, usable = greedy(logits)
        picked: list[int | None] = [token if ok else None for token, ok in zip(tokens, usable, strict=True)]
        sampled = [n for n, entry in enumerate(entries) if not entry.request.params.greedy and usable[n]]
        if sampled:
            filters = Filters.of([entries[n].request.params for n in sampled], logits.device)
            q = distribution(logits[torch.tensor(sampled, device=logits.device)], filters)
            numbers = [
                uniform(entries[n].request.seed, entries[n].last_position + 1 + step, Purpose.DRAFT) for n in sampled
            ]
            for row, (n, drawn) in enumerate(zip(sampled, draw(q, numbers), strict=True)):
                picked[n] = drawn
                found[entries[n].request.owner][1].append(q[row])
        for entry, token in zip(entries, picked, strict=True):
            if token is not None:
                found[entry.request.owner][0].append(token)
        return picked


def _rows_of(streams: Tensor, work: Sequence[CatchUp]) -> Tensor:
    """The target's streams of every accepted row, in the order of the catch-up."""
    if len(work) == 1:
        entry = work[0]
        return streams[entry.stream_row : entry.stream_row + len(entry.next_tokens)]
    rows = [entry.stream_row + i for entry in work for i in range(len(entry.next_tokens))]
    return streams[torch.tensor(rows, device=streams.device)]
