"""Writers of a step: K/V, raw index keys and pooled index keys of its rows.

Everything here overwrites: a row writes its own position and nothing else. A rejected draft leaves bytes behind, but no
row can see a position before the row of that position has been written again, because what is visible follows from
positions alone. Padding rows (position -1) write nothing, so page 0 is never touched.
"""

from __future__ import annotations

from collections.abc import Callable

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
    page, offset, real = _addresses(rows, layer_kv.page_tokens)
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
    positions, requests = rows.positions, rows.request_of_row
    row_ids = torch.arange(rows.num_rows, device=positions.device)
    ends = (positions >= 0) & (positions % BLOCK_TOKENS == BLOCK_TOKENS - 1)
    closing = ends.nonzero().squeeze(1)
    first_rows, first_positions = _starts(rows)
    if closing.numel():
        last = positions[closing]
        back = torch.arange(BLOCK_TOKENS - 1, -1, -1, device=positions.device)
        token_positions = last.unsqueeze(1) - back
        token_requests = requests[closing].unsqueeze(1)
        here = token_positions >= first_positions[token_requests]
        own = raw_keys[(row_ids[closing].unsqueeze(1) - back).clamp_min(0)]
        old = ring[state_slots[token_requests], token_positions % RING_TOKENS].to(raw_keys.dtype)
        keys = torch.where(here.unsqueeze(-1), own, old)
        mean = keys.float().mean(1).to(raw_keys.dtype)
        first = last - (BLOCK_TOKENS - 1)
        page_tokens = pooled.shape[1] * BLOCK_TOKENS
        page, offset = rows.pages_of(first, requests[closing], page_tokens)
        pooled[page, offset // BLOCK_TOKENS] = norm_and_rope(mean, first).to(pooled.dtype)
    newest = _newest(rows, first_rows, row_ids)
    ring[state_slots[requests[newest]], positions[newest] % RING_TOKENS] = raw_keys[newest].to(ring.dtype)


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


def _newest(rows: Rows, first_rows: Tensor, row_ids: Tensor) -> Tensor:
    """Rows whose raw key goes into the ring: the newest 16 of each request, so that no two share a place."""
    if rows.row_starts is not None:
        spans = zip(rows.row_starts, rows.row_starts[1:], strict=False)
        if all(end - start <= RING_TOKENS for start, end in spans):
            return row_ids
    real = rows.positions >= 0
    counts = torch.zeros(rows.num_requests, dtype=torch.int64, device=row_ids.device)
    counts.scatter_add_(0, rows.request_of_row[real], torch.ones_like(row_ids[real]))
    last_rows = first_rows + counts
    return (real & (row_ids >= last_rows[rows.request_of_row] - RING_TOKENS)).nonzero().squeeze(1)
