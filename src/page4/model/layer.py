"""One decoder layer: PLE, attention or GDN inside a hyper-connection, experts inside another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.attention import Qsa
from page4.model.batch import StepBatch, Suffix, row_spans
from page4.model.delta import Accepted
from page4.model.gdn import Gdn, GdnPending
from page4.model.groups import Group
from page4.model.hyper import Hyper
from page4.model.moe import Moe
from page4.model.ple import Ple, PlePending
from page4.model.rope import Rope
from page4.model.weight_tree import LayerWeights
from page4.select import Selection


@dataclass(frozen=True)
class LayerPending:
    """What one layer needs to commit, one entry for each group of the batch."""

    gdn: tuple[GdnPending, ...]
    ple: tuple[PlePending, ...]


@dataclass(frozen=True)
class LayerOutput:
    """streams: [R, C, hidden] (the input tensor, updated in place), or the rows of the suffix."""

    streams: Tensor
    pending: LayerPending
    selection: Selection | None
    nonfinite_rows: Tensor | None


class Layer:
    """A GDN or a QSA layer, with experts, and PLE where the checkpoint has it."""

    def __init__(self, weights: LayerWeights, geometry: Geometry, rope: Rope, layer: int) -> None:
        self.attn_hyper = Hyper(weights.attn_hyper, geometry)
        self.mlp_hyper = Hyper(weights.mlp_hyper, geometry)
        self.gdn = Gdn(weights.gdn, geometry, layer) if weights.gdn is not None else None
        self.qsa = Qsa(weights.qsa, geometry, rope, layer) if weights.qsa is not None else None
        self.ple = Ple(weights.ple, geometry, layer) if weights.ple is not None else None
        self.moe = Moe(weights.moe, geometry)

    def forward(
        self,
        streams: Tensor,
        batch: StepBatch,
        cos_sin: tuple[Tensor, Tensor],
        arena: Arena,
        reuse: tuple[Selection, Tensor] | None = None,
        suffix: Suffix | None = None,
    ) -> LayerOutput:
        """streams: [R, C, hidden], updated in place; `reuse` and `suffix` as in `Qsa.forward`."""
        gdn_pending: tuple[GdnPending, ...] = ()
        ple_pending: tuple[PlePending, ...] = ()
        selection = nonfinite = None
        if self.ple is not None:
            streams, ple_pending = self.ple.forward(streams, batch, arena)
        x, injection = self._enter(streams)
        if self.gdn is not None:
            x, gdn_pending = self.gdn.forward(x, batch.groups, arena)
        else:
            assert self.qsa is not None
            attended = self.qsa.forward(x, batch, cos_sin, arena, reuse, suffix)
            x, selection, nonfinite = attended.out, attended.selection, attended.nonfinite_rows
        if suffix is not None:
            streams, injection = streams[suffix.index], injection[suffix.index]
            x = x if self.gdn is None else x[suffix.index]
        for span in row_spans(streams.shape[0]):
            part = streams[span]
            inner, inner_injection = self.attn_hyper.pass_on(part, x[span], injection[span], self.mlp_hyper)
            self.mlp_hyper.leave(part, self.moe.forward(inner), inner_injection)
        return LayerOutput(streams, LayerPending(gdn_pending, ple_pending), selection, nonfinite)

    def _enter(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        spans = row_spans(streams.shape[0])
        if len(spans) == 1:
            return self.attn_hyper.enter(streams)
        xs, injections = zip(*(self.attn_hyper.enter(streams[span]) for span in spans), strict=True)
        return torch.cat(xs), torch.cat(injections)

    def commit(
        self, pending: LayerPending, groups: tuple[Group, ...], accepted: list[Accepted | None], arena: Arena
    ) -> None:
        """accepted: for each group, None for a long span."""
        if self.gdn is not None:
            for gdn_entry, group, count in zip(pending.gdn, groups, accepted, strict=True):
                self.gdn.commit(gdn_entry, group, count, arena)
        if self.ple is not None:
            for ple_entry, group, count in zip(pending.ple, groups, accepted, strict=True):
                self.ple.commit(ple_entry, group, count, arena)
