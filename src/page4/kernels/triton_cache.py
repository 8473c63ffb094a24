"""Writers of a step on a GPU: K/V to their pages, raw index keys to the ring, block keys to the pages.

One program a row, so no program waits for another and nothing is copied to the host. Counters are added to as integers,
whose sum has no order. A padding row, a page 0 or a state slot 0 writes nothing.

    append_kv      k, v [R, J, D] -> pages, E4M3 or as they are; counters [2, 2], rows with a non-finite input [R]
    pool_keys      raw keys of the step and of the ring -> the mean of every block that a row completes [R, E]
    put_index      raw keys -> ring, block keys (after norm and RoPE, which stay with the caller) -> pages

Bound: bytes, each input read and each output written once: 8,192 rows of 2 x 256 K/V in 16 bits to E4M3 are 25 MB, so
what counts in a decode step is the launch.
"""

import torch
from torch import Tensor

from page4.kernels import triton_env
from page4.kernels.triton_env import i64, jit, next_power_of_2, tl

BLOCK = 4
SCAN = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROW_CHANNELS = 8192


def refusal(
    device: str, capability: tuple[int, int] | None, dtype: str, kv_dtype: str, kv_heads: int, dim: int
) -> str | None:
    """None when these kernels write rows of `kv_heads` x `dim` in `dtype` as `kv_dtype`, else the reason."""
    reason = triton_env.refusal(device, capability)
    if reason is not None:
        return reason
    names = [str(known).removeprefix("torch.") for known in DTYPES]
    if dtype not in names or kv_dtype not in (*names, "uint8"):
        return f"{', '.join(names)} are written as themselves or as E4M3 (uint8), not {dtype} as {kv_dtype}"
    if kv_heads * dim > MAX_ROW_CHANNELS:
        return f"a row of {kv_heads} x {dim} channels is more than the {MAX_ROW_CHANNELS} that a program holds"
    return None


@jit
def e4m3_of(raw, scale):
    """(byte, |x / scale|) of a float: the division in fp32, to nearest even, saturating; a NaN keeps its sign.

    By the bits, so that every device and the interpreter agree: below 2^-6 an E4M3 value counts steps of 2^-9, which
    is what fp32 leaves of a sum with 2^14; above, the mantissa is rounded at bit 20 and a carry is the next exponent.
    """
    # The sign of a NaN does not survive its conversion to fp32.
    if raw.dtype.primitive_bitwidth == 16:
        sign = (raw.to(tl.int16, bitcast=True).to(tl.int32) >> 8) & 0x80
    else:
        sign = (raw.to(tl.int32, bitcast=True) >> 24) & 0x80
    x = raw.to(tl.float32)
    size = tl.abs(tl.div_rn(x, scale))
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.where(bits < 0x3C800000, size, 0.0) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(bits < 0x3C800000, small, tl.where(bits >= 0x43E00000, 0x7E, normal))
    return (tl.where(x != x, 0x7F, byte) | sign).to(tl.uint8), size


@jit
def _put_side(x, cache, scale, counters, at, mask, E4M3: tl.constexpr):
    """Writes one side of a row and returns how many of its inputs were not finite."""
    wrong = 0
    if E4M3:
        byte, size = e4m3_of(x, tl.load(scale))
        finite = tl.abs(x.to(tl.float32)) < float("inf")
        wrong = tl.sum((mask & (finite == 0)).to(tl.int32))
        clipped = tl.sum((mask & finite & (size > 448.0)).to(tl.int32))
        tl.store(cache + at, byte, mask=mask)
        tl.atomic_add(counters, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
        tl.atomic_add(counters + 1, wrong.to(tl.int64), mask=wrong > 0, sem="relaxed")
    else:
        tl.store(cache + at, x.to(cache.dtype.element_ty), mask=mask)
    return wrong


@jit(vary=("positions", "requests", "table", "counters", "nonfinite", "width", "table_row"))
def _append_kv(
    k,
    v,
    k_cache,
    v_cache,
    positions,
    requests,
    table,
    k_scale,
    v_scale,
    counters,
    nonfinite,
    width,
    table_row: "i64",
    k_row: "i64",
    k_head: "i64",
    v_row: "i64",
    v_head: "i64",
    k_page: "i64",
    k_token: "i64",
    k_kv_head: "i64",
    v_page: "i64",
    v_token: "i64",
    v_kv_head: "i64",
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    E4M3: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    column = tl.maximum(position, 0) // PAGE
    there = (position >= 0) & (column < width)
    page = tl.load(table + tl.load(requests + row) * table_row + column, mask=there, other=0).to(tl.int64)
    token = tl.maximum(position, 0) % PAGE
    channel = tl.arange(0, SIZE)
    head, lane = channel // DIM, channel % DIM
    mask = channel < tl.where(page > 0, HEADS * DIM, 0)
    key = tl.load(k + row * k_row + head * k_head + lane, mask=mask, other=0.0)
    value = tl.load(v + row * v_row + head * v_head + lane, mask=mask, other=0.0)
    k_at = page * k_page + token * k_token + head * k_kv_head + lane
    v_at = page * v_page + token * v_token + head * v_kv_head + lane
    wrong = _put_side(key, k_cache, k_scale, counters, k_at, mask, E4M3)
    wrong += _put_side(value, v_cache, v_scale, counters + 2, v_at, mask, E4M3)
    if E4M3:
        tl.store(nonfinite + row, (wrong > 0).to(tl.uint8))


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    counters: Tensor | None,
    nonfinite: Tensor | None,
) -> None:
    """k, v: [R, J, D]; k_cache, v_cache: [P, S, J, D], uint8 with scales ([] fp32 each); unit strides in D.

    positions, requests: [R] int64; block_table: [N, W] int32; counters: [2, 2] int64, increased by (clipped, not
    finite) of K and V; nonfinite: [R] bool, written. The last three are None for a cache that is not E4M3.
    """
    rows, heads, dim = k.shape
    e4m3 = scales is not None
    # What is not used has to be a pointer all the same.
    k_scale, v_scale = scales if scales is not None else (positions, positions)
    flags = positions if nonfinite is None else nonfinite.view(torch.uint8)
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    size = next_power_of_2(heads * dim)
    if rows:
        _append_kv[(rows,)](
            *(k, v, k_cache, v_cache, positions, requests, block_table, k_scale, v_scale),
            *(positions if counters is None else counters, flags, block_table.shape[1], block_table.stride(0)),
            *strides,
            *(k_cache.shape[1], heads, dim, size, e4m3),
            num_warps=1 if size <= 256 else 4,
        )


@jit
def _row_of(positions, requests, rows, guess, request, position, STEP: tl.constexpr):
    """The row of a step that holds `position` of `request`, -1 when none does; looks at `guess` first."""
    known = (guess >= 0) & (guess < rows)
    hit = tl.load(positions + guess, mask=known, other=-1) == position
    found = tl.where(hit & (tl.load(requests + guess, mask=known, other=-1) == request), guess, -1).to(tl.int32)
    if found < 0:
        for first in range(0, rows, STEP):
            row = first + tl.arange(0, STEP)
            hits = tl.load(positions + row, mask=row < rows, other=-1) == position
            hits = hits & (tl.load(requests + row, mask=row < rows, other=-1) == request)
            found = tl.maximum(found, tl.max(tl.where(hits, row, -1)))
    return found


@jit(vary=("positions", "requests", "slots", "firsts", "rows"))
def _pool_keys(
    raw,
    ring,
    positions,
    requests,
    slots,
    means,
    firsts,
    rows,
    raw_row: "i64",
    slot_stride: "i64",
    place_stride: "i64",
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0)
    position, request = tl.load(positions + row), tl.load(requests + row)
    channel = tl.arange(0, SIZE)
    mask = channel < DIM
    total = tl.zeros((SIZE,), tl.float32)
    closes = (position >= 0) & (position % 4 == 3)
    if closes:
        slot = tl.load(slots + request).to(tl.int64)
        for token in tl.static_range(4):
            at = position - 3 + token
            here = _row_of(positions, requests, rows, row - 3 + token, request, at, STEP)
            new = tl.load(
                raw + here.to(tl.int64) * raw_row + channel, mask=channel < tl.where(here >= 0, DIM, 0), other=0.0
            )
            place = slot * slot_stride + (at % 16) * place_stride
            old = tl.load(ring + place + channel, mask=channel < tl.where(here < 0, DIM, 0), other=0.0)
            total += tl.where(here >= 0, new.to(tl.float32), old.to(new.dtype).to(tl.float32))
    tl.store(means + row.to(tl.int64) * DIM + channel, (total * 0.25).to(means.dtype.element_ty), mask=mask)
    tl.store(firsts + row, tl.where(closes, position - 3, 0))


@jit(vary=("positions", "requests", "slots", "table", "rows", "width", "table_row"))
def _put_index(
    raw,
    keys,
    ring,
    pooled,
    positions,
    requests,
    slots,
    table,
    rows,
    width,
    table_row: "i64",
    raw_row: "i64",
    key_row: "i64",
    slot_stride: "i64",
    place_stride: "i64",
    page_stride: "i64",
    block_stride: "i64",
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0)
    position, request = tl.load(positions + row), tl.load(requests + row)
    channel = tl.arange(0, SIZE)
    mask = channel < DIM
    if position >= 0:
        slot = tl.load(slots + request).to(tl.int64)
        # Of rows that share a place of the ring the newest one writes.
        later = _row_of(positions, requests, rows, row + 16, request, position + 16, STEP)
        key = tl.load(raw + row.to(tl.int64) * raw_row + channel, mask=mask, other=0.0)
        place = slot * slot_stride + (position % 16) * place_stride
        tl.store(
            ring + place + channel,
            key.to(ring.dtype.element_ty),
            mask=channel < tl.where((later < 0) & (slot > 0), DIM, 0),
        )
        column = position // PAGE
        closes = (position % 4 == 3) & (column < width)
        page = tl.load(table + request * table_row + column, mask=closes, other=0).to(tl.int64)
        block = tl.load(
            keys + row.to(tl.int64) * key_row + channel, mask=channel < tl.where(page > 0, DIM, 0), other=0.0
        )
        at = page * page_stride + (position % PAGE) // 4 * block_stride
        tl.store(pooled + at + channel, block.to(pooled.dtype.element_ty), mask=channel < tl.where(page > 0, DIM, 0))


def pool_keys(
    raw_keys: Tensor,
    ring: Tensor,
    positions: Tensor,
    requests: Tensor,
    state_slots: Tensor,
    means: Tensor,
    firsts: Tensor,
) -> None:
    """The fp32 mean, in the keys' dtype, of the 4 raw keys of every block that a row completes.

    raw_keys: [R, E]; ring: [slots, 16, E], not written; state_slots: [N] int64; means: [R, E] contiguous and firsts:
    [R] int64, position of the block's first token, are written: zeros for a row that completes nothing.
    """
    rows, dim = raw_keys.shape
    if rows:
        _pool_keys[(rows,)](
            *(raw_keys, ring, positions, requests, state_slots, means, firsts, rows),
            *(raw_keys.stride(0), ring.stride(0), ring.stride(1)),
            *(dim, next_power_of_2(dim), SCAN),
            num_warps=1,
        )


def put_index(
    raw_keys: Tensor,
    block_keys: Tensor,
    ring: Tensor,
    pooled: Tensor,
    positions: Tensor,
    requests: Tensor,
    state_slots: Tensor,
    block_table: Tensor,
) -> None:
    """Writes each row's raw key [R, E] to the ring and, of rows that complete a block, block_keys [R, E] to its page.

    ring: [slots, 16, E]; pooled: [P, S / 4, E]. To be called after `pool_keys`, which reads what the ring held.
    """
    rows, dim = raw_keys.shape
    if rows:
        _put_index[(rows,)](
            *(raw_keys, block_keys, ring, pooled, positions, requests, state_slots, block_table, rows),
            *(block_table.shape[1], block_table.stride(0), raw_keys.stride(0), block_keys.stride(0)),
            *(ring.stride(0), ring.stride(1), pooled.stride(0), pooled.stride(1)),
            *(dim, next_power_of_2(dim), pooled.shape[1] * BLOCK, SCAN),
            num_warps=1,
        )


def append_index(
    pooled: Tensor,
    ring: Tensor,
    raw_keys: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    norm_and_rope,
    out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`cache.append.append_index` with these kernels; `norm_and_rope` sees [R, E] means and [R] first positions.

    out: room for both, when no memory may be taken.
    """
    if out is None:
        out = (torch.empty_like(raw_keys, memory_format=torch.contiguous_format), torch.empty_like(positions))
    pool_keys(raw_keys, ring, positions, requests, state_slots, *out)
    block_keys = norm_and_rope(*out)
    put_index(raw_keys, block_keys, ring, pooled, positions, requests, state_slots, block_table)
