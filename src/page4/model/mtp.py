"""The multi-token-prediction head: drafts token i + 2 from the target's streams at i and token i + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.batch import StepBatch
from page4.model.hyper import Mixer
from page4.model.layer import Layer
from page4.model.linear import Linear
from page4.model.norms import rms_norm
from page4.model.rope import Rope
from page4.model.weight_tree import DraftWeights
from page4.select import Selection


@dataclass(frozen=True)
class DraftOutput:
    """streams: [R, C * hidden] before the draft's mixer (the next iteration's input); selection: of each row kept."""

    streams: Tensor
    selection: Selection
    nonfinite_rows: Tensor | None


class Draft:
    """One QSA decoder layer behind the fused embedding and streams; it shares the target's embedding and LM head."""

    def __init__(self, weights: DraftWeights, geometry: Geometry, rope: Rope, embed: Tensor, lm_head: Linear) -> None:
        self.geometry, self.rope, self.embed, self.lm_head = geometry, rope, embed, lm_head
        self.norm_embedding, self.norm_hidden = weights.norm_embedding, weights.norm_hidden
        self.fc_embedding, self.fc_hidden = Linear(weights.fc_embedding), Linear(weights.fc_hidden)
        self.layer = Layer(weights.layer, geometry, rope, geometry.draft_layer)
        self.mixer = Mixer(weights.mixer, geometry)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        streams: Tensor,
        arena: Arena,
        reuse: tuple[Selection, Tensor] | None = None,
        keep: Sequence[int] | None = None,
    ) -> DraftOutput:
        """Row i of `batch` has token t_{i+1} at position i; streams: [R, C * hidden] are h_i.

        First iteration of a window: all newly accepted positions, with the target's streams. Later ones: one row a
        request, with the draft's own streams and `reuse` (selection of the first iteration's last row, and the
        positions it was made at: [R] int64). keep: newest rows of each request that come out, None for all; the others
        only leave their K, V and index keys.
        """
        eps = self.geometry.rms_norm_eps
        embedded = self.fc_embedding(rms_norm(F.embedding(batch.token_ids, self.embed), self.norm_embedding, eps))
        normed = rms_norm(streams, self.norm_hidden, eps).view(-1, self.geometry.hc_count, self.geometry.hidden_size)
        mixed = self.fc_hidden(normed).add_(embedded.unsqueeze(1))
        suffix = None if keep is None else batch.suffix(keep)
        output = self.layer.forward(mixed, batch, self.rope.cos_sin(batch.rows.positions), arena, reuse, suffix)
        assert output.selection is not None
        return DraftOutput(output.streams.flatten(1), output.selection, output.nonfinite_rows)

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """streams: [M, C * hidden] -> [M, V] fp32."""
        mixed = self.mixer.mix(streams.view(-1, self.geometry.hc_count, self.geometry.hidden_size))
        return self.lm_head(mixed).float()
