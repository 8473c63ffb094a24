"""Selections against Python's own sort, with every kind of tie, and the order of a step's rows and chunks varied."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from tests.attention_cases import make_rows, selection_of

from page4 import select as select_module
from page4.cache.rows import Rows
from page4.errors import KernelError
from page4.kernels import reference, torch_select
from page4.plan import plan_rows
from page4.select import Selection, chunk_rows, extend, select, select_from_scores

pytestmark = pytest.mark.usefixtures("one_thread")

EVENS_AND_ODDS = [*range(0, 600, 2), *range(1, 424, 2)]


@pytest.fixture(params=["auto", "reference"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGE4_KERNELS", request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def best(scores: list[float], visible: int, top_k: int) -> list[int]:
    """Score descending, then id ascending; Python compares -0.0 and 0.0 as equal and sorts stably."""
    return sorted(sorted(range(visible), key=lambda block: -scores[block])[:top_k])


def ids_of(selection: Selection) -> list[list[int]]:
    """The ids of each row; what is behind `counts` must be -1."""
    rows = selection.block_ids.tolist()
    for row, count in zip(rows, selection.counts.tolist(), strict=True):
        assert all(block == -1 for block in row[count:])
    return [row[:count] for row, count in zip(rows, selection.counts.tolist(), strict=True)]


def chosen(scores: torch.Tensor, top_k: int = 512, visible: int | None = None) -> list[int]:
    count = scores.numel() if visible is None else visible
    return ids_of(select_from_scores(scores.view(1, -1), torch.tensor([count]), top_k))[0]


# ------------------------------------------------------------------------------------------------------------------ B01


def alternating() -> torch.Tensor:
    scores = torch.zeros(600)
    scores[::2] = 1.0
    return scores


def test_b01_all_equal_scores_take_the_lowest_ids() -> None:
    assert chosen(torch.zeros(600)) == list(range(512))


def test_b01_ties_at_the_cutoff_take_the_lowest_ids() -> None:
    assert chosen(alternating()) == sorted(EVENS_AND_ODDS)


def test_b01_negative_zero_is_zero(rng: random.Random) -> None:
    for _ in range(20):
        scores = alternating()
        scores[rng.sample(range(1, 600, 2), 150)] = -0.0
        assert chosen(scores) == sorted(EVENS_AND_ODDS)


def test_b01_threads_and_row_order_change_nothing(threads: None, rng: random.Random) -> None:
    """100 times: shuffled among other rows, other thread counts; the answer is the one worked out by hand."""
    hard = [torch.zeros(600), alternating(), alternating().where(torch.arange(600) % 4 > 0, -0.0)]
    right = [list(range(512)), sorted(EVENS_AND_ODDS)]
    right.append(best(hard[2].tolist(), 600, 512))
    other = torch.rand(5, 600, generator=torch.Generator().manual_seed(0))
    for repeat in range(100):
        torch.set_num_threads(1 + repeat % 4)
        order = rng.sample(range(8), 8)
        scores = torch.stack([*hard, *other])[order]
        found = ids_of(select_from_scores(scores, torch.full((8,), 600), 512))
        assert [found[order.index(i)] for i in range(3)] == right


@pytest.mark.parametrize("row", [0, 3])
def test_b01_a_nan_names_its_row(row: int) -> None:
    scores = torch.zeros(4, 600)
    scores[row, 599] = math.nan
    with pytest.raises(KernelError, match=f"index scores of row {row}: expected numbers, got NaN"):
        select_from_scores(scores, torch.full((4,), 600), 512)
    hidden = select_from_scores(scores, torch.full((4,), 599), 512)
    assert ids_of(hidden) == [list(range(512))] * 4


def test_b01_a_nan_beside_tied_scores_names_its_row() -> None:
    """A row of equal scores but for a NaN: ties are split only where every score is a number."""
    scores = torch.zeros(3, 90)
    scores[1, 40] = math.nan
    with pytest.raises(KernelError, match="index scores of row 1: expected numbers, got NaN"):
        select_from_scores(scores, torch.tensor([90, 90, 90]), 8)


@pytest.mark.parametrize("host", [True, False])
def test_b01_a_nan_in_a_step_names_the_row_of_the_step(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    monkeypatch.setattr(select_module, "WORKSPACE_BYTES", 4 * 30 * 2 * 3)  # three rows a chunk
    table = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]], dtype=torch.int32)
    rows = make_rows([(40, 2), (100, 20)], table, host=host)
    index_q = torch.ones(22, 2, 8)
    index_q[17, 1, 3] = math.nan
    with pytest.raises(KernelError, match="index scores of row 17:"):
        select(index_q, torch.ones(17, 4, 8), rows, 4)


# ---------------------------------------------------------------------------------------------------------- total order


@hypothesis.given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, 0.5, math.inf, 1e-45]), min_size=1, max_size=60),
    data=st.data(),
)
@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_total_order_with_many_ties(scores: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 70))
    visible = data.draw(st.integers(0, len(scores)))
    # What is not visible may hold anything.
    filled = [*scores[:visible], *[math.nan] * (len(scores) - visible)]
    assert chosen(torch.tensor(filled), top_k, visible) == best(scores, visible, top_k)


def test_rows_of_one_call_see_different_numbers_of_blocks(rng: random.Random) -> None:
    scores = [[rng.choice([0.0, -0.0, 1.0, 3.0]) for _ in range(90)] for _ in range(60)]
    visible = [rng.randint(0, 90) for _ in range(60)]
    found = select_from_scores(torch.tensor(scores), torch.tensor(visible), 17)
    assert ids_of(found) == [best(row, seen, 17) for row, seen in zip(scores, visible, strict=True)]


# ------------------------------------------------------------------------------------------------------------------ B03


def test_b03_blocks_are_taken_whole_and_the_tail_is_added() -> None:
    """2059 visible tokens, block b has score b: all blocks but 0 and 1, and the tail 2056..2058."""
    position = torch.tensor([2058])
    selection = select_from_scores(torch.arange(514.0).view(1, -1), torch.tensor([514]), 512)
    right = [*range(8, 2056), 2056, 2057, 2058]
    assert reference.expand_blocks(selection.block_ids, position) == [right]
    table = torch.arange(1, 131, dtype=torch.int32).view(1, -1)
    plan = plan_rows(selection, Rows(position, torch.tensor([0]), table), 16)
    tokens = (plan.table[0].unsqueeze(1) * 4 + torch.arange(4)).flatten()[: int(plan.lengths[0])]
    assert (tokens - 16).tolist() == right  # page of logical page n is n + 1
    assert len(right) == 2051


# ------------------------------------------------------------------------------------------------------ a step's scores


def integer_step(
    seed: int, spans: list[tuple[int, int]], *, host: bool = True, padding: bool = False
) -> tuple[torch.Tensor, torch.Tensor, Rows, list[torch.Tensor]]:
    """Small integers, so that every order of summation gives the same scores and many of them tie."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width = -(-max(first + count for first, count in spans) // 16) + 1
    pages = list(range(1, len(spans) * width + 1))
    rng.shuffle(pages)
    table = torch.tensor(pages, dtype=torch.int32).view(len(spans), width)
    pooled = torch.full((len(pages) + 1, 4, 16), math.nan)
    keys = []
    for request, (first, count) in enumerate(spans):
        own = torch.randint(-2, 3, ((first + count) // 4, 16), generator=generator).float()
        keys.append(own)
        for block, key in enumerate(own):
            pooled[int(table[request, block // 4]), block % 4] = key
    rows = make_rows(spans, table, host=host, padding=padding)
    index_q = torch.randint(-2, 3, (rows.num_rows, 3, 16), generator=generator).float()
    return index_q, pooled, rows, keys


def expected_ids(index_q: torch.Tensor, rows: Rows, keys: list[torch.Tensor], top_k: int) -> list[list[int]]:
    found = []
    for row, position in enumerate(rows.positions.tolist()):
        visible = (position + 1) // 4
        own = keys[int(rows.request_of_row[row])].tolist()
        scores = [
            sum(max(0.0, sum(a * b for a, b in zip(q, key, strict=True))) for q in index_q[row].tolist())
            for key in own[:visible]
        ]
        found.append(best(scores, visible, top_k))
    return found


SPANS = [(120, 5), (0, 3), (61, 5), (250, 30)]


@pytest.mark.parametrize("host,padding", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("top_k", [1, 8, 16, 70, 1000])
def test_a_step_selects_what_the_definition_says(seed: int, host: bool, padding: bool, top_k: int) -> None:
    index_q, pooled, rows, keys = integer_step(seed, SPANS, host=host, padding=padding)
    selection = select(index_q, pooled, rows, top_k)
    assert ids_of(selection) == expected_ids(index_q, rows, keys, top_k)


def test_unwritten_and_foreign_keys_are_never_scored(seed: int) -> None:
    """NaN keys behind each request's last block: `integer_step` leaves them, and only a visible NaN is refused."""
    index_q, pooled, rows, keys = integer_step(seed, [(250, 30)], host=False)
    assert pooled.isnan().any()
    assert ids_of(select(index_q, pooled, rows, 9)) == expected_ids(index_q, rows, keys, 9)


def test_rows_in_any_order_without_host_fields(seed: int, rng: random.Random) -> None:
    index_q, pooled, rows, keys = integer_step(seed, SPANS, host=False)
    order = rng.sample(range(rows.num_rows), rows.num_rows)
    mixed = Rows(rows.positions[order], rows.request_of_row[order], rows.block_table)
    found = ids_of(select(index_q[order], pooled, mixed, 8))
    assert found == [expected_ids(index_q, rows, keys, 8)[row] for row in order]


@pytest.mark.parametrize("length", [63, 64, 67, 68, 71, 72])
def test_nothing_is_scored_while_everything_fits(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    calls = []
    for module in (torch_select, reference):
        real = module.index_scores
        monkeypatch.setattr(module, "index_scores", lambda *args, real=real: calls.append(1) or real(*args))
    rows = make_rows([(0, length)], torch.arange(1, 6, dtype=torch.int32).view(1, -1))
    selection = select(torch.ones(length, 1, 8), torch.ones(6, 4, 8), rows, 16)
    assert bool(calls) == (length >= 68)
    assert ids_of(selection)[-1] == list(range(min(16, length // 4)))


# ------------------------------------------------------------------------------------------------------------------ B48


def test_b48_chunks_of_rows_fit_the_budget() -> None:
    chunks = chunk_rows(8192, 65_536, 256 << 20)
    assert max(len(chunk) for chunk in chunks) == 1024
    assert [row for chunk in chunks for row in chunk] == list(range(8192))
    assert all(4 * 65_536 * len(chunk) <= 256 << 20 for chunk in chunks)
    assert chunk_rows(5, 1 << 40, 256 << 20) == [range(i, i + 1) for i in range(5)]
    assert chunk_rows(0, 100, 1) == []


@pytest.mark.parametrize("host", [True, False])
def test_b48_any_chunking_gives_the_same_selection(monkeypatch: pytest.MonkeyPatch, seed: int, host: bool) -> None:
    index_q, pooled, rows, keys = integer_step(seed, SPANS, host=host)
    right = expected_ids(index_q, rows, keys, 9)
    for budget in (1, 5_000, 20_000, 1 << 30):
        monkeypatch.setattr(select_module, "WORKSPACE_BYTES", budget)
        assert ids_of(select(index_q, pooled, rows, 9)) == right


def test_b48_the_workspace_is_constant_over_growing_chunks(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """64 prefill chunks of 64 rows: scores of all heads never take more than the budget, whatever the context."""
    budget = 64 << 10
    monkeypatch.setattr(select_module, "WORKSPACE_BYTES", budget)
    sizes: list[int] = []
    module = reference if kernels == "reference" else torch_select
    real = module.index_scores

    def spy(index_q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        sizes.append(4 * index_q[..., 0].numel() * keys.shape[-2])
        return real(index_q, keys)

    monkeypatch.setattr(module, "index_scores", spy)
    table = torch.arange(1, 257, dtype=torch.int32).view(1, -1)
    pooled = torch.ones(257, 4, 4)
    for chunk in range(64):
        rows = make_rows([(64 * chunk, 64)], table)
        selection = select(torch.ones(64, 2, 4), pooled, rows, 8)
        assert ids_of(selection)[-1] == list(range(min(8, 16 * chunk + 16)))
    assert max(sizes) <= budget
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes)


# --------------------------------------------------------------------------------------------------- reuse and refusals


@hypothesis.given(first=st.integers(0, 70), later=st.integers(0, 8), top_k=st.integers(1, 12), seed=st.integers(0, 99))
@hypothesis.settings(max_examples=80, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_extend_adds_what_was_completed_since(first: int, later: int, top_k: int, seed: int) -> None:
    visible = (first + 1) // 4
    old = sorted(random.Random(seed).sample(range(visible), min(top_k, visible)))
    ids, start, end = [old, old], torch.tensor([first, first]), torch.tensor([first, first + later])
    extended = extend(selection_of(ids, top_k), start, end)
    assert ids_of(extended) == [old, old + list(range(visible, (first + later + 1) // 4))]


def test_take_compacts_rows() -> None:
    selection = selection_of([[1], [2, 3], [4]], 2).take(torch.tensor([2, 0]))
    assert ids_of(selection) == [[4], [1]]


def test_ids_from_elsewhere_become_canonical() -> None:
    mine = selection_of([[7, 3, 3, -4, 900, 2], [0, 1]], 6).as_canonical(torch.tensor([31, 6]))
    assert mine.canonical
    assert ids_of(mine) == [[2, 3, 7], [0]]


def test_refuses_what_does_not_fit() -> None:
    rows = make_rows([(0, 3)], torch.ones(1, 1, dtype=torch.int32))
    with pytest.raises(KernelError, match=r"index_q: expected \[3, I, 8\], got \[2, 1, 8\]"):
        select(torch.ones(2, 1, 8), torch.ones(2, 4, 8), rows, 4)
    with pytest.raises(KernelError, match="top_k: expected 1 or more blocks, got 0"):
        select(torch.ones(3, 1, 8), torch.ones(2, 4, 8), rows, 0)
