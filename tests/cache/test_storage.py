"""The views of the arena against its bytes, read one by one."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import torch
from tests.cache.helpers import geometry
from torch import Tensor

from page4.cache.layout import CacheLayout, Field
from page4.cache.pages import PageAllocator
from page4.cache.storage import Arena, LayerKV
from page4.codec import Scale
from page4.errors import CacheError

FP32, FP16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
UNIT = {layer: (Scale(0.5), Scale(2.0)) for layer in (1, 3, 4)}
KINDS = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, E4M3), (BF16, E4M3)]


def make_arena(
    dtype: torch.dtype = FP32, kv: torch.dtype = FP32, *, states: int = 3, poison: int | None = None
) -> Arena:
    layout = CacheLayout.of(geometry(), dtype=dtype, kv_dtype=kv, with_draft=True)
    pages = states * layout.pages_per_state + 2
    return Arena(layout, pages, "cpu", poison, scales=UNIT if kv == E4M3 else None)


def read(arena: Arena, at: int, dtype: torch.dtype) -> float:
    """The element at a byte offset of the arena, without torch's views."""
    raw = bytes(arena.bytes[at : at + dtype.itemsize].tolist())
    if dtype == BF16:
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    return float(struct.unpack({FP32: "<f", FP16: "<e", E4M3: "B"}[dtype], raw)[0])


def fields_of(arena: Arena) -> list[tuple[Field, Tensor, int]]:
    """Every field with its view in the layout's own axes and the distance between its copies."""
    layout = arena.layout
    found: list[tuple[Field, Tensor, int]] = []
    for layer, field in layout.kv.items():
        kv = arena.layer_kv(layer)
        # Side by side again, in a page's own order [P, J, S, 2D]; a copy, which is fine for reading.
        found.append((field, torch.cat((kv.k, kv.v), -1).permute(0, 2, 1, 3), layout.page_bytes))
    found += [(field, arena.pooled(layer), layout.page_bytes) for layer, field in layout.pooled.items()]
    for fields, view in (
        (layout.recurrent, arena.recurrent),
        (layout.conv, arena.conv),
        (layout.ple, arena.ple),
        (layout.ring, arena.ring),
    ):
        found += [(field, view(layer), layout.slot_bytes) for layer, field in fields.items()]
    return found


@pytest.mark.parametrize(("dtype", "kv"), KINDS)
def test_views_show_the_bytes_that_the_layout_names(dtype: torch.dtype, kv: torch.dtype, rng: random.Random) -> None:
    arena = make_arena(dtype, kv)
    # No exponent byte of all ones, so that every element is a number that compares equal to itself.
    noise = torch.tensor(rng.choices(range(0x60), k=1009), dtype=E4M3)
    arena.bytes.copy_(noise.repeat(arena.num_bytes // 1009 + 1)[: arena.num_bytes])
    for field, view, distance in fields_of(arena):
        assert view.shape[1:] == field.shape and view.dtype == field.dtype
        assert view.shape[0] == arena.num_bytes // distance
        for _ in range(40):
            index = tuple(rng.randrange(size) for size in view.shape)
            inside = 0
            for place, size in zip(index[1:], field.shape, strict=True):
                inside = inside * size + place
            at = index[0] * distance + field.offset + inside * field.dtype.itemsize
            assert float(view[index]) == read(arena, at, field.dtype)


@pytest.mark.parametrize(("dtype", "kv"), KINDS)
def test_a_write_through_a_view_changes_its_bytes_only(dtype: torch.dtype, kv: torch.dtype) -> None:
    arena = make_arena(dtype, kv, poison=0x7F)
    layer_kv, field = arena.layer_kv(3), arena.layout.kv[3]
    size = field.dtype.itemsize
    layer_kv.v[5, 7, 1] = 0
    start = 5 * arena.layout.page_bytes + field.offset + ((1 * 16 + 7) * 64 + 32) * size
    changed = (arena.bytes != 0x7F).nonzero().flatten().tolist()
    assert changed == list(range(start, start + 32 * size))


def test_a_block_is_one_run_of_4_x_2d() -> None:
    arena = make_arena(BF16, E4M3)
    kv, field = arena.layer_kv(1), arena.layout.kv[1]
    for page, head, block in itertools.product((1, 4), (0, 1), (0, 3)):
        kv.k[page, 4 * block : 4 * block + 4, head] = 1
        kv.v[page, 4 * block : 4 * block + 4, head] = 2
        start = page * arena.layout.page_bytes + field.offset + (head * 16 + 4 * block) * 64
        run = arena.bytes[start : start + 4 * 64].tolist()
        assert run == ([1] * 32 + [2] * 32) * 4
    assert kv.k.stride() == kv.v.stride() == (arena.layout.page_bytes, 64, 16 * 64, 1)


@pytest.mark.parametrize("poison", [None, 0x00, 0x7F, 0xFF])
def test_the_arena_starts_with_one_byte_everywhere(poison: int | None) -> None:
    arena = make_arena(poison=poison)
    assert arena.num_bytes == arena.num_pages * arena.layout.page_bytes
    assert arena.bytes.unique().tolist() == [poison or 0]


@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_pages_are_poisoned_when_they_change_owner(poison: int) -> None:
    arena = make_arena(poison=poison)
    allocator = PageAllocator(arena.num_pages, arena.layout.pages_per_state, arena.poison_pages)
    table = arena.bytes.view(arena.num_pages, -1)
    for owner in ("a", "b"):
        arena.bytes.fill_(0x11)
        pages = allocator.allocate_pages(owner, 3)
        slot = allocator.allocate_state(owner)
        assert pages is not None and slot is not None
        run = range(slot.slot * arena.layout.pages_per_state, (slot.slot + 1) * arena.layout.pages_per_state)
        for page in range(arena.num_pages):
            fresh = page in pages or page in run
            assert table[page].unique().tolist() == [poison if fresh else 0x11], page
        allocator.free(owner)


def test_nothing_is_poisoned_when_the_mode_is_off() -> None:
    arena = make_arena()
    arena.bytes.fill_(0x11)
    arena.poison_pages([1, 2])
    assert arena.bytes.unique().tolist() == [0x11]


@pytest.mark.parametrize(("dtype", "kv"), KINDS)
def test_a_zeroed_state_is_zero_in_every_view_and_nothing_else_changes(dtype: torch.dtype, kv: torch.dtype) -> None:
    arena = make_arena(dtype, kv, poison=0x7F)
    arena.zero_state(2)
    start = 2 * arena.layout.slot_bytes
    end = start + arena.layout.state_bytes
    assert not arena.bytes[start:end].any() and torch.equal(arena.state_bytes(2), arena.bytes[start:end])
    assert arena.bytes[:start].unique().tolist() == [0x7F]
    assert arena.bytes[end:].unique().tolist() == [0x7F]
    for view in (arena.recurrent(0), arena.recurrent(2), arena.conv(0), arena.ple(2), arena.ring(4)):
        assert not view[2].any()
    arena.recurrent(2)[2, 3, 1, 4] = 1.0
    assert arena.state_bytes(2).count_nonzero() == 2, "1.0 is 3F 80 00 00"


@pytest.mark.parametrize("slot", [-1, 0, 3])
def test_the_slot_of_the_null_page_is_no_state(slot: int) -> None:
    arena = make_arena(states=3)
    with pytest.raises(CacheError, match=r"state slot: expected 1\.\.2, got"):
        arena.zero_state(slot)
    with pytest.raises(CacheError, match="state slot"):
        arena.state_bytes(slot)


def test_the_scales_of_a_layer_are_the_objects_that_were_given() -> None:
    arena = make_arena(BF16, E4M3)
    for layer in (1, 3, 4):
        kv = arena.layer_kv(layer)
        assert kv is arena.layer_kv(layer) and kv.is_e4m3 and kv.page_tokens == 16
        assert kv.k_scale is UNIT[layer][0] and kv.v_scale is UNIT[layer][1]
        assert kv.counters is not None and kv.counters.tolist() == [[0, 0], [0, 0]]
    plain = make_arena(BF16, BF16).layer_kv(1)
    assert plain.k_scale is None and plain.v_scale is None and not plain.is_e4m3


@pytest.mark.parametrize(
    ("kv", "draft", "scaled"),
    [
        (E4M3, E4M3, []),
        (E4M3, E4M3, [1, 3]),
        (E4M3, E4M3, [1, 3, 4, 5]),
        (E4M3, BF16, [1, 3, 4]),
        (BF16, E4M3, [1, 3]),
        (BF16, BF16, [1]),
    ],
)
def test_scales_are_given_for_e4m3_layers_exactly(kv: torch.dtype, draft: torch.dtype, scaled: list[int]) -> None:
    layout = CacheLayout.of(geometry(), dtype=BF16, kv_dtype=kv, draft_kv_dtype=draft, with_draft=True)
    pair = (Scale(0.5), Scale(2.0))
    with pytest.raises(CacheError, match=r"scales: expected layers .*, got layers"):
        Arena(layout, 1 << 50, "cpu", None, scales=dict.fromkeys(scaled, pair))  # a refusal takes no memory


def test_too_few_pages_are_refused() -> None:
    layout = CacheLayout.of(geometry(), dtype=FP32, kv_dtype=FP32, with_draft=True)
    with pytest.raises(CacheError, match="num_pages: expected 2 or more, got 1"):
        Arena(layout, 1, "cpu", None)


def pool(dtype: torch.dtype = FP32, *shape: int) -> Tensor:
    return torch.zeros(shape or (3, 16, 2, 8), dtype=dtype)


@pytest.mark.parametrize(
    ("k", "v", "scales", "what"),
    [
        (
            pool(),
            pool(FP16),
            (None, None),
            r"v cache: expected .* torch.float32 as of the k cache, got .* torch.float16",
        ),
        (pool(), pool(FP32, 3, 16, 2, 4), (None, None), "v cache"),
        (pool(FP32, 3, 16, 8), pool(FP32, 3, 16, 8), (None, None), r"k cache: expected \[P, S, J, D\]"),
        (pool().transpose(2, 3), pool(), (None, None), "k cache: .* unit stride in D"),
        (pool(), pool().transpose(1, 3), (None, None), "v cache: .* unit stride in D"),
        (pool(E4M3), pool(E4M3), (None, None), "scales of a torch.uint8 cache: expected both scales"),
        (pool(E4M3), pool(E4M3), (Scale(1), None), "scales of a torch.uint8 cache"),
        (pool(E4M3), pool(E4M3), (None, Scale(1)), "scales of a torch.uint8 cache"),
        (pool(), pool(), (Scale(1), Scale(1)), "scales of a torch.float32 cache: expected no scales"),
    ],
)
def test_views_that_do_not_fit_are_refused(
    k: Tensor, v: Tensor, scales: tuple[Scale | None, Scale | None], what: str
) -> None:
    with pytest.raises(CacheError, match=what):
        LayerKV(k, v, *scales)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CacheError, match="k cache: expected float32, float16, bfloat16 or uint8"):
        LayerKV(pool(dtype), pool(dtype))


@pytest.mark.parametrize("counters", [torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2)])
def test_counters_that_do_not_fit_are_refused(counters: Tensor) -> None:
    with pytest.raises(CacheError, match=r"counters: expected \[2, 2\] int64"):
        LayerKV(pool(E4M3), pool(E4M3), Scale(1), Scale(1), counters)
