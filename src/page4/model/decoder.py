"""The text model: a varlen forward over an arena, and the commit of what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.batch import StepBatch
from page4.model.delta import Accepted
from page4.model.groups import Group
from page4.model.hyper import Mixer
from page4.model.layer import Layer, LayerPending
from page4.model.linear import Linear
from page4.model.mtp import Draft
from page4.model.rope import Rope
from page4.model.weight_tree import LoadReport, Weights


@dataclass(frozen=True)
class Pending:
    """What `Model.commit` needs, for each layer. Good for one commit, of the batch that made it."""

    layers: tuple[LayerPending, ...]


@dataclass(frozen=True)
class StepOutput:
    """streams: [R, C * hidden] before the final mixer, or of the rows that were to be kept.

    nonfinite_rows: [R] bool, or None when nothing counts them.
    """

    streams: Tensor
    pending: Pending
    nonfinite_rows: Tensor | None


class Model:
    """The main model, and its draft head as `draft` (None when the checkpoint has none or it was not asked for)."""

    def __init__(self, weights: Weights, geometry: Geometry, dtype: torch.dtype, device: torch.device | str) -> None:
        self.geometry, self.dtype, self.device = geometry, dtype, torch.device(device)
        self.load_report: LoadReport = weights.report
        target = weights.target
        self.rope = Rope(geometry, dtype, device)
        self.embed = target.embed
        self.layers = [Layer(layer, geometry, self.rope, i) for i, layer in enumerate(target.layers)]
        self.mixer, self.lm_head = Mixer(target.mixer, geometry), Linear(target.lm_head)
        self.draft: Draft | None = None
        if weights.draft is not None:
            self.draft = Draft(weights.draft, geometry, self.rope, self.embed, self.lm_head)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, arena: Arena, keep: Sequence[int] | None = None) -> StepOutput:
        """Runs all rows of `batch`; keep: newest rows of each request whose streams come out, None for all.

        K, V and index keys of every row are written to the arena; positions say which of them a later row may see.
        Recurrent, conv and PLE states are not: `commit` advances them.
        """
        embedded = F.embedding(batch.token_ids, self.embed)
        streams = embedded.unsqueeze(1).repeat(1, self.geometry.hc_count, 1)
        cos_sin = self.rope.cos_sin(batch.rows.positions)
        pending, nonfinite = [], None
        last = None if keep is None else batch.suffix(keep)
        for number, layer in enumerate(self.layers, start=1):
            suffix = last if number == len(self.layers) else None
            output = layer.forward(streams, batch, cos_sin, arena, suffix=suffix)
            streams = output.streams
            pending.append(output.pending)
            if output.nonfinite_rows is not None:
                nonfinite = output.nonfinite_rows if nonfinite is None else nonfinite | output.nonfinite_rows
        return StepOutput(streams.flatten(1), Pending(tuple(pending)), nonfinite)

    @torch.inference_mode()
    def commit(self, batch: StepBatch, pending: Pending, arena: Arena, accepted_rows: Tensor | None) -> None:
        """Advances every state by the first `accepted_rows[n]` rows of request n: [N] int64; None accepts all rows.

        Spans above MAX_WINDOW_ROWS (prefill) have only their last state, and commit whole.
        """
        groups = batch.groups
        accepted = [_accepted(group, accepted_rows) for group in groups]
        for layer, entry in zip(self.layers, pending.layers, strict=True):
            layer.commit(entry, groups, accepted, arena)

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams: [M, C * hidden] -> [M, V] fp32."""
        mixed = self.mixer.mix(streams.view(-1, self.geometry.hc_count, self.geometry.hidden_size))
        return self.lm_head(mixed).float()


def _accepted(group: Group, accepted_rows: Tensor | None) -> Accepted | None:
    """The group's part of `accepted_rows`: [N] int64; None for a long span."""
    if group.is_window:
        if accepted_rows is None:
            return Accepted.of(torch.tensor(group.lengths, device=group.request_index.device), group.width)
        return Accepted.of(accepted_rows[group.request_index], group.width)
    if accepted_rows is not None and accepted_rows.device.type == "cpu":
        got = int(accepted_rows[group.requests[0]])
        assert got == group.width, f"a span of {group.width} rows commits whole, not {got} rows"
    return None
