"""Lengths keep their unit; the figures are those of public reports where a unit was mistaken for another (B44)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from page4.cache import units
from page4.cache.units import Blocks, Tokens, TokenUnit
from page4.errors import CacheError


def test_columns_of_a_resumed_request() -> None:
    state, kernel = TokenUnit("state block", 2176), TokenUnit("kernel block", 128)
    computed = Tokens(100_096)
    assert state.last_column(computed) == 45
    assert kernel.last_column(computed) == 781
    assert kernel.column(100_096) == 782, "the next token opens a column: asking for it is another question"
    assert (state.covering(computed), state.complete(computed)) == (46, 46)
    assert state.covering(Tokens(100_097)) == 47 and state.complete(Tokens(100_095)) == 45


def test_a_scheduler_block_expands_to_kernel_blocks() -> None:
    ratio = TokenUnit("scheduler block", 2176).ratio_to(TokenUnit("kernel block", 128))
    assert ratio.fine == 17
    assert list(ratio.expand(3)) == list(range(51, 68))
    assert [ratio.coarse_of(fine) for fine in (50, 51, 67, 68)] == [2, 3, 3, 4]


def test_sizes_that_do_not_divide_are_refused_at_start() -> None:
    with pytest.raises(CacheError, match="kernel block in scheduler block: expected a divisor of 800, got 256"):
        TokenUnit("scheduler block", 800).ratio_to(TokenUnit("kernel block", 256))
    with pytest.raises(CacheError, match="kernel block in scheduler block"):
        TokenUnit("scheduler block", 128).ratio_to(TokenUnit("kernel block", 2176))


@pytest.mark.parametrize(("tokens", "needed"), [(3996, 999), (4000, 1000), (4001, 1000), (4003, 1000)])
def test_a_gather_that_fits_its_budget(tokens: int, needed: int) -> None:
    assert units.check_gather(Tokens(tokens), Blocks(1000)) == needed


@pytest.mark.parametrize("tokens", [4004, 4005, 16_000])
def test_a_gather_over_its_budget_is_refused_in_both_units(tokens: int) -> None:
    with pytest.raises(CacheError, match=rf"at most 1000 blocks \(4000 tokens\), got {tokens // 4} blocks"):
        units.check_gather(Tokens(tokens), Blocks(1000))


def test_or_split_so_that_no_block_is_skipped() -> None:
    assert units.split_by_budget(Blocks(1001), Blocks(1000)) == [range(1000), range(1000, 1001)]


@given(blocks=st.integers(0, 500), budget=st.integers(1, 60))
def test_a_split_covers_every_block_once(blocks: int, budget: int) -> None:
    runs = units.split_by_budget(Blocks(blocks), Blocks(budget))
    assert [block for run in runs for block in run] == list(range(blocks))
    assert all(1 <= len(run) <= budget for run in runs)


@given(tokens=st.integers(0, 300), size=st.integers(1, 80))
def test_units_against_counting(tokens: int, size: int) -> None:
    unit = TokenUnit("unit", size)
    columns = [position // size for position in range(tokens)]
    assert unit.covering(Tokens(tokens)) == len(set(columns))
    assert unit.complete(Tokens(tokens)) == sum(columns.count(column) == size for column in set(columns))
    if tokens:
        assert unit.last_column(Tokens(tokens)) == columns[-1]
        assert unit.column(tokens - 1) * size + unit.offset(tokens - 1) == tokens - 1


@given(tokens=st.integers(0, 1000))
def test_blocks_and_tail_make_the_whole(tokens: int) -> None:
    complete = units.complete_blocks(Tokens(tokens))
    tail = units.tail_tokens(Tokens(tokens))
    assert units.tokens_of_blocks(complete) + tail == tokens and 0 <= tail < 4
    assert units.covering_blocks(Tokens(tokens)) == complete + (tail > 0)


def test_pages_of_tokens() -> None:
    assert [units.pages_of(Tokens(n), 16) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("page_tokens", [1, 2, 6, 15, 18])
def test_a_page_is_whole_blocks(page_tokens: int) -> None:
    with pytest.raises(CacheError, match=f"block in page: expected a divisor of {page_tokens}, got 4"):
        units.page_unit(page_tokens)


@pytest.mark.parametrize("page_tokens", [0, -16])
def test_a_page_has_a_size(page_tokens: int) -> None:
    with pytest.raises(CacheError, match="page: expected 1 or more tokens"):
        units.page_unit(page_tokens)


def test_placeholders_are_no_lengths() -> None:
    unit = TokenUnit("page", 16)
    for call in (
        lambda: units.complete_blocks(Tokens(-1)),
        lambda: units.covering_blocks(Tokens(-1)),
        lambda: units.tail_tokens(Tokens(-1)),
        lambda: units.tokens_of_blocks(Blocks(-1)),
        lambda: units.split_by_budget(Blocks(-1), Blocks(4)),
        lambda: units.split_by_budget(Blocks(4), Blocks(0)),
        lambda: unit.column(-1),
        lambda: unit.offset(-1),
        lambda: unit.covering(Tokens(-1)),
        lambda: unit.complete(Tokens(-1)),
        lambda: unit.last_column(Tokens(0)),
        lambda: units.UnitRatio(17).expand(-1),
        lambda: units.UnitRatio(17).coarse_of(-1),
    ):
        with pytest.raises(CacheError):
            call()
