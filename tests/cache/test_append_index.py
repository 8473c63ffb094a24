"""Raw and pooled index keys of a step against the mean over a request's whole history, block by block."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.helpers import geometry, make_rows
from tests.conftest import poison_byte
from torch import Tensor

from page4.cache.append import append_index, append_kv
from page4.cache.layout import CacheLayout
from page4.cache.places import index_places
from page4.cache.rows import Rows
from page4.cache.storage import Arena
from page4.errors import CacheError

E, S, LAYER = 24, 8, 3
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def norm_and_rope(mean: Tensor, first: Tensor) -> Tensor:
    """A stand-in that depends on both arguments, exact on the small integers of the tests."""
    assert mean.shape == (len(first), E) and first.dtype == torch.int64
    return mean * 2 + (first % 64).unsqueeze(1).to(mean.dtype)


def block_keys(history: Tensor) -> Tensor:
    """The pooled key of each complete block of a history of raw keys [L, E]: the sum of four rows, a quarter of it."""
    whole = history[: len(history) - len(history) % 4].float()
    mean = (whole[0::4] + whole[1::4] + whole[2::4] + whole[3::4]) / 4
    first = torch.arange(0, len(whole), 4) % 64
    return mean.to(history.dtype) * 2 + first.unsqueeze(1).to(history.dtype)


@dataclass
class Request:
    """What a request has committed, [L, E] raw keys, and where it lives."""

    pages: list[int]
    slot: int
    history: Tensor


class Lane:
    """An arena of several requests with shuffled pages and slots; every key that a row could see is checked."""

    def __init__(self, rng: random.Random, requests: int = 1, pages: int = 10, dtype: torch.dtype = FP32) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.dtype = dtype
        layout = CacheLayout.of(geometry(), dtype=dtype, kv_dtype=FP32, page_tokens=S, with_draft=True)
        slots = requests + 2
        self.arena = Arena(layout, slots * layout.pages_per_state + pages * requests, "cpu", poison_byte())
        # Pages from beyond the states that are in use, in any order; slots in any order.
        free = list(range(slots * layout.pages_per_state, self.arena.num_pages))
        rng.shuffle(free)
        order = rng.sample(range(1, slots), requests)
        empty = torch.zeros(0, E, dtype=dtype)
        self.requests = [Request(free[n::requests], order[n], empty) for n in range(requests)]
        self.pooled, self.ring = self.arena.pooled(LAYER), self.arena.ring(LAYER)
        self.kv = self.arena.layer_kv(LAYER)

    def draw(self, rows: int) -> Tensor:
        """[rows, E] raw keys of integers: their sums are exact in fp32, and too long for 16 bits."""
        return torch.randint(-250, 251, (rows, E), generator=self.generator).to(self.dtype)

    def step(self, windows: dict[int, Tensor], *, host: bool = True, padding: int = 0) -> None:
        """Write each window of rows after its request's history, then check all that its rows can see."""
        names = list(windows)
        spans = [(len(self.requests[n].history), len(windows[n])) for n in names]
        raw = torch.cat([*windows.values(), self.draw(padding)])
        order = None
        if not host:
            order = list(range(len(raw)))
            self.rng.shuffle(order)
            raw = raw[order]
        rows = make_rows(spans, [self.requests[n].pages for n in names], host=host, padding=padding, order=order)
        slots = torch.tensor([self.requests[n].slot for n in names])
        k = raw.float()[:, :1].expand(-1, 64).reshape(-1, 2, 32)
        append_kv(self.kv, k, -k, rows)
        append_index(self.pooled, self.ring, raw, rows, slots, norm_and_rope)
        for n in names:
            self.check(n, torch.cat((self.requests[n].history, windows[n])))

    def check(self, n: int, sequence: Tensor) -> None:
        """Every block that the newest row of the sequence can see, and every token's K and V."""
        pages = self.requests[n].pages
        want = block_keys(sequence)
        assert torch.equal(self.pooled[pages].flatten(0, 1)[: len(want)], want), f"pooled of {len(sequence)} tokens"
        token = sequence[:, :1].float()
        assert self.kv.k[pages].flatten(0, 1)[: len(token)].flatten(1).eq(token).all()
        assert self.kv.v[pages].flatten(0, 1)[: len(token)].flatten(1).eq(-token).all()

    def commit(self, n: int, window: Tensor, accepted: int) -> None:
        """Keep the first rows of a window; the rest was rejected, and its bytes stay where they are."""
        self.requests[n].history = torch.cat((self.requests[n].history, window[:accepted]))

    def prefill(self, n: int, chunks: list[int], *, host: bool = True) -> None:
        """Chunks of a prompt, all of them kept."""
        for length in chunks:
            window = self.draw(length)
            self.step({n: window}, host=host)
            self.commit(n, window, length)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize(
    "chunks",
    [
        [80],
        [1] * 37,
        [16, 16, 16],
        [17, 15, 33],
        [3, 5, 2, 6],
        [4] * 9,
        [19, 1, 1, 1, 1, 30],
        [2, 40, 1, 3, 7],
        [15, 1, 16, 1, 17],
    ],
    ids=str,
)
def test_any_chunks_pool_the_mean_over_the_history(
    chunks: list[int], host: bool, dtype: torch.dtype, rng: random.Random
) -> None:
    lane = Lane(rng, dtype=dtype)
    lane.prefill(0, chunks, host=host)
    history = lane.requests[0].history
    newest = {position % 16: raw for position, raw in enumerate(history)}
    for where, raw in newest.items():
        assert torch.equal(lane.ring[lane.requests[0].slot, where], raw), "the ring keeps the newest 16"


@settings(max_examples=60)
@given(data=st.data(), chunks=st.lists(st.integers(1, 24), min_size=1, max_size=8), host=st.booleans())
def test_requests_of_a_step_do_not_mix(data: st.DataObject, chunks: list[int], host: bool) -> None:
    lane = Lane(random.Random(data.draw(st.integers(0, 1000))), requests=3, pages=24)
    for length in chunks:
        names = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        windows = {n: lane.draw(1 + (length * (n + 1) + n) % 20) for n in names}
        lane.step(windows, host=host, padding=0 if host else data.draw(st.integers(0, 3)))
        for n, window in windows.items():
            lane.commit(n, window, len(window))
    for n, request in enumerate(lane.requests):
        lane.check(n, request.history)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("k", range(8))
def test_rejected_drafts_are_overwritten_before_a_row_can_see_them(k: int, host: bool, rng: random.Random) -> None:
    """Windows of 1 + k rows at every offset of the ring, every number of accepted drafts, then two windows more.

    What is rejected stays in K/V, in the ring and in the pooled keys. Each later window starts at the first rejected
    position, so by the time that a row stands at a position, everything up to there has been written again.
    """
    lane = Lane(rng, pages=6)
    for start in range(1, 17):
        for accepted in range(k + 1):
            # A new request on the pages and the slot of the last one, with all that it left there.
            lane.requests[0].history = lane.draw(0)
            lane.prefill(0, [start], host=host)
            for kept in (accepted, 0, k, accepted):
                window = lane.draw(1 + k)
                lane.step({0: window}, host=host)
                lane.commit(0, window, 1 + kept)


@settings(max_examples=40)
@given(data=st.data(), host=st.booleans())
def test_windows_of_many_requests_with_any_acceptance(data: st.DataObject, host: bool) -> None:
    lane = Lane(random.Random(data.draw(st.integers(0, 1000))), requests=3, pages=16)
    for _ in range(data.draw(st.integers(1, 8))):
        windows = {
            n: lane.draw(data.draw(st.integers(1, 8)))
            for n in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        }
        lane.step(windows, host=host)
        for n, window in windows.items():
            lane.commit(n, window, data.draw(st.integers(1, len(window))))


def test_pages_with_stale_index_keys_are_written_again(rng: random.Random) -> None:
    """A second owner of pages and slot sees nothing of the first (B05)."""
    lane = Lane(rng, pages=20)
    lane.prefill(0, [150])
    lane.requests[0].history = lane.draw(0)
    lane.prefill(0, [5, 1, 1, 1, 60, 32])


def test_only_the_blocks_and_the_ring_places_of_the_step_are_written(rng: random.Random) -> None:
    lane = Lane(rng, pages=8)
    request = lane.requests[0]
    lane.prefill(0, [6])
    before = lane.arena.bytes.clone()
    raw = lane.draw(7)
    rows = make_rows([(6, 7)], [request.pages])
    append_index(lane.pooled, lane.ring, raw, rows, torch.tensor([request.slot]), norm_and_rope)
    layout, changed = lane.arena.layout, torch.zeros_like(before, dtype=torch.bool)
    for first in (4, 8):  # positions 6..12 complete blocks 1 and 2
        at = request.pages[first // S] * layout.page_bytes + layout.pooled[LAYER].offset + first % S // 4 * E * 4
        changed[at : at + E * 4] = True
    for position in range(6, 13):
        at = request.slot * layout.slot_bytes + layout.ring[LAYER].offset + position * E * 4
        changed[at : at + E * 4] = True
    assert torch.equal(before[~changed], lane.arena.bytes[~changed])


def test_random_keys_do_not_depend_on_how_the_history_was_cut(rng: random.Random, generator: torch.Generator) -> None:
    raw = torch.randn(61, E, generator=generator)
    exact = raw[:60].double().view(15, 4, E).mean(1)
    seen = []
    for chunks in ([61], [1] * 61, [7] * 8 + [5], [30, 31]):
        lane = Lane(rng, pages=8)
        request, at = lane.requests[0], 0
        for length in chunks:
            rows = make_rows([(at, length)], [request.pages])
            slots = torch.tensor([request.slot])
            append_index(lane.pooled, lane.ring, raw[at : at + length], rows, slots, lambda mean, _: mean)
            at += length
        seen.append(lane.pooled[request.pages].flatten(0, 1)[:15].clone())
        assert (seen[-1].double() - exact).abs().max() < 2e-7
    assert all(torch.equal(other, seen[0]) for other in seen)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("step", ["padding", "zeros", "zeros, host", "slot 0, host"])
def test_page_0_never_changes(step: str, byte: int, rng: random.Random) -> None:
    """Padding rows, a warm-up whose table and slots are all zeros: not a byte of the arena changes (B08)."""
    lane = Lane(rng, requests=2)
    lane.arena.bytes.fill_(byte)
    if step == "padding":
        rows = make_rows([(0, 0), (0, 0)], [[3], [5]], host=False, padding=9)
    else:
        rows = make_rows([(0, 5), (2, 4)], [[0], [0]], host=step.endswith("host"))
    slots = torch.tensor([2, 1] if step == "padding" else [0, 0])
    raw = torch.full((9, E), float("nan"))
    append_index(lane.pooled, lane.ring, raw, rows, slots, norm_and_rope)
    assert lane.arena.bytes.unique().tolist() == [byte]


@pytest.mark.parametrize("host", [True, False])
def test_one_request_on_null_pages_does_not_stop_the_others(host: bool, rng: random.Random) -> None:
    lane = Lane(rng, requests=2)
    request, window = lane.requests[0], lane.draw(9)
    rows = make_rows([(0, 4), (0, 9)], [[0], request.pages], host=host)
    before = lane.arena.bytes[: lane.arena.layout.slot_bytes].clone()
    raw = torch.cat((lane.draw(4), window))
    append_index(lane.pooled, lane.ring, raw, rows, torch.tensor([0, request.slot]), norm_and_rope)
    assert torch.equal(before, lane.arena.bytes[: lane.arena.layout.slot_bytes])
    for block, want in enumerate(block_keys(window)):
        assert torch.equal(lane.pooled[request.pages[4 * block // S], 4 * block % S // 4], want)
    assert torch.equal(lane.ring[request.slot, :9], window)


def test_layers_share_a_plan_but_not_their_slots(rng: random.Random) -> None:
    """The same rows with other slots (another arena, say) go to those slots."""
    lane = Lane(rng, requests=2)
    raw = lane.draw(6)
    rows = make_rows([(0, 6)], [lane.requests[0].pages])
    for slot in (1, 2):
        append_index(lane.pooled, lane.ring, raw, rows, torch.tensor([slot]), norm_and_rope)
        assert torch.equal(lane.ring[slot, :6], raw)


def test_shapes_that_do_not_fit_are_refused(rng: random.Random) -> None:
    lane = Lane(rng)
    rows: Rows = make_rows([(0, 6)], [lane.requests[0].pages])
    with pytest.raises(CacheError, match=r"raw index keys: expected \[6, 24\], got \[5, 24\]"):
        append_index(lane.pooled, lane.ring, torch.zeros(5, E), rows, torch.tensor([1]), norm_and_rope)
    with pytest.raises(CacheError, match=r"raw index keys: expected \[6, 24\], got \[6, 12\]"):
        append_index(lane.pooled, lane.ring, torch.zeros(6, E // 2), rows, torch.tensor([1]), norm_and_rope)
    with pytest.raises(CacheError, match=r"state slots: expected \[1\], got \[2\]"):
        append_index(lane.pooled, lane.ring, torch.zeros(6, E), rows, torch.tensor([1, 2]), norm_and_rope)


@pytest.mark.parametrize("host", [True, False])
def test_no_two_rows_share_a_place(host: bool) -> None:
    """Which of two writes to one place wins is up to the device, so the ring is given the newest 16 rows only."""
    rows = make_rows([(5, 40), (0, 3), (14, 17)], [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11]], host=host)
    places = index_places(rows, torch.tensor([3, 1, 2]), S)
    kept = slice(None) if places.real is None else places.real
    ring = torch.stack((places.slots, places.ring_places), 1)[kept].tolist()
    assert sorted(map(tuple, ring)) == sorted(
        [(3, p % 16) for p in range(29, 45)] + [(1, p) for p in range(3)] + [(2, p % 16) for p in range(15, 31)]
    )
    assert places.blocks is not None
    kept = slice(None) if places.blocks.real is None else places.blocks.real
    pooled = torch.stack((places.blocks.page, places.blocks.place), 1)[kept].tolist()
    # Positions 5..44 complete blocks 1..10, 0..2 none, 14..30 blocks 3..6.
    want = [(1 + b // 2, b % 2) for b in range(1, 11)] + [(8 + b // 2, b % 2) for b in range(3, 7)]
    assert sorted(map(tuple, pooled)) == sorted(want)
