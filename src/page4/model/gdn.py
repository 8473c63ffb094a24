"""Gated DeltaNet layer: convolved q, k, v, the gated delta rule, a gated norm.

The recurrent and conv states are read from the arena by slot. `forward` never writes them: it returns what `commit`
needs to advance them by the accepted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.kernels import cpu
from page4.model.conv import causal_conv, window_after
from page4.model.delta import SEGMENT_ROWS, Accepted, DeltaWindow, advance, delta_chunks, delta_window
from page4.model.groups import MAX_WINDOW_ROWS, Group
from page4.model.linear import Linear
from page4.model.norms import inverse_rms, unit_norm
from page4.model.weight_tree import GdnWeights


@dataclass(frozen=True)
class CompiledWindow:
    """What the compiled commit needs: projected rows [R, width], and what `cpu.Gdn.window` kept."""

    projected: Tensor
    kept: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class GdnPending:
    """conv_inputs: [n, kernel - 1 + W, conv_dim]; a window has `window`, a long span its final `state` instead.

    A window of the compiled kernel has `compiled` and nothing else.
    """

    conv_inputs: Tensor | None
    window: DeltaWindow | None = None
    state: Tensor | None = None
    compiled: CompiledWindow | None = None


class Gdn:
    """One layer; `layer` is its index in the arena."""

    def __init__(self, weights: GdnWeights, geometry: Geometry, layer: int) -> None:
        gdn = geometry.gdn
        self.layer, self.eps = layer, geometry.rms_norm_eps
        self.key_heads, self.value_heads = gdn.key_heads, gdn.value_heads
        self.key_dim, self.value_dim = gdn.key_dim, gdn.value_dim
        self.split = weights.split
        self.in_proj, self.out_proj = Linear(weights.in_proj), Linear(weights.out_proj)
        self.conv = weights.conv
        self.rate, self.dt_bias = -weights.a_log.float().exp(), weights.dt_bias.float()
        self.norm = weights.norm
        self.kernel: cpu.Gdn | None = None
        channels = (gdn.conv_dim, gdn.key_dim, gdn.value_dim)
        if cpu.refusal(weights.conv, channels=channels) is None and MAX_WINDOW_ROWS <= cpu.MAX_WINDOW_ROWS:
            self.kernel = cpu.Gdn(
                self.conv,
                self.rate,
                self.dt_bias,
                self.norm,
                heads=(gdn.key_heads, gdn.value_heads),
                dims=(gdn.key_dim, gdn.value_dim),
                silu_gate=gdn.gate_activation == "silu",
                eps=self.eps,
            )
        self.activate = F.silu if gdn.gate_activation == "silu" else torch.sigmoid

    def forward(self, x: Tensor, groups: tuple[Group, ...], arena: Arena) -> tuple[Tensor, tuple[GdnPending, ...]]:
        """x: [R, hidden] -> [R, hidden], and one pending for each group."""
        if len(groups) == 1 and groups[0].is_window and self.kernel is not None:
            out, entry = self._compiled_window(self.kernel, groups[0], x, arena)
            return out, (entry,)
        if len(groups) == 1 and groups[0].kept is None:
            part, entry = self._window(groups[0], x, arena) if groups[0].is_window else self._span(groups[0], x, arena)
            return part.flatten(0, 1), (entry,)
        out, pending = torch.empty_like(x), []
        for group in groups:
            if group.is_window and self.kernel is not None:
                out[group.real_rows], entry = self._compiled_window(self.kernel, group, x, arena)
            else:
                part, entry = self._window(group, x, arena) if group.is_window else self._span(group, x, arena)
                group.scatter(out, part)
            pending.append(entry)
        return out, tuple(pending)

    def _compiled_window(self, kernel: cpu.Gdn, group: Group, x: Tensor, arena: Arena) -> tuple[Tensor, GdnPending]:
        """Short spans of many requests at once, their real rows alone -> [R of the group, hidden]."""
        projected = self.in_proj(x if sum(group.lengths) == x.shape[0] else x[group.real_rows])
        heads, kept = kernel.window(projected, group.spans, arena.recurrent(self.layer), arena.conv(self.layer))
        return self.out_proj(heads), GdnPending(None, compiled=CompiledWindow(projected, kept))

    def _window(self, group: Group, x: Tensor, arena: Arena) -> tuple[Tensor, GdnPending]:
        """Short spans of many requests at once -> [n, W, hidden]."""
        n, width = len(group.requests), group.width
        qkv, z, g, beta = self._project(group.gather(x).flatten(0, 1))
        before = group.read(arena.conv(self.layer)).transpose(1, 2)
        inputs = torch.cat((before, qkv.view(n, width, -1)), 1)
        qk, v = self._heads(F.silu(causal_conv(inputs, self.conv)).float())
        qk = qk.view(n, width, 2, self.key_heads, self.key_dim).permute(0, 3, 2, 1, 4)
        qk = qk.reshape(n, self.key_heads, 2 * width, self.key_dim)
        g, beta = (y.view(n, width, -1).transpose(1, 2) for y in (g, beta))
        state = group.read(arena.recurrent(self.layer))
        out, window = delta_window(qk, v.transpose(1, 2), g, beta, state)
        heads = out.transpose(1, 2).flatten(0, 1).to(x.dtype)
        return self.out_proj(self._gated_norm(heads, z)).view(n, width, -1), GdnPending(inputs, window)

    def _span(self, group: Group, x: Tensor, arena: Arena) -> tuple[Tensor, GdnPending]:
        """One long span -> [1, W, hidden], in segments, so that its workspace does not grow with it."""
        x = group.gather(x)[0]
        before = group.read(arena.conv(self.layer)).transpose(1, 2)
        state, out = group.read(arena.recurrent(self.layer))[0].clone(), torch.empty_like(x)
        for begin in range(0, x.shape[0], SEGMENT_ROWS):
            rows = slice(begin, begin + SEGMENT_ROWS)
            qkv, z, g, beta = self._project(x[rows])
            inputs = torch.cat((before, qkv.unsqueeze(0)), 1)
            before = inputs[:, inputs.shape[1] - before.shape[1] :].clone()
            qk, v = self._heads(F.silu(causal_conv(inputs, self.conv)).float())
            heads = delta_chunks(qk[0], v[0], g, beta, state).to(x.dtype)
            out[rows] = self.out_proj(self._gated_norm(heads, z))
        return out.unsqueeze(0), GdnPending(before, state=state.unsqueeze(0))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [R, hidden] -> qkv [R, conv_dim], z [R, Hv * Dv], log decay and beta [R, Hv] fp32."""
        qkv, z, b, a = self.in_proj(x).split_with_sizes(self.split, -1)
        log_decay = F.softplus(a.float() + self.dt_bias).mul_(self.rate)
        return qkv, z, log_decay, b.sigmoid().float()

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """mixed: [n, W, conv_dim] fp32 -> qk: [n, W, 2 * Hk, Dk] unit vectors (q over sqrt(Dk)), v: [n, W, Hv, Dv]."""
        keys = self.key_heads * self.key_dim
        qk, v = mixed.split_with_sizes((2 * keys, self.value_heads * self.value_dim), -1)
        qk = unit_norm(qk.view(*qk.shape[:2], 2 * self.key_heads, self.key_dim))
        qk[:, :, : self.key_heads].mul_(self.key_dim**-0.5)
        return qk, v.view(*v.shape[:2], self.value_heads, self.value_dim)

    def _gated_norm(self, heads: Tensor, z: Tensor) -> Tensor:
        """heads: [R, Hv, Dv], z: [R, Hv * Dv] -> [R, Hv * Dv]: RMSNorm times weight, then the activated gate."""
        wide = heads.float()
        normed = (wide * inverse_rms(wide, self.eps)).to(heads.dtype) * self.norm
        return (normed.flatten(1) * self.activate(z.float())).to(heads.dtype)

    def commit(self, pending: GdnPending, group: Group, accepted: Accepted | None, arena: Arena) -> None:
        """Advances this group's states by its accepted rows; None for a long span, which keeps all of them."""
        conv, recurrent = arena.conv(self.layer), arena.recurrent(self.layer)
        if pending.compiled is not None:
            assert self.kernel is not None and accepted is not None
            projected, kept = pending.compiled.projected, pending.compiled.kept
            self.kernel.commit(projected, kept, group.spans, accepted.counts, recurrent, conv)
            return
        assert pending.conv_inputs is not None
        if pending.window is None:
            assert pending.state is not None
            conv[group.slots] = pending.conv_inputs.transpose(1, 2)
            recurrent[group.slots] = pending.state
            return
        assert accepted is not None
        conv[group.slots] = window_after(pending.conv_inputs, accepted.counts, conv.shape[-1]).transpose(1, 2)
        decay, update = advance(pending.window, accepted)
        if isinstance(group.slots, slice):
            recurrent[group.slots].mul_(decay).add_(update)
        else:
            recurrent[group.slots] = update.addcmul_(recurrent[group.slots], decay)
