"""Hands out the tensors of a checkpoint by canonical name, each once, and collects what does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from page4.checkpoint import Checkpoint, TensorBytes, classify

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32}


class TensorSource:
    """One pass over a checkpoint's tensors; `problems` is filled and nothing is raised."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.folder: Path = checkpoint.folder
        self.dtype = dtype
        self.device = device
        self.problems: list[str] = []
        self._checkpoint = checkpoint
        self._bytes = TensorBytes(checkpoint)
        self._skipped: set[str] = set()
        self._taken: dict[str, str] = {}
        self._missing: list[str] = []
        self._stored: dict[str, str] = {}
        self._prefix = ""
        for name in checkpoint.names():
            canonical = classify(name).canonical
            if canonical.startswith("layers."):
                self._prefix = name.removesuffix(canonical)
            if canonical in self._stored:
                self.problems.append(f"both {self._stored[canonical]} and {name}")
            self._stored[canonical] = name

    def checking(self) -> TensorSource:
        """A pass that compares names, shapes and dtypes only and hands out meta tensors."""
        source = TensorSource(self._checkpoint, self.dtype, torch.device("meta"))
        source._skipped = self._skipped
        return source

    @property
    def _meta(self) -> bool:
        return self.device.type == "meta"

    def names(self) -> list[str]:
        """All canonical names."""
        return list(self._stored)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a canonical name."""
        return name in self._stored

    def skip(self, name: str) -> None:
        """Declare a canonical name as ignored."""
        self._skipped.add(name)

    def numbered(self, prefix: str, suffix: str) -> list[int]:
        """The N of the names `prefix` N `suffix`, in numeric order."""
        pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]{0,8})" + re.escape(suffix))
        return sorted(int(match.group(1)) for match in map(pattern.fullmatch, self._stored) if match)

    def rows_of(self, name: str) -> int:
        """The size of the first axis of a stored tensor; 0 for a scalar."""
        shape = self._checkpoint.entry(self._stored[name]).shape
        return shape[0] if shape else 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Memory for `shape`, to be filled by `fill`."""
        return torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)

    def fill(self, destination: Tensor, name: str, shape: Sequence[int] | None = None) -> None:
        """Copy tensor `name` to `destination`; `shape` is its shape on disk if that differs."""
        stored = self._take(name)
        if stored is None:
            return
        entry = self._checkpoint.entry(stored)
        expected = tuple(destination.shape if shape is None else shape)
        known = _INTEGERS if destination.dtype is torch.int64 else _DTYPES
        if entry.shape != expected:
            self.problems.append(f"{stored} has shape {list(entry.shape)}, not {list(expected)}")
        elif entry.dtype not in known:
            self.problems.append(f"{stored} has dtype {entry.dtype}, not {' or '.join(known)}")
        elif not self._meta and destination.numel():
            flat = torch.frombuffer(self._bytes.view(stored), dtype=known[entry.dtype])
            destination.copy_(flat.view(destination.shape))
            self._bytes.release(stored)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of its own."""
        return self.rows([(name, shape[0])], shape[1:], dtype)

    def rows(self, parts: Sequence[tuple[str, int]], tail: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Several tensors of shape [rows, *tail], one below the other."""
        whole = self.empty((sum(rows for _, rows in parts), *tail), dtype)
        first = 0
        for name, rows in parts:
            self.fill(whole[first : first + rows], name)
            first += rows
        return whole

    def integers(self, name: str, expected: Sequence[int]) -> Tensor:
        """Numbers that follow from the config; when the checkpoint stores them too, they must agree."""
        derived = torch.tensor(list(expected), dtype=torch.int64)
        if self.has(name):
            stored = derived.clone()
            before, device = len(self.problems), self.device
            self.device = derived.device  # a few numbers: compared in the checking pass already
            self.fill(stored, name)
            self.device = device
            if len(self.problems) == before and not torch.equal(stored, derived):
                self.problems.append(f"{self._stored[name]} is {stored.tolist()}, the config gives {derived.tolist()}")
        return derived.to(self.device)

    def same(self, name: str, other: str) -> bool:
        """Whether two stored tensors have the same dtype, shape and bytes."""
        first, second = self._stored[name], self._stored[other]
        a, b = self._checkpoint.entry(first), self._checkpoint.entry(second)
        return (a.dtype, a.shape) == (b.dtype, b.shape) and self._bytes.view(first) == self._bytes.view(second)

    def take_duplicate(self, name: str) -> None:
        """Count a tensor as read whose content another one already gave."""
        self._take(name)

    def problem(self, text: str) -> None:
        """Record something else that does not fit."""
        self.problems.append(text)

    def missing(self, name: str) -> None:
        """Record a tensor that should exist."""
        self._missing.append(name)

    def _take(self, name: str) -> str | None:
        if name not in self._stored or name in self._skipped:
            self._missing.append(name)
            return None
        if name in self._taken:
            raise AssertionError(f"{name} is read twice")  # a fault of the builder, never of a file
        self._taken[name] = self._stored[name]
        return self._stored[name]

    def finish(self) -> tuple[str, ...]:
        """The names that were read, after adding missing and unexpected ones to the problems."""
        unexpected = [
            stored for name, stored in self._stored.items() if name not in self._taken and name not in self._skipped
        ]
        if unexpected:
            self.problems.insert(0, f"unexpected {', '.join(unexpected)}")
        if self._missing:
            missing = [name if name.startswith(("mtp.", "lm_head.")) else self._prefix + name for name in self._missing]
            self.problems.insert(0, f"missing {', '.join(missing)}")
        return tuple(sorted(self._taken.values()))
