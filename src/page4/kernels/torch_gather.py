"""Gathers of K and V from strided pages: a block is 4 tokens, and rows that nobody attends to come back as zeros.

Bound by memory traffic. index_select of long rows copies at memory speed, indexing by two tensors does not (10 times
slower on a CPU). So a cache is seen as overlapping rows that begin at every multiple of the greatest common divisor of
its strides, and a gather is one index_select. In a layout that keeps K and V of a token side by side, the 4 tokens of a
block are one row for each KV head; any other layout goes token by token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from page4.codec import decode

BLOCK = 4


def gather_blocks(
    k: Tensor, v: Tensor, blocks: Tensor, page_tokens: int, unattended: Tensor | None
) -> tuple[Tensor, Tensor]:
    """K and V of whole blocks for every KV head.

    k, v: [P, S, J, D] strided with unit stride in D; blocks: [T, B] int64 physical; unattended: [T, 4 * B] bool, tokens
    to zero, None to keep whatever the bytes say. Returns two [T * J, 4 * B, D] fp32.
    """
    tiles, count = blocks.shape
    kv_heads, dim = k.shape[2:]
    per_page = page_tokens // BLOCK
    dead = None
    if unattended is not None:
        flat_dead = unattended if kv_heads == 1 else unattended.unsqueeze(1).expand(-1, kv_heads, -1)
        dead = flat_dead.reshape(-1).nonzero().squeeze(1)
    page, block = blocks // per_page, blocks % per_page
    side_by_side = _side_by_side(k, v)
    sources = ((k, 2 * dim),) if side_by_side else ((k, dim), (v, dim))
    parts = []
    for view, length in sources:
        taken = _take(view, page, block, length, whole=side_by_side and view.stride(1) == length)
        values = (decode(taken) if taken.dtype == torch.uint8 else taken.float()).view(-1, length)
        if dead is not None:
            values.index_fill_(0, dead, 0.0)
        parts.append(values.view(tiles * kv_heads, BLOCK * count, length))
    if side_by_side:
        return parts[0][..., :dim], parts[0][..., dim:]
    return parts[0], parts[1]


def _side_by_side(k: Tensor, v: Tensor) -> bool:
    """Whether the V row of a token begins where its K row ends."""
    return (
        k.stride() == v.stride()
        and v.storage_offset() - k.storage_offset() == k.shape[3]
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    )


def _take(view: Tensor, page: Tensor, block: Tensor, length: int, *, whole: bool) -> Tensor:
    """Rows of `length` elements, one for each tile, KV head, block and token; always a copy.

    whole: the 4 tokens of a block are contiguous and can be copied as one row.
    """
    page_stride, token_stride, head_stride = view.stride()[:3]
    run = BLOCK * length if whole else length
    block_stride = BLOCK * token_stride
    unit = math.gcd(page_stride, head_stride, block_stride if whole else token_stride)
    pages, slots, kv_heads = view.shape[:3]
    reach = (pages - 1) * page_stride + (kv_heads - 1) * head_stride + (slots - BLOCK) * token_stride
    if not whole:
        reach += (BLOCK - 1) * token_stride
    flat = view.as_strided((reach // unit + 1, run), (unit, 1), view.storage_offset())
    place = page * (page_stride // unit) + block * (block_stride // unit)
    if not whole:
        token = torch.arange(BLOCK, device=view.device) * (token_stride // unit)
        place = (place.unsqueeze(2) + token).flatten(1)
    if kv_heads > 1:
        head = torch.arange(kv_heads, device=view.device) * (head_stride // unit)
        place = place.unsqueeze(1) + head.view(1, -1, 1)
    return flat.index_select(0, place.view(-1))
