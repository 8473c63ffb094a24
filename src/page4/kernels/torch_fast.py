"""Vectorised torch versions of the operations: what a CPU runs unless PAGE4_KERNELS=reference.

Kernels know tensors only: no rows, no layouts, no choices. The operations (select, plan, attend) own those.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_blocks(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The best min(top_k, visible) columns of each row: score descending, then column ascending.

    scores: [R, B] fp32 without NaN in visible columns; visible: [R] int64, columns at and after it do not count.
    Returns ids [R, min(top_k, B)] int32 ascending with -1 after the last, and counts [R] int32.

    The k-th best value splits a row into columns above it, all taken, and columns equal to it, of which the lowest ids
    fill what is left: exact for any ties, and -0.0 equals +0.0 because comparisons say so.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    seen = columns < visible.unsqueeze(1)
    width = min(top_k, scores.shape[1])
    chosen = seen
    if scores.shape[1] > top_k:
        masked = scores.masked_fill(~seen, -math.inf)
        kth = masked.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
        above = masked > kth
        equal = (masked == kth).logical_and_(seen)
        left = top_k - above.sum(1, keepdim=True)
        chosen = above.logical_or_(equal.logical_and_(equal.cumsum(1, dtype=torch.int32) <= left))
    counts = visible.clamp(max=width)
    return ids_of_mask(chosen, counts, width), counts.int()


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


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, attended: Tensor, softmax_scale: float, v_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention of tiles of rows over gathered tokens, with every row's own mask.

    q: [T, M, H, D] fp32, k, v: [T, W, J, D] fp32 whose unattended tokens are zero, attended: [T, M, W] bool.
    Returns out [T, M, H, D] fp32 (0 for a row that attends to nothing) and the log-sum-exp [T, M, H] fp32 (-inf there).
    """
    tiles, m, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    queries = q.view(tiles, m, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(tiles * kv_heads, m * group, dim)
    keys = k.permute(0, 2, 3, 1).reshape(tiles * kv_heads, dim, -1)
    values = v.permute(0, 2, 1, 3).reshape(tiles * kv_heads, -1, dim)
    logits = torch.bmm(queries, keys).view(tiles, kv_heads, m, group, -1).mul_(softmax_scale)
    logits.masked_fill_(~attended.view(tiles, 1, m, 1, -1), -math.inf)
    top = logits.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights.view(tiles * kv_heads, m * group, -1), values).view(tiles, kv_heads, m, group, dim)
    out.mul_(v_scale / total.clamp_min(torch.finfo(torch.float32).tiny))
    lse = (top + total.log()).squeeze(-1)
    return (
        out.permute(0, 2, 1, 3, 4).reshape(tiles, m, heads, dim),
        lse.permute(0, 2, 1, 3).reshape(tiles, m, heads),
    )
