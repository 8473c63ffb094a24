"""How layers with per-request state walk through the rows of a step.

Short spans (decode, verify windows, short chunks) are handled together as one [n, width] group; a long span (prefill)
is a group of its own. Padding only ever follows a request's last row, and every recurrence here is causal, so a padded
row cannot reach a real one; it repeats its request's last row, so it is as finite as that row is.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

# A verify window has at most 8 rows (k <= 7); up to this width one window form costs less than a chunk of 64.
MAX_WINDOW_ROWS = 16


@dataclass(frozen=True)
class Group:
    """n requests of at most `width` rows.

    requests: positions in the step, request_index: the same as [n] int64; lengths: rows of each request;
    slots: slice or [n] int64 into state views [slots, ...]; rows: slice (contiguous, nothing padded) or
    [n * width] int64 into the step's rows; kept: [n * width] int64 padded rows that are real, None with a slice, and
    targets: [sum of lengths] int64, where those rows lie in the step; spans: [n, 4] int64, for each request its first
    row among the real rows of this group, its rows, its slot, and 0.
    """

    requests: tuple[int, ...]
    request_index: Tensor
    lengths: tuple[int, ...]
    width: int
    slots: slice | Tensor
    rows: slice | Tensor
    kept: Tensor | None
    targets: Tensor | None
    spans: Tensor

    @property
    def is_window(self) -> bool:
        """Whether commit can keep any number of rows; a long span commits whole."""
        return self.width <= MAX_WINDOW_ROWS

    def gather(self, x: Tensor) -> Tensor:
        """x: [R, ...] -> [n, width, ...]; a view when nothing is padded."""
        return x[self.rows].view(len(self.requests), self.width, *x.shape[1:])

    @property
    def real_rows(self) -> slice | Tensor:
        """The group's rows in the step without padding, in the order of `spans`."""
        return self.rows if self.targets is None else self.targets

    def scatter(self, out: Tensor, y: Tensor) -> None:
        """Writes y: [n, width, ...] to its rows of out: [R, ...]; padded rows are dropped."""
        flat = y.flatten(0, 1)
        if self.kept is None:
            out[self.rows] = flat
        else:
            assert self.targets is not None
            out[self.targets] = flat[self.kept]

    def read(self, state: Tensor) -> Tensor:
        """state: [slots, ...] -> [n, ...] of this group's requests; a view when their slots are evenly spaced."""
        return state[self.slots]


def make_groups(row_starts: tuple[int, ...], slots: tuple[int, ...], device: torch.device) -> tuple[Group, ...]:
    """One group of all short spans (if any), then one group for each long span."""
    lengths = [end - start for start, end in itertools.pairwise(row_starts)]
    short = [n for n, length in enumerate(lengths) if length <= MAX_WINDOW_ROWS]
    long = [n for n, length in enumerate(lengths) if length > MAX_WINDOW_ROWS]
    members = ([tuple(short)] if short else []) + [(n,) for n in long]
    return tuple(_group(requests, row_starts, slots, device) for requests in members)


def _group(
    requests: tuple[int, ...], row_starts: tuple[int, ...], slots: tuple[int, ...], device: torch.device
) -> Group:
    lengths = tuple(row_starts[n + 1] - row_starts[n] for n in requests)
    width = max(lengths)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    adjacent = requests[-1] - requests[0] == len(requests) - 1
    rows: slice | Tensor
    kept = targets = None
    if adjacent and min(lengths) == width:
        rows = slice(row_starts[requests[0]], row_starts[requests[-1] + 1])
    else:
        starts = [row_starts[n] for n in requests]
        rows = tensor([s + min(i, k - 1) for s, k in zip(starts, lengths, strict=True) for i in range(width)])
        kept = tensor([n * width + i for n, k in enumerate(lengths) for i in range(k)])
        targets = tensor([s + i for s, k in zip(starts, lengths, strict=True) for i in range(k)])
    own = [slots[n] for n in requests]
    step = own[1] - own[0] if len(own) > 1 else 1
    evenly = step > 0 and all(b == a + step for a, b in itertools.pairwise(own))
    slot_index: slice | Tensor = slice(own[0], own[-1] + 1, step) if evenly else tensor(own)
    firsts = itertools.accumulate(lengths, initial=0)
    spans = torch.tensor([(f, k, slot, 0) for f, k, slot in zip(firsts, lengths, own, strict=False)], dtype=torch.int64)
    return Group(requests, tensor(list(requests)), lengths, width, slot_index, rows, kept, targets, spans)
