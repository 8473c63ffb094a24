"""Routed experts and the shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.geometry import Geometry
from page4.kernels import cpu
from page4.model.linear import Linear
from page4.model.weight_tree import MoeWeights

# With few rows and few small experts, two large products over all experts cost less than a loop over the chosen ones.
# That needs a second copy of the experts, so it is for layers where the copy is small.
DENSE_ROWS = 64
DENSE_EXPERTS_PER_CHOICE = 4
DENSE_BYTES = 16 << 20


class Moe:
    """Softmax over all experts in fp32, the top k of them, and a shared expert behind a sigmoid gate."""

    def __init__(self, weights: MoeWeights, geometry: Geometry) -> None:
        moe = geometry.moe
        self.num_experts, self.top_k, self.normalise = moe.num_experts, moe.top_k, moe.norm_topk_prob
        self.routed = moe.num_experts * moe.intermediate
        self.router = Linear(weights.router)
        self.gate_up, self.down = weights.gate_up, weights.down
        self.shared_gate_up, self.shared_down = Linear(weights.shared_gate_up), Linear(weights.shared_down)
        small = weights.gate_up.nbytes + weights.down.nbytes <= DENSE_BYTES
        self.has_dense = small and moe.num_experts <= DENSE_EXPERTS_PER_CHOICE * moe.top_k
        self.kernel: cpu.Moe | None = None
        if self.has_dense:
            self._fuse(weights)
            widths = (moe.intermediate, self.inner - self.routed)
            if cpu.refusal(weights.router, channels=widths) is None:
                self.kernel = cpu.Moe(moe.num_experts, moe.top_k, moe.intermediate, self.inner, moe.norm_topk_prob)

    def _fuse(self, weights: MoeWeights) -> None:
        """One matrix into all experts (gates, ups, router) and one out of them; the shared expert is the last."""
        gate, up = weights.gate_up.chunk(2, 1)
        shared_gate, shared_up = weights.shared_gate_up.chunk(2)
        parts = (gate.flatten(0, 1), shared_gate, up.flatten(0, 1), shared_up, weights.router)
        self.inner = self.routed + len(shared_gate)
        self.dense_in = Linear(torch.cat(parts))
        self.dense_out = Linear(torch.cat((weights.down.transpose(0, 1).flatten(1), weights.shared_down), 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, hidden] -> [R, hidden]."""
        if self.has_dense and x.shape[0] <= DENSE_ROWS:
            return self._dense(x)
        logits = self.router(x)
        scores, chosen = self._route(logits[:, : self.num_experts])
        gate, up = self.shared_gate_up(x).chunk(2, -1)
        out = self.shared_down(F.silu(gate).mul_(up)).mul_(logits[:, self.num_experts :].sigmoid())
        return self._experts(x, scores, chosen, out)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [R, X] -> weights [R, top_k] in their dtype, expert ids [R, top_k]."""
        scores, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        if self.normalise:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores.to(logits.dtype), chosen

    def _dense(self, x: Tensor) -> Tensor:
        """All experts for all rows, weighted before the way out; the unchosen weigh nothing, whatever they hold."""
        projected = self.dense_in(x)
        if self.kernel is not None:
            return self.dense_out(self.kernel.activate(projected))
        gate, up, logits = projected.split_with_sizes((self.inner, self.inner, self.num_experts + 1), -1)
        scores, chosen = self._route(logits[:, : self.num_experts])
        weights = torch.zeros_like(logits).scatter_(1, chosen, scores)[:, : self.num_experts].unsqueeze(-1)
        inner = F.silu(gate).mul_(up)
        routed = inner[:, : self.routed].view(x.shape[0], self.num_experts, -1)
        # 0 * inf is NaN: an unchosen expert that overflows is replaced, not multiplied away.
        routed.mul_(weights).masked_fill_(weights == 0, 0.0)
        inner[:, self.routed :].mul_(logits[:, self.num_experts :].sigmoid())
        return self.dense_out(inner)

    def _experts(self, x: Tensor, scores: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Adds the routed experts to out: [R, hidden], one expert at a time."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        rows = order // self.top_k
        inputs, weights = x[rows], scores.flatten()[order].unsqueeze(-1)
        parts = zip(*(y.split_with_sizes(counts) for y in (inputs, rows, weights)), strict=True)
        for expert, (mine, row, weight) in enumerate(parts):
            if len(row):
                gate, up = F.linear(mine, self.gate_up[expert]).chunk(2, -1)
                out.index_add_(0, row, F.linear(F.silu(gate).mul_(up), self.down[expert]).mul_(weight))
        return out
