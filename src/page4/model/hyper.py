"""Hyper-connections: the residual is C streams; a block reads a learned mix of them and writes into all of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from page4.geometry import Geometry
from page4.kernels import cpu
from page4.model.linear import Linear
from page4.model.norms import rms_norm
from page4.model.weight_tree import HyperWeights, MixerWeights

# Low-rank matrices that stay in a core's cache; larger ones are read at full speed by torch's products only.
COMPILED_ELEMENTS = 1 << 18


class Mixer:
    """The mix alone: what a block reads, or what the LM head reads at the end."""

    def __init__(self, weights: MixerWeights | HyperWeights, geometry: Geometry) -> None:
        self.count, self.hidden, self.eps = geometry.hc_count, geometry.hidden_size, geometry.rms_norm_eps
        self.lowrank = geometry.hc_lowrank
        # Both the down projection and the mean over the streams divide by C: once here, it costs a step nothing.
        self.norm = weights.norm.view(self.count, self.hidden) / self.count
        self.down, self.up = Linear(weights.down), Linear(weights.up)
        self.kernel: cpu.Hyper | None = None
        tensors = (self.norm, weights.down, weights.up)
        small = weights.down.numel() + weights.up.numel() <= COMPILED_ELEMENTS
        if small and cpu.refusal(*tensors, channels=(self.hidden,)) is None:
            self.kernel = cpu.Hyper(*tensors, self.eps)

    def mix(self, streams: Tensor) -> Tensor:
        """streams: [R, C, hidden] -> mixed [R, hidden]."""
        return (self._mix(streams) if self.kernel is None else self.kernel.enter(streams.contiguous()))[0]

    def _mix(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """As `mix`, and the scaled down projection [R, lowrank (+ C)]."""
        normed = rms_norm(streams, self.norm, self.eps)
        low = self.down(normed.flatten(1))
        weight = self.up(F.silu(low[:, : self.lowrank])).sigmoid_().view_as(normed)
        return weight.mul_(normed).sum(1), low


class Hyper(Mixer):
    """The mix and the injection weights around one block."""

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams: [R, C, hidden] -> block input [R, hidden], injection weights [R, C, 1] (to be doubled)."""
        if self.kernel is not None:
            return self.kernel.enter(streams.contiguous())
        mixed, low = self._mix(streams)
        return mixed, low[:, self.lowrank :].sigmoid().unsqueeze(-1)

    def leave(self, streams: Tensor, block_out: Tensor, injection: Tensor) -> Tensor:
        """Adds 2 * injection * block_out: [R, hidden] to the streams, in place."""
        if self.kernel is not None:
            return cpu.leave(streams, block_out.contiguous(), injection)
        return streams.addcmul_(injection, block_out.unsqueeze(1), value=2)

    def pass_on(self, streams: Tensor, block_out: Tensor, injection: Tensor, after: Hyper) -> tuple[Tensor, Tensor]:
        """`leave` and then `after.enter` of the same streams, in one pass over them where that is compiled."""
        if after.kernel is not None:
            return after.kernel.enter(streams, block_out.contiguous(), injection)
        return after.enter(self.leave(streams, block_out, injection))
