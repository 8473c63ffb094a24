"""Query Sparse Attention layer: projections, norms, RoPE, cache writes, selection, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.attend import attend
from page4.cache.append import append_index, append_kv
from page4.cache.rows import Rows
from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.batch import Segment, StepBatch, Suffix
from page4.model.linear import Linear
from page4.model.norms import rms_norm
from page4.model.rope import Rope, rotate_
from page4.model.weight_tree import QsaWeights
from page4.select import Selection, extend, select


@dataclass(frozen=True)
class QsaOutput:
    """out: [R, hidden]; nonfinite_rows: [R] bool, rows whose K or V the cache could not hold, None when not counted."""

    out: Tensor
    selection: Selection
    nonfinite_rows: Tensor | None


# Sees (layer, k [R, J, D], v [R, J, D]) as the cache is about to store them: K after norm and RoPE, in the model's
# dtype. It must not keep or change them.
KvObserver = Callable[[int, Tensor, Tensor], None]


class Qsa:
    """One layer; `layer` is its index in the arena. `observer` is for calibration, None otherwise."""

    def __init__(self, weights: QsaWeights, geometry: Geometry, rope: Rope, layer: int) -> None:
        self.layer, self.rope, self.eps = layer, rope, geometry.rms_norm_eps
        self.heads, self.kv_heads, self.dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.index = geometry.index
        self.observer: KvObserver | None = None
        self.split = weights.split
        self.in_proj = Linear(weights.in_proj, weights.in_bias)
        self.o_proj = Linear(weights.o_proj, weights.o_bias)
        self.qk_norm = torch.cat((weights.q_norm.expand(self.heads, -1), weights.k_norm.expand(self.kv_heads, -1)))
        self.index_q_norm, self.index_k_norm = weights.index_q_norm, weights.index_k_norm

    def forward(
        self,
        x: Tensor,
        batch: StepBatch,
        cos_sin: tuple[Tensor, Tensor],
        arena: Arena,
        reuse: tuple[Selection, Tensor] | None = None,
        suffix: Suffix | None = None,
    ) -> QsaOutput:
        """x: [R, hidden]; writes K, V and index keys of every row, then attends.

        reuse: a selection made earlier for each row's request and the positions it was made at, [R] int64; the blocks
        completed since are added, nothing is scored. suffix: the rows that attend, and that come out; None for all.
        """
        kept: list[tuple[Tensor, ...]] = []
        parts: list[tuple[Tensor, Selection]] = []
        flags: list[Tensor] = []
        for segment in batch.segments:
            span = segment.span
            turned = (cos_sin[0][span], cos_sin[1][span])
            *queries, nonfinite = self._write(x[span], segment, turned, arena)
            if nonfinite is not None:
                flags.append(nonfinite)
            if suffix is None:
                parts.append(self._attend((*queries, *turned), segment.rows, arena, reuse))
            else:
                at = suffix.index if len(batch.segments) == 1 else suffix.inside(span)
                kept.append(tuple(y[at] for y in (*queries, *turned)))
        if suffix is not None:
            tensors = kept[0] if len(kept) == 1 else tuple(torch.cat(columns) for columns in zip(*kept, strict=True))
            parts.append(self._attend(tensors, suffix.rows, arena, reuse))
        outs, selections = zip(*parts, strict=True)
        return QsaOutput(
            outs[0] if len(outs) == 1 else torch.cat(outs),
            _joined(selections),
            None if not flags else flags[0] if len(flags) == 1 else torch.cat(flags),
        )

    def _write(
        self, x: Tensor, segment: Segment, cos_sin: tuple[Tensor, Tensor], arena: Arena
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Writes K, V and index keys of some rows -> their q and gate [R, H, D], index_q [R, I, E], nonfinite rows."""
        q_gate, k, v, index = self.in_proj(x).split_with_sizes(self.split, -1)
        q, gate = q_gate.view(-1, self.heads, 2 * self.dim).chunk(2, -1)
        k, v = (y.view(-1, self.kv_heads, self.dim) for y in (k, v))
        qk = rotate_(rms_norm(torch.cat((q, k), 1), self.qk_norm, self.eps), *cos_sin)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        if self.observer is not None:
            self.observer(self.layer, k, v)
        nonfinite = append_kv(arena.layer_kv(self.layer), k, v, segment.rows)
        index = index.view(-1, self.index.num_heads + 1, self.index.head_dim)
        pooled, ring = arena.pooled(self.layer), arena.ring(self.layer)
        append_index(pooled, ring, index[:, -1], segment.rows, segment.state_slots, self._index_keys)
        return q, gate, index[:, :-1], nonfinite

    def _attend(
        self, queries: tuple[Tensor, ...], rows: Rows, arena: Arena, reuse: tuple[Selection, Tensor] | None
    ) -> tuple[Tensor, Selection]:
        """queries: q, gate, index_q, cos, sin of some rows -> [R, hidden], and what they selected."""
        q, gate, index_q, cos, sin = queries
        if reuse is None:
            index_q = rotate_(rms_norm(index_q, self.index_q_norm, self.eps), cos, sin)
            selection = select(index_q, arena.pooled(self.layer), rows, self.index.top_k_blocks)
        else:
            selection = extend(*reuse, rows.positions)
        heads = attend(q, arena.layer_kv(self.layer), selection, rows, gate=gate)
        return self.o_proj(heads.flatten(1)), selection

    def _index_keys(self, mean_keys: Tensor, first_positions: Tensor) -> Tensor:
        """mean_keys: [B, E], first_positions: [B] int64 -> [B, E]: the key of a block, normed and turned."""
        keys = rms_norm(mean_keys, self.index_k_norm, self.eps).unsqueeze(1)
        return rotate_(keys, *self.rope.cos_sin(first_positions)).squeeze(1)


def _joined(selections: tuple[Selection, ...]) -> Selection:
    """The selections of consecutive runs of rows as one."""
    if len(selections) == 1:
        return selections[0]
    width = max(part.block_ids.shape[1] for part in selections)
    ids = [F.pad(part.block_ids, (0, width - part.block_ids.shape[1]), value=-1) for part in selections]
    return Selection(torch.cat(ids), torch.cat([part.counts for part in selections]), True)
