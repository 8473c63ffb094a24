"""K and V of a step: the bytes that are written, the bytes that are not, and what is counted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from tests.cache.helpers import exact_byte, fp32_quotient, geometry, make_rows
from tests.conftest import poison_byte, poisoned
from torch import Tensor

from page4.cache.append import append_kv
from page4.cache.layout import CacheLayout
from page4.cache.storage import Arena, LayerKV
from page4.codec import Scale
from page4.errors import CacheError

FP32, FP16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
S, J, D, PAGES = 8, 2, 16, 12
K_SCALE, V_SCALE = Scale(0.037), Scale(1.7)
SPANS = [(5, 4), (0, 9), (30, 1)]
TABLES = [[7, 2], [11, 1], [4, 10, 6, 3]]


def pools(layout: str, dtype: torch.dtype) -> tuple[Tensor, LayerKV]:
    """A poisoned pool and its views: [2, P, S, J, D] or K and V of a token side by side, [P, J, S, 2D]."""
    if layout == "separate":
        pool = poisoned((2, PAGES, S, J, D), dtype)
        k, v = pool[0], pool[1]
    else:
        pool = poisoned((PAGES, J, S, 2 * D), dtype)
        both = pool.permute(0, 2, 1, 3)
        k, v = both[..., :D], both[..., D:]
    scales = (K_SCALE, V_SCALE) if dtype == E4M3 else (None, None)
    return pool, LayerKV(k, v, *scales, torch.zeros(2, 2, dtype=torch.int64))


def values(rng: random.Random, rows: int, dtype: torch.dtype = FP32) -> Tensor:
    """[R, J, D] of values over the whole E4M3 range of both scales: subnormals, ties, clips, zeros of both signs."""

    def draw() -> float:
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice([0.0, -0.0, 1e-9, -1e-30])
        if kind == 1:  # a tie between two neighbouring bytes, in a scale of 1
            return rng.choice([1, -1]) * (8.5 + rng.randrange(8)) * 2.0 ** rng.randrange(-9, 5)
        return rng.gauss(0, 1) * 10 ** rng.uniform(-4, 3)

    return torch.tensor([draw() for _ in range(rows * J * D)]).view(rows, J, D).to(dtype)


def place(spans: list[tuple[int, int]], tables: list[list[int]]) -> list[tuple[int, int]]:
    """(page, offset) of every row, in plain Python."""
    positions = [(n, first + i) for n, (first, length) in enumerate(spans) for i in range(length)]
    return [(tables[n][p // S], p % S) for n, p in positions]


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("layout", ["separate", "side by side"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_16_and_32_bit_rows_go_to_their_places(dtype: torch.dtype, layout: str, host: bool, rng: random.Random) -> None:
    pool, kv = pools(layout, dtype)
    before = pool.clone().view(E4M3)
    k, v = values(rng, 14, dtype), values(rng, 14, dtype)
    assert append_kv(kv, k, v, make_rows(SPANS, TABLES, host=host)) is None
    places = place(SPANS, TABLES)
    for row, (page, offset) in enumerate(places):
        assert torch.equal(kv.k[page, offset].view(E4M3), k[row].view(E4M3))
        assert torch.equal(kv.v[page, offset].view(E4M3), v[row].view(E4M3))
    check_rest_unchanged(kv, places, pool, before)


def check_rest_unchanged(kv: LayerKV, places: list[tuple[int, int]], pool: Tensor, before: Tensor) -> None:
    """Put the poison back where rows were written: then nothing differs."""
    for page, offset in places:
        for view in (kv.k, kv.v):
            view[page, offset] = poisoned((J, D), pool.dtype)
    assert torch.equal(pool.view(E4M3), before)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("layout", ["separate", "side by side"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_e4m3_bytes_are_those_of_exact_arithmetic(
    dtype: torch.dtype, layout: str, host: bool, rng: random.Random
) -> None:
    pool, kv = pools(layout, E4M3)
    before = pool.clone()
    k, v = values(rng, 14, dtype), values(rng, 14, dtype)
    k, v = k.clamp(-6e4, 6e4), v.clamp(-6e4, 6e4)
    nonfinite = append_kv(kv, k, v, make_rows(SPANS, TABLES, host=host))
    assert nonfinite is not None and nonfinite.tolist() == [False] * 14
    places = place(SPANS, TABLES)
    clipped = [0, 0]
    for side, (view, x, scale) in enumerate(((kv.k, k, K_SCALE), (kv.v, v, V_SCALE))):
        for row, (page, offset) in enumerate(places):
            flat = x[row].flatten().tolist()
            assert view[page, offset].flatten().tolist() == [exact_byte(value, scale.value) for value in flat]
            clipped[side] += sum(abs(fp32_quotient(value, scale.value)) > 448 for value in flat)
    assert min(clipped) > 0, "the draw tests no clip"
    assert kv.counters is not None and kv.counters.tolist() == [[clipped[0], 0], [clipped[1], 0]]
    check_rest_unchanged(kv, places, pool, before)


def test_ties_and_edges_by_hand() -> None:
    _, kv = pools("separate", E4M3)
    kv = LayerKV(kv.k, kv.v, Scale(1.0), Scale(0.5), kv.counters)
    # 1.0625 lies between 0x38 (1) and 0x39 (1.125), 1.1875 between 0x39 and 0x3A: each goes to the even byte.
    x = [1.0625, 1.1875, -1.0625, 448.0, 448.1, -464.0, 500.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, -0.0, 0.0, 3e38, 240.0]
    want = [0x38, 0x3A, 0xB8, 0x7E, 0x7E, 0xFE, 0x7E, 0x01, 0x00, 0x02, 0x80, 0x00, 0x7E, 0x77]
    k = torch.zeros(1, J, D)
    k[0, 0, : len(x)] = torch.tensor(x)
    append_kv(kv, k, k / 2, make_rows([(0, 1)], [[1]]))
    assert kv.k[1, 0, 0, : len(x)].tolist() == want
    assert kv.v[1, 0, 0, : len(x)].tolist() == want, "V / 2 with a scale of 0.5 is the same byte"
    assert kv.counters is not None and kv.counters.tolist() == [[4, 0], [4, 0]]


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_rows_that_are_not_finite_are_named_and_counted(bad: float, dtype: torch.dtype, host: bool) -> None:
    _, kv = pools("side by side", E4M3)
    k, v = torch.ones(14, J, D, dtype=dtype), torch.ones(14, J, D, dtype=dtype)
    k[2, 1, 3] = bad
    v[2, 0, 0] = bad
    v[9, 1, 15] = bad
    v[9, 1, 14] = bad
    k[5, 0, 0] = 3e4  # clips at a scale of 0.037, but is finite
    nonfinite = append_kv(kv, k, v, make_rows(SPANS, TABLES, host=host))
    assert nonfinite is not None and nonfinite.nonzero().flatten().tolist() == [2, 9]
    assert kv.counters is not None and kv.counters.tolist() == [[1, 1], [0, 3]]
    append_kv(kv, k, v, make_rows(SPANS, TABLES, host=host))
    assert kv.counters.tolist() == [[2, 2], [0, 6]], "counters go on"


def test_a_scale_so_small_that_the_quotient_overflows_clips() -> None:
    _, kv = pools("separate", E4M3)
    kv = LayerKV(kv.k, kv.v, Scale(1e-38), Scale(1e-38), kv.counters)
    nonfinite = append_kv(kv, torch.full((1, J, D), 3e38), torch.full((1, J, D), -3e38), make_rows([(0, 1)], [[1]]))
    assert nonfinite is not None and not nonfinite.any()
    assert kv.counters is not None and kv.counters.tolist() == [[J * D, 0], [J * D, 0]]
    assert kv.k[1, 0].unique().tolist() == [0x7E] and kv.v[1, 0].unique().tolist() == [0xFE]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, E4M3])
def test_padding_rows_write_and_count_nothing(dtype: torch.dtype, rng: random.Random) -> None:
    pool, kv = pools("side by side", dtype)
    before = pool.clone().view(E4M3)
    k, v = values(rng, 17), values(rng, 17)
    k[14:], v[14:] = math.nan, math.inf  # whatever a padding row holds
    order = list(range(17))
    rng.shuffle(order)
    nonfinite = append_kv(kv, k[order], v[order], make_rows(SPANS, TABLES, host=False, padding=3, order=order))
    _, alone = pools("side by side", dtype)
    append_kv(alone, k[:14], v[:14], make_rows(SPANS, TABLES))
    assert torch.equal(kv.k.contiguous().view(E4M3), alone.k.contiguous().view(E4M3))
    assert torch.equal(kv.v.contiguous().view(E4M3), alone.v.contiguous().view(E4M3))
    if dtype == E4M3:
        assert nonfinite is not None and not nonfinite.any()
        assert kv.counters is not None and alone.counters is not None and torch.equal(kv.counters, alone.counters)
    check_rest_unchanged(kv, place(SPANS, TABLES), pool, before)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, E4M3])
@pytest.mark.parametrize("step", ["padding", "table of zeros", "table of zeros, host"])
def test_page_0_never_changes(step: str, dtype: torch.dtype, byte: int, rng: random.Random) -> None:
    """A step of padding rows, or a warm-up whose table is all zeros, leaves the whole pool as it was (B08)."""
    pool, kv = pools("separate", dtype)
    pool.view(E4M3).fill_(byte)
    if step == "padding":
        rows = make_rows([(0, 0)], [[3]], host=False, padding=6)
    else:
        rows = make_rows([(0, 4), (6, 2)], [[0], [0]], host=step.endswith("host"))
    k, v = values(rng, 6), values(rng, 6)
    k[3] = math.nan
    nonfinite = append_kv(kv, k, v, rows)
    assert pool.view(E4M3).unique().tolist() == [byte]
    if dtype == E4M3:
        assert nonfinite is not None and not nonfinite.any()
        assert kv.counters is not None and kv.counters.tolist() == [[0, 0], [0, 0]]


def test_one_row_on_the_null_page_does_not_stop_the_others() -> None:
    pool, kv = pools("side by side", E4M3)
    before = pool.clone()
    rows = make_rows([(7, 2)], [[5, 0]])
    nonfinite = append_kv(kv, torch.full((2, J, D), math.nan), torch.ones(2, J, D), rows)
    assert nonfinite is not None and nonfinite.tolist() == [True, False]
    assert kv.counters is not None and kv.counters.tolist() == [[0, J * D], [0, 0]]
    check_rest_unchanged(kv, [(5, 7)], pool, before)


def test_any_permutation_of_pages_holds_the_same_tokens(rng: random.Random) -> None:
    k, v = values(rng, 4 * S), values(rng, 4 * S)
    seen = []
    for _ in range(5):
        table = rng.sample(range(1, PAGES), 4)
        _, kv = pools("side by side", E4M3)
        append_kv(kv, k, v, make_rows([(0, 4 * S)], [table]))
        seen.append((kv.k[table].clone(), kv.v[table].clone()))
    for other_k, other_v in seen[1:]:
        assert torch.equal(seen[0][0], other_k) and torch.equal(seen[0][1], other_v)


def test_a_row_written_again_replaces_the_old_one(rng: random.Random) -> None:
    _, kv = pools("side by side", E4M3)
    old, new = values(rng, 4), values(rng, 2)
    append_kv(kv, old, old, make_rows([(6, 4)], [[3, 5]]))
    append_kv(kv, new, new, make_rows([(7, 2)], [[3, 5]]))
    _, want = pools("side by side", E4M3)
    append_kv(
        want, torch.cat((old[:1], new, old[3:])), torch.cat((old[:1], new, old[3:])), make_rows([(6, 4)], [[3, 5]])
    )
    assert torch.equal(kv.k, want.k) and torch.equal(kv.v, want.v)


def test_layers_of_one_arena_do_not_touch_each_other(rng: random.Random) -> None:
    config = geometry(num_key_value_heads=J, head_dim=D, num_attention_heads=J)
    layout = CacheLayout.of(config, dtype=FP32, kv_dtype=E4M3, page_tokens=S, with_draft=True)
    scales = dict.fromkeys(layout.kv, (K_SCALE, V_SCALE))
    arena = Arena(layout, PAGES, "cpu", poison_byte(), scales=scales)
    rows = make_rows(SPANS, TABLES)
    x = values(rng, 14)
    append_kv(arena.layer_kv(3), x, x, rows)
    _, want = pools("side by side", E4M3)
    append_kv(want, x, x, rows)
    assert torch.equal(arena.layer_kv(3).k, want.k) and torch.equal(arena.layer_kv(3).v, want.v)
    field = layout.kv[3]
    table = arena.bytes.view(PAGES, -1)
    table[:, field.offset : field.offset + field.num_bytes] = poison_byte()
    assert table.unique().tolist() == [poison_byte()]


@pytest.mark.parametrize(
    "change", [lambda x: x[:-1], lambda x: x[:, :1], lambda x: x[..., :-1], lambda x: x.flatten(1)]
)
def test_shapes_that_do_not_fit_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    pool, kv = pools("separate", FP32)
    good = torch.zeros(14, J, D)
    for k, v, name in ((change(good), good, "k"), (good, change(good), "v")):
        with pytest.raises(CacheError, match=rf"{name}: expected \[14, 2, 16\], got"):
            append_kv(kv, k, v, make_rows(SPANS, TABLES))
    assert pool.view(E4M3).unique().tolist() == [poison_byte()], "nothing is written by a refused step"
