"""select: index keys -> the blocks that each row attends to.

score(b) = sum_i relu(q_i . key_b) / sqrt(E) in fp32, over the blocks that are complete at the row's position; the
min(K, visible) best in the total order (score descending, then block id ascending; -0.0 equals +0.0). Blocks are chosen
whole: the tail, at most 3 newest tokens, is not part of a selection but follows from the position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from page4 import kernels
from page4.cache.rows import Rows
from page4.cache.units import BLOCK_TOKENS
from page4.errors import KernelError, message
from page4.kernels import cpu, gpu, reference, torch_planner, torch_select

# Scores of one chunk of rows, all index heads counted: what bounds the workspace whatever the context. Small enough to
# stay in a CPU's cache and in memory that the allocator hands out again without page faults.
WORKSPACE_BYTES = 4 << 20
# Requests with at most this many rows (decode, verify windows) are scored together.
WINDOW_ROWS = 16


@dataclass(frozen=True)
class Selection:
    """block_ids: [R, K] int32, ascending, -1 after the last; counts: [R] int32, valid ids of each row.

    `canonical` says that the ids are known to be so: ascending, distinct and complete at the row's position. Every
    selection made here is; ids from elsewhere need not be, and `as_canonical` drops those that select nothing.
    bad_rows: [R] bool, rows with a NaN among their visible scores, which select nothing; None when NaN was refused.
    """

    block_ids: Tensor
    counts: Tensor
    canonical: bool = False
    bad_rows: Tensor | None = None

    def take(self, index: Tensor) -> Selection:
        """The selection of some rows, index: [M] int64."""
        bad_rows = None if self.bad_rows is None else self.bad_rows[index]
        return Selection(self.block_ids[index], self.counts[index], self.canonical, bad_rows)

    def as_canonical(self, positions: Tensor) -> Selection:
        """The same selection in canonical form: an id below 0 or not complete at its row's position is not selected."""
        return self if self.canonical else Selection(*torch_planner.canonical(self.block_ids, positions), True)


def visible_blocks(positions: Tensor) -> Tensor:
    """Blocks that are complete at each position: [R] int64 -> [R] int64; 0 for padding rows (-1)."""
    return torch.div(positions + 1, BLOCK_TOKENS, rounding_mode="floor")


def chunk_rows(rows: int, blocks: int, budget_bytes: int, heads: int = 1) -> list[range]:
    """Runs of rows whose fp32 scores over `blocks` blocks and `heads` heads fit the budget; at least one row a run."""
    step = max(1, budget_bytes // max(1, 4 * blocks * heads))
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def select(index_q: Tensor, pooled: Tensor, rows: Rows, top_k: int) -> Selection:
    """The selection of every row of a step.

    index_q: [R, I, E] (after norm and RoPE), pooled: [P, S / 4, E] block keys of the pages, top_k: blocks a row.
    Raises `KernelError` when shapes do not fit, and when a visible score is NaN: naming the row, but for GPU kernels,
    which do not wait for the host and report such rows in `bad_rows`.
    """
    if index_q.ndim != 3 or index_q.shape[0] != rows.num_rows or index_q.shape[2] != pooled.shape[2]:
        allowed = f"[{rows.num_rows}, I, {pooled.shape[2]}]"
        raise KernelError(message("index_q", allowed=allowed, got=list(index_q.shape), do="pass one row a token"))
    if top_k < 1:
        raise KernelError(message("top_k", allowed="1 or more blocks", got=top_k, do="fix the geometry"))
    if gpu.select_refusal(index_q, pooled) is None:
        return _on_gpu(index_q, pooled, rows, top_k)
    visible: Tensor = rows.once("visible", lambda: visible_blocks(rows.positions))
    most = _most_visible(rows, visible)
    if most <= top_k:
        return _everything(visible, min(most, top_k))
    counts = visible.clamp(max=top_k).int()
    if is_compiled(index_q, pooled):
        rows.check_within(pooled.shape[1] * BLOCK_TOKENS)
        ids, bad = cpu.select_blocks(index_q, pooled, rows.block_table, rows.request_of_row, visible, top_k)
        return _refuse_nan(bad) if bad is not None else Selection(ids, counts, True)
    tiles = list(_tiles(rows))
    found = [_tile_ids(index_q, pooled, rows, visible, top_k, *tile) for tile in tiles]
    if len(tiles) == 1 and isinstance(tiles[0][0], slice):
        return Selection(found[0], counts, True)
    block_ids = torch.full((rows.num_rows, top_k), -1, dtype=torch.int32, device=index_q.device)
    for (index, _, _), ids in zip(tiles, found, strict=True):
        block_ids[index] = ids
    return Selection(block_ids, counts, True)


def _on_gpu(index_q: Tensor, pooled: Tensor, rows: Rows, top_k: int) -> Selection:
    """The selection without a host sync: what a step may see is bounded by what the host knows, or by the table."""
    lengths = rows.lengths()
    most, window = rows.block_table.shape[1] * pooled.shape[1], -(-rows.num_rows // max(1, rows.num_requests))
    if lengths is not None and rows.first_positions is not None:
        ends = [first + n for first, n in zip(rows.first_positions, lengths, strict=True) if n]
        most, window = max(ends, default=0) // BLOCK_TOKENS, max(lengths, default=1)
        if most <= top_k:
            visible: Tensor = rows.once("visible", lambda: visible_blocks(rows.positions))
            return _everything(visible, min(most, top_k))
    places = (rows.positions, rows.request_of_row, rows.block_table)
    ids, counts, bad = gpu.select_blocks(index_q, pooled, places, top_k, most, max(1, window))
    return Selection(ids, counts, True, bad)


def is_compiled(index_q: Tensor, pooled: Tensor) -> bool:
    """Whether the compiled kernel scores these: index_q [R, I, E], pooled [P, S / 4, E]."""
    contiguous = index_q.is_contiguous() and pooled.stride()[1:] == (pooled.shape[2], 1)
    return contiguous and cpu.refusal(index_q, pooled, channels=(index_q.shape[2],)) is None


def select_from_scores(scores: Tensor, visible: Tensor, top_k: int) -> Selection:
    """The selection that given scores lead to: scores [R, B] fp32, visible [R] int64. Raises `KernelError` on NaN."""
    block_ids, counts, bad = _top_blocks(scores, visible, top_k)
    if bad is not None:
        _refuse_nan(bad)
    return Selection(block_ids, counts, True)


def _top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor, int | None]:
    """Ids, counts, and the first row with a NaN among its visible scores."""
    if not kernels.reference_wanted():
        return torch_select.checked_top_blocks(scores, visible, top_k)
    columns = torch.arange(scores.shape[1], device=scores.device)
    bad = (scores.isnan() & (columns < visible.unsqueeze(1))).any(1).nonzero()
    return (*reference.top_blocks(scores, visible, top_k), int(bad[0]) if bad.numel() else None)


def _refuse_nan(row: int) -> NoReturn:
    do = "look for NaN in the indexer's inputs of that row"
    raise KernelError(message(f"index scores of row {row}", allowed="numbers", got="NaN", do=do))


def extend(selection: Selection, selected_at: Tensor, positions: Tensor) -> Selection:
    """The same blocks for later positions, and every block that was completed since.

    selected_at, positions: [R] int64, where the selection was made and where it is used; at most 8 positions apart, so
    at most 2 blocks more. The draft layer selects once a window and reuses it this way.
    """
    if selection.block_ids.is_contiguous() and cpu.refusal(channels=()) is None and positions.device.type == "cpu":
        extended = cpu.extend_blocks(selection.block_ids, selection.counts, selected_at, positions)
        return Selection(*extended, selection.canonical)
    old, new = visible_blocks(selected_at), visible_blocks(positions)
    block_ids = torch.nn.functional.pad(selection.block_ids, (0, 2), value=-1)
    for more in range(2):
        block = old + more
        place = (selection.counts + more).long().unsqueeze(1)
        held = block_ids.gather(1, place)
        block_ids.scatter_(1, place, torch.where((block < new).unsqueeze(1), block.int().unsqueeze(1), held))
    return Selection(block_ids, selection.counts + (new - old).int(), selection.canonical)


def _most_visible(rows: Rows, visible: Tensor) -> int:
    """The largest number of visible blocks; known on the host when the rows say where they begin."""
    lengths = rows.lengths()
    if lengths is None or rows.first_positions is None:
        return int(visible.max()) if visible.numel() else 0
    ends = [first + n for first, n in zip(rows.first_positions, lengths, strict=True) if n]
    return max(ends, default=0) // BLOCK_TOKENS


def _everything(visible: Tensor, width: int) -> Selection:
    """All visible blocks: nothing is pruned, so nothing needs a score."""
    ids = torch.arange(width, dtype=torch.int32, device=visible.device).expand(visible.shape[0], -1)
    return Selection(ids.masked_fill(ids >= visible.unsqueeze(1), -1), visible.int(), True)


def _tiles(rows: Rows) -> Iterator[tuple[slice | Tensor, list[int], int]]:
    """Rows that are scored together: (index of the rows, their requests, rows of each request)."""
    lengths = rows.lengths()
    if lengths is None or rows.row_starts is None:
        for request in range(rows.num_requests):
            index = ((rows.request_of_row == request) & (rows.positions >= 0)).nonzero().squeeze(1)
            if index.numel():
                yield index, [request], index.numel()
        return
    start = 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and lengths[end] == lengths[start] <= WINDOW_ROWS:
            end += 1
        if lengths[start]:
            yield slice(rows.row_starts[start], rows.row_starts[end]), list(range(start, end)), lengths[start]
        start = end


def _tile_ids(
    index_q: Tensor,
    pooled: Tensor,
    rows: Rows,
    visible: Tensor,
    top_k: int,
    index: slice | Tensor,
    requests: list[int],
    width: int,
) -> Tensor:
    """Selected ids of one tile, `width` rows of each of n requests: [n * width, top_k] int32."""
    n, heads = len(requests), index_q.shape[1]
    q = index_q[index].view(n, width, heads, -1)
    visible = visible[index].view(n, width)
    most = int(visible.max())
    if most <= top_k:
        return _everything(visible.view(-1), top_k).block_ids
    pages = rows.block_table[requests[0] : requests[-1] + 1, : -(-most // pooled.shape[1])]
    keys = pooled.index_select(0, pages.reshape(-1)).view(n, -1, pooled.shape[2])[:, :most]
    found = []
    for run in chunk_rows(width, most, WORKSPACE_BYTES // n, heads):
        part = slice(run.start, run.stop)
        seen = visible[:, part].reshape(-1)
        bound = max(1, int(seen.max())) if n == 1 else most
        scores = _scores(q[:, part], keys[:, :bound]).view(-1, bound)
        ids, _, bad = _top_blocks(scores, seen, top_k)
        if bad is not None:
            row_ids = torch.arange(rows.num_rows, device=visible.device)[index].view(n, width)
            _refuse_nan(int(row_ids[:, part].reshape(-1)[bad]))
        if ids.shape[1] < top_k:
            ids = torch.nn.functional.pad(ids, (0, top_k - ids.shape[1]), value=-1)
        found.append(ids.view(n, len(run), top_k))
    return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).view(n * width, top_k)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Q [n, T, I, E], keys [n, B, E] -> [n, T, B] fp32."""
    if kernels.reference_wanted():
        return torch.stack([reference.index_scores(*pair) for pair in zip(q, keys, strict=True)])
    return torch_select.index_scores(q, keys)
