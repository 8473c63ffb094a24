"""Gathers by long rows against plain indexing, on every layout."""

from __future__ import annotations

import pytest
import torch
from tests.attention_cases import E4M3_TABLE, LAYOUTS, empty_cache

from page4.kernels.torch_gather import gather_blocks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(16, 1, 64), (4, 2, 8), (804, 3, 5), (8, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_is_indexing(
    generator: torch.Generator, layout: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    page_tokens, kv_heads, dim = shape
    k, v = empty_cache(layout, 5, page_tokens, kv_heads, dim, dtype, 0x7F)
    for cache in (k, v):
        if dtype == torch.uint8:
            cache.copy_(torch.randint(0, 256, cache.shape, generator=generator))
        else:
            cache.copy_(torch.randn(cache.shape, generator=generator))
    per_page = page_tokens // 4
    blocks = torch.randint(0, 5 * per_page, (3, 7), generator=generator)
    dead = torch.rand(3, 28, generator=generator) < 0.3
    tokens = (blocks.unsqueeze(-1) * 4 + torch.arange(4)).flatten(1)
    for unattended in (dead, None):
        found = gather_blocks(k, v, blocks, page_tokens, unattended)
        for got, cache in zip(found, (k, v), strict=True):
            want = cache[tokens // page_tokens, tokens % page_tokens]
            want = E4M3_TABLE[want.long()].float() if dtype == torch.uint8 else want.float()
            if unattended is not None:
                want[unattended] = 0.0
            want = want.transpose(1, 2).reshape(3 * kv_heads, 28, dim)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
