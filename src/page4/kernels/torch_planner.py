"""Vectorised planners: the same plans as `reference`, entry by entry, without a loop over rows.

Block ids must be canonical here: ascending, distinct, complete at the row's position, -1 only after the last
(`canonical` makes them so). Bound by memory traffic of small integers; a decode step spends about 15 operations.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from page4.kernels.plans import CATEGORY_ENTRIES, MAX_GROUP_ROWS, GroupedPlan, RowPlan, tiles_of_place

BLOCK = 4
# One int32 a group and block of context is what a chunk of groups costs.
WORKSPACE_BYTES = 32 << 20
_FAR = torch.iinfo(torch.int64).max


def canonical(block_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Any ids [R, K] as (ids [R, K] int32 ascending and -1 padded, counts [R] int32).

    An id that is no complete block at the row's position is not selected; a repeated id counts once.
    """
    complete = torch.div(positions + 1, BLOCK, rounding_mode="floor").unsqueeze(1)
    ids = block_ids.long()
    ids = torch.where((ids >= 0) & (ids < complete), ids, _FAR).sort(1).values
    ids[:, 1:].masked_fill_(ids[:, 1:] == ids[:, :-1], _FAR)
    ids = ids.sort(1).values
    found = ids != _FAR
    return ids.masked_fill(~found, -1).int(), found.sum(1).int()


def plan_rows(
    block_ids: Tensor,
    counts: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_tokens: int,
    repoint: bool,
) -> RowPlan:
    """See `reference.plan_rows`; counts: [R], canonical ids of each row."""
    per_page = page_tokens // BLOCK
    seen = positions + 1
    complete, tail = seen // BLOCK, seen % BLOCK
    blocks = torch.nn.functional.pad(block_ids, (0, 1), value=-1).long()
    blocks.scatter_(1, counts.long().unsqueeze(1), torch.where(tail > 0, complete, -1).unsqueeze(1))
    padding = blocks < 0
    blocks = torch.where(padding, blocks[:, :1] if repoint else 0, blocks).clamp_min_(0)
    # int64 before the multiply: a page of an int32 table times blocks a page may pass 2**31.
    table = block_table[requests.unsqueeze(1), blocks // per_page].long() * per_page + blocks % per_page
    lengths = counts * BLOCK + tail
    if repoint:
        table.masked_fill_((lengths == 0).unsqueeze(1), 0)
    else:
        table.masked_fill_(padding, 0)
    return RowPlan(table, lengths, page_tokens)


def group_neighbours(positions: Tensor, requests: Tensor, group_rows: int) -> Tensor:
    """[G, M] int64: rows of each group of neighbouring rows of one request, -1 after a group's last."""
    real = (positions >= 0).nonzero().squeeze(1)
    if not real.numel():
        return real.new_empty(0, group_rows)
    request = requests[real]
    order = torch.arange(real.numel(), device=real.device)
    begins = torch.ones_like(order, dtype=torch.bool)
    begins[1:] = request[1:] != request[:-1]
    place = (order - torch.where(begins, order, 0).cummax(0).values) % group_rows
    group = (place == 0).cumsum(0) - 1
    rows = real.new_full((int(group[-1]) + 1, group_rows), -1)
    rows[group, place] = real
    return rows


def plan_grouped(
    block_ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_tokens: int,
    heads_per_kv: int,
    group_rows: int,
    repoint: bool,
    groups: Tensor | None = None,
) -> GroupedPlan:
    """See `reference.plan_grouped`; groups: what `group_neighbours` returned for these rows, when it is known."""
    device = positions.device
    groups = group_neighbours(positions, requests, group_rows) if groups is None else groups
    most = (int(positions.max()) + 1) // BLOCK + 1 if positions.numel() else 1
    step = max(1, WORKSPACE_BYTES // (4 * (most + 1)))
    found = [_union(groups[i : i + step], block_ids, positions, most) for i in range(0, groups.shape[0], step)]
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    group = torch.cat([part[0] + i * step for i, part in enumerate(found)]) if found else empty
    logical = torch.cat([part[1] for part in found]) if found else empty
    masks = torch.cat([part[2] for part in found]) if found else empty.int()

    tile_set = _tile_set_table(heads_per_kv, device)[_places(masks)]
    key, order = ((group << 32) | tile_set).sort(stable=True)
    group, logical, masks = group[order], logical[order], masks[order]
    per_page = page_tokens // BLOCK
    request = requests[groups[:, 0]][group] if groups.numel() else empty
    blocks = block_table[request, logical // per_page].long() * per_page + logical % per_page

    # Where each (group, tile set) begins among the real entries, and among the padded ones.
    category, inverse, sizes = key.unique_consecutive(return_inverse=True, return_counts=True)
    padded = (sizes + CATEGORY_ENTRIES - 1) // CATEGORY_ENTRIES * CATEGORY_ENTRIES
    shift = (padded.cumsum(0) - padded) - (sizes.cumsum(0) - sizes)
    place = torch.arange(key.numel(), device=device) + shift[inverse]
    starts = torch.zeros(groups.shape[0] + 1, dtype=torch.int64, device=device)
    starts.scatter_add_(0, (category >> 32) + 1, padded)
    starts = starts.cumsum(0)
    total = int(starts[-1])
    all_blocks = torch.zeros(total, dtype=torch.int64, device=device)
    if repoint and total:
        all_blocks[place] = blocks
        first = all_blocks[starts[:-1].clamp_max(total - 1)]
        all_blocks = first.repeat_interleave(starts.diff())
    all_blocks[place] = blocks
    all_logical = torch.full((total,), -1, dtype=torch.int64, device=device)
    all_logical[place] = logical
    all_masks = torch.zeros(total, dtype=torch.int32, device=device)
    all_masks[place] = masks
    tile_sets = (category & 0xFFFFFFFF).repeat_interleave(padded // CATEGORY_ENTRIES)
    return GroupedPlan(groups, starts, all_blocks, all_logical, all_masks, tile_sets, page_tokens, heads_per_kv)


def _union(groups: Tensor, block_ids: Tensor, positions: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(group, block, mask) of every block that a group attends to, ascending: [T] int64, int64, int32.

    A row names a block at most once and rows own disjoint bits, so adding masks is or-ing them (wrapping into the sign
    bit included). Column `most` takes what is no block.
    """
    there = groups >= 0
    safe = groups.clamp_min(0)
    seen = (positions[safe] + 1).masked_fill_(~there, 0)
    shifts = torch.arange(0, 4 * groups.shape[1], 4, device=groups.device)
    tail = seen % BLOCK
    ids = block_ids[safe]
    ids = torch.where((ids < 0) | ~there.unsqueeze(2), most, ids).long()
    columns = torch.cat((ids, torch.where(tail > 0, seen // BLOCK, most).unsqueeze(2)), 2)
    bits = torch.full_like(columns, 0b1111)
    bits[..., -1] = (1 << tail) - 1
    bits = (bits << shifts.view(1, -1, 1)).int()
    union = torch.zeros(groups.shape[0], most + 1, dtype=torch.int32, device=groups.device)
    union.scatter_add_(1, columns.flatten(1), bits.flatten(1))
    union[:, most] = 0
    group, block = union.nonzero(as_tuple=True)
    return group, block, union[group, block]


def _places(masks: Tensor) -> Tensor:
    """The set (bit r) of places that have a bit in each mask: [T] int32 -> [T] int64."""
    x = masks.long()
    x = (x | x >> 1 | x >> 2 | x >> 3) & 0x11111111
    x = (x | x >> 3) & 0x03030303
    x = (x | x >> 6) & 0x000F000F
    return (x | x >> 12) & 0xFF


@functools.cache
def _tile_set_table(heads_per_kv: int, device: torch.device) -> Tensor:
    """[256] int64: for each set of places, the set of tiles that their query rows fall into."""
    of_place = [sum(1 << tile for tile in tiles_of_place(place, heads_per_kv)) for place in range(MAX_GROUP_ROWS)]
    table = []
    for places in range(1 << MAX_GROUP_ROWS):
        tiles = 0
        for place, touched in enumerate(of_place):
            if places >> place & 1:
                tiles |= touched
        table.append(tiles)
    return torch.tensor(table, dtype=torch.int64, device=device)
