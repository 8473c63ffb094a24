"""Selection on a GPU: index scores in Triton, then the exact best blocks of each row.

    index_q [R, I, E] x paged keys [P, S / 4, E] --tl.dot--> scores [rows of a chunk, columns] fp32 --> ids [R, K]

A tile is keys x (heads x rows): a block's key is read once for all rows of the tile, one product serves all heads, relu
and the sum over heads stay in registers. 64 keys x 64 rows in prefill, 64 keys x the rows of one request in decode and
windows. A tile whose rows belong to several requests goes through them one by one, so rows may lie in any order;
neighbours of one request are merely fastest. Scores are zero or above, or NaN: relu passes NaN on.

The best blocks are found by `cuda/select.cu` where cuda-core is there, else by `_top` below: the 32 bits of the k-th
key one by one, each by counting the row, so exact for any scores, and slower.

Bound: narrow, the keys' bytes once (64 requests at 32k: 134 MB, 32 us at 4.25 TB/s); wide, 8 bytes a score (written,
read) against 2 * I * E operations a score (2,048 rows at 32k: 32 and 22 us). Measured on an H200 (2026-12-01, torch
2.11, Triton 3.6, graph replay, 4 heads of 128): scores of 64 requests at 32k 38.9 us (84% of the bound), of 2,048 rows
at 32k 69.7 us, and the whole of select there 123.5 us (26%).
"""

import math

import torch
from torch import Tensor

from page4.kernels import triton_env
from page4.kernels.triton_env import i64, jit, next_power_of_2, tl

BLOCK = 4
# Scores of one chunk of rows: what bounds the workspace, and keeps them near the L2 cache.
WORKSPACE_BYTES = 128 << 20
# Windows of at most this many rows are scored narrow.
NARROW_ROWS = 8
WIDE_ROWS = 64
# Keys of a tile, warps, stages, and for the wide one programs.
WIDE, NARROW = (64, 4, 3, 264), (64, 2, 3)
NARROW_PROGRAMS = 2112
TOP_CHUNK = 1024
# A mask of the visible blocks is counted in int32 and a score's column in 32 bits.
MAX_BLOCKS = 1 << 24
DTYPES = ("float16", "bfloat16", "float32")


def refusal(
    device: str, capability: tuple[int, int] | None, dtype: str, key_dtype: str, heads: int, dim: int, page_tokens: int
) -> str | None:
    """None when these kernels score `heads` queries of `dim` in `dtype` over such keys, else the reason."""
    reason = triton_env.refusal(device, capability)
    if reason is not None:
        return reason
    if dtype not in DTYPES or key_dtype != dtype:
        return f"queries and keys of one type of {', '.join(DTYPES)} are scored, not {dtype} and {key_dtype}"
    if dtype == "bfloat16" and capability is not None and tuple(capability) < (8, 0):
        return f"bfloat16 products need compute capability 8.0 or newer, got {capability}"
    if not 1 <= heads <= 16 or not 8 <= dim <= 256:
        return f"1 to 16 index heads of 8 to 256 channels are scored, not {heads} of {dim}"
    if page_tokens < BLOCK or page_tokens % BLOCK:
        return f"a page of {page_tokens} tokens is not a whole number of 4-token blocks"
    return None


def num_columns(max_visible_bound: int) -> int:
    """Scores that are kept of a row which sees at most `max_visible_bound` blocks."""
    return -(-max(1, max_visible_bound) // 64) * 64


def chunk_rows(rows: int, max_visible_bound: int) -> int:
    """Rows whose scores are kept at once: whole tiles within WORKSPACE_BYTES, one tile at least."""
    fitting = WORKSPACE_BYTES // (4 * num_columns(max_visible_bound))
    return min(max(1, rows), max(1, fitting // WIDE_ROWS) * WIDE_ROWS)


def workspace_bytes(rows: int, max_visible_bound: int) -> int:
    """Size of the workspace of `select_blocks`; it grows with the context but not with the rows past one chunk."""
    return 4 * chunk_rows(rows, max_visible_bound) * num_columns(max_visible_bound)


@jit
def _relu_dot(a, b, UPCAST: tl.constexpr):
    """relu(a . b). UPCAST: for the interpreter, which multiplies the bits of bfloat16."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.maximum(tl.dot(a, b, input_precision="ieee"), 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit(vary=("table", "requests", "positions", "rows", "table_row", "programs"))
def _score(
    index_q,
    pooled,
    table,
    requests,
    positions,
    scores,
    rows,
    columns: "i64",
    table_row: "i64",
    q_row: "i64",
    q_head: "i64",
    page_stride: "i64",
    place_stride: "i64",
    programs,
    top_k: tl.constexpr,
    PER_PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    place = tl.arange(0, WINDOW_PAD)
    row = tl.program_id(0).to(tl.int64) * WINDOW + place
    inside = (place < WINDOW) & (row < rows)
    seen = (tl.load(positions + row, mask=inside, other=-1) + 1) // 4
    seen = tl.minimum(tl.maximum(seen, 0), columns).to(tl.int32)
    request = tl.load(requests + row, mask=inside, other=0).to(tl.int32)
    scored = seen > top_k
    channel = tl.arange(0, DIM_PAD)
    # Heads apart, rows together: in a tensor core's result the heads of a row then lie in one thread.
    query = tl.arange(0, HEADS_PAD * WINDOW_PAD)
    head, q_place = query // WINDOW_PAD, query % WINDOW_PAD
    q_line = tl.program_id(0).to(tl.int64) * WINDOW + q_place
    q_there = (q_place < WINDOW) & (q_line < rows) & (head < HEADS)
    q_at = index_q + q_line[:, None] * q_row + head[:, None] * q_head + channel[None, :]
    q = tl.trans(tl.load(q_at, mask=q_there[:, None] & (channel < DIM)[None, :], other=0.0))
    least = tl.min(tl.where(scored, request, 2147483647))
    most = tl.max(tl.where(scored, request, -1))
    for owner in range(least, most + 1):
        mine = scored & (request == owner)
        end = tl.max(tl.where(mine, seen, 0))
        for first in range(tl.program_id(1) * KEYS, end, programs * KEYS):
            block = first + tl.arange(0, KEYS)
            there = block < end
            page = tl.load(table + owner * table_row + block // PER_PAGE, mask=there, other=0)
            at = page.to(tl.int64) * page_stride + (block % PER_PAGE) * place_stride
            key_at = pooled + at[:, None] + channel[None, :]
            keys = tl.load(key_at, mask=there[:, None] & (channel < DIM)[None, :], other=0.0)
            dots = _relu_dot(keys, q, UPCAST)
            total = tl.sum(tl.reshape(dots, (KEYS, HEADS_PAD, WINDOW_PAD)), 1)
            # Columns at and after a row's last block are scratch; there are whole tiles of them.
            out = scores + row[None, :] * columns + block[:, None]
            tl.store(out, total * SCALE, mask=mine[None, :] & there[:, None])


@jit
def _keys(scores, block, seen):
    """Ascending 32-bit keys of scores, 0 after the last: below the key of every number."""
    bits = (tl.load(scores + block, mask=block < seen, other=0.0) + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return tl.where(block < seen, key, 0)


@jit(vary=("positions", "ids", "counts", "bad"))
def _top(scores, columns: "i64", positions, ids, counts, bad, top_k: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions + row) + 1) // 4
    seen = tl.minimum(tl.maximum(seen, 0), columns).to(tl.int32)
    mine, out = scores + row * columns, ids + row * top_k
    lane = tl.arange(0, CHUNK)
    nan = 0
    if seen > top_k:
        for first in range(0, seen, CHUNK):
            score = tl.load(mine + first + lane, mask=first + lane < seen, other=0.0)
            nan += tl.sum((score != score).to(tl.int32))
    tl.store(bad + row, (nan > 0).to(tl.uint8))
    tl.store(counts + row, tl.where(nan > 0, 0, tl.minimum(seen, top_k)))
    if (seen <= top_k) | (nan > 0):
        for first in range(0, top_k, CHUNK):
            place = first + lane
            tl.store(out + place, tl.where((place < seen) & (nan == 0), place, -1), mask=place < top_k)
    else:
        kth = seen.to(tl.int64) * 0
        for step in range(32):
            larger = kth + (tl.full((), 1, tl.int64) << (31 - step))
            above = 0
            for first in range(0, seen, CHUNK):
                above += tl.sum((_keys(mine, first + lane, seen) >= larger).to(tl.int32))
            kth = tl.where(above >= top_k, larger, kth)
        above = 0
        for first in range(0, seen, CHUNK):
            above += tl.sum((_keys(mine, first + lane, seen) > kth).to(tl.int32))
        left, done = top_k - above, 0
        for first in range(0, seen, CHUNK):
            key = _keys(mine, first + lane, seen)
            tied = (key == kth).to(tl.int32)
            taken = (key > kth) | ((tied > 0) & (tl.cumsum(tied, 0) <= left))
            place = done + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(out + place, first + lane, mask=taken)
            left -= tl.minimum(left, tl.sum(tied))
            done += tl.sum(taken.to(tl.int32))


def scores_of(
    index_q: Tensor,
    pooled: Tensor,
    block_table: Tensor,
    requests: Tensor,
    positions: Tensor,
    scores: Tensor,
    top_k: int,
    window: int,
) -> None:
    """Writes the visible scores of the rows that see more than `top_k` blocks: scores [R, columns] fp32.

    window: rows that lie together and mostly share a request, what a tile holds (1 for decode). Operands as
    `select_blocks`.
    """
    rows, heads, dim = index_q.shape
    columns = scores.shape[1]
    tile, keys, warps, stages, most_programs = tiling(window, _is_plain(index_q))
    tiles, runs, heads_pad = -(-rows // tile), -(-columns // keys), next_power_of_2(heads)
    programs = min(runs, max(1, most_programs // tiles))
    _score[(tiles, programs)](
        *(index_q, pooled, block_table, requests, positions, scores, rows, columns, block_table.stride(0)),
        *(index_q.stride(0), index_q.stride(1), pooled.stride(0), pooled.stride(1), programs),
        top_k=top_k,
        PER_PAGE=pooled.shape[1],
        HEADS=heads,
        HEADS_PAD=heads_pad,
        DIM=dim,
        DIM_PAD=max(16, next_power_of_2(dim)),
        WINDOW=tile,
        WINDOW_PAD=max(next_power_of_2(tile), 16 // heads_pad),
        KEYS=keys,
        SCALE=1 / math.sqrt(dim),
        UPCAST=triton_env.interpreted(),
        num_warps=warps,
        num_stages=stages,
    )


def tiling(window: int, plain: bool) -> tuple[int, int, int, int, int]:
    """Rows and keys of a tile, warps, stages and the most programs, for `window` rows that lie together.

    plain: without tensor cores, where larger tiles spill.
    """
    if plain:
        return (min(window, 8), 32, 4, 1, NARROW_PROGRAMS)
    if window > NARROW_ROWS:
        return (WIDE_ROWS, *WIDE)
    return (window, *NARROW, NARROW_PROGRAMS)


def _is_plain(index_q: Tensor) -> bool:
    """Whether Triton has no tensor cores for these products: float32, and everything before Ampere."""
    old = index_q.is_cuda and torch.cuda.get_device_capability(index_q.device) < (8, 0)
    return index_q.dtype == torch.float32 or old


def top_blocks(scores: Tensor, positions: Tensor, top_k: int, ids: Tensor, counts: Tensor, bad: Tensor) -> None:
    """The selection that given scores lead to: scores [R, columns] fp32; the rest as `select_blocks` returns it."""
    rows, columns = scores.shape
    if rows:
        _top[(rows,)](scores, columns, positions, ids, counts, bad, top_k, TOP_CHUNK, num_warps=8)


def select_blocks(
    index_q: Tensor,
    pooled: Tensor,
    block_table: Tensor,
    requests: Tensor,
    positions: Tensor,
    top_k: int,
    max_visible_bound: int,
    workspace: Tensor,
    *,
    window: int = WIDE_ROWS,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    top=top_blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """The selection of every row, without a host sync; a capture may hold it when `out` is given or pooled memory is.

    index_q: [R, I, E], unit stride in E; pooled: [P, S / 4, E], likewise; block_table: [N, W] int32; requests,
    positions: [R] int64 (-1 for padding rows, which select nothing); max_visible_bound: blocks that no row sees more
    of; workspace: `workspace_bytes` bytes, uint8, 16-byte aligned; window: rows of a request that lie together;
    top: what finds the best of given scores, `top_blocks` or that of `cuda_select`.
    Returns ids [R, K] int32 ascending, -1 after the last; counts [R] int32; bad [R] uint8, 1 where a visible score is
    NaN: that row selects nothing.
    """
    rows, device = index_q.shape[0], index_q.device
    ids, counts, bad = out if out is not None else empty_selection(rows, top_k, device)
    columns, step = num_columns(max_visible_bound), chunk_rows(rows, max_visible_bound)
    scores = workspace.view(torch.float32)[: step * columns].view(step, columns)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        mine = scores[: part.stop - part.start]
        if max_visible_bound > top_k:
            scores_of(
                index_q[part], pooled, block_table, requests[part], positions[part], mine, top_k, min(window, WIDE_ROWS)
            )
        top(mine, positions[part], top_k, ids[part], counts[part], bad[part])
    return ids, counts, bad


def empty_selection(rows: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what `select_blocks` returns; every element of it is written."""
    return (
        torch.empty(rows, top_k, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.uint8, device=device),
    )
