"""The rows of one step: tokens of many requests, flattened without padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from page4.cache.rows import Rows
from page4.geometry import Geometry
from page4.model.groups import Group, make_groups


@dataclass(frozen=True)
class RowSpan:
    """The rows of one request in a step: consecutive tokens from `first_position` on.

    `pages` are the request's physical pages in logical order; `context` are up to ngram_size - 1 tokens before the
    first row, oldest first (fewer at the start of the request, where eos stands in for the rest).
    """

    token_ids: list[int]
    first_position: int
    pages: list[int]
    state_slot: int
    context: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Suffix:
    """The newest rows of each request of a step: index [M] int64 into the step's rows, and where those rows live."""

    index: Tensor
    rows: Rows

    def inside(self, span: slice) -> Tensor:
        """The rows that lie in `span`, counted from its beginning."""
        there = (self.index >= span.start) & (self.index < span.stop)
        return self.index.masked_select(there).sub_(span.start)


@dataclass(frozen=True)
class Segment:
    """A run of a step's rows: span into them, where they live, and the state slots of their requests [n] int64."""

    span: slice
    rows: Rows
    state_slots: Tensor


# Streams and a sparse layer's queries are several times as wide as a layer's input: longer runs cost memory and gain
# no speed.
SEGMENT_ROWS = 512


def row_spans(rows: int) -> list[slice]:
    """The rows of a step in runs of at most SEGMENT_ROWS."""
    return [slice(begin, min(begin + SEGMENT_ROWS, rows)) for begin in range(0, rows, SEGMENT_ROWS)]


@dataclass(frozen=True)
class StepBatch:
    """token_ids: [R] int64, state_slots: [N] int64, ngram_context: [N, ngram_size - 1] int64 (eos before the start).

    `row_starts` (N + 1 offsets into the rows) and `slots` repeat on the host what the tensors say, so that no step
    waits for the device to learn its own shape.
    """

    token_ids: Tensor
    rows: Rows
    state_slots: Tensor
    ngram_context: Tensor
    row_starts: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.row_starts[-1]

    @property
    def num_requests(self) -> int:
        """N."""
        return len(self.slots)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """How layers with state walk through the rows."""
        return make_groups(self.row_starts, self.slots, self.token_ids.device)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The rows in runs of at most SEGMENT_ROWS; a later run may read what an earlier one wrote to the cache."""
        if self.num_rows <= SEGMENT_ROWS:
            return (Segment(slice(0, self.num_rows), self.rows, self.state_slots),)
        return tuple(self._segment(span.start, span.stop) for span in row_spans(self.num_rows))

    def _segment(self, begin: int, end: int) -> Segment:
        starts, firsts, rows = self.row_starts, self.rows.first_positions, self.rows
        assert firsts is not None
        first = bisect_right(starts, begin) - 1
        last = bisect_left(starts, end)
        inside = [min(max(start, begin), end) - begin for start in starts[first : last + 1]]
        part = Rows(
            positions=rows.positions[begin:end],
            request_of_row=rows.request_of_row[begin:end] - first,
            block_table=rows.block_table[first:last],
            row_starts=tuple(inside),
            first_positions=tuple(firsts[n] + max(begin - starts[n], 0) for n in range(first, last)),
        )
        return Segment(slice(begin, end), part, self.state_slots[first:last])

    def suffix(self, keep: Sequence[int]) -> Suffix | None:
        """The newest keep[n] rows of request n, at least one each; None when that is every row.

        K, V and states need all rows of a prompt, but what leaves the last layer is read for few of them.
        """
        starts, firsts = self.row_starts, self.rows.first_positions
        assert firsts is not None and len(keep) == self.num_requests and min(keep, default=1) > 0
        if sum(keep) == self.num_rows:
            return None
        ends = starts[1:]
        device = self.token_ids.device
        index = torch.tensor([r for end, n in zip(ends, keep, strict=True) for r in range(end - n, end)], device=device)
        rows = Rows(
            positions=self.rows.positions[index],
            request_of_row=self.rows.request_of_row[index],
            block_table=self.rows.block_table,
            row_starts=tuple(accumulate(keep, initial=0)),
            first_positions=tuple(
                first + end - start - n for first, start, end, n in zip(firsts, starts, ends, keep, strict=False)
            ),
        )
        return Suffix(index, rows)

    @classmethod
    def build(cls, spans: list[RowSpan], geometry: Geometry, device: torch.device | str = "cpu") -> StepBatch:
        """Flattens `spans`, one request each, in the order given."""
        lengths = [len(span.token_ids) for span in spans]
        starts = [0]
        for length in lengths:
            assert length > 0, "a span without rows"
            starts.append(starts[-1] + length)
        width = max((len(span.pages) for span in spans), default=0)
        table = [span.pages + [0] * (width - len(span.pages)) for span in spans]
        context_tokens = geometry.ple.ngram_size - 1 if geometry.ple is not None else 0
        context = [_pad_context(span.context, context_tokens, geometry) for span in spans]
        firsts = tuple(span.first_position for span in spans)

        def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        positions = [p for span in spans for p in range(span.first_position, span.first_position + len(span.token_ids))]
        rows = Rows(
            positions=tensor(positions),
            request_of_row=tensor([n for n, length in enumerate(lengths) for _ in range(length)]),
            block_table=tensor(table, torch.int32).view(len(spans), width),
            row_starts=tuple(starts),
            first_positions=firsts,
        )
        return cls(
            token_ids=tensor([token for span in spans for token in span.token_ids]),
            rows=rows,
            state_slots=tensor([span.state_slot for span in spans]),
            ngram_context=tensor(context).view(len(spans), context_tokens),
            row_starts=tuple(starts),
            slots=tuple(span.state_slot for span in spans),
        )


def _pad_context(context: list[int], length: int, geometry: Geometry) -> list[int]:
    if length == 0:
        return []
    kept = context[-length:]
    return [geometry.eos_token_ids[0]] * (length - len(kept)) + kept
