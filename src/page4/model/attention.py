"""Query Sparse Attention layer: projections, norms, RoPE, cache writes, selection, attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from page4.attend import attend
from page4.cache.append import append_index, append_kv
from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.batch import StepBatch, Suffix
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


class Qsa:
    """One layer; `layer` is its index in the arena."""

    def __init__(self, weights: QsaWeights, geometry: Geometry, rope: Rope, layer: int) -> None:
        self.layer, self.rope, self.eps = layer, rope, geometry.rms_norm_eps
        self.heads, self.kv_heads, self.dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.index = geometry.index
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
        rows = batch.rows
        q_gate, k, v, index = self.in_proj(x).split_with_sizes(self.split, -1)
        q, gate = q_gate.view(-1, self.heads, 2 * self.dim).chunk(2, -1)
        k, v = (y.view(-1, self.kv_heads, self.dim) for y in (k, v))
        qk = rotate_(rms_norm(torch.cat((q, k), 1), self.qk_norm, self.eps), *cos_sin)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        layer_kv = arena.layer_kv(self.layer)
        nonfinite = append_kv(layer_kv, k, v, rows)
        index = index.view(-1, self.index.num_heads + 1, self.index.head_dim)
        pooled = arena.pooled(self.layer)
        append_index(pooled, arena.ring(self.layer), index[:, -1], rows, batch.state_slots, self._index_keys)
        index_q = index[:, :-1]
        if suffix is not None:
            rows, at = suffix.rows, suffix.index
            q, gate, index_q, cos_sin = q[at], gate[at], index_q[at], (cos_sin[0][at], cos_sin[1][at])
        if reuse is None:
            index_q = rotate_(rms_norm(index_q, self.index_q_norm, self.eps), *cos_sin)
            selection = select(index_q, pooled, rows, self.index.top_k_blocks)
        else:
            selection = extend(*reuse, rows.positions)
        heads = attend(q, layer_kv, selection, rows, gate=gate)
        return QsaOutput(self.o_proj(heads.flatten(1)), selection, nonfinite)

    def _index_keys(self, mean_keys: Tensor, first_positions: Tensor) -> Tensor:
        """mean_keys: [B, E], first_positions: [B] int64 -> [B, E]: the key of a block, normed and turned."""
        keys = rms_norm(mean_keys, self.index_k_norm, self.eps).unsqueeze(1)
        return rotate_(keys, *self.rope.cos_sin(first_positions)).squeeze(1)
