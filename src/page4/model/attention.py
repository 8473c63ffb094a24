"""Query Sparse Attention layer: projections, norms, RoPE, cache writes, selection, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.attend import attend
from page4.cache.append import append_index, append_kv
from page4.cache.places import completed_blocks, kv_places, request_spans
from page4.cache.rows import Rows
from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.kernels import cpu
from page4.model.batch import Segment, StepBatch, Suffix
from page4.model.linear import Linear
from page4.model.norms import rms_norm
from page4.model.rope import Rope, rotate_
from page4.model.weight_tree import QsaWeights
from page4.select import Selection, extend, select


@dataclass(frozen=True)
class QsaOutput:
    """out: [R, hidden]; nonfinite_rows: [R] bool, None when not counted.

    These are rows whose K or V the cache could not hold, or whose index scores were no numbers.
    """

    out: Tensor
    selection: Selection
    nonfinite_rows: Tensor | None


# What the compiled writer stores: fp32 and E4M3.
_COMPILED_CACHES = (torch.float32, torch.uint8)


@dataclass(frozen=True)
class Queries:
    """q, gate: [R, H, D], index_q: [R, I, E] or None when nothing is scored, all normed and turned."""

    q: Tensor
    gate: Tensor
    index_q: Tensor | None

    def take(self, index: Tensor) -> Queries:
        """Those of some rows, index: [M] int64."""
        return Queries(self.q[index], self.gate[index], None if self.index_q is None else self.index_q[index])

    @classmethod
    def joined(cls, parts: list[Queries]) -> Queries:
        """Those of consecutive runs of rows as one."""
        if len(parts) == 1:
            return parts[0]
        index_q = [part.index_q for part in parts if part.index_q is not None]
        joined = torch.cat(index_q) if index_q else None
        return cls(torch.cat([part.q for part in parts]), torch.cat([part.gate for part in parts]), joined)


# Sees (layer, k [R, J, D], v [R, J, D], rows) as the cache is about to store them: K after norm and RoPE, in the
# model's dtype. It must not keep or change them.
KvObserver = Callable[[int, Tensor, Tensor, Rows], None]


@dataclass(frozen=True)
class Attended:
    """One attention of a layer, as it came out: heads [R, H, D], and what it was computed from but for the cache."""

    layer: int
    queries: Queries
    selection: Selection
    rows: Rows
    heads: Tensor


AttentionObserver = Callable[[Attended], None]


class Qsa:
    """One layer; `layer` is its index in the arena. The observers are for tools that measure, None otherwise."""

    def __init__(self, weights: QsaWeights, geometry: Geometry, rope: Rope, layer: int) -> None:
        self.layer, self.rope, self.eps = layer, rope, geometry.rms_norm_eps
        self.heads, self.kv_heads, self.dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.index = geometry.index
        self.observer: KvObserver | None = None
        self.attention_observer: AttentionObserver | None = None
        self.split = weights.split
        self.in_proj = Linear(weights.in_proj, weights.in_bias)
        self.o_proj = Linear(weights.o_proj, weights.o_bias)
        self.qk_norm = torch.cat((weights.q_norm.expand(self.heads, -1), weights.k_norm.expand(self.kv_heads, -1)))
        self.index_q_norm, self.index_k_norm = weights.index_q_norm, weights.index_k_norm
        self.kernel: cpu.Qsa | None = None
        channels = (self.dim, self.index.head_dim)
        if cpu.refusal(weights.o_proj, channels=channels) is None and geometry.rotary_dim <= min(channels):
            norms = (weights.q_norm, weights.k_norm, weights.index_q_norm, weights.index_k_norm)
            sizes = (self.heads, self.kv_heads, self.index.num_heads, geometry.rotary_dim)
            self.kernel = cpu.Qsa(norms, *sizes, self.eps)

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
        kept: list[Queries] = []
        parts: list[tuple[Tensor, Selection]] = []
        flags: list[Tensor] = []
        for segment in batch.segments:
            span = segment.span
            turned = (cos_sin[0][span], cos_sin[1][span])
            queries, nonfinite = self._write(x[span], segment, turned, arena, score=reuse is None)
            if nonfinite is not None:
                flags.append(nonfinite)
            if suffix is None:
                parts.append(self._attend(queries, segment.rows, arena, reuse))
            else:
                kept.append(queries.take(suffix.index if len(batch.segments) == 1 else suffix.inside(span)))
        if suffix is not None:
            parts.append(self._attend(Queries.joined(kept), suffix.rows, arena, reuse))
        outs, selections = zip(*parts, strict=True)
        selection = _joined(selections)
        nonfinite = None if not flags else flags[0] if len(flags) == 1 else torch.cat(flags)
        if selection.bad_rows is not None:
            nonfinite = _with_bad(nonfinite, selection.bad_rows, x.shape[0], suffix)
        return QsaOutput(outs[0] if len(outs) == 1 else torch.cat(outs), selection, nonfinite)

    def _write(
        self, x: Tensor, segment: Segment, cos_sin: tuple[Tensor, Tensor], arena: Arena, *, score: bool
    ) -> tuple[Queries, Tensor | None]:
        """Writes K, V and index keys of some rows -> their queries (index_q when `score`), and the nonfinite rows."""
        projected = self.in_proj(x)
        layer_kv = arena.layer_kv(self.layer)
        if self.kernel is not None and segment.rows.row_starts is not None and layer_kv.k.dtype in _COMPILED_CACHES:
            return self._write_compiled(self.kernel, projected, segment, cos_sin, arena, score=score)
        q_gate, k, v, index = projected.split_with_sizes(self.split, -1)
        q, gate = q_gate.view(-1, self.heads, 2 * self.dim).chunk(2, -1)
        k, v = (y.view(-1, self.kv_heads, self.dim) for y in (k, v))
        qk = rotate_(rms_norm(torch.cat((q, k), 1), self.qk_norm, self.eps), *cos_sin)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        if self.observer is not None:
            self.observer(self.layer, k, v, segment.rows)
        nonfinite = append_kv(layer_kv, k, v, segment.rows)
        index = index.view(-1, self.index.num_heads + 1, self.index.head_dim)
        pooled, ring = arena.pooled(self.layer), arena.ring(self.layer)
        append_index(pooled, ring, index[:, -1], segment.rows, segment.state_slots, self._index_keys)
        index_q = rotate_(rms_norm(index[:, :-1], self.index_q_norm, self.eps), *cos_sin) if score else None
        return Queries(q, gate, index_q), nonfinite

    def _write_compiled(
        self,
        kernel: cpu.Qsa,
        projected: Tensor,
        segment: Segment,
        cos_sin: tuple[Tensor, Tensor],
        arena: Arena,
        *,
        score: bool,
    ) -> tuple[Queries, Tensor | None]:
        """`_write` of projected rows [R, sum of split]."""
        rows, layer_kv = segment.rows, arena.layer_kv(self.layer)
        q, k, index_q = kernel.queries(projected, *cos_sin, score=score)
        if self.observer is not None:
            v = projected[:, sum(self.split[:2]) : sum(self.split[:3])]
            self.observer(self.layer, k, v.view(-1, self.kv_heads, self.dim), rows)
        sides = (layer_kv.k_scale, layer_kv.v_scale)
        scales = (1.0 if sides[0] is None else sides[0].value, 1.0 if sides[1] is None else sides[1].value)
        caches, places = (layer_kv.k, layer_kv.v), kv_places(rows, layer_kv.page_tokens)[:2]
        nonfinite = kernel.append_kv(projected, k, places, caches, scales, layer_kv.counters)
        turned = rows.once("completed blocks", lambda: self.rope.cos_sin(completed_blocks(rows)))
        spans, pooled = request_spans(rows, segment.state_slots), arena.pooled(self.layer)
        kernel.append_index(projected, spans, rows.block_table, turned, pooled, arena.ring(self.layer))
        gate = projected[:, : self.split[0]].view(-1, self.heads, 2 * self.dim)[..., self.dim :]
        return Queries(q, gate, index_q), nonfinite

    def _attend(
        self, queries: Queries, rows: Rows, arena: Arena, reuse: tuple[Selection, Tensor] | None
    ) -> tuple[Tensor, Selection]:
        """The attention of some rows -> [R, hidden], and what they selected."""
        if reuse is None:
            assert queries.index_q is not None, "nothing was scored"
            selection = select(queries.index_q, arena.pooled(self.layer), rows, self.index.top_k_blocks)
        else:
            selection = extend(*reuse, rows.positions)
        heads = attend(queries.q, arena.layer_kv(self.layer), selection, rows, gate=queries.gate)
        if self.attention_observer is not None:
            self.attention_observer(Attended(self.layer, queries, selection, rows, heads))
        return self.o_proj(heads.flatten(1)), selection

    def _index_keys(self, mean_keys: Tensor, first_positions: Tensor) -> Tensor:
        """mean_keys: [B, E], first_positions: [B] int64 -> [B, E]: the key of a block, normed and turned."""
        keys = rms_norm(mean_keys, self.index_k_norm, self.eps).unsqueeze(1)
        return rotate_(keys, *self.rope.cos_sin(first_positions)).squeeze(1)


def _with_bad(nonfinite: Tensor | None, bad_rows: Tensor, rows: int, suffix: Suffix | None) -> Tensor:
    """[rows] bool: `nonfinite` (None: nowhere), and the rows whose scores were no numbers."""
    if suffix is None:
        return bad_rows if nonfinite is None else nonfinite | bad_rows
    found = torch.zeros(rows, dtype=torch.bool, device=bad_rows.device) if nonfinite is None else nonfinite.clone()
    found[suffix.index] |= bad_rows
    return found


def _joined(selections: tuple[Selection, ...]) -> Selection:
    """The selections of consecutive runs of rows as one."""
    if len(selections) == 1:
        return selections[0]
    width = max(part.block_ids.shape[1] for part in selections)
    ids = [F.pad(part.block_ids, (0, width - part.block_ids.shape[1]), value=-1) for part in selections]
    bad_rows = None
    if any(part.bad_rows is not None for part in selections):
        # Where nothing was pruned nothing was scored, and no row is bad.
        none = [part.counts != part.counts if part.bad_rows is None else part.bad_rows for part in selections]
        bad_rows = torch.cat(none)
    return Selection(torch.cat(ids), torch.cat([part.counts for part in selections]), True, bad_rows)
