"""Observing what the cache is about to store, over requests tagged as calibration and over nothing else.

An observer sees every forward of the model that it is attached to: warm-up, capture, health probes. It counts only what
runs inside `counting`, and it never changes a tensor, so outputs are the same bits with it and without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

from torch import Tensor

from page4.cache.rows import Rows
from page4.errors import ScaleError, message
from page4.geometry import Geometry
from page4.model.attention import Qsa
from page4.model.decoder import Model
from page4.scales.kv_statistics import KvStatistics, Place, Side, Statistics, merge_all

__all__ = ["SIDES", "KvStatistics", "Observer", "check_complete", "merge_ranks", "tensor_name"]

SIDES: tuple[Side, Side] = ("k", "v")
CALIBRATION = "calibration"


def tensor_name(place: Place) -> str:
    """The name of a scale in a report; the draft is layer num_hidden_layers."""
    return f"model.layers.{place[0]}.self_attn.{place[1]}_scale"


class Observer:
    """Statistics of K and V for each layer. Not thread-safe, like the model that it watches."""

    def __init__(self) -> None:
        self.statistics: Statistics = {}
        self.counted_forwards = 0
        self._request: str | None = None
        self._failed: str | None = None

    def __call__(self, layer: int, k: Tensor, v: Tensor, rows: Rows | None = None) -> None:
        """k, v: [R, J, D]; the hook of `Qsa.observer`. Where they go does not matter."""
        if self._request is None:
            return
        for side, x in zip(SIDES, (k, v), strict=True):
            seen = self.statistics.get((layer, side), KvStatistics())
            self.statistics[layer, side] = seen.merge(KvStatistics.of(x))

    @contextmanager
    def counting(self, purpose: str, *, request: str) -> Iterator[None]:
        """Count the block as one forward; only purpose "calibration" may. A block that raises spoils the observer."""
        if purpose != CALIBRATION:
            do = "run it outside of counting"
            raise ScaleError(message("forward to count", allowed=CALIBRATION, got=repr(purpose), do=do))
        if self._request is not None:
            do = "end that one first"
            raise ScaleError(message(f"request {request}", allowed="one at a time", got=self._request, do=do))
        self._request = request
        try:
            yield
        except BaseException:
            self._failed = request
            raise
        finally:
            self._request = None
        self.counted_forwards += 1

    def step(self, request: str) -> AbstractContextManager[None]:
        """One forward of calibration requests, for `SampleLane`."""
        return self.counting(CALIBRATION, request=request)

    def outputs(self, target: Tensor, draft: Tensor | None) -> None:
        """Not looked at: calibration is about what goes into the cache."""

    @contextmanager
    def attached(self, model: Model) -> Iterator[None]:
        """Watch every QSA layer of the model, and of its draft head, inside the block."""
        layers = qsa_layers(model)
        before = [layer.observer for layer in layers]
        for layer in layers:
            layer.observer = self
        try:
            yield
        finally:
            for layer, observer in zip(layers, before, strict=True):
                layer.observer = observer

    def nonfinite(self) -> list[str]:
        """The tensors in which a value that is no number was seen, and how many."""
        return [f"{seen.nonfinite} values of {tensor_name(p)}" for p, seen in self.statistics.items() if seen.nonfinite]

    def take(self) -> tuple[Statistics, int]:
        """Statistics and counted forwards since the last time. Raises `ScaleError` when a counted request failed."""
        if self._failed is not None:
            got = f"request {self._failed}, which failed half-way"
            raise ScaleError(message("observed requests", allowed="whole ones", got=got, do="run it again"))
        taken = merge_all([self.statistics]), self.counted_forwards
        self.statistics, self.counted_forwards = {}, 0
        return taken


def qsa_layers(model: Model) -> list[Qsa]:
    """The layers that own a K/V cache, the draft's last."""
    layers = [*model.layers, *([] if model.draft is None else [model.draft.layer])]
    return [layer.qsa for layer in layers if layer.qsa is not None]


def expected_layers(geometry: Geometry, *, with_draft: bool) -> tuple[int, ...]:
    """The layers that have to be seen."""
    return (*geometry.qsa_layers, *((geometry.draft_layer,) if with_draft else ()))


def check_complete(
    statistics: Mapping[Place, KvStatistics], layers: Sequence[int], *, tokens: int, counted_forwards: int
) -> None:
    """Every layer and side saw `tokens` tokens, all finite and not all zero. Raises `ScaleError` naming each fault."""
    if not counted_forwards or not tokens:
        _refuse("counted forwards", "at least 1", "0", "run calibration requests inside of counting")
    wanted = [(layer, side) for layer in layers for side in SIDES]
    faults = [f"{tensor_name(place)}: {fault}" for place in wanted if (fault := _fault(statistics.get(place), tokens))]
    faults += [f"{tensor_name(place)}: no such layer was expected" for place in sorted(set(statistics) - set(wanted))]
    if faults:
        allowed = f"{tokens} tokens in each of the layers {list(layers)}, finite and not all zero"
        _refuse("observed K/V", allowed, "; ".join(faults), "look at the checkpoint, the dtype and what attends")


def _fault(seen: KvStatistics | None, tokens: int) -> str | None:
    if seen is None or seen.tokens == 0:
        return "saw no token"
    if seen.tokens != tokens:
        return f"saw {seen.tokens} tokens"
    if seen.nonfinite:
        return f"{seen.nonfinite} values are not finite"
    return None if seen.max_abs > 0.0 else "all values are zero"


def merge_ranks(ranks: Sequence[Statistics | BaseException]) -> Statistics:
    """The statistics of all ranks together. Raises `ScaleError` when one of them failed or saw other layers."""
    parts = []
    for rank, result in enumerate(ranks):
        if isinstance(result, BaseException):
            raise ScaleError(
                message(f"rank {rank}", allowed="statistics", got=repr(result), do="run all ranks again")
            ) from result
        parts.append(result)
    for rank, part in enumerate(parts):
        if set(part) != set(parts[0]):
            odd = ", ".join(tensor_name(place) for place in sorted(set(part) ^ set(parts[0])))
            _refuse(f"rank {rank}", "the layers of rank 0", f"a difference in {odd}", "run all ranks again")
    return merge_all(parts)


def _refuse(what: str, allowed: str, got: str, do: str) -> NoReturn:
    raise ScaleError(message(what, allowed=allowed, got=got, do=do))
