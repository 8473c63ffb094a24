"""Compiled queries and cache writers: float64 formulas, E4M3 in exact arithmetic, every other byte unchanged."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention_cases import empty_cache
from tests.cache.helpers import MAGNITUDES, exact_byte
from tests.kernels.cpu_cases import assert_close, assert_threads_agree, needs_compiler, same_bits
from torch import Tensor

from page4.cache.append import append_index, append_kv
from page4.cache.places import completed_blocks, request_spans
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale, encode_sides
from page4.kernels import cpu

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]
EPS = 1e-6
LAYOUTS = ("ours", "tokens", "separate", "odd")


class Layer:
    """Random norms of some sizes, and rows as the projection lays them out."""

    def __init__(
        self,
        generator: torch.Generator,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 32,
        index_heads: int = 2,
        index_dim: int = 16,
        rotary: int = 8,
    ) -> None:
        self.generator = generator
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.index_heads, self.index_dim, self.rotary = index_heads, index_dim, rotary
        self.norms = [1 + torch.randn(n, generator=generator) / 3 for n in (dim, dim, index_dim, index_dim)]
        self.kernel = cpu.Qsa(self.norms, heads, kv_heads, index_heads, rotary, EPS)
        self.widths = [2 * heads * dim, kv_heads * dim, kv_heads * dim, (index_heads + 1) * index_dim]

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, sum(self.widths), generator=self.generator) * 2

    def angles(self, positions: Tensor) -> Tensor:
        """[R, rotary / 2] float64."""
        return torch.outer(positions.double(), 100.0 ** -torch.arange(0, 1, 2 / self.rotary, dtype=torch.float64))

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions)
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)

    def turned(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        """float64 of x: [R, heads, d]: RMSNorm, then a rotation of pairs (i, i + rotary / 2)."""
        x = x.double()
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
        half = self.rotary // 2
        cos, sin = (f(self.angles(positions)).unsqueeze(1) for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), -1)


SIZES = [
    {},
    {"heads": 1, "dim": 16, "index_heads": 1, "rotary": 2},
    {"heads": 6, "kv_heads": 2, "dim": 80, "index_dim": 48, "rotary": 16},
    {"heads": 3, "kv_heads": 3, "dim": 48, "index_heads": 4, "index_dim": 32, "rotary": 32},
    {"heads": 2, "kv_heads": 1, "dim": 256, "index_heads": 4, "index_dim": 128, "rotary": 64},
]


@pytest.mark.parametrize("score", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 23])
def test_queries_equal_the_formula(generator: torch.Generator, rows: int, sizes: dict[str, int], score: bool) -> None:
    layer = Layer(generator, **sizes)
    projected, positions = layer.rows(rows), torch.arange(rows) * 37 + 5
    before = projected.clone()
    q, k, index_q = layer.kernel.queries(projected, *layer.cos_sin(positions), score=score)
    assert same_bits(projected, before)
    q_gate, keys, _, index = projected.split(layer.widths, 1)
    heads = q_gate.view(rows, layer.heads, 2 * layer.dim)[..., : layer.dim]
    assert_close(q, layer.turned(heads, layer.norms[0], positions), 3e-6)
    keys = keys.view(rows, layer.kv_heads, layer.dim)
    assert_close(k, layer.turned(keys, layer.norms[1], positions), 3e-6)
    if not score:
        assert index_q is None
        return
    assert index_q is not None
    index = index.view(rows, layer.index_heads + 1, layer.index_dim)[:, :-1]
    assert_close(index_q, layer.turned(index, layer.norms[2], positions), 3e-6)


def test_queries_rows_and_threads_change_no_bit(generator: torch.Generator) -> None:
    layer = Layer(generator, **SIZES[2])
    projected, turned = layer.rows(19), layer.cos_sin(torch.arange(19))

    def run(rows: slice = slice(None)) -> list[Tensor]:
        parts = layer.kernel.queries(projected[rows].clone(), *(x[rows].clone() for x in turned), score=True)
        return [x for x in parts if x is not None]

    assert_threads_agree(run)
    together = run()
    for row in range(19):
        one = slice(row, row + 1)
        assert all(same_bits(got, want[one]) for got, want in zip(run(one), together, strict=True))


def neighbours(x: float) -> list[float]:
    """x and the fp32 numbers beside it."""
    value = np.float32(x)
    return [
        float(np.nextafter(value, np.float32(-math.inf))),
        float(value),
        float(np.nextafter(value, np.float32(math.inf))),
    ]


def tricky_values(scale: float) -> list[float]:
    """Every E4M3 value, every midpoint of two, the ends of the range, and their fp32 neighbours, times the scale."""
    values = [float(x) for x in MAGNITUDES]
    values += [(a + b) / 2 for a, b in itertools.pairwise(values)]
    values += [456.0, 464.0, 480.0, 512.0, 1e30, 2.0**-10, 2.0**-11, 2.0**-149, 2.0**-126]
    found = {y for x in values for y in neighbours(x * scale)}
    finite = sorted(x for x in found if math.isfinite(x))
    return finite + [-x for x in finite] + [0.0, -0.0, 3.4028234663852886e38, -3.4028234663852886e38]


def table_bytes(values: list[float], scale: float) -> list[int]:
    """The E4M3 bytes of values / scale from the table of values: the nearest one, ties to the even byte."""
    with np.errstate(over="ignore", under="ignore"):
        quotient = np.float32(values) / np.float32(scale)
    codes = np.array([float(x) for x in MAGNITUDES])
    middle, size = (codes[1:] + codes[:-1]) / 2, np.abs(quotient.astype(np.float64))
    below, upto = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    found = np.where((below != upto) & (below % 2 == 1), upto, below)
    return [int(byte) for byte in found | np.where(np.signbit(quotient), 0x80, 0)]


def pages_and_offsets(rng: random.Random, rows: int, pages: int, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Distinct places of rows, some of them on the null page."""
    places = rng.sample([(p, o) for p in range(pages) for o in range(page_tokens)], rows)
    page, offset = torch.tensor(places, dtype=torch.int64).T.contiguous()
    return page, offset


def storage(view: Tensor) -> Tensor:
    """A copy of all bytes behind a view."""
    whole = view.untyped_storage()
    return torch.zeros(0, dtype=torch.uint8).set_(whole, 0, (whole.nbytes(),), (1,)).clone()


def write(layer: Layer, k: Tensor, v: Tensor) -> Tensor:
    """Projected rows whose values are v; all else is NaN."""
    projected = torch.full((len(v), sum(layer.widths)), math.nan)
    begin = sum(layer.widths[:2])
    projected[:, begin : begin + layer.widths[2]] = v.flatten(1)
    assert k.shape == v.shape
    return projected


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**20, 2.0**-130, 0.03, 1 / 3, 0.0123, 7.7e-4, 1e-39])
def test_e4m3_bytes_are_those_of_exact_arithmetic(generator: torch.Generator, scale: float) -> None:
    layer, owned = Layer(generator, dim=16), Scale(scale)
    values = tricky_values(owned.value)
    values += [0.0] * (-len(values) % 16)
    x = torch.tensor(values, dtype=torch.float32).view(-1, 1, 16)
    assert x.flatten().tolist() == values
    rows, page_tokens = len(x), 64
    k, v = empty_cache("separate", -(-rows // page_tokens) + 1, page_tokens, 1, 16, torch.uint8, 0x7F)
    at = torch.arange(rows)
    page, offset = 1 + at // page_tokens, at % page_tokens
    counters = torch.zeros(2, 2, dtype=torch.int64)
    scales = (owned.value, owned.value)
    flags = layer.kernel.append_kv(write(layer, x, -x), x, (page, offset), (k, v), scales, counters)
    want = table_bytes(values, owned.value)
    assert want[::11] == [exact_byte(value, owned.value) for value in values[::11]]
    got = k[page, offset].flatten().tolist()
    wrong = [(a.hex(), hex(b), hex(c)) for a, b, c in zip(values, got, want, strict=True) if b != c]
    assert not wrong
    assert v[page, offset].flatten().tolist() == table_bytes([-value for value in values], owned.value)
    with np.errstate(over="ignore"):
        clipped = int((np.abs(np.float32(values) / np.float32(owned.value)) > 448).sum())
    assert clipped > 0
    assert counters.tolist() == [[clipped, 0], [clipped, 0]]
    assert flags is not None and not flags.any()


def random_side(generator: torch.Generator, rows: int, layer: Layer, scale: float) -> Tensor:
    """[R, J, D] with clips, subnormals, zeros, infinities and NaN of both signs in some rows."""
    shape = (rows, layer.kv_heads, layer.dim)
    x = torch.randn(shape, generator=generator) * scale * 10.0 ** torch.randint(-4, 4, shape, generator=generator)
    odd = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 448 * scale, -448 * scale, 0.0, -0.0])
    odd = torch.cat((odd, torch.tensor([0x7FC00000, 0xFFC00000 - (1 << 32)]).int().view(torch.float32)))
    where = torch.rand(shape, generator=generator) < 0.02
    return torch.where(where, odd[torch.randint(0, len(odd), shape, generator=generator)], x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kv_heads", "dim", "page_tokens"), [(1, 16, 4), (2, 48, 16), (3, 32, 64)])
def test_e4m3_writer_equals_the_codec_and_writes_nothing_else(
    generator: torch.Generator, rng: random.Random, layout: str, kv_heads: int, dim: int, page_tokens: int
) -> None:
    layer, scales = Layer(generator, kv_heads=kv_heads, dim=dim), (Scale(0.031), Scale(1.7))
    for rows in (1, 20):
        k, v = (random_side(generator, rows, layer, scale.value) for scale in scales)
        caches = empty_cache(layout, 8, page_tokens, kv_heads, dim, torch.uint8, rng.randrange(256))
        page, offset = pages_and_offsets(rng, rows, 8, page_tokens)
        before = storage(caches[0])
        counters = torch.tensor([[1, 2], [3, 4]])
        values = (scales[0].value, scales[1].value)
        flags = layer.kernel.append_kv(write(layer, k, v), k, (page, offset), caches, values, counters)
        got = storage(caches[0])
        real = page > 0
        want_counters = torch.tensor([[1, 2], [3, 4]])
        sides, want_flags = encode_sides(torch.stack((k, v))[:, real], scales, counters=want_counters)
        assert counters.tolist() == want_counters.tolist()
        assert flags is not None and same_bits(flags[real], want_flags) and not flags[~real].any()
        # The same bytes put there by indexing, over what was there before.
        torch.zeros(0, dtype=torch.uint8).set_(caches[0].untyped_storage()).copy_(before)
        for cache, side in zip(caches, sides, strict=True):
            cache[page[real], offset[real]] = side
        assert same_bits(got, storage(caches[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kv_heads", "dim", "page_tokens"), [(1, 16, 4), (2, 48, 16), (3, 32, 64)])
def test_fp32_writer_copies_bits_and_writes_nothing_else(
    generator: torch.Generator, rng: random.Random, layout: str, kv_heads: int, dim: int, page_tokens: int
) -> None:
    layer = Layer(generator, kv_heads=kv_heads, dim=dim)
    for rows in (1, 20):
        k, v = (random_side(generator, rows, layer, 1.0) for _ in range(2))
        caches = empty_cache(layout, 8, page_tokens, kv_heads, dim, torch.float32, rng.randrange(256))
        page, offset = pages_and_offsets(rng, rows, 8, page_tokens)
        before = storage(caches[0])
        flags = layer.kernel.append_kv(write(layer, k, v), k, (page, offset), caches, (1.0, 1.0), None)
        assert flags is None, "fp32 holds anything"
        got = storage(caches[0])
        torch.zeros(0, dtype=torch.uint8).set_(caches[0].untyped_storage()).copy_(before)
        real = page > 0
        for cache, side in zip(caches, (k, v), strict=True):
            cache[page[real], offset[real]] = side[real]
        assert same_bits(got, storage(caches[0]))


def test_the_writer_equals_the_torch_writer_of_a_step(generator: torch.Generator, rng: random.Random) -> None:
    layer, scales = Layer(generator, kv_heads=2), (Scale(0.02), Scale(0.4))
    k, v = (random_side(generator, 9, layer, scale.value) for scale in scales)
    table = torch.tensor([[5, 3, 0], [1, 6, 2]], dtype=torch.int32)
    rows = Rows(torch.tensor([2, 3, 4, 5, 6, 7, 8, 9, 10]), torch.tensor([0] * 4 + [1] * 5), table)
    results = []
    for compiled in (True, False):
        caches = empty_cache("ours", 8, 4, 2, 32, torch.uint8, 0x55)
        counters = torch.zeros(2, 2, dtype=torch.int64)
        if compiled:
            places = rows.pages_of(rows.positions, rows.request_of_row, 4)
            values = (scales[0].value, scales[1].value)
            flags = layer.kernel.append_kv(write(layer, k, v), k, places, caches, values, counters)
        else:
            flags = append_kv(LayerKV(*caches, *scales, counters), k, v, rows)
        assert flags is not None
        results.append((storage(caches[0]), counters, flags))
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Index:
    """Rings and pooled pages of some requests, with strides of their own and poison all around."""

    def __init__(self, layer: Layer, requests: int, page_tokens: int, capacity: int, rng: random.Random) -> None:
        self.layer, self.page_tokens, self.rng = layer, page_tokens, rng
        columns = -(-capacity // page_tokens)
        pages, slots, dim = requests * columns + 3, requests + 3, layer.index_dim
        per_page = page_tokens // 4
        self.flat = torch.full((4 * (pages * (per_page * dim + 9) + slots * (16 * dim + 5)),), 0x7F, dtype=torch.uint8)
        floats = self.flat.view(torch.float32)
        self.pooled = floats.as_strided((pages, per_page, dim), (per_page * dim + 9, dim, 1))
        self.ring = floats.as_strided((slots, 16, dim), (16 * dim + 5, dim, 1), pages * (per_page * dim + 9))
        order = rng.sample(range(1, pages), requests * columns)
        self.tables = [order[n::requests] for n in range(requests)]
        self.slots = rng.sample(range(1, slots), requests)
        self.history = [torch.zeros(0, dim) for _ in range(requests)]

    def rows_of(self, names: list[int], lengths: list[int]) -> Rows:
        firsts = [len(self.history[n]) for n in names]
        positions = [first + t for first, length in zip(firsts, lengths, strict=True) for t in range(length)]
        requests = [i for i, length in enumerate(lengths) for _ in range(length)]
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        table = torch.tensor([self.tables[n] for n in names], dtype=torch.int32)
        return Rows(_int64(positions), _int64(requests), table, tuple(starts), tuple(firsts))

    def step(self, names: list[int], lengths: list[int]) -> None:
        """Append rows, then compare all bytes with what the histories say."""
        rows, slots = self.rows_of(names, lengths), torch.tensor([self.slots[n] for n in names])
        projected = self.layer.rows(sum(lengths))
        before = self.flat.clone()
        spans = request_spans(rows, slots)
        turned = self.layer.cos_sin(completed_blocks(rows))
        self.layer.kernel.append_index(projected, spans, rows.block_table, turned, self.pooled, self.ring)
        got = self.flat.clone()
        raw = projected[:, -self.layer.index_dim :]

        # The torch writer from the same bytes.
        self.flat.copy_(before)
        append_index(self.pooled, self.ring, raw, rows, slots, self._norm_and_rope)
        assert torch.equal(self.ring, self._of(got, self.ring)), "the ring holds raw bits"
        torch.testing.assert_close(self.pooled, self._of(got, self.pooled), rtol=1e-5, atol=1e-5, equal_nan=True)

        # Brute force over the whole history: only the blocks and ring places of these rows may change.
        self.flat.copy_(before)
        for n, part in zip(names, raw.split(lengths), strict=True):
            first = len(self.history[n])
            self.history[n] = torch.cat((self.history[n], part))
            whole = self.history[n].double()
            for position in range(first, len(whole)):
                self.ring[self.slots[n], position % 16] = self.history[n][position]
                if position % 4 == 3:
                    page = self.tables[n][position // self.page_tokens]
                    place = position % self.page_tokens // 4
                    mean = whole[position - 3 : position + 1].mean(0).view(1, 1, -1)
                    want = self.layer.turned(mean, self.layer.norms[3], torch.tensor([position - 3])).flatten()
                    found = self._of(got, self.pooled)[page, place]
                    assert_close(found, want, 5e-6)
                    self.pooled[page, place] = found
        assert same_bits(got, self.flat)

    def _of(self, flat: Tensor, view: Tensor) -> Tensor:
        return flat.view(torch.float32).as_strided(view.shape, view.stride(), view.storage_offset())

    def _norm_and_rope(self, mean: Tensor, first: Tensor) -> Tensor:
        return self.layer.turned(mean.unsqueeze(1), self.layer.norms[3], first).squeeze(1).float()

    def rewind(self, n: int, rows: int) -> None:
        """The last rows were rejected: the next ones take their positions."""
        self.history[n] = self.history[n][: len(self.history[n]) - rows]


@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
@pytest.mark.parametrize(
    "chunks",
    [[1] * 40, [4] * 9, [16] * 4, [17, 15, 33], [3, 5, 2, 6, 1, 9], [70], [15, 1, 16, 1, 17], [2, 40, 1, 3, 7]],
    ids=str,
)
def test_index_keys_of_chunks(
    generator: torch.Generator, rng: random.Random, chunks: list[int], page_tokens: int
) -> None:
    index = Index(Layer(generator), 1, page_tokens, sum(chunks), rng)
    for length in chunks:
        index.step([0], [length])


@settings(max_examples=40)
@given(data=st.data())
def test_index_keys_of_ragged_requests_with_rejected_rows(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    index = Index(Layer(generator), 3, rng.choice([4, 8, 16]), 240, rng)
    for _ in range(6):
        names = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        lengths = [data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33])) for _ in names]
        index.step(names, lengths)
        for n, length in zip(names, lengths, strict=True):
            # A verify window has at most 8 rows, so the ring still holds what a rewound block needs.
            index.rewind(n, data.draw(st.integers(0, min(length, 8))) if length <= 8 else 0)


def test_the_null_page_and_slot_0_are_never_written(generator: torch.Generator, rng: random.Random) -> None:
    layer = Layer(generator)
    index = Index(layer, 2, 8, 32, rng)
    index.step([1], [8])
    index.tables[0], index.slots[0] = [0] * len(index.tables[0]), 0
    rows = index.rows_of([0, 1], [12, 6])
    slots, projected = torch.tensor(index.slots), layer.rows(18)
    null_page, null_slot = index.pooled[0].clone(), index.ring[0].clone()
    turned = layer.cos_sin(completed_blocks(rows))
    layer.kernel.append_index(projected, request_spans(rows, slots), rows.block_table, turned, index.pooled, index.ring)
    assert same_bits(index.pooled[0], null_page) and same_bits(index.ring[0], null_slot)
    mean = projected[12:16, -layer.index_dim :].double().mean(0).view(1, 1, -1)
    want = layer.turned(mean, layer.norms[3], torch.tensor([8])).flatten()
    assert_close(index.pooled[index.tables[1][1], 0], want, 5e-6)


@pytest.mark.parametrize("slack", [0, 3])
def test_a_block_table_may_be_a_view_of_a_wider_one(generator: torch.Generator, rng: random.Random, slack: int) -> None:
    layer, results = Layer(generator), []
    projected = layer.rows(30)
    for wide in (False, True):
        index = Index(layer, 2, 8, 32, random.Random(5))
        rows, slots = index.rows_of([0, 1], [18, 12]), torch.tensor(index.slots)
        table = rows.block_table
        if wide:
            table = torch.full((2, table.shape[1] + slack), 1, dtype=torch.int32)[:, : table.shape[1]]
            table.copy_(rows.block_table)
        turned = layer.cos_sin(completed_blocks(rows))
        layer.kernel.append_index(projected, request_spans(rows, slots), table, turned, index.pooled, index.ring)
        results.append(index.flat)
    assert same_bits(*results)
