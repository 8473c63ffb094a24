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
from page4.model.conv import causal_conv, window_after
from page4.model.delta import Accepted, DeltaWindow, advance, delta_chunks, delta_window
from page4.model.groups import Group
from page4.model.linear import Linear
from page4.model.norms import inverse_rms, unit_norm
from page4.model.weight_tree import GdnWeights


@dataclass(frozen=True)
class GdnPending:
    """conv_inputs: [n, kernel - 1 + W, conv_dim]; a window has `window`, a long span its final `state` instead."""

    conv_inputs: Tensor
    window: DeltaWindow | None
    state: Tensor | None


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
        self.activate = F.silu if gdn.gate_activation == "silu" else torch.sigmoid

    def forward(self, x: Tensor, groups: tuple[Group, ...], arena: Arena) -> tuple[Tensor, tuple[GdnPending, ...]]:
        """x: [R, hidden] -> [R, hidden], and one pending for each group."""
        qkv, z, b, a = self.in_proj(x).split_with_sizes(self.split, -1)
        beta = b.sigmoid().float()
        log_decay = F.softplus(a.float() + self.dt_bias).mul_(self.rate)
        outs, pending = zip(*(self._run(group, qkv, log_decay, beta, arena) for group in groups), strict=True)
        if len(groups) == 1 and groups[0].kept is None:
            heads = outs[0].flatten(0, 1)
        else:
            heads = torch.empty(x.shape[0], self.value_heads, self.value_dim, dtype=torch.float32, device=x.device)
            for group, out in zip(groups, outs, strict=True):
                group.scatter(heads, out)
        return self.out_proj(self._gated_norm(heads.to(x.dtype), z)), pending

    def _run(
        self, group: Group, qkv: Tensor, log_decay: Tensor, beta: Tensor, arena: Arena
    ) -> tuple[Tensor, GdnPending]:
        """The rows of one group -> out [n, W, Hv, Dv] fp32."""
        before = group.read(arena.conv(self.layer)).transpose(1, 2)
        inputs = torch.cat((before, group.gather(qkv)), 1)
        qk, v = self._heads(F.silu(causal_conv(inputs, self.conv)).float())
        g, beta = group.gather(log_decay), group.gather(beta)
        state = group.read(arena.recurrent(self.layer))
        if not group.is_window:
            out, final = delta_chunks(qk[0], v[0], g[0], beta[0], state[0])
            tail = inputs[:, inputs.shape[1] - before.shape[1] :].clone()
            return out.unsqueeze(0), GdnPending(tail, None, final.unsqueeze(0))
        n, width = v.shape[:2]
        qk = qk.view(n, width, 2, self.key_heads, self.key_dim).permute(0, 3, 2, 1, 4)
        qk = qk.reshape(n, self.key_heads, 2 * width, self.key_dim)
        out, window = delta_window(qk, v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2), state)
        return out.transpose(1, 2), GdnPending(inputs, window, None)

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
