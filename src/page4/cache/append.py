"""Writers of a step: K/V, raw index keys and pooled index keys of its rows.

Everything here overwrites: a row writes its own position and nothing else. A rejected draft leaves bytes behind, but no
row can see a position before the row of that position has been written again, because what is visible follows from
positions alone. Whatever would land on the null page (a padding row, a table of zeros in a warm-up, state slot 0) puts
back the bytes that are there, so page 0 never changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from page4.cache.places import index_places, kv_places
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.cache.units import BLOCK_TOKENS
from page4.codec import encode_sides
from page4.errors import CacheError, message
from page4.kernels import gpu

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
    if gpu.append_refusal(k, layer_kv.k) is None:
        scales = None
        if layer_kv.k_scale is not None and layer_kv.v_scale is not None:
            scales = (layer_kv.k_scale, layer_kv.v_scale)
        return gpu.append_kv(k, v, (layer_kv.k, layer_kv.v), _of(rows), scales, layer_kv.counters)
    page, offset, real = kv_places(rows, layer_kv.page_tokens)
    nonfinite = None
    if layer_kv.k_scale is not None and layer_kv.v_scale is not None:
        both = torch.stack((k, v))
        if real is not None:
            both = torch.where(real.view(1, -1, 1, 1), both, 0)
        pair = (layer_kv.k_scale, layer_kv.v_scale)
        (k, v), nonfinite = encode_sides(both, pair, counters=layer_kv.counters)
    _put(layer_kv.k, page, offset, k, real)
    _put(layer_kv.v, page, offset, v, real)
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
    Raises `CacheError` when shapes do not fit the cache.
    """
    for name, got, allowed in (
        ("raw index keys", raw_keys.shape, [rows.num_rows, pooled.shape[2]]),
        ("state slots", state_slots.shape, [rows.num_requests]),
    ):
        if list(got) != allowed:
            raise CacheError(message(name, allowed=allowed, got=list(got), do="rebuild the step"))
    if gpu.wanted(raw_keys.device) and gpu.append_refusal(raw_keys.unsqueeze(1), pooled.unsqueeze(2)) is None:
        gpu.append_index(pooled, ring, raw_keys, _of(rows), state_slots, norm_and_rope)
        return
    places = index_places(rows, state_slots, pooled.shape[1] * BLOCK_TOKENS)
    blocks = places.blocks
    if blocks is not None:
        keys = raw_keys[blocks.rows]
        if blocks.here is not None:
            old = ring[blocks.slots, blocks.ring_places].to(keys.dtype)
            keys = torch.where(blocks.here, keys, old)
        mean = keys.float().mean(1).to(keys.dtype)
        _put(pooled, blocks.page, blocks.place, norm_and_rope(mean, blocks.first), blocks.real)
    newest = raw_keys if places.rows is None else raw_keys[places.rows]
    _put(ring, places.slots, places.ring_places, newest, places.real)


def _of(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.positions, rows.request_of_row, rows.block_table


def _put(view: Tensor, first: Tensor, second: Tensor, values: Tensor, real: Tensor | None) -> None:
    """view[first, second] = values where `real` (None: everywhere); the rest keeps its bytes, without a host sync."""
    values = values.to(view.dtype)
    if real is not None:
        keep = real.view(-1, *[1] * (values.ndim - 1))
        values = torch.where(keep, values, view[first, second])
    view[first, second] = values
