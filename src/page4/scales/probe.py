"""Watching attention at given scales: how far it is from unquantised K/V, and from what E4M3 at those scales gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from page4.cache.rows import Rows
from page4.cache.storage import Arena
from page4.model.attention import Attended
from page4.model.decoder import Model
from page4.scales.observe import qsa_layers
from page4.scales.shadow import Distance, Pair, ShadowKV


@dataclass
class LayerDistances:
    """Of one layer, relative to attention over unquantised K/V.

    error: of the cache under test; expected: of E4M3 at the scales that the cache was given; mismatch: between these
    two; moved: of the cache under test from E4M3 at the overlay's own scales.
    """

    error: Distance = field(default_factory=Distance)
    expected: Distance = field(default_factory=Distance)
    mismatch: Distance = field(default_factory=Distance)
    moved: Distance = field(default_factory=Distance)


class AttentionProbe:
    """Shadows of some layers beside an arena, and the distances of what was attended to since.

    given: the scales that the arena's writer and reader were given; own: those of the overlay, by layer.
    """

    def __init__(self, model: Model, arena: Arena, given: Mapping[int, Pair], own: Mapping[int, Pair]) -> None:
        self._model = model
        self._shadows: dict[int, tuple[ShadowKV, ShadowKV, ShadowKV]] = {}
        for layer, pair in given.items():
            like = arena.layer_kv(layer)
            plain, expected = ShadowKV(like, None), ShadowKV(like, pair)
            same = own[layer] == pair
            self._shadows[layer] = (plain, expected, expected if same else ShadowKV(like, own[layer]))
        self.distances = {layer: LayerDistances() for layer in given}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch the layers inside the block."""
        layers = [layer for layer in qsa_layers(self._model) if layer.layer in self._shadows]
        for layer in layers:
            layer.observer, layer.attention_observer = self._on_kv, self._on_attention
        try:
            yield
        finally:
            for layer in layers:
                layer.observer = layer.attention_observer = None

    def _on_kv(self, layer: int, k: Tensor, v: Tensor, rows: Rows) -> None:
        for shadow in dict.fromkeys(self._shadows[layer]):
            shadow.write(k, v, rows)

    def _on_attention(self, seen: Attended) -> None:
        plain, expected, own = self._shadows[seen.layer]
        reference, wanted = plain.attend(seen), expected.attend(seen)
        unmoved = wanted if own is expected else own.attend(seen)
        found, heads = self.distances[seen.layer], seen.heads
        found.error = found.error.plus(heads, reference, reference)
        found.expected = found.expected.plus(wanted, reference, reference)
        found.mismatch = found.mismatch.plus(heads, wanted, reference)
        found.moved = found.moved.plus(heads, unmoved, reference)


class LogitsWatch:
    """Keeps the logits of some rows of a `SampleLane`, for the comparison of two runs over the same samples."""

    def __init__(self, model: Model, every: int) -> None:
        self._model, self._every = model, every
        self.target: list[Tensor] = []
        self.draft: list[Tensor] = []

    def step(self, request: str) -> AbstractContextManager[None]:
        """Nothing to do around a step."""
        return nullcontext()

    def nonfinite(self) -> list[str]:
        """Not looked for: calibration has."""
        return []

    def outputs(self, target: Tensor, draft: Tensor | None) -> None:
        """Logits of every so many rows."""
        self.target.append(self._model.logits(target[:: self._every]))
        if draft is not None and self._model.draft is not None:
            self.draft.append(self._model.draft.logits(draft[:: self._every]))


def logit_error(found: list[Tensor], reference: list[Tensor]) -> float | None:
    """RMS difference of logits [M, V], in the RMS of the reference around each row's mean; None without any."""
    if not reference:
        return None
    a, b = torch.cat(found).double(), torch.cat(reference).double()
    spread = (b - b.mean(1, keepdim=True)).square().sum()
    return float(((a - b).square().sum() / spread).sqrt())
