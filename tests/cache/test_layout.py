"""Sizes and offsets by hand arithmetic, and no byte in two fields."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.cache.helpers import geometry, production

from page4.cache.layout import CacheLayout, Field
from page4.errors import CacheError

FP32, FP16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
SIZES = {FP32: 4, FP16: 2, BF16: 2, E4M3: 1}


def check_disjoint(fields: list[Field], end: int) -> None:
    """Fields in any order: aligned, inside [0, end), without an overlap."""
    for field in fields:
        assert field.offset % 64 == 0 and field.offset % SIZES[field.dtype] == 0
        assert field.num_bytes == math.prod(field.shape) * SIZES[field.dtype]
    spans = sorted((field.offset, field.offset + field.num_bytes) for field in fields)
    assert spans[0][0] == 0 and spans[-1][1] <= end
    for (_, stop), (start, _) in itertools.pairwise(spans):
        assert stop <= start < stop + 64, "an overlap, or a hole larger than the alignment needs"


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("page_tokens", [4, 16, 20, 64])
@pytest.mark.parametrize(
    ("dtype", "kv", "draft"),
    [(FP32, FP32, None), (FP32, E4M3, None), (BF16, BF16, E4M3), (FP16, E4M3, FP16), (BF16, E4M3, E4M3)],
)
def test_no_two_fields_share_a_byte(
    dtype: torch.dtype, kv: torch.dtype, draft: torch.dtype | None, page_tokens: int, with_draft: bool
) -> None:
    made = CacheLayout.of(
        geometry(), dtype=dtype, kv_dtype=kv, draft_kv_dtype=draft, page_tokens=page_tokens, with_draft=with_draft
    )
    layers = [1, 3, 4] if with_draft else [1, 3]
    assert list(made.kv) == list(made.pooled) == list(made.ring) == layers
    assert list(made.recurrent) == list(made.conv) == [0, 2] and list(made.ple) == [2]
    check_disjoint([*made.kv.values(), *made.pooled.values()], made.page_bytes)
    states = [*made.recurrent.values(), *made.conv.values(), *made.ple.values(), *made.ring.values()]
    check_disjoint(states, made.state_bytes)
    assert made.page_bytes % 256 == 0
    assert (made.pages_per_state - 1) * made.page_bytes < made.state_bytes <= made.pages_per_state * made.page_bytes
    assert made.slot_bytes == made.pages_per_state * made.page_bytes
    for layer in layers:
        assert made.kv[layer].shape == (2, page_tokens, 64)
        assert made.kv[layer].dtype == (draft or kv if layer == 4 else kv)
        assert (made.pooled[layer].shape, made.pooled[layer].dtype) == ((page_tokens // 4, 24), dtype)
        assert (made.ring[layer].shape, made.ring[layer].dtype) == ((16, 24), dtype)
    for layer in (0, 2):
        assert (made.recurrent[layer].shape, made.recurrent[layer].dtype) == ((8, 32, 32), FP32)
        assert (made.conv[layer].shape, made.conv[layer].dtype) == ((2 * 2 * 32 + 8 * 32, 3), dtype)
    assert (made.ple[2].shape, made.ple[2].dtype) == ((9, 128), dtype)


@pytest.mark.parametrize(
    ("dtype", "kv", "draft", "page_bytes"),
    [
        # 13 layers of K/V 2 x 16 x 512 = 16,384 elements and of 4 x 128 pooled elements.
        (BF16, BF16, None, 13 * (16_384 * 2 + 512 * 2)),
        (BF16, E4M3, None, 13 * (16_384 + 512 * 2)),
        (FP32, FP32, None, 13 * (16_384 * 4 + 512 * 4)),
        (BF16, E4M3, BF16, 12 * 16_384 + 32_768 + 13 * 1024),
    ],
)
def test_a_page_of_the_production_model(
    dtype: torch.dtype, kv: torch.dtype, draft: torch.dtype | None, page_bytes: int
) -> None:
    made = CacheLayout.of(production(), dtype=dtype, kv_dtype=kv, draft_kv_dtype=draft, with_draft=True)
    assert made.page_bytes == page_bytes
    assert made.token_bytes == page_bytes / 16


def test_a_state_of_the_production_model() -> None:
    made = CacheLayout.of(production(), dtype=BF16, kv_dtype=E4M3, with_draft=True)
    recurrent = 48 * 128 * 128 * 4  # 3,145,728 bytes a GDN layer
    conv = (2 * 16 * 128 + 48 * 128) * 3 * 2  # 61,440
    ple = 3 * 3 * 4 * 2560 * 2  # 184,320
    ring = 16 * 128 * 2  # 4,096
    assert made.state_bytes == 36 * (recurrent + conv) + ple + 13 * ring == 115_695_616
    assert (made.page_bytes, made.pages_per_state) == (226_304, 512)
    bf16 = CacheLayout.of(production(), dtype=BF16, kv_dtype=BF16, with_draft=True)
    assert (bf16.page_bytes, bf16.state_bytes, bf16.pages_per_state) == (439_296, 115_695_616, 264)
    fp32 = CacheLayout.of(production(), dtype=FP32, kv_dtype=FP32, with_draft=True)
    assert fp32.state_bytes == 36 * (recurrent + 2 * conv) + 2 * ple + 13 * 2 * ring


def test_no_draft_means_no_draft_bytes() -> None:
    made = CacheLayout.of(production(), dtype=BF16, kv_dtype=E4M3, with_draft=False)
    assert made.page_bytes == 12 * (16_384 + 1024) and 48 not in made.kv
    assert made.draft_kv_dtype is None


def test_a_model_without_ple_keeps_no_ple_state() -> None:
    made = CacheLayout.of(geometry(ple_layer_ids=[]), dtype=FP32, kv_dtype=FP32, with_draft=True)
    assert made.ple == {}


@pytest.mark.parametrize("page_tokens", [0, 2, 6, 18])
def test_a_page_that_is_not_whole_blocks_is_refused(page_tokens: int) -> None:
    with pytest.raises(CacheError, match="page"):
        CacheLayout.of(geometry(), dtype=FP32, kv_dtype=FP32, page_tokens=page_tokens, with_draft=True)


def test_a_dtype_that_holds_no_kv_is_refused() -> None:
    with pytest.raises(CacheError, match="kv_dtype: expected float32, float16, bfloat16 or uint8"):
        CacheLayout.of(geometry(), dtype=FP32, kv_dtype=torch.int8, with_draft=True)
    with pytest.raises(CacheError, match="draft_kv_dtype: "):
        CacheLayout.of(geometry(), dtype=FP32, kv_dtype=FP32, draft_kv_dtype=torch.float64, with_draft=True)
