"""Attention in Triton: the generic route for any GQA geometry, and a grouped route for GPUs before Hopper.

Generic: a program takes one row, one KV head and one split of the row's virtual table (`RowPlan`), 64 tokens a tile:

    q [heads of the KV head, D] x K tile [64, D] -> logits -> online softmax -> x V tile [64, D]

Grouped: a program takes one group (8 neighbouring rows), one KV head and one split of the group's entries, 16 blocks a
tile; a query attends to a token where the entry's mask has the bit of its place and token.

Splits leave (largest logit, sum, unscaled output) in fp32, and a second kernel merges them from first to last, divides,
multiplies by v_scale and the sigmoid of the gate, and writes zeros and -inf for a row without tokens. So the order of
every sum is fixed. A token that no query of a tile attends to is never loaded: its K and V are zeros (`zero=False`, for
tests only, loads them). Queries and 16-bit K/V are multiplied as they are, E4M3 as the exact value of the byte in fp16
beside queries brought to 1..2 by a power of two; probabilities are rounded to the products' dtype, never to E4M3;
float32 takes no tensor cores.

Bound: decode, the bytes of the selected K and V, each once a row; prefill grouped, the products. Measured on an H200
(2026-12-01, torch 2.11, Triton 3.6, CUDA-graph replay), generic, 24/2 heads of 256, E4M3, 2,051 tokens a row, rows of
random blocks: 1 row 12.5 us, 16 rows 23.3 us, 64 rows 65.6 us (134 MB, 32 us at 4.25 TB/s: 48% of the bound), 2,048
rows 1,424 us.
"""

import torch
from torch import Tensor

from page4.kernels import triton_env
from page4.kernels.plans import MAX_GROUP_ROWS
from page4.kernels.triton_env import fp32, i64, jit, next_power_of_2, tl

BLOCK = 4
DTYPES = ("float16", "bfloat16", "float32")
MIN_DIM, MAX_DIM, MAX_QUERIES = 8, 256, 128
# Queries x channels of a tile whose products take no tensor cores, and before compute capability 8.0.
PLAIN_ELEMENTS, PLAIN_ELEMENTS_OLD = 64 * 256, 32 * 256
# Programs that fill a large GPU a few times over, and tokens below which a split is not worth its merge.
FULL_PROGRAMS, MIN_SPLIT_TOKENS, MAX_SPLITS = 528, 128, 16
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
PLAIN, E4M3_BITS, E4M3_CAST = 0, 1, 2
_Tile = tuple[int, int, int]


def refusal(
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    kv_dtype: str,
    heads_per_kv: int,
    dim: int,
    page_tokens: int,
    group_rows: int = 1,
) -> str | None:
    """None when the route serves these operands (generic: group_rows 1), else the reason."""
    reason = triton_env.refusal(device, capability)
    if reason is not None:
        return reason
    if dtype not in DTYPES or kv_dtype not in (dtype, "uint8"):
        return f"queries of {', '.join(DTYPES)} over K/V of the same type or E4M3, not {dtype} over {kv_dtype}"
    if dtype == "bfloat16" and capability is not None and tuple(capability) < (8, 0):
        return f"bfloat16 products need compute capability 8.0 or newer, got {capability}"
    if not MIN_DIM <= dim <= MAX_DIM:
        return f"heads of {MIN_DIM} to {MAX_DIM} channels, not of {dim}"
    if page_tokens < BLOCK or page_tokens % BLOCK:
        return f"a page of {page_tokens} tokens is not a whole number of 4-token blocks"
    if not 1 <= group_rows <= MAX_GROUP_ROWS:
        return f"groups of 1 to {MAX_GROUP_ROWS} rows, not of {group_rows}"
    if heads_per_kv < 1 or heads_per_kv * group_rows > MAX_QUERIES:
        return f"{heads_per_kv} query heads a KV head in {group_rows} rows are more than {MAX_QUERIES} queries a tile"
    queries, old = next_power_of_2(heads_per_kv * group_rows), capability is not None and tuple(capability) < (8, 0)
    most = PLAIN_ELEMENTS_OLD if old else PLAIN_ELEMENTS if dtype == "float32" else MAX_QUERIES * MAX_DIM
    if queries * next_power_of_2(dim) > most:
        return f"{queries} queries of {dim} channels are more than a tile holds without tensor cores"
    return None


def num_splits(programs: int, tokens: int) -> int:
    """Splits of a walk over `tokens` tokens when one split makes `programs` programs: a power of two."""
    wanted = min(MAX_SPLITS, -(-FULL_PROGRAMS // max(1, programs)), max(1, tokens // MIN_SPLIT_TOKENS))
    return 1 << (wanted.bit_length() - 1)


def workspace_bytes(rows: int, heads: int, dim: int, splits: int) -> int:
    """Size of the workspace of either route: fp32 outputs, largest logits and sums of every split."""
    return 4 * rows * heads * splits * (dim + 2)


@jit
def e4m3_bits(byte):
    """The value of each byte in fp16, exact: its bits read as an fp16 of another bias, and what is NaN."""
    code = byte.to(tl.int16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * tl.full((), 256.0, tl.float16)
    return tl.where((code & 0x7F) == 0x7F, tl.full((), float("nan"), tl.float16), value)


@jit
def _queries(raw, scale, DTYPE: tl.constexpr):
    """(raw [M, D] in DTYPE, [M] what turns their logits into powers of two).

    fp16 holds every E4M3 value, and bfloat16 queries once each is brought to 1..2 by a power of two, so exactly.
    """
    scale = tl.full((raw.shape[0],), 0.0, tl.float32) + scale
    if tl.float16 == DTYPE and raw.dtype != tl.float16:
        size = tl.max(tl.abs(raw.to(tl.float32)), 1)
        exponent = (size.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        scale = scale * (exponent << 23).to(tl.float32, bitcast=True)
        raw = raw.to(tl.float32) * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    return raw.to(DTYPE), scale


@jit
def _loaded(at, mask, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """K or V at these places in DTYPE, zeros where the mask is off."""
    if KIND == 0:
        value = tl.load(at, mask=mask, other=0.0)
    elif KIND == 1:
        value = e4m3_bits(tl.load(at, mask=mask, other=0))
    else:
        value = tl.load(at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
    return value.to(DTYPE)


@jit
def _step(q, k, v, attended, top, total, out, scale, DTYPE: tl.constexpr):
    """One tile of tokens: q [M, D], k and v [T, D], attended [M or 1, T], scale [M]: see `_queries`."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale[:, None]
    logits = tl.where(attended, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1), propagate_nan=tl.PropagateNan.ALL)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(weights, 1)
    out = tl.dot(weights.to(DTYPE), v, out * keep[:, None], input_precision="ieee")
    return new_top, total, out


@jit
def _put_part(parts, stats, at, channel, top, total, out, mask, DIM: tl.constexpr):
    """at: [M] place of each query's split."""
    tl.store(parts + at[:, None] * DIM + channel[None, :], out, mask=mask[:, None] & (channel < DIM)[None, :])
    tl.store(stats + 2 * at, top, mask=mask)
    tl.store(stats + 2 * at + 1, total, mask=mask)


@jit(vary=("table", "lengths", "k_scale", "stats", "run", "table_row"))
def _generic(
    q,
    k,
    v,
    table,
    lengths,
    k_scale,
    parts,
    stats,
    softmax_scale: "fp32",
    run,
    table_row: "i64",
    q_row: "i64",
    q_head: "i64",
    k_page: "i64",
    k_token: "i64",
    k_head: "i64",
    v_page: "i64",
    v_token: "i64",
    v_head: "i64",
    PER_PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    ZERO: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    channel, member = tl.arange(0, DIM_PAD), tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    inside = channel < DIM
    q_at = q + row * q_row + head[:, None] * q_head + channel[None, :]
    raw = tl.load(q_at, mask=(member < GROUP)[:, None] & inside[None, :], other=0.0)
    scale = softmax_scale
    if KIND > 0:
        scale = scale * tl.load(k_scale)
    queries, scale = _queries(raw, scale, DTYPE)
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    out = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    for first in range(split * run, tl.minimum(length, (split + 1) * run), TILE):
        token = first + tl.arange(0, TILE)
        attended = token < length
        block = tl.load(table + row * table_row + token // 4, mask=attended, other=0)
        if not ZERO:
            block = tl.load(table + row * table_row + token // 4, mask=token // 4 < table_row, other=0)
        page = (block // PER_PAGE).to(tl.int64)
        slot = (block % PER_PAGE) * 4 + token % 4
        there = attended if ZERO else token >= 0
        mask = there[:, None] & inside[None, :]
        k_at = page * k_page + slot * k_token + kv_head * k_head
        v_at = page * v_page + slot * v_token + kv_head * v_head
        keys = _loaded(k + k_at[:, None] + channel[None, :], mask, KIND, DTYPE)
        values = _loaded(v + v_at[:, None] + channel[None, :], mask, KIND, DTYPE)
        top, total, out = _step(queries, keys, values, attended[None, :], top, total, out, scale, DTYPE)
    at = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
    _put_part(parts, stats, at, channel, top, total, out, member < GROUP, DIM)


@jit(vary=("rows", "begins", "ends", "blocks", "masks", "k_scale", "stats"))
def _grouped(
    q,
    k,
    v,
    rows,
    begins,
    ends,
    blocks,
    masks,
    k_scale,
    parts,
    stats,
    softmax_scale: "fp32",
    q_row: "i64",
    q_head: "i64",
    k_page: "i64",
    k_token: "i64",
    k_head: "i64",
    v_page: "i64",
    v_token: "i64",
    v_head: "i64",
    PER_PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    ZERO: tl.constexpr,
):
    group, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(begins + group), tl.load(ends + group)
    if begin < end:
        run = ((end - begin) // 8 + SPLITS - 1) // SPLITS * 8
        channel, query = tl.arange(0, DIM_PAD), tl.arange(0, QUERIES)
        place, head = query // GROUP, kv_head * GROUP + query % GROUP
        row = tl.load(rows + group * PLACES + place, mask=place < PLACES, other=-1).to(tl.int64)
        inside = channel < DIM
        q_at = q + row[:, None] * q_row + head[:, None] * q_head + channel[None, :]
        raw = tl.load(q_at, mask=(row >= 0)[:, None] & inside[None, :], other=0.0)
        scale = softmax_scale
        if KIND > 0:
            scale = scale * tl.load(k_scale)
        queries, scale = _queries(raw, scale, DTYPE)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, DIM_PAD), tl.float32)
        last = tl.minimum(end, begin + (split + 1) * run)
        for first in range(begin + split * run, last, TILE // 4):
            token = tl.arange(0, TILE)
            entry = first + token // 4
            known = entry < last
            block = tl.load(blocks + entry, mask=known, other=0)
            bits = tl.load(masks + entry, mask=known, other=0) >> (token % 4)
            page = (block // PER_PAGE).to(tl.int64)
            slot = (block % PER_PAGE) * 4 + token % 4
            there = (bits & 0x11111111) != 0 if ZERO else known
            mask = there[:, None] & inside[None, :]
            k_at = page * k_page + slot * k_token + kv_head * k_head
            v_at = page * v_page + slot * v_token + kv_head * v_head
            keys = _loaded(k + k_at[:, None] + channel[None, :], mask, KIND, DTYPE)
            values = _loaded(v + v_at[:, None] + channel[None, :], mask, KIND, DTYPE)
            attended = ((bits[None, :] >> (4 * tl.minimum(place, 7))[:, None]) & 1) != 0
            attended = attended & (row >= 0)[:, None]
            top, total, out = _step(queries, keys, values, attended, top, total, out, scale, DTYPE)
        at = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
        _put_part(parts, stats, at, channel, top, total, out, row >= 0, DIM)


@jit(vary=("stats", "v_scale", "lse"))
def _merge(
    parts,
    stats,
    v_scale,
    gate,
    out,
    lse,
    gate_row: "i64",
    gate_head: "i64",
    out_row: "i64",
    out_head: "i64",
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    WANT_LSE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, DIM_PAD)
    inside = channel < DIM
    first = (row * HEADS + head) * SPLITS
    split = tl.arange(0, SPLITS)
    top = tl.max(tl.load(stats + 2 * (first + split)), 0)
    nan = tl.sum((tl.load(stats + 2 * (first + split)) != tl.load(stats + 2 * (first + split))).to(tl.int32)) > 0
    safe = tl.where(top == float("-inf"), 0.0, top)
    total, mean = 0.0, tl.zeros((DIM_PAD,), tl.float32)
    for part in range(SPLITS):
        part_top = tl.load(stats + 2 * (first + part))
        # What an empty split left is nothing, whatever its memory holds.
        empty = part_top == float("-inf")
        weight = tl.where(empty, 0.0, tl.exp2(part_top - safe))
        total += tl.where(empty, 0.0, tl.load(stats + 2 * (first + part) + 1) * weight)
        limit = tl.where(empty, 0, DIM)
        mean += tl.load(parts + (first + part) * DIM + channel, mask=channel < limit, other=0.0) * weight
    none = (top == float("-inf")) & (nan == 0)
    mean = mean / tl.where(none, 1.0, total)
    if SCALED:
        mean = mean * tl.load(v_scale)
    if GATED:
        opened = tl.load(gate + row * gate_row + head * gate_head + channel, mask=inside, other=0.0).to(tl.float32)
        mean = mean / (1.0 + tl.exp(-opened))
    mean = tl.where(none, 0.0, mean)
    tl.store(out + row * out_row + head * out_head + channel, mean.to(out.dtype.element_ty), mask=inside)
    if WANT_LSE:
        value = (top + tl.log2(tl.where(none, 1.0, total))) * 0.6931471805599453
        tl.store(lse + row * HEADS + head, tl.where(none, float("-inf"), value))


def kind_of(e4m3: bool, capability: tuple[int, int] | None) -> int:
    """How K/V are read: as they are, by the bits of E4M3, or by the device's own exact cast (8.9 and newer)."""
    if not e4m3:
        return PLAIN
    return E4M3_CAST if capability is not None and tuple(capability) >= (8, 9) else E4M3_BITS


def _capability(tensor: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def _product_dtype(dtype: torch.dtype, e4m3: bool) -> object:
    """E4M3 becomes fp16, in one instruction for two. The interpreter multiplies the bits of bfloat16, so not there."""
    if dtype == torch.float32 or (dtype == torch.bfloat16 and triton_env.interpreted() and not e4m3):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 and not e4m3 else tl.float16


def _tile(queries: int, dim_pad: int, dtype: torch.dtype, kind: int, capability: tuple[int, int] | None) -> _Tile:
    """Tokens a tile, warps, stages."""
    if dtype == torch.float32 or (capability is not None and tuple(capability) < (8, 0)):
        return 16, 8, 1
    if queries <= 16:
        return (128, 4, 2) if kind == E4M3_CAST else (64, 4, 3 if kind == PLAIN else 2)
    if queries <= 32:
        return 64, 4, 2
    return (32, 8, 2) if queries * dim_pad > 64 * 256 else (64, 8, 2)


def attend_generic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    softmax_scale: float,
    scales: tuple[Tensor, Tensor] | None,
    out: Tensor,
    workspace: Tensor,
    *,
    splits: int,
    gate: Tensor | None = None,
    lse: Tensor | None = None,
    zero: bool = True,
) -> None:
    """Writes out [R, H, D] and lse [R, H] fp32 (None: not wanted).

    q: [R, H, D]; k, v: [P, S, J, D], uint8 with scales ([] fp32 each, on the device); table: [R, V] and lengths: [R],
    the row plan, int32 or int64; gate: [R, H, D]; all with unit stride in D. workspace: `workspace_bytes`, uint8,
    16-byte aligned; splits: a power of two, `num_splits(R * J, 4 * V)`.
    """
    rows, heads, dim = q.shape
    kv_heads, capability = k.shape[2], _capability(q)
    group = heads // kv_heads
    if not rows:
        return
    group_pad, dim_pad = max(16, next_power_of_2(group)), max(16, next_power_of_2(dim))
    kind = kind_of(scales is not None, capability)
    tile, warps, stages = _tile(group_pad, dim_pad, q.dtype, kind, capability)
    # Whole tiles that together hold the table's BLOCK * V tokens.
    run = (BLOCK * table.shape[1] + splits * tile - 1) // (splits * tile) * tile
    parts, stats = _parts(workspace, rows * heads * splits, dim)
    _generic[(rows, kv_heads, splits)](
        *(q, k, v, table, lengths, q if scales is None else scales[0], parts, stats, softmax_scale * LOG2_E, run),
        *(table.stride(0), q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3]),
        PER_PAGE=k.shape[1] // BLOCK,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        DIM_PAD=dim_pad,
        TILE=tile,
        SPLITS=splits,
        KIND=kind,
        DTYPE=_product_dtype(q.dtype, scales is not None),
        ZERO=zero,
        num_warps=warps,
        num_stages=stages,
    )
    _merged(parts, stats, scales, gate, out, lse, splits)


def attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    begins: Tensor,
    ends: Tensor,
    blocks: Tensor,
    masks: Tensor,
    softmax_scale: float,
    scales: tuple[Tensor, Tensor] | None,
    out: Tensor,
    workspace: Tensor,
    *,
    splits: int,
    gate: Tensor | None = None,
    lse: Tensor | None = None,
    zero: bool = True,
) -> None:
    """As `attend_generic`, over a grouped plan on the device.

    rows: [G, M] (-1 none), begins, ends: [G], blocks, masks: [T], int32 or int64 (masks int32); a row that is in no
    group gets zeros. splits: `num_splits(G * J, tokens that a group is expected to attend to)`.
    """
    total, heads, dim = q.shape
    kv_heads, capability = k.shape[2], _capability(q)
    group, places = heads // kv_heads, rows.shape[1]
    if not total:
        return
    queries, dim_pad = max(16, next_power_of_2(group * places)), max(16, next_power_of_2(dim))
    kind = kind_of(scales is not None, capability)
    tile, warps, stages = _tile(queries, dim_pad, q.dtype, kind, capability)
    parts, stats = _parts(workspace, total * heads * splits, dim)
    stats.fill_(float("-inf"))
    if rows.shape[0]:
        _grouped[(rows.shape[0], kv_heads, splits)](
            *(q, k, v, rows, begins, ends, blocks, masks, q if scales is None else scales[0], parts, stats),
            *(softmax_scale * LOG2_E, q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3]),
            PER_PAGE=k.shape[1] // BLOCK,
            KV_HEADS=kv_heads,
            GROUP=group,
            PLACES=places,
            QUERIES=queries,
            DIM=dim,
            DIM_PAD=dim_pad,
            TILE=tile,
            SPLITS=splits,
            KIND=kind,
            DTYPE=_product_dtype(q.dtype, scales is not None),
            ZERO=zero,
            num_warps=warps,
            num_stages=stages,
        )
    _merged(parts, stats, scales, gate, out, lse, splits)


def _parts(workspace: Tensor, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """[count, D] and [count, 2] fp32 of the workspace."""
    flat = workspace.view(torch.float32)
    return flat[: count * dim].view(count, dim), flat[count * dim : count * (dim + 2)].view(count, 2)


def _merged(
    parts: Tensor,
    stats: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    splits: int,
) -> None:
    rows, heads, dim = out.shape
    gated = out if gate is None else gate
    _merge[(rows, heads)](
        *(parts, stats, parts if scales is None else scales[1], gated, out, stats if lse is None else lse),
        *(gated.stride(0), gated.stride(1), out.stride(0), out.stride(1)),
        HEADS=heads,
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        SPLITS=splits,
        SCALED=scales is not None,
        GATED=gate is not None,
        WANT_LSE=lse is not None,
        num_warps=1,
    )
