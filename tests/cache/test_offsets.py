"""Pools beyond 2**31 bytes: what is written for a page lies at page * stride, worked out in Python's integers (B48).

The pool is memory that nobody touches but for the pages in use, so it costs next to nothing.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.cache.helpers import exact_byte, make_rows
from torch import Tensor

from page4.cache.append import append_index, append_kv
from page4.cache.storage import LayerKV
from page4.codec import Scale, decode

END = (1 << 31) + (64 << 10)


def make_pool(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def views(pool: Tensor, stride: int, kv_heads: int, page_tokens: int, head_dim: int) -> LayerKV:
    """E4M3 pages that start every `stride` bytes, K and V of a token side by side."""
    shape = (pool.numel() // stride, page_tokens, kv_heads, 2 * head_dim)
    both = pool.as_strided(shape, (stride, 2 * head_dim, page_tokens * 2 * head_dim, 1))
    return LayerKV(both[..., :head_dim], both[..., head_dim:], Scale(0.5), Scale(0.25))


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    ("page", "stride", "offset", "kv_heads", "page_tokens"),
    [
        (2066, 1_039_680, 2_147_978_880, 2, 16),
        (1_048_577, 2048, 2_147_485_696, 1, 4),
        (131_072, 16_384, 2_147_483_648, 2, 16),
    ],
)
def test_a_page_beyond_2_to_the_31(
    page: int, stride: int, offset: int, kv_heads: int, page_tokens: int, host: bool, rng: random.Random
) -> None:
    pool = make_pool(max(END, offset + stride))
    kv = views(pool, stride, kv_heads, page_tokens, 256)
    x = torch.tensor([rng.uniform(-300, 300) for _ in range(2 * kv_heads * 256)]).view(2, kv_heads, 256)
    pool[offset : offset + min(stride, 16_384)] = 0x7F
    append_kv(kv, x, -x, make_rows([(page_tokens + 1, 2)], [[3, page]], host=host))
    for row, token in enumerate((1, 2)):
        for head in range(kv_heads):
            at = offset + (head * page_tokens + token) * 512
            k = [exact_byte(value, 0.5) for value in x[row, head].tolist()]
            v = [exact_byte(-value, 0.25) for value in x[row, head].tolist()]
            assert pool[at : at + 512].tolist() == k + v
            assert decode(kv.k[page, token, head]).tolist() == decode(pool[at : at + 256]).tolist()
    written = (pool[offset : offset + kv_heads * page_tokens * 512] != 0x7F).sum()
    assert written <= 2 * kv_heads * 512, "a token beside the two was written"


def test_the_last_page_of_a_pool_of_2_gib_and_64_kib(rng: random.Random) -> None:
    pool = make_pool(END)
    kv = views(pool, 2048, 1, 4, 256)
    last = kv.k.shape[0] - 1
    assert last == 1_048_607
    pool[-2048:] = 0x7F
    x = torch.tensor([rng.uniform(-300, 300) for _ in range(4 * 256)]).view(4, 1, 256)
    append_kv(kv, x, x / 2, make_rows([(4, 4)], [[1, last]]))
    want = [exact_byte(value, 0.5) for value in x.flatten().tolist()]
    assert pool[-2048:].view(4, 2, 256)[:, 0].flatten().tolist() == want
    assert pool[-2048:].view(4, 2, 256)[:, 1].flatten().tolist() == want, "x / 2 in half the scale"


@pytest.mark.parametrize("host", [True, False])
def test_pooled_keys_and_the_ring_beyond_2_to_the_31(host: bool, generator: torch.Generator) -> None:
    pool = make_pool(END).view(torch.float32)
    width, stride = 32, 4096  # elements of a key, elements from page to page
    pages = pool.numel() // stride
    pooled = pool.as_strided((pages, 4, width), (stride, width, 1))
    ring = pool.as_strided((pages, 16, width), (stride, width, 1), 1024)
    page, slot = pages - 1, pages - 2
    raw = torch.randint(-99, 99, (5, width), generator=generator).float()
    rows = make_rows([(8, 5)], [[page]], host=host)
    append_index(pooled, ring, raw, rows, torch.tensor([slot]), lambda mean, first: mean + first.unsqueeze(1))
    at = page * stride + 2 * width
    assert at * 4 > 1 << 31
    assert torch.equal(pool[at : at + width], raw[:4].sum(0) / 4 + 8)
    at = slot * stride + 1024 + 8 * width
    assert torch.equal(pool[at : at + 5 * width], raw.flatten())
