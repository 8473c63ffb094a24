"""The truth of every operation in readable torch: loops, no tricks, no workspace limits.

PAGE4_KERNELS=reference runs the engine on this; the tests compare every other kernel with it. Words as everywhere: a
block is four tokens, complete at position p when 4 * b + 3 <= p; the tail is the (p + 1) % 4 tokens after the last one.

    index_scores, top_blocks, pool_keys               select
    blocks_of, tail_of, expand_blocks                 a selection as blocks and tokens
    plan_rows, plan_grouped                           plan
    attend_generic, attend_rows, attend_grouped       attend: routes generic, xqa, grouped
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from page4.codec import decode
from page4.kernels.plans import CATEGORY_ENTRIES, TILE_ROWS, GroupedPlan, RowPlan, tiles_of_place

BLOCK = 4
_TINY = torch.finfo(torch.float32).tiny

# ------------------------------------------------------------------------------------------------------------- select


def index_scores(index_q: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) / sqrt(E): index_q [T, I, E], keys [B, E] -> [T, B] fp32."""
    scores = torch.zeros(index_q.shape[0], keys.shape[0], device=index_q.device)
    for head in range(index_q.shape[1]):
        scores += (index_q[:, head].float() @ keys.float().T).relu()
    return scores / math.sqrt(index_q.shape[2])


def top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best min(top_k, visible) columns of each row: score descending, then column ascending.

    scores: [R, B] fp32 without NaN in visible columns; visible: [R] int64. Returns ids [R, min(top_k, B)] int32
    ascending with -1 after the last, and counts [R] int32.
    """
    width = min(top_k, scores.shape[1])
    ids = torch.full((scores.shape[0], width), -1, dtype=torch.int32, device=scores.device)
    counts = visible.clamp(max=width).int()
    for row in range(scores.shape[0]):
        # -0.0 + 0.0 is +0.0: the two zeros are one score, whatever a sort thinks of their signs.
        seen = scores[row, : int(visible[row])] + 0.0
        order = torch.sort(seen, descending=True, stable=True).indices
        best = order[: int(counts[row])].sort().values
        ids[row, : best.numel()] = best.int()
    return ids, counts


def pool_keys(raw_keys: Tensor) -> Tensor:
    """The mean of each complete block, before norm and RoPE: raw_keys [T, E] from token 0 on -> [T // 4, E].

    The mean is taken in fp32 and returned in the keys' dtype.
    """
    blocks = raw_keys.shape[0] // BLOCK
    return raw_keys[: BLOCK * blocks].float().view(blocks, BLOCK, -1).mean(1).to(raw_keys.dtype)


def blocks_of(block_ids: Sequence[int], position: int) -> list[int]:
    """The blocks that a row's ids select, ascending: negative, incomplete and repeated ids do not count."""
    return sorted({block for block in block_ids if 0 <= block < (position + 1) // BLOCK})


def tail_of(position: int) -> list[int]:
    """The newest (p + 1) % 4 tokens; none at position -1."""
    return list(range((position + 1) // BLOCK * BLOCK, position + 1))


def expand_blocks(block_ids: Tensor, positions: Tensor) -> list[list[int]]:
    """The tokens that each row attends to, ascending: block_ids [R, K], positions [R] -> R lists."""
    return [
        [BLOCK * block + token for block in blocks_of(ids, position) for token in range(BLOCK)] + tail_of(position)
        for ids, position in zip(block_ids.tolist(), positions.tolist(), strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------- plan


def plan_rows(
    block_ids: Tensor, positions: Tensor, requests: Tensor, block_table: Tensor, page_tokens: int, repoint: bool
) -> RowPlan:
    """The plan of single rows (see `RowPlan`).

    block_ids: [R, K], any ids; positions, requests: [R] int64; block_table: [N, W] pages.
    """
    table = torch.zeros(block_ids.shape[0], block_ids.shape[1] + 1, dtype=torch.int64)
    lengths = []
    facts = zip(block_ids.tolist(), positions.tolist(), requests.tolist(), strict=True)
    for row, (ids, position, request) in enumerate(facts):
        blocks, tail = blocks_of(ids, position), tail_of(position)
        lengths.append(BLOCK * len(blocks) + len(tail))
        if tail:
            blocks.append(tail[0] // BLOCK)
        if not blocks:
            continue
        physical = [_physical(block, block_table[request], page_tokens) for block in blocks]
        if repoint:
            table[row] = physical[0]
        table[row, : len(blocks)] = torch.tensor(physical)
    device = block_ids.device
    return RowPlan(table.to(device), torch.tensor(lengths, dtype=torch.int64, device=device), page_tokens)


def plan_grouped(
    block_ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_tokens: int,
    heads_per_kv: int,
    group_rows: int,
    repoint: bool,
) -> GroupedPlan:
    """The grouped plan (see `GroupedPlan`); operands as `plan_rows`."""
    ids, at, owners = block_ids.tolist(), positions.tolist(), requests.tolist()
    groups = _groups(at, owners, group_rows)
    starts = [0]
    blocks: list[int] = []
    logical: list[int] = []
    masks: list[int] = []
    tile_sets: list[int] = []
    for rows in groups:
        pages = block_table[owners[rows[0]]]
        entries = _by_tile_set(_union_masks([ids[row] for row in rows], [at[row] for row in rows]), heads_per_kv)
        first = next((entry[0] for tile_set in sorted(entries) for entry in entries[tile_set]), None)
        padding = _physical(first, pages, page_tokens) if repoint and first is not None else 0
        for tile_set in sorted(entries):
            missing = -len(entries[tile_set]) % CATEGORY_ENTRIES
            for block, mask in entries[tile_set]:
                blocks.append(_physical(block, pages, page_tokens))
                logical.append(block)
                masks.append(mask)
            blocks += [padding] * missing
            logical += [-1] * missing
            masks += [0] * missing
            tile_sets += [tile_set] * ((len(entries[tile_set]) + missing) // CATEGORY_ENTRIES)
        starts.append(len(blocks))

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=block_ids.device)

    return GroupedPlan(
        rows=tensor([rows + [-1] * (group_rows - len(rows)) for rows in groups]).view(-1, group_rows),
        starts=tensor(starts),
        blocks=tensor(blocks),
        logical=tensor(logical),
        # Bit 31 is the sign of an int32.
        masks=tensor([mask - (mask >> 31 << 32) for mask in masks], torch.int32),
        tile_sets=tensor(tile_sets),
        page_tokens=page_tokens,
        heads_per_kv=heads_per_kv,
    )


def _physical(block: int, pages: Tensor, page_tokens: int) -> int:
    """The block `block` of the request whose pages these are."""
    per_page = page_tokens // BLOCK
    return int(pages[block // per_page]) * per_page + block % per_page


def _groups(positions: list[int], requests: list[int], group_rows: int) -> list[list[int]]:
    """Rows in groups: a group ends when it is full, or where the next row that is no padding has another request."""
    groups: list[list[int]] = []
    for row in (row for row, position in enumerate(positions) if position >= 0):
        if groups and len(groups[-1]) < group_rows and requests[groups[-1][-1]] == requests[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _union_masks(ids: list[list[int]], positions: list[int]) -> dict[int, int]:
    """Of every block that a group attends to, bit 4 * place + token: who attends to which of its tokens."""
    masks: dict[int, int] = {}
    for place, (row_ids, position) in enumerate(zip(ids, positions, strict=True)):
        tokens = [BLOCK * block + token for block in blocks_of(row_ids, position) for token in range(BLOCK)]
        for token in tokens + tail_of(position):
            block = token // BLOCK
            masks[block] = masks.get(block, 0) | 1 << (BLOCK * place + token % BLOCK)
    return masks


def _by_tile_set(masks: dict[int, int], heads_per_kv: int) -> dict[int, list[tuple[int, int]]]:
    """(block, mask) by the set of tiles that the mask touches, blocks ascending."""
    found: dict[int, list[tuple[int, int]]] = {}
    for block in sorted(masks):
        tile_set = 0
        for bit in range(32):
            if masks[block] >> bit & 1:
                for tile in tiles_of_place(bit // BLOCK, heads_per_kv):
                    tile_set |= 1 << tile
        found.setdefault(tile_set, []).append((block, masks[block]))
    return found


# ------------------------------------------------------------------------------------------------------------- attend


class Partial:
    """Softmax attention over a part of the tokens: the largest logit, the sum of exponentials, the weighted values.

    top, total: [...] fp32; out: [..., D] fp32, not yet divided by total. A part without tokens has top -inf, total 0.
    """

    def __init__(self, top: Tensor, total: Tensor, out: Tensor) -> None:
        self.top, self.total, self.out = top, total, out

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, attended: Tensor) -> Partial:
        """q: [J, M, D] already scaled; k, v: [J, W, D]; attended: [M or 1, W] bool."""
        logits = (q @ k.transpose(-1, -2)).masked_fill(~attended, -math.inf)
        top = logits.amax(-1)
        weights = (logits - _finite(top).unsqueeze(-1)).exp()
        # A weight of zero times a value of NaN is NaN. Nothing here repairs that: who loads v has to.
        return cls(top, weights.sum(-1), weights @ v)

    def merge(self, other: Partial) -> Partial:
        """Both parts as one; the caller fixes the order of merges."""
        top = torch.maximum(self.top, other.top)
        mine, theirs = (self.top - _finite(top)).exp(), (other.top - _finite(top)).exp()
        out = self.out * mine.unsqueeze(-1) + other.out * theirs.unsqueeze(-1)
        return Partial(top, self.total * mine + other.total * theirs, out)

    def stored(self, dtype: torch.dtype) -> Partial:
        """The same after its output, divided by its sum, went through memory as `dtype`."""
        total = self.total.unsqueeze(-1)
        return Partial(self.top, self.total, (self.out / total.clamp_min(_TINY)).to(dtype).float() * total)

    def finish(self, v_scale: float) -> tuple[Tensor, Tensor]:
        """(out, log-sum-exp); zeros and -inf where nothing was attended to."""
        return self.out / self.total.clamp_min(_TINY).unsqueeze(-1) * v_scale, self.top + self.total.log()


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -math.inf, 0.0)


def attend_generic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    logit_scale: float,
    v_scale: float,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Route generic: each row's tokens in `splits` equal runs, the partial results merged from first to last.

    q: [R, H, D]; k, v: [P, S, J, D]; logit_scale: softmax scale times k_scale. Returns out [R, H, D] fp32, lse [R, H]
    fp32. Only attended tokens are read, so there is nothing to zero.
    """
    out, lse = _nothing(q)
    for row in range(q.shape[0]):
        token = torch.arange(int(plan.lengths[row]), device=q.device)
        blocks = plan.table[row, token // BLOCK]
        size = -(-token.numel() // splits)
        parts = []
        for begin in range(0, token.numel(), max(1, size)):
            run = slice(begin, begin + size)
            keys, values = (_load(cache, blocks[run], token[run] % BLOCK, plan.page_tokens) for cache in (k, v))
            attended = torch.ones(1, keys.shape[1], dtype=torch.bool, device=q.device)
            parts.append(Partial.of(_queries(q[row], k.shape[2], logit_scale), keys, values, attended))
        if parts:
            out[row], lse[row] = _of_row(parts, v_scale)
    return out, lse


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    logit_scale: float,
    v_scale: float,
    partition_blocks: int,
    partial_dtype: torch.dtype,
    zero_unattended: bool,
) -> tuple[Tensor, Tensor]:
    """Route xqa: each row's virtual table in partitions of whole blocks, partial outputs stored, then merged.

    Operands and results as `attend_generic`. A partition reads all its blocks, entries behind the row's last and tokens
    of the tail block that were never written included; `zero_unattended` zeroes their K and V before the products.
    """
    out, lse = _nothing(q)
    token = torch.arange(BLOCK, device=q.device)
    for row in range(q.shape[0]):
        parts = []
        for begin in range(0, -(-int(plan.lengths[row]) // BLOCK), partition_blocks):
            blocks = plan.table[row, begin : begin + partition_blocks]
            attended = BLOCK * begin + torch.arange(BLOCK * blocks.numel(), device=q.device) < plan.lengths[row]
            places = (blocks.repeat_interleave(BLOCK), token.repeat(blocks.numel()), plan.page_tokens)
            keys, values = _load(k, *places), _load(v, *places)
            if zero_unattended:
                keys[:, ~attended], values[:, ~attended] = 0.0, 0.0
            part = Partial.of(_queries(q[row], k.shape[2], logit_scale), keys, values, attended.unsqueeze(0))
            parts.append(part.stored(partial_dtype))
        if parts:
            out[row], lse[row] = _of_row(parts, v_scale)
    return out, lse


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan, logit_scale: float, v_scale: float, zero_unattended: bool
) -> tuple[Tensor, Tensor]:
    """Route grouped: every tile of 16 query rows over the entries of the tile sets that contain it, eight at a time.

    Operands and results as `attend_generic`. `zero_unattended` zeroes the K and V rows of a step that no query of the
    tile attends to; without it they take part as 0 * value, so that a NaN among them reaches every head.
    """
    out, lse = _nothing(q)
    starts, kv_heads, heads = plan.starts.tolist(), k.shape[2], plan.heads_per_kv
    for group, rows in enumerate(plan.rows):
        # A place without a row attends to nothing, whatever its query.
        queries = q[rows.clamp_min(0)].float() * logit_scale
        queries = queries.view(-1, kv_heads, heads, q.shape[2]).transpose(0, 1).flatten(1, 2)
        tiles = [
            _tile(queries, k, v, plan, tile, starts[group], starts[group + 1], zero_unattended).finish(v_scale)
            for tile in range(plan.num_tiles)
        ]
        there = rows >= 0
        tile_out, tile_lse = (torch.cat(parts, 1) for parts in zip(*tiles, strict=True))
        out[rows[there]] = tile_out.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)[there]
        lse[rows[there]] = tile_lse.unflatten(1, (-1, heads)).transpose(0, 1).flatten(1, 2)[there]
    return out, lse


def _tile(
    queries: Tensor, k: Tensor, v: Tensor, plan: GroupedPlan, tile: int, begin: int, end: int, zero_unattended: bool
) -> Partial:
    """Query rows 16 * tile .. + 15 of a group, queries [J, M * H / J, D], over the entries begin .. end - 1."""
    q = queries[:, TILE_ROWS * tile : TILE_ROWS * (tile + 1)]
    place = (TILE_ROWS * tile + torch.arange(q.shape[1], device=q.device)) // plan.heads_per_kv
    token = torch.arange(BLOCK, device=q.device)
    total = torch.zeros(q.shape[:2], device=q.device)
    running = Partial(torch.full_like(total, -math.inf), total, torch.zeros_like(q))
    for step in range(begin, end, CATEGORY_ENTRIES):
        if not int(plan.tile_sets[step // CATEGORY_ENTRIES]) >> tile & 1:
            continue
        entries = slice(step, step + CATEGORY_ENTRIES)
        bit = BLOCK * place.view(-1, 1, 1) + token
        attended = (plan.masks[entries].long().view(1, -1, 1) >> bit & 1).bool().flatten(1)
        places = (plan.blocks[entries].repeat_interleave(BLOCK), token.repeat(CATEGORY_ENTRIES), plan.page_tokens)
        keys, values = _load(k, *places), _load(v, *places)
        if zero_unattended:
            dead = ~attended.any(0)
            keys[:, dead], values[:, dead] = 0.0, 0.0
        running = running.merge(Partial.of(q, keys, values, attended))
    return running


def _load(cache: Tensor, blocks: Tensor, token: Tensor, page_tokens: int) -> Tensor:
    """cache: [P, S, J, D]; blocks: [W] physical, token: [W] in the block -> [J, W, D] fp32, without the scale."""
    per_page = page_tokens // BLOCK
    taken = cache[blocks // per_page, blocks % per_page * BLOCK + token]
    return (decode(taken) if taken.dtype == torch.uint8 else taken.float()).transpose(0, 1).contiguous()


def _queries(q: Tensor, kv_heads: int, logit_scale: float) -> Tensor:
    """[H, D] -> [J, H / J, D] fp32, scaled."""
    return (q.float() * logit_scale).unflatten(0, (kv_heads, -1))


def _of_row(parts: list[Partial], v_scale: float) -> tuple[Tensor, Tensor]:
    """Output [H, D] and lse [H] of a row from its parts, merged from first to last."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    out, lse = whole.finish(v_scale)
    return out.flatten(0, 1), lse.flatten()


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """What rows give that attend to nothing: zeros, and a log-sum-exp of -inf."""
    return torch.zeros_like(q, dtype=torch.float32), torch.full(q.shape[:2], -math.inf, device=q.device)
