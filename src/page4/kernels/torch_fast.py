"""Vectorised torch versions of the operations: what a CPU runs unless PAGE4_KERNELS=reference.

Kernels know tensors only: no rows, no layouts, no choices. The operations (select, plan, attend) own those.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from page4.codec import decode


def top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best min(top_k, visible) columns of each row: score descending, then column ascending.

    scores: [R, B] fp32 without NaN in visible columns; visible: [R] int64, columns at and after it do not count.
    Returns ids [R, min(top_k, B)] int32 ascending with -1 after the last, and counts [R] int32.

    The k-th best value splits a row into columns above it, all taken, and columns equal to it, of which the lowest ids
    fill what is left: exact for any ties, and -0.0 equals +0.0 because comparisons say so.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    chosen = columns < visible.unsqueeze(1)
    width = min(top_k, scores.shape[1])
    counts = visible.clamp(max=width)
    if scores.shape[1] > top_k:
        masked = scores.masked_fill(~chosen, -math.inf)
        kth = masked.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
        chosen.logical_and_(masked >= kth)
        tied = (chosen.sum(1) > counts).nonzero().squeeze(1)
        if tied.numel():
            chosen[tied] = _break_ties(masked[tied], chosen[tied], kth[tied], top_k)
    return ids_of_mask(chosen, counts, width), counts.int()


def _break_ties(masked: Tensor, chosen: Tensor, kth: Tensor, top_k: int) -> Tensor:
    """Of the columns at or above the k-th value, all above it and the lowest ids equal to it, top_k in all."""
    above = masked > kth
    equal = chosen & ~above
    left = top_k - above.sum(1, keepdim=True)
    return above.logical_or_(equal.logical_and_(equal.cumsum(1, dtype=torch.int32) <= left))


def ids_of_mask(chosen: Tensor, counts: Tensor, width: int) -> Tensor:
    """Ascending ids of set columns: chosen [R, B] bool with counts [R] of them set -> [R, width] int32, -1 padded."""
    ids = torch.full((chosen.shape[0], width), -1, dtype=torch.int32, device=chosen.device)
    places = torch.arange(width, device=chosen.device) < counts.unsqueeze(1)
    ids[places] = chosen.nonzero()[:, 1].int()
    return ids


def index_scores(index_q: Tensor, keys: Tensor) -> Tensor:
    """Sum over heads of relu(q . key) / sqrt(E): index_q [n, T, I, E], keys [n, B, E] -> [n, T, B] fp32."""
    n, rows, heads, dim = index_q.shape
    dots = torch.bmm(index_q.float().view(n, rows * heads, dim), keys.float().transpose(1, 2))
    return dots.relu_().view(n, rows, heads, -1).sum(2).div_(math.sqrt(dim))


def gather_tokens(k: Tensor, v: Tensor, page: Tensor, offset: Tensor, unattended: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of some tokens for every KV head, those that nobody attends to zeroed.

    k, v: [P, S, J, D] strided with unit stride in D; page, offset: [T, W] int64; unattended: [T, W] bool.
    Returns two [T * J, W, D] fp32 (views of one tensor when K and V of a token lie side by side).

    index_select of long rows copies at memory speed, indexing by two tensors does not (10 times slower here). So the
    cache is seen as overlapping rows that begin at every multiple of the strides' greatest common divisor.
    """
    tiles, width = page.shape
    kv_heads, dim = k.shape[2:]
    side_by_side = (
        k.stride() == v.stride()
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and v.storage_offset() - k.storage_offset() == dim
    )
    sources = ((k, 2 * dim),) if side_by_side else ((k, dim), (v, dim))
    dead = unattended.unsqueeze(1).expand(-1, kv_heads, -1).reshape(-1).nonzero().squeeze(1)
    parts = []
    for view, length in sources:
        strides = [view.stride(axis) for axis in range(3)]
        unit = math.gcd(*strides)
        reach = sum((size - 1) * stride for size, stride in zip(view.shape[:3], strides, strict=True))
        flat = view.as_strided((reach // unit + 1, length), (unit, 1), view.storage_offset())
        place = page * (strides[0] // unit) + offset * (strides[1] // unit)
        heads = torch.arange(kv_heads, device=view.device) * (strides[2] // unit)
        taken = flat.index_select(0, (place.unsqueeze(1) + heads.view(1, -1, 1)).view(-1))
        values = decode(taken) if taken.dtype == torch.uint8 else taken.float()
        parts.append(values.index_fill_(0, dead, 0.0).view(tiles * kv_heads, width, length))
    if side_by_side:
        return parts[0][..., :dim], parts[0][..., dim:]
    return parts[0], parts[1]


def gather_blocks(k: Tensor, v: Tensor, page: Tensor, block: Tensor, unattended: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of whole blocks for every KV head, tokens that nobody attends to zeroed.

    k, v: [P, S, J, D] strided with unit stride in D; page, block: [T, B] int64 (block: in its page, 0 .. S/4 - 1);
    unattended: [T, 4 * B] bool. Returns two [T * J, 4 * B, D] fp32. In our own arena the four tokens of a block are one
    contiguous run for each KV head, and so one row to copy; any other layout goes token by token.
    """
    tiles, count = page.shape
    kv_heads, dim = k.shape[2:]
    page_stride, token_stride, head_stride = k.stride()[:3]
    side_by_side = (
        token_stride == 2 * dim
        and v.stride() == k.stride()
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and v.storage_offset() - k.storage_offset() == dim
    )
    if not side_by_side:
        offset = (block.unsqueeze(-1) * 4 + torch.arange(4, device=page.device)).flatten(1)
        return gather_tokens(k, v, page.repeat_interleave(4, 1), offset, unattended)
    length = 8 * dim
    unit = math.gcd(page_stride, head_stride, length)
    last = (k.shape[0] - 1) * page_stride + (kv_heads - 1) * head_stride + (k.shape[1] - 4) * token_stride
    flat = k.as_strided((last // unit + 1, length), (unit, 1), k.storage_offset())
    place = page * (page_stride // unit) + block * (length // unit)
    if kv_heads > 1:
        heads = torch.arange(kv_heads, device=page.device) * (head_stride // unit)
        place = place.unsqueeze(1) + heads.view(1, -1, 1)
    taken = flat.index_select(0, place.view(-1))
    values = (decode(taken) if taken.dtype == torch.uint8 else taken.float()).view(-1, 2 * dim)
    dead = unattended.unsqueeze(1).expand(-1, kv_heads, -1).reshape(-1).nonzero().squeeze(1)
    values = values.index_fill_(0, dead, 0.0).view(tiles * kv_heads, 4 * count, 2 * dim)
    return values[..., :dim], values[..., dim:]


def row_attention(
    q: Tensor, k: Tensor, v: Tensor, attended: Tensor, softmax_scale: float, v_scale: float = 1.0
) -> Tensor:
    """Softmax attention of single rows: q [R, H, D] fp32, k, v [R * J, W, D] fp32, attended [R, W] bool -> [R, H, D].

    Every row attends to at least one token.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[0] // rows
    queries = (q * softmax_scale).view(rows * kv_heads, heads // kv_heads, dim)
    logits = torch.bmm(queries, k.transpose(1, 2)).view(rows, heads, -1)
    weights = logits.masked_fill_(~attended.unsqueeze(1), -math.inf).softmax(-1)
    out = torch.bmm(weights.view(rows * kv_heads, heads // kv_heads, -1), v).view(rows, heads, dim)
    return out if v_scale == 1.0 else out.mul_(v_scale)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, attended: Tensor, softmax_scale: float, v_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention of tiles of rows over gathered tokens, with every row's own mask.

    q: [T, M, H, D] fp32; k, v: [T * J, W, D] fp32 whose unattended tokens are zero; attended: [T, M, W] bool.
    Returns out [T, M, H, D] fp32 (0 for a row that attends to nothing) and the log-sum-exp [T, M, H] fp32 (-inf there).
    """
    tiles, m, heads, dim = q.shape
    kv_heads = k.shape[0] // tiles
    group = heads // kv_heads
    queries = (q * softmax_scale).view(tiles, m, kv_heads, group, dim).transpose(1, 2)
    queries = queries.reshape(tiles * kv_heads, m * group, dim)
    logits = torch.bmm(queries, k.transpose(1, 2)).view(tiles, kv_heads, m, group, -1)
    logits.masked_fill_(~attended.view(tiles, 1, m, 1, -1), -math.inf)
    top = logits.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.view(tiles * kv_heads, m * group, -1), v).view(tiles, kv_heads, m, group, dim)
    out.mul_(v_scale / total.clamp_min(torch.finfo(torch.float32).tiny))
    lse = (top + total.log()).squeeze(-1)
    return out.transpose(1, 2).reshape(tiles, m, heads, dim), lse.transpose(1, 2).reshape(tiles, m, heads)
