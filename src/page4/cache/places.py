"""Where the rows of a step write: worked out once a step, shared by its layers.

With the host fields of `Rows` only what is needed is worked on; without them every row is a candidate and those that
write nothing are masked out, so that the shapes follow from R and N alone and nothing waits for the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.cache.layout import RING_TOKENS
from page4.cache.rows import Rows
from page4.cache.units import BLOCK_TOKENS

_REQUEST_SHIFT = 32


@dataclass(frozen=True)
class BlockPlaces:
    """B blocks, among them every block that the step completes. Tensors are int64 unless said otherwise.

    rows: [B, 4] rows of a block's tokens; here: [B, 4, 1] bool, tokens of this step (None: all); slots: [B, 1] and
    ring_places: [B, 4], where the other tokens' raw keys lie; first: [B] position of the first token; page, place: [B]
    where the pooled key goes; real: [B] bool, the blocks that are written (None: all).
    """

    rows: Tensor
    here: Tensor | None
    slots: Tensor
    ring_places: Tensor
    first: Tensor
    page: Tensor
    place: Tensor
    real: Tensor | None


@dataclass(frozen=True)
class IndexPlaces:
    """The blocks to pool (None: no block), and the M rows whose raw keys the ring keeps.

    rows: [M] (None: all rows in order); slots, ring_places: [M] int64; real: [M] bool, the rows written (None: all).
    """

    blocks: BlockPlaces | None
    rows: Tensor | None
    slots: Tensor
    ring_places: Tensor
    real: Tensor | None
    state_slots: Tensor


def kv_places(rows: Rows, page_tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Page [R] and offset in it [R] of each row, and [R] bool which rows write (None: all)."""

    def make() -> tuple[Tensor, Tensor, Tensor | None]:
        page, offset = rows.pages_of(rows.positions, rows.request_of_row, page_tokens)
        return page, offset, _mask(page, rows)

    return rows.once(("kv", page_tokens), make)


def index_places(rows: Rows, state_slots: Tensor, page_tokens: int) -> IndexPlaces:
    """Places of raw and pooled index keys; state_slots: [N] int64."""

    # The result holds `state_slots`, so its id stays its own for as long as the key is in use.
    def make() -> IndexPlaces:
        if rows.row_starts is None or rows.first_positions is None:
            return _masked_places(rows, state_slots, page_tokens)
        return _known_places(rows, state_slots, page_tokens)

    return rows.once(("index", page_tokens, id(state_slots)), make)


def request_spans(rows: Rows, state_slots: Tensor) -> Tensor:
    """[N, 4] int64 on the CPU: first row, rows, state slot and first position of each request, from the host fields."""
    starts, firsts = rows.row_starts, rows.first_positions
    assert starts is not None and firsts is not None, "spans are made from the host fields"

    def make() -> tuple[Tensor, Tensor]:
        facts = zip(itertools.pairwise(starts), state_slots.tolist(), firsts, strict=True)
        spans = [(start, end - start, slot, first) for (start, end), slot, first in facts]
        return torch.tensor(spans, dtype=torch.int64).view(-1, 4), state_slots

    return rows.once(("spans", id(state_slots)), make)[0]


def completed_blocks(rows: Rows) -> Tensor:
    """[B] int64: position of the first token of each block that the rows complete, by request and position."""
    starts, firsts = rows.row_starts, rows.first_positions
    assert starts is not None and firsts is not None, "known from the host fields"
    found = [
        block * BLOCK_TOKENS
        for (start, end), first in zip(itertools.pairwise(starts), firsts, strict=True)
        for block in range(first // BLOCK_TOKENS, (first + end - start) // BLOCK_TOKENS)
    ]
    return torch.tensor(found, dtype=torch.int64, device=rows.positions.device)


def _mask(target: Tensor, rows: Rows) -> Tensor | None:
    """Which of the pages or slots are not the null one; None when all are and asking costs no sync."""
    real = target > 0
    on_host = target.device.type == "cpu" and rows.row_starts is not None
    return None if on_host and bool(real.all()) else real


def _known_places(rows: Rows, state_slots: Tensor, page_tokens: int) -> IndexPlaces:
    """Of rows that the host knows: the blocks that they complete, the newest rows of each request."""
    assert rows.row_starts is not None and rows.first_positions is not None
    closing: list[_Closing] = []
    newest: list[int] = []
    for request, (start, end) in enumerate(itertools.pairwise(rows.row_starts)):
        position = rows.first_positions[request]
        for row in range(start + (BLOCK_TOKENS - 1 - position) % BLOCK_TOKENS, end, BLOCK_TOKENS):
            first = position + row - start - (BLOCK_TOKENS - 1)
            closing.append((row, request, first, max(0, position - first)))
        newest.extend(range(max(start, end - RING_TOKENS), end))
    positions, requests = rows.positions, rows.request_of_row
    kept = None
    if len(newest) < rows.num_rows:
        kept = torch.tensor(newest, dtype=torch.int64, device=positions.device)
        positions, requests = positions[kept], requests[kept]
    slots = state_slots[requests]
    blocks = _known_blocks(closing, rows, state_slots, page_tokens) if closing else None
    return IndexPlaces(blocks, kept, slots, positions % RING_TOKENS, _mask(slots, rows), state_slots)


# The row that ends a block, its request, the first position of the block, its tokens from before this step.
_Closing = tuple[int, int, int, int]


def _known_blocks(closing: list[_Closing], rows: Rows, state_slots: Tensor, page_tokens: int) -> BlockPlaces:
    facts = [
        (row, request, first, old, first % RING_TOKENS, first // page_tokens, first % page_tokens // BLOCK_TOKENS)
        for row, request, first, old in closing
    ]
    device = rows.positions.device
    row, owner, first, old, ring_place, column, place = torch.tensor(facts, dtype=torch.int64, device=device).unbind(1)
    steps = torch.arange(BLOCK_TOKENS, device=device)
    page = rows.block_table[owner, column].long()
    return BlockPlaces(
        rows=(row.unsqueeze(1) + (steps - (BLOCK_TOKENS - 1))).clamp_min_(0),
        here=(steps >= old.unsqueeze(1)).unsqueeze(-1) if any(fact[3] for fact in facts) else None,
        slots=state_slots[owner].unsqueeze(1),
        ring_places=ring_place.unsqueeze(1) + steps,
        first=first,
        page=page,
        place=place,
        real=_mask(page, rows),
    )


def _masked_places(rows: Rows, state_slots: Tensor, page_tokens: int) -> IndexPlaces:
    """Of rows in any order with padding among them: every row is a candidate for everything."""
    order, positions, requests = _by_request(rows)
    owner = requests.clamp_min(0)
    closes = (positions >= 0) & (positions % BLOCK_TOKENS == BLOCK_TOKENS - 1)
    first_positions = torch.where(closes, positions - (BLOCK_TOKENS - 1), -1)
    steps = torch.arange(BLOCK_TOKENS, device=positions.device)
    token_positions = first_positions.unsqueeze(1) + steps
    token_rows = torch.arange(rows.num_rows, device=positions.device).unsqueeze(1) + (steps - (BLOCK_TOKENS - 1))
    token_rows.clamp_min_(0)
    here = (positions[token_rows] == token_positions) & (requests[token_rows] == requests.unsqueeze(1))
    page, offset = rows.pages_of(first_positions, owner, page_tokens)
    blocks = BlockPlaces(
        rows=order[token_rows],
        here=here.unsqueeze(-1),
        slots=state_slots[owner].unsqueeze(1),
        ring_places=token_positions % RING_TOKENS,
        first=first_positions.clamp_min(0),
        page=page,
        place=offset // BLOCK_TOKENS,
        real=page > 0,
    )
    # A row is among the newest 16 when the one 16 further on belongs to another request.
    further = torch.nn.functional.pad(requests[RING_TOKENS:], (0, min(RING_TOKENS, rows.num_rows)), value=-1)
    slots = torch.where((positions >= 0) & (further != requests), state_slots[owner], 0)
    ring_places = torch.where(slots > 0, positions % RING_TOKENS, 0)
    return IndexPlaces(blocks, order, slots, ring_places, slots > 0, state_slots)


def _by_request(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by request and position, padding (request -1) first: (row, position, request), [R] int64 each."""
    requests = torch.where(rows.positions >= 0, rows.request_of_row, -1)
    order = ((requests << _REQUEST_SHIFT) + rows.positions).argsort(stable=True)
    return order, rows.positions[order], requests[order]
