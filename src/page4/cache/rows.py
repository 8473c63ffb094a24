"""Where the rows of a step live: which request, which position, which pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from page4.errors import CacheError, message

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """R rows from N requests.

    positions: [R] int64, place of the row's token in its request, -1 for a padding row (which reads and writes
    nothing); request_of_row: [R] int64 in 0..N-1; block_table: [N, W] int32, physical page of each logical page, padded
    with the null page 0. `row_starts` (N + 1 offsets) and `first_positions` (N) say the same on the host when every
    request's rows are contiguous with consecutive positions (so none is padding); operations are faster with them and
    equal without, where rows may lie in any order. In both a request's rows of a step have no gap between them.
    Raises `CacheError` when shapes or dtypes do not fit.
    """

    positions: Tensor
    request_of_row: Tensor
    block_table: Tensor
    row_starts: tuple[int, ...] | None = None
    first_positions: tuple[int, ...] | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returned the first time: the layers of a step share what depends on its rows alone."""
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def __post_init__(self) -> None:
        if self.positions.ndim != 1 or self.positions.dtype != torch.int64:
            self._refuse("positions", "[R] int64", self.positions)
        if self.request_of_row.shape != self.positions.shape or self.request_of_row.dtype != torch.int64:
            self._refuse("request_of_row", f"[{self.num_rows}] int64", self.request_of_row)
        if self.block_table.ndim != 2 or self.block_table.dtype != torch.int32:
            self._refuse("block_table", "[N, W] int32", self.block_table)
        if (self.row_starts is None) != (self.first_positions is None):
            got = f"row_starts {self.row_starts}, first_positions {self.first_positions}"
            raise CacheError(message("host fields", allowed="both or none", got=got, do="pass both"))
        if self.row_starts is not None and self.first_positions is not None:
            self._check_host_fields(self.row_starts, self.first_positions)

    def _check_host_fields(self, row_starts: tuple[int, ...], first_positions: tuple[int, ...]) -> None:
        ends = (row_starts[0], row_starts[-1]) if row_starts else None
        ascending = all(start <= end for start, end in itertools.pairwise(row_starts))
        if len(row_starts) != self.num_requests + 1 or ends != (0, self.num_rows) or not ascending:
            allowed = f"{self.num_requests + 1} ascending offsets from 0 to {self.num_rows}"
            raise CacheError(message("row_starts", allowed=allowed, got=row_starts, do="rebuild the step"))
        if len(first_positions) != self.num_requests or any(first < 0 for first in first_positions):
            allowed = f"{self.num_requests} positions, 0 or more"
            do = "leave the host fields out when a step has padding rows"
            raise CacheError(message("first_positions", allowed=allowed, got=first_positions, do=do))

    @staticmethod
    def _refuse(what: str, allowed: str, got: Tensor) -> None:
        raise CacheError(message(what, allowed=allowed, got=f"{list(got.shape)} {got.dtype}", do="rebuild the step"))

    @property
    def num_rows(self) -> int:
        """R."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """N."""
        return self.block_table.shape[0]

    def lengths(self) -> tuple[int, ...] | None:
        """Rows of each request, from the host fields."""
        if self.row_starts is None:
            return None
        return tuple(end - start for start, end in itertools.pairwise(self.row_starts))

    def check_within(self, page_tokens: int) -> None:
        """Raises `CacheError` when a position lies past the block table; for code that reads the table by address."""
        self.once(("within", page_tokens), lambda: self._check_within(page_tokens))

    def _check_within(self, page_tokens: int) -> None:
        last, tokens = int(self.positions.max()) if self.num_rows else -1, self.block_table.shape[1] * page_tokens
        if last >= tokens:
            allowed = f"below {tokens}, {self.block_table.shape[1]} pages of {page_tokens} tokens"
            raise CacheError(message("positions", allowed=allowed, got=last, do="pass the pages of every position"))

    def pages_of(self, positions: Tensor, requests: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
        """Physical page and offset in it of tokens; a position below 0 gives the null page.

        positions, requests: [...] int64 -> ([...] int64 page, [...] int64 offset). A position past the table is a
        caller's error and raises IndexError from torch.
        """
        safe = positions.clamp_min(0)
        page = self.block_table[requests, safe // page_tokens].long()
        return page * (positions >= 0), safe % page_tokens
