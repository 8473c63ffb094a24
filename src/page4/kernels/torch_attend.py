"""Vectorised attention over plans: what a CPU runs unless PAGE4_KERNELS=reference.

Bound by the copy of the gathered K and V in decode, by the two products in prefill. Workspace is bounded: rows and
groups go in chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from page4.kernels.plans import GroupedPlan, RowPlan
from page4.kernels.torch_gather import BLOCK, gather_blocks

# K, V and logits of one chunk: small enough to stay in a CPU's cache, and in memory that the allocator hands out again
# without page faults (48 MB chunks take twice as long in prefill).
WORKSPACE_BYTES = 6 << 20
_TINY = torch.finfo(torch.float32).tiny


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
    want_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See `reference.attend_rows`; the lse is left out unless it is wanted."""
    rows, heads, dim = q.shape
    columns = plan.table.shape[1]
    step = max(1, WORKSPACE_BYTES // (4 * BLOCK * columns * (2 * k.shape[2] * dim + 2 * heads)))
    token = torch.arange(BLOCK * columns, device=q.device)
    outs, lses = [], []
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        lengths = plan.lengths[part]
        attended = token < lengths.unsqueeze(1)
        dead = ~attended
        keys, values = gather_blocks(k, v, plan.table[part], plan.page_tokens, dead if zero_unattended else None)
        queries = _by_kv_head(q[part].float() * logit_scale, k.shape[2])
        logits = torch.bmm(queries, keys.transpose(1, 2)).view(-1, heads, token.numel())
        logits.masked_fill_(dead.unsqueeze(1), -math.inf)
        if columns <= partition_blocks:
            out, lse = _whole(logits, values, want_lse)
        else:
            out, lse = _partitioned(logits, values, partition_blocks * BLOCK, partial_dtype)
        out = out.view(-1, heads, dim)
        # A row without tokens: its softmax is 0 / 0.
        outs.append(out.masked_fill_((lengths == 0).view(-1, 1, 1), 0.0))
        lses.append(lse)
    out = outs[0] if len(outs) == 1 else torch.cat(outs) if outs else torch.zeros(q.shape, device=q.device)
    if v_scale != 1.0:
        out.mul_(v_scale)
    if not want_lse:
        return out, None
    return out, torch.cat([lse for lse in lses if lse is not None]) if lses else out.new_zeros(rows, heads)


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """[R, H, D] -> [R * J, H / J, D]."""
    return q.view(q.shape[0] * kv_heads, -1, q.shape[2])


def _whole(logits: Tensor, values: Tensor, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Logits [R, H, W], values [R * J, W, D] -> out [R * J, H / J, D], lse [R, H]."""
    lse = logits.logsumexp(-1) if want_lse else None
    weights = logits.softmax(-1).view(values.shape[0], -1, values.shape[1])
    return torch.bmm(weights, values), lse


def _partitioned(logits: Tensor, values: Tensor, width: int, partial_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `_whole`, in partitions of `width` tokens whose outputs are stored as `partial_dtype` and merged in order."""
    rows, heads, tokens = logits.shape
    count = -(-tokens // width)
    logits = torch.nn.functional.pad(logits, (0, count * width - tokens), value=-math.inf)
    logits = logits.view(rows, heads, count, width)
    top = logits.amax(-1)
    shift = top.masked_fill(top == -math.inf, 0.0)
    weights = (logits - shift.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    best = shift.amax(-1) if count == 1 else top.amax(-1)
    best = best.masked_fill(best == -math.inf, 0.0)
    weights = weights.view(values.shape[0], -1, count, width)
    out, sums = None, torch.zeros_like(best)
    for index in range(count):
        end = min(tokens, (index + 1) * width)
        stored = torch.bmm(weights[:, :, index, : end - index * width], values[:, index * width : end])
        part_sum = total[..., index]
        stored = stored / part_sum.clamp_min(_TINY).view(*stored.shape[:2], 1)
        factor = (top[..., index] - best).exp() * part_sum
        sums = sums + factor
        stored = stored.to(partial_dtype).float() * factor.view(*stored.shape[:2], 1)
        out = stored if out is None else out + stored
    assert out is not None, "a plan has at least one column"
    return out / sums.clamp_min(_TINY).view(*out.shape[:2], 1), best + sums.log()


def attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: GroupedPlan,
    logit_scale: float,
    v_scale: float,
    zero_unattended: bool,
    want_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """See `reference.attend_grouped`: here the tile is a whole group, 8 * H / J query rows for each KV head."""
    rows, heads, dim = q.shape
    places, kv_heads = plan.group_rows, k.shape[2]
    q = q.float() * logit_scale
    out = torch.zeros(rows, heads, dim, device=q.device)
    lse = torch.full((rows, heads), -math.inf, device=q.device) if want_lse else None
    entry_bytes = 4 * BLOCK * (2 * kv_heads * dim + 2 * places * heads)
    for begin, end, width in _chunks(plan.starts.tolist(), entry_bytes):
        groups = end - begin
        masks, blocks = _entries(plan, begin, end, width)
        keys, values = gather_blocks(k, v, blocks, plan.page_tokens, _dead(masks) if zero_unattended else None)
        attended = _bits(masks, places)
        index, there = _rows_of(plan, begin, end, attended)
        queries = q[index].view(groups, places, kv_heads, -1, dim).transpose(1, 2)
        logits = torch.bmm(queries.reshape(keys.shape[0], -1, dim), keys.transpose(1, 2))
        shaped = logits.view(groups, kv_heads, places, -1, keys.shape[1])
        if zero_unattended:
            # Sooner than masked_fill_, and as good where every logit is a number.
            off = torch.zeros(attended.shape, device=q.device).masked_fill_(~attended, -math.inf)
            shaped.add_(off.view(groups, 1, places, 1, -1))
        else:
            shaped.masked_fill_(~attended.view(groups, 1, places, 1, -1), -math.inf)
        part_lse = logits.logsumexp(-1) if want_lse else None
        part = torch.bmm(logits.softmax(-1), values).view(groups, kv_heads, places, -1, dim)
        part = part.transpose(1, 2).reshape(-1, heads, dim)
        if part_lse is not None:
            part_lse = part_lse.view(groups, kv_heads, places, -1).transpose(1, 2).reshape(-1, heads)
        if there is not None:
            index, part = index[there], part[there]
            part_lse = None if part_lse is None else part_lse[there]
        out[index] = part
        if lse is not None:
            lse[index] = part_lse
    return out.mul_(v_scale) if v_scale != 1.0 else out, lse


def _rows_of(plan: GroupedPlan, begin: int, end: int, attended: Tensor) -> tuple[slice | Tensor, Tensor | None]:
    """Rows of some groups, and which of them get a result (None: all); a slice where that is all there is to it.

    No result: a place without a row, and a row without tokens, whose softmax is 0 / 0.
    """
    index = plan.rows[begin:end].reshape(-1)
    there = (index >= 0) & attended.any(-1).view(-1)
    if bool(there.all()):
        first, last = int(index[0]), int(index[-1])
        # Rows of a plan ascend, so as many rows as places from first to last are all of them.
        return (slice(first, last + 1), None) if last - first + 1 == index.numel() else (index, None)
    return index.clamp_min(0), there


def _chunks(starts: list[int], entry_bytes: int) -> list[tuple[int, int, int]]:
    """Runs of groups (begin, end, entries of the largest) whose rectangle fits the workspace; at least one group."""
    chunks: list[tuple[int, int, int]] = []
    begin, width = 0, 0
    for group in range(len(starts) - 1):
        size = starts[group + 1] - starts[group]
        wider = max(width, size)
        if group > begin and (group + 1 - begin) * wider * entry_bytes > WORKSPACE_BYTES:
            chunks.append((begin, group, width))
            begin, wider = group, size
        width = wider
    if begin < len(starts) - 1:
        chunks.append((begin, len(starts) - 1, width))
    return [chunk for chunk in chunks if chunk[2]]


def _entries(plan: GroupedPlan, begin: int, end: int, width: int) -> tuple[Tensor, Tensor]:
    """Masks and blocks of some groups as rectangles [G, width]: a shorter group repeats its last entry, masked off."""
    last = plan.starts[begin + 1 : end + 1].unsqueeze(1)
    place = plan.starts[begin:end].unsqueeze(1) + torch.arange(width, device=plan.starts.device)
    real = place < last
    place = torch.minimum(place, last - 1).clamp_min_(0)
    return plan.masks[place].masked_fill_(~real, 0), plan.blocks[place]


def _dead(masks: Tensor) -> Tensor:
    """Masks [G, U] int32 -> [G, 4 * U] bool: does no place attend to token t of the entry."""
    tokens = masks | masks >> 16
    tokens = tokens | tokens >> 8
    tokens = tokens | tokens >> 4
    shifts = torch.arange(BLOCK, dtype=torch.int32, device=masks.device)
    return ((tokens.unsqueeze(-1) >> shifts) & 1).eq_(0).bool().flatten(1)


def _bits(masks: Tensor, places: int) -> Tensor:
    """Masks [G, U] int32 -> [G, M, 4 * U] bool: does place r attend to token t of the entry."""
    shifts = torch.arange(places * BLOCK, dtype=torch.int32, device=masks.device).view(places, 1, BLOCK)
    return ((masks.view(masks.shape[0], 1, -1, 1) >> shifts) & 1).bool().flatten(2)
