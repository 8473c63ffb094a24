"""Routed experts and the shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.geometry import Geometry
from page4.model.linear import Linear
from page4.model.weight_tree import MoeWeights


class Moe:
    """Softmax over all experts in fp32, the top k of them, and a shared expert behind a sigmoid gate."""

    def __init__(self, weights: MoeWeights, geometry: Geometry) -> None:
        moe = geometry.moe
        self.num_experts, self.top_k, self.normalise = moe.num_experts, moe.top_k, moe.norm_topk_prob
        self.router = Linear(weights.router)
        self.gate_up, self.down = weights.gate_up, weights.down
        self.shared_gate_up, self.shared_down = Linear(weights.shared_gate_up), Linear(weights.shared_down)

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, hidden] -> [R, hidden]."""
        logits = self.router(x)
        scores, chosen = self._route(logits[:, : self.num_experts])
        gate, up = self.shared_gate_up(x).chunk(2, -1)
        out = self.shared_down(F.silu(gate) * up).mul_(logits[:, self.num_experts :].sigmoid())
        return self._experts(x, scores, chosen, out)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits: [R, X] -> weights [R, top_k] in their dtype, expert ids [R, top_k]."""
        scores, chosen = F.softmax(logits, -1, dtype=torch.float32).topk(self.top_k, -1)
        if self.normalise:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores.to(logits.dtype), chosen

    def _experts(self, x: Tensor, scores: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Adds the routed experts to out: [R, hidden], one expert at a time."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
        rows, weights = order // self.top_k, scores.flatten()[order].unsqueeze(-1)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            mine = rows[start : start + count]
            gate, up = F.linear(x[mine], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert]).mul_(weights[start : start + count])
            out.index_add_(0, mine, y)
            start += count
        return out
