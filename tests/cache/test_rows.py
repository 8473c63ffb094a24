"""What a step's rows may look like, and where their tokens lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.helpers import make_rows

from page4.cache.rows import Rows
from page4.errors import CacheError


def fields(**changes: Any) -> dict[str, Any]:
    """Rows of two requests, 2 and 1 rows, that are fine."""
    return {
        "positions": torch.tensor([4, 5, 9]),
        "request_of_row": torch.tensor([0, 0, 1]),
        "block_table": torch.tensor([[3, 0], [7, 2]], dtype=torch.int32),
        "row_starts": (0, 2, 3),
        "first_positions": (4, 9),
        **changes,
    }


def test_a_step_says_what_it_holds() -> None:
    rows = Rows(**fields())
    assert (rows.num_rows, rows.num_requests, rows.lengths()) == (3, 2, (2, 1))
    assert Rows(**fields(row_starts=None, first_positions=None)).lengths() is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"positions": torch.tensor([[4, 5, 9]])}, r"positions: expected \[R\] int64, got \[1, 3\]"),
        ({"positions": torch.tensor([4, 5, 9], dtype=torch.int32)}, "positions: .* torch.int32"),
        ({"request_of_row": torch.tensor([0, 0])}, r"request_of_row: expected \[3\] int64, got \[2\]"),
        ({"request_of_row": torch.tensor([0, 0, 1], dtype=torch.int32)}, "request_of_row: .* torch.int32"),
        ({"block_table": torch.tensor([3, 7], dtype=torch.int32)}, r"block_table: expected \[N, W\] int32"),
        ({"block_table": torch.tensor([[3], [7]])}, "block_table: .* torch.int64"),
        ({"first_positions": None}, "host fields: expected both or none"),
        ({"row_starts": None}, "host fields: expected both or none"),
        ({"row_starts": (0, 2, 4)}, "row_starts: expected 3 ascending offsets from 0 to 3"),
        ({"row_starts": (1, 2, 3)}, "row_starts"),
        ({"row_starts": (0, 4, 3)}, "row_starts"),
        ({"row_starts": (0, 3), "first_positions": (4,)}, "row_starts"),
        ({"row_starts": ()}, "row_starts"),
        ({"first_positions": (4,)}, "first_positions: expected 2 positions"),
        ({"first_positions": (4, -1)}, "first_positions: .* leave the host fields out when a step has padding rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CacheError, match=what):
        Rows(**fields(**changes))


def test_pages_of_tokens() -> None:
    rows = make_rows([(0, 1), (0, 1)], [[5, 9, 2], [8, 1]])
    positions = torch.tensor([[0, 15, 16], [31, 47, -1]])
    page, offset = rows.pages_of(positions, torch.zeros_like(positions), 16)
    assert page.tolist() == [[5, 5, 9], [9, 2, 0]], "a padding row lies on the null page"
    assert offset.tolist() == [[0, 15, 0], [15, 15, 0]]
    page, offset = rows.pages_of(torch.tensor([3, 7, 8]), torch.tensor([1, 1, 0]), 4)
    assert (page.tolist(), offset.tolist()) == ([8, 1, 2], [3, 3, 0])
    assert page.dtype == offset.dtype == torch.int64


def test_a_position_past_the_table_is_no_page() -> None:
    with pytest.raises(IndexError):
        make_rows([(0, 1)], [[5]]).pages_of(torch.tensor([16]), torch.tensor([0]), 16)


@pytest.mark.parametrize(
    ("page", "stride", "offset"),
    [(2066, 1_039_680, 2_147_978_880), (1_048_577, 2048, 2_147_485_696), (131_072, 16_384, 2_147_483_648)],
)
def test_page_times_stride_is_64_bit(page: int, stride: int, offset: int) -> None:
    rows = make_rows([(0, 1)], [[page]])
    assert rows.block_table.dtype == torch.int32
    found, _ = rows.pages_of(rows.positions, rows.request_of_row, 16)
    assert (found * stride).tolist() == [offset]


def test_what_depends_on_rows_alone_is_made_once() -> None:
    rows, other = make_rows([(0, 1)], [[5]]), make_rows([(0, 1)], [[5]])
    made: list[int] = []
    for _ in range(3):
        assert rows.once("key", lambda: [*made, made.append(1)]) == [None]
    assert rows.once("another", lambda: 7) == 7
    assert other.once("key", lambda: 9) == 9
