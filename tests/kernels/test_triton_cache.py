"""The GPU's cache writers: E4M3 against exact arithmetic, places against Python dictionaries, null page and padding."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.cache.helpers import exact_byte

pytest.importorskip("triton")

from page4 import codec
from page4.codec import Scale
from page4.kernels import triton_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def encoded(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, list[int]]:
    """Bytes of x [n] by the writer, and its (clipped, not finite) counts; n is cut into rows of 64."""
    rows = x.view(-1, 1, 64).to(DEVICE)
    count = rows.shape[0]
    cache = torch.full((1 + count, 4, 1, 128), 0x55, dtype=torch.uint8, device=DEVICE)
    table = torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE).view(count, 1)
    counters = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    flags = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    scales = (Scale(scale).tensor(DEVICE), Scale(scale).tensor(DEVICE))
    positions = torch.full((count,), 2, device=DEVICE)
    triton_cache.append_kv(
        *(rows, rows, cache[..., :64], cache[..., 64:], positions, torch.arange(count, device=DEVICE), table),
        *(scales, counters, flags),
    )
    assert bool((cache[0] == 0x55).all()) and bool((cache[1:, [0, 1, 3]] == 0x55).all())
    assert torch.equal(cache[1:, 2, 0, :64], cache[1:, 2, 0, 64:])
    assert counters[0].tolist() == counters[1].tolist()
    finite = x.view(-1, 64).isfinite().all(1)
    assert flags.cpu().tolist() == (~finite).tolist()
    return cache[1:, 2, 0, :64].flatten().cpu(), counters[0].tolist()


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    patterns = torch.arange(65536).to(torch.int32)
    return torch.where(patterns > 32767, patterns - 65536, patterns).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_every_16_bit_input_is_encoded_as_the_codec_does(dtype: torch.dtype, scale: float) -> None:
    x = every_16_bit(dtype)
    x = x if ON_GPU else x.view(-1, 64)[:: 7 if scale == 1.0 else 31].reshape(-1)
    found, counts = encoded(x, scale)
    right = codec.encode(x, Scale(scale))
    numbers = ~x.isnan()
    assert torch.equal(found[numbers], right[numbers])
    nan_bytes = torch.where(x.view(torch.int16) < 0, 0xFF, 0x7F).to(torch.uint8)
    assert torch.equal(found[~numbers], nan_bytes[~numbers])
    stats = codec.count(x, Scale(scale))
    assert counts == [int(stats.clipped), int(stats.nonfinite)]


def edges() -> list[float]:
    """Every E4M3 value, every midpoint of neighbours, and the fp32 numbers beside them; extremes of fp32."""
    values = [v for v in codec.table().tolist() if v >= 0]
    middles = [(a + b) / 2 for a, b in zip(sorted(values), sorted(values)[1:], strict=False)]
    exact = torch.tensor(sorted({*values, *middles, 464.0, 480.0}), dtype=torch.float32)
    up, down = (exact.view(torch.int32) + 1).view(torch.float32), (exact.view(torch.int32) - 1).view(torch.float32)
    sizes = [*exact.tolist(), *up.tolist(), *[x for x in down.tolist() if not math.isnan(x)]]
    return [*sizes, *[-x for x in sizes], 3.4028234e38, -3.4028234e38, 1e-45, -1e-45, -0.0, 2.0**-10, 3 * 2.0**-10]


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 0.0312, 1e-40, 1e30])
def test_fp32_edges_are_encoded_exactly(scale: float) -> None:
    scale = Scale(scale).value
    numbers = [x for x in edges() if 1e-30 < scale < 1e20 or abs(x) < 1e3]
    x = torch.tensor([*numbers, *[0.0] * (-len(numbers) % 64)])
    found, _ = encoded(x, scale)
    right = [
        exact_byte(value, scale) if abs(value / scale) < 3e38 else 0x7E | 0x80 * (value < 0) for value in x.tolist()
    ]
    assert found.tolist() == right


def test_random_quotients_are_encoded_exactly(rng: random.Random) -> None:
    x = torch.tensor([rng.uniform(-500, 500) * 2.0 ** rng.randint(-18, 0) for _ in range(512)])
    scale = Scale(rng.uniform(0.01, 2)).value
    assert encoded(x, scale)[0].tolist() == [exact_byte(value, scale) for value in x.tolist()]


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("page_tokens", [4, 16, 20])
def test_rows_go_to_their_place_and_nowhere_else(
    kv_dtype: torch.dtype, page_tokens: int, rng: random.Random, generator: torch.Generator
) -> None:
    dtype = torch.float32 if kv_dtype == torch.uint8 else kv_dtype
    storage = torch.full((9, page_tokens, 3, 48), 0x55, dtype=torch.uint8).to(kv_dtype)
    storage = storage.to(DEVICE)
    caches = storage[..., :24], storage[..., 24:]
    table = torch.tensor([[5, 2, 7], [0, 3, 0]], dtype=torch.int32, device=DEVICE)
    at = [(0, p) for p in range(3 * page_tokens)] + [(1, 0), (1, page_tokens), (0, -1), (1, -1), (1, 2 * page_tokens)]
    rng.shuffle(at)
    requests, positions = (torch.tensor(part, device=DEVICE) for part in zip(*at, strict=True))
    k, v = torch.randn(2, len(at), 3, 30, generator=generator).to(dtype)[..., :24].to(DEVICE)
    before, scales = storage.clone(), (Scale(0.25), Scale(0.5))
    counters, flags = torch.ones(2, 2, dtype=torch.int64, device=DEVICE), torch.ones(len(at), dtype=torch.bool)
    e4m3 = (
        (tuple(s.tensor(DEVICE) for s in scales), counters, flags.to(DEVICE)) if kv_dtype == torch.uint8 else [None] * 3
    )
    triton_cache.append_kv(k, v, *caches, positions, requests, table, *e4m3)
    for row, (request, position) in enumerate(at):
        page = int(table[request, position // page_tokens]) if position >= 0 else 0
        if page:
            sides = (k[row], v[row])
            if kv_dtype == torch.uint8:
                sides = tuple(codec.encode(x, scale) for x, scale in zip(sides, scales, strict=True))
            before[page, position % page_tokens] = torch.cat(sides, -1)
    assert torch.equal(storage.view(torch.uint8), before.view(torch.uint8))


def test_rows_that_write_nothing_count_nothing() -> None:
    cache = torch.zeros(2, 4, 1, 64, dtype=torch.uint8, device=DEVICE)
    x = torch.full((3, 1, 32), math.nan, device=DEVICE)
    positions = torch.tensor([-1, 0, 2], device=DEVICE)
    requests, table = torch.tensor([0, 1, 0], device=DEVICE), torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    flags = torch.ones(3, dtype=torch.bool, device=DEVICE)
    scales = (Scale(1.0).tensor(DEVICE), Scale(1.0).tensor(DEVICE))
    triton_cache.append_kv(x, x, cache[..., :32], cache[..., 32:], positions, requests, table, scales, counters, flags)
    assert flags.tolist() == [False, False, True] and counters.tolist() == [[0, 32], [0, 32]]
    assert not cache[0].any() and set(cache[1].unique().tolist()) == {0, 0x7F}


# ----------------------------------------------------------------------------------------------------------- index keys


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_index_keys_over_many_steps(dtype: torch.dtype, order: str, rng: random.Random) -> None:
    """Three requests, one on the null slot and null pages; steps of uneven lengths, a rejected draft among them."""
    generator = torch.Generator().manual_seed(1)
    dim, page_tokens = 24, 8
    raw = torch.randn(3, 120, dim, generator=generator).to(dtype)
    table = torch.zeros(3, 15, dtype=torch.int32)
    table[:2] = torch.tensor(rng.sample(range(1, 33), 30), dtype=torch.int32).view(2, 15)
    slots = torch.tensor([2, 1, 0])
    pooled = torch.full((33, 2, dim + 8), 7.0, dtype=dtype, device=DEVICE)[..., :dim]
    ring = torch.full((3, 16, dim), math.nan, dtype=dtype, device=DEVICE)
    expected = pooled.clone()
    at = [0, 0, 0]
    for lengths in ([5, 40, 2], [1, 1, 1], [1, 1, 1], [3, 0, 4], [1, 25, 1], [4, 4, 4], [1, 1, 1]):
        rows = [(n, at[n] + i) for n in range(3) for i in range(lengths[n])] + [(0, -1)]
        if order == "shuffled":
            rng.shuffle(rows)
        requests, positions = (torch.tensor(part, device=DEVICE) for part in zip(*rows, strict=True))
        keys = torch.stack([raw[n, max(p, 0)] for n, p in rows]).to(DEVICE)
        seen: list[torch.Tensor] = []

        def norm_and_rope(mean: torch.Tensor, first: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen += [mean, first]
            return mean * 2 + first.unsqueeze(1).to(mean.dtype)

        operands = (positions, requests, table.to(DEVICE), slots.to(DEVICE))
        triton_cache.append_index(pooled, ring, keys, *operands, norm_and_rope)
        for row, (n, p) in enumerate(rows):
            closes = p >= 0 and p % 4 == 3
            assert int(seen[1][row]) == (p - 3 if closes else 0)
            if n < 2 and closes:
                a, b, c, d = raw[n, p - 3 : p + 1].float()
                mean = (((a + b) + c + d) / 4).to(dtype)
                # The interpreter cuts bfloat16 off where hardware rounds.
                exact = ON_GPU or dtype != torch.bfloat16
                torch.testing.assert_close(seen[0][row].cpu(), mean, rtol=0 if exact else 2**-7, atol=0)
                key = seen[0][row] * 2 + (p - 3)
                expected[table[n, p // page_tokens], p % page_tokens // 4] = key
        at = [a + length for a, length in zip(at, lengths, strict=True)]
        at[0] -= 1 if lengths[0] == 3 else 0  # the last of three was a rejected draft
        assert torch.equal(pooled, expected)
        assert bool(ring[0].isnan().all())
        for n in range(2):
            newest = range(max(0, at[n] - 12), at[n])
            assert all(torch.equal(ring[slots[n], p % 16].cpu(), raw[n, p]) for p in newest)


def test_offsets_beyond_32_bits() -> None:
    if not ON_GPU:
        pytest.skip("takes 3 GB")
    cache = torch.zeros(70_000, 16, 2, 1024, dtype=torch.uint8, device=DEVICE)
    k = torch.full((1, 2, 512), 2.0, device=DEVICE, dtype=torch.bfloat16)
    table = torch.tensor([[69_999]], dtype=torch.int32, device=DEVICE)
    zero, scale = torch.zeros(1, dtype=torch.int64, device=DEVICE), Scale(1.0).tensor(DEVICE)
    counters, flags = (
        torch.zeros(2, 2, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.bool, device=DEVICE),
    )
    places = (zero + 15, zero, table, (scale, scale), counters, flags)
    triton_cache.append_kv(k, k, cache[..., :512], cache[..., 512:], *places)
    assert bool((cache[69_999, 15] == 0x40).all()) and int(cache.sum(dtype=torch.int64)) == 0x40 * 2048


def test_refusals_are_pure() -> None:
    assert triton_cache.refusal("cuda", (9, 0), "bfloat16", "uint8", 2, 256) is None
    assert "as themselves or as E4M3" in str(triton_cache.refusal("cuda", (9, 0), "float64", "uint8", 2, 256))
    assert "8192" in str(triton_cache.refusal("cuda", (9, 0), "bfloat16", "uint8", 64, 256))
    assert "7.5" in str(triton_cache.refusal("cuda", (6, 0), "bfloat16", "uint8", 2, 256))


@pytest.mark.skipif(not ON_GPU, reason="a CUDA graph")
def test_a_captured_step_writes_what_the_next_replay_brings() -> None:
    """Captured on a side stream, nothing allocated; the null page, slot 0 and padding rows stay out of it."""
    generator = torch.Generator().manual_seed(3)
    kv = torch.zeros(9, 8, 2, 64, dtype=torch.uint8, device=DEVICE)
    pooled, ring = torch.zeros(9, 2, 24, device=DEVICE), torch.zeros(4, 16, 24, device=DEVICE)
    k, v, raw = torch.zeros(6, 2, 32), torch.zeros(6, 2, 32), torch.zeros(6, 24)
    table, slots = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    padding, requests = torch.full((6,), -1), torch.zeros(6, dtype=torch.int64)
    static = [x.to(DEVICE) for x in (k, v, raw, padding, requests, table, slots)]
    scales = (Scale(0.1).tensor(DEVICE), Scale(0.2).tensor(DEVICE))
    counters, flags = (
        torch.zeros(2, 2, dtype=torch.int64, device=DEVICE),
        torch.zeros(6, dtype=torch.bool, device=DEVICE),
    )
    out = (torch.empty(6, 24, device=DEVICE), torch.empty(6, dtype=torch.int64, device=DEVICE))

    def step() -> None:
        sides, (positions, requests) = (kv[..., :32], kv[..., 32:]), static[3:5]
        triton_cache.append_kv(*static[:2], *sides, positions, requests, static[5], scales, counters, flags)
        places = (positions, requests, static[5], static[6])
        triton_cache.append_index(pooled, ring, static[2], *places, lambda mean, first: mean, out=out)

    step()
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    assert not any(bool(x.any()) for x in (kv, pooled, ring, counters))
    truth: dict[tuple[int, int], torch.Tensor] = {}
    tables, owners = torch.tensor([[5, 2, 7, 1], [8, 3, 4, 6]], dtype=torch.int32), torch.tensor([3, 1])
    for first in (0, 3, 6, 9):
        at = [(n, first + i) for n in range(2) for i in range(3 if n == 0 else 2)] + [(0, -1)]
        values = [torch.randn(x.shape, generator=generator) for x in (k, v, raw)]
        requests, positions = (torch.tensor(part) for part in zip(*at, strict=True))
        for mine, new in zip(static, (*values, positions, requests, tables, owners), strict=True):
            mine.copy_(new)
        graph.replay()
        for row, (n, p) in enumerate(at[:-1]):
            truth[n, p] = values[2][row]
            page, token = int(tables[n, p // 8]), p % 8
            for side, scale, x in ((kv[..., :32], 0.1, values[0]), (kv[..., 32:], 0.2, values[1])):
                assert torch.equal(side[page, token].cpu(), codec.encode(x[row], Scale(scale)))
            assert torch.equal(ring[owners[n], p % 16].cpu(), values[2][row])
            if p % 4 == 3 and all((n, q) in truth for q in range(p - 3, p)):
                a, b, c, d = (truth[n, q] for q in range(p - 3, p + 1))
                assert torch.equal(pooled[page, token // 4].cpu(), ((a + b) + c + d) / 4)
    assert not kv[0].any() and not pooled[0].any() and not ring[0].any()
