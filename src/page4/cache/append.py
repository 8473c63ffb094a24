"""Writers of a step: K/V, raw index keys and pooled index keys of its rows.

Everything here overwrites: a row writes its own position and nothing else. A rejected draft leaves bytes behind, but no
row can see a position before the row of that position has been written again, because what is visible follows from
positions alone. Padding rows (position -1) write nothing, so page 0 is never touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from page4.cache.layout import RING_TOKENS
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.cache.units import BLOCK_TOKENS
from page4.codec import encode
from page4.errors import CacheError, message

NormAndRope = Callable[[Tensor, Tensor], Tensor]


def append_kv(layer_kv: LayerKV, k: Tensor, v: Tensor, rows: Rows) -> Tensor | None:
    """Write K (after norm and RoPE) and V of each row to its place.

    k, v: [R, J, D]. An E4M3 cache divides by the layer's scales, saturates, and counts clips and non-finite inputs in
    `layer_kv.counters`. Returns [R] bool, the rows with a non-finite input, for an E4M3 cache, else None.
    Raises `CacheError` when shapes do not fit the cache.
    """
    allowed = [rows.num_rows, *layer_kv.k.shape[2:]]
    for name, x in (("k", k), ("v", v)):
        if list(x.shape) != allowed:
            raise CacheError(message(name, allowed=allowed, got=list(x.shape), do="pass one row a token"))
    page, offset, real = rows.once(("kv", layer_kv.page_tokens), lambda: _addresses(rows, layer_kv.page_tokens))
    if real is not None:
        k, v = k[real], v[real]
    for side, (view, x, scale) in enumerate(
        ((layer_kv.k, k, layer_kv.k_scale), (layer_kv.v, v, layer_kv.v_scale)),
    ):
        if scale is None:
            view[page, offset] = x.to(view.dtype)
        else:
            counters = None if layer_kv.counters is None else layer_kv.counters[side]
            view[page, offset] = encode(x, scale, counters=counters)
    if not layer_kv.is_e4m3:
        return None
    bad = ~(torch.isfinite(k).flatten(1).all(1) & torch.isfinite(v).flatten(1).all(1))
    if real is None:
        return bad
    nonfinite = torch.zeros(rows.num_rows, dtype=torch.bool, device=bad.device)
    nonfinite[real] = bad
    return nonfinite


def append_index(
    pooled: Tensor,
    ring: Tensor,
    raw_keys: Tensor,
    rows: Rows,
    state_slots: Tensor,
    norm_and_rope: NormAndRope,
) -> None:
    """Keep the raw index key of each row, and pool every block that these rows complete.

    pooled: [P, S / 4, E]; ring: [slots, 16, E]; raw_keys: [R, E]; state_slots: [N] int64. `norm_and_rope(mean, first)`
    makes the block key of the mean [B, E] (fp32 mean of its 4 raw keys, in the keys' dtype) and the position [B] of its
    first token. Raw keys of earlier tokens come from the ring, where the newest 16 of a request lie at position % 16.
    """
    plan = rows.once(("index", pooled.shape[1]), lambda: _index_plan(rows, pooled.shape[1] * BLOCK_TOKENS))
    if plan.own_rows.numel():
        keys = raw_keys[plan.own_rows]
        if plan.here is not None:
            old = ring[state_slots[plan.requests].unsqueeze(1), plan.old_places].to(raw_keys.dtype)
            keys = torch.where(plan.here.unsqueeze(-1), keys, old)
        mean = keys.float().mean(1).to(raw_keys.dtype)
        pooled[plan.page, plan.block] = norm_and_rope(mean, plan.first).to(pooled.dtype)
    newest = raw_keys if plan.newest is None else raw_keys[plan.newest]
    ring[state_slots[plan.newest_requests], plan.newest_places] = newest.to(ring.dtype)


@dataclass(frozen=True)
class _IndexPlan:
    """B blocks that the rows of a step complete, and the rows whose raw keys the ring keeps. All int64.

    own_rows: [B, 4] rows of a block's tokens; here: [B, 4] bool, tokens of this step (None: all of them);
    old_places: [B, 4] ring places of the others; requests, first, page, block: [B], the block's request, first
    position, page and place in the page; newest: [M] rows kept (None: all), newest_requests, newest_places: [M].
    """

    own_rows: Tensor
    here: Tensor | None
    old_places: Tensor
    requests: Tensor
    first: Tensor
    page: Tensor
    block: Tensor
    newest: Tensor | None
    newest_requests: Tensor
    newest_places: Tensor


def _index_plan(rows: Rows, page_tokens: int) -> _IndexPlan:
    positions, requests = rows.positions, rows.request_of_row
    row_ids = torch.arange(rows.num_rows, device=positions.device)
    first_rows, first_positions = _starts(rows)
    closing = _closing(rows)
    last = positions[closing]
    back = torch.arange(BLOCK_TOKENS - 1, -1, -1, device=positions.device)
    token_positions = last.unsqueeze(1) - back
    closing_requests = requests[closing]
    here = token_positions >= first_positions[closing_requests].unsqueeze(1)
    first = last - (BLOCK_TOKENS - 1)
    page, offset = rows.pages_of(first, closing_requests, page_tokens)
    newest = _newest(rows, first_rows, row_ids)
    kept = row_ids if newest is None else newest
    return _IndexPlan(
        own_rows=(closing.unsqueeze(1) - back).clamp_min(0),
        here=here,
        old_places=token_positions % RING_TOKENS,
        requests=closing_requests,
        first=first,
        page=page,
        block=offset // BLOCK_TOKENS,
        newest=newest,
        newest_requests=requests[kept],
        newest_places=positions[kept] % RING_TOKENS,
    )


def _closing(rows: Rows) -> Tensor:
    """Rows that complete a block: [B] int64; found on the host when it knows the rows."""
    if rows.row_starts is None or rows.first_positions is None:
        ends = (rows.positions >= 0) & (rows.positions % BLOCK_TOKENS == BLOCK_TOKENS - 1)
        return ends.nonzero().squeeze(1)
    found = [
        row
        for (start, end), first in zip(itertools.pairwise(rows.row_starts), rows.first_positions, strict=True)
        for row in range(start + (BLOCK_TOKENS - 1 - first) % BLOCK_TOKENS, end, BLOCK_TOKENS)
    ]
    return torch.tensor(found, dtype=torch.int64, device=rows.positions.device)


def _addresses(rows: Rows, page_tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Page and offset of every real row, and which rows those are when some are padding."""
    positions, requests = rows.positions, rows.request_of_row
    if rows.row_starts is not None:
        return (*rows.pages_of(positions, requests, page_tokens), None)
    real = (positions >= 0).nonzero().squeeze(1)
    return (*rows.pages_of(positions[real], requests[real], page_tokens), real)


def _starts(rows: Rows) -> tuple[Tensor, Tensor]:
    """Of each request: its first row and that row's position, [N] int64 each."""
    device = rows.positions.device
    if rows.row_starts is not None and rows.first_positions is not None:
        return (
            torch.tensor(rows.row_starts[:-1], dtype=torch.int64, device=device),
            torch.tensor(rows.first_positions, dtype=torch.int64, device=device),
        )
    far = torch.iinfo(torch.int64).max
    first_positions = torch.full((rows.num_requests,), far, dtype=torch.int64, device=device)
    real = rows.positions >= 0
    first_positions.scatter_reduce_(0, rows.request_of_row[real], rows.positions[real], "amin")
    first_rows = torch.full_like(first_positions, far)
    ids = torch.arange(rows.num_rows, device=device)
    first_rows.scatter_reduce_(0, rows.request_of_row[real], ids[real], "amin")
    return first_rows, first_positions


def _newest(rows: Rows, first_rows: Tensor, row_ids: Tensor) -> Tensor | None:
    """Rows whose raw key goes into the ring: the newest 16 of each request, so that no two share a place; None: all."""
    if rows.row_starts is not None:
        spans = zip(rows.row_starts, rows.row_starts[1:], strict=False)
        if all(end - start <= RING_TOKENS for start, end in spans):
            return None
    real = rows.positions >= 0
    counts = torch.zeros(rows.num_requests, dtype=torch.int64, device=row_ids.device)
    counts.scatter_add_(0, rows.request_of_row[real], torch.ones_like(row_ids[real]))
    last_rows = first_rows + counts
    return (real & (row_ids >= last_rows[rows.request_of_row] - RING_TOKENS)).nonzero().squeeze(1)
