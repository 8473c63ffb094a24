"""Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

# Gates, routers, low ranks, convolutions and tables are no maps between wide spaces: AdamW serves them better.
NOT_MUON = r"mlp\.gate|shared_expert_gate|block_inject|in_proj_[ab]|conv1d|ngram_embedding|input_mix|indexer"
TABLES = r"embed_tokens|lm_head|ngram_embedding"


def orthogonalise(x: Tensor) -> Tensor:
    """Nearest half-orthogonal matrices of `x: [X, rows, columns]` by five Newton-Schulz steps, in bf16."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = y @ y.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        y = torch.baddbmm(y, b, y, beta=3.4445)
    return y.mT if tall else y


class Muon:
    """Momentum, orthogonalised; matrices of one shape share their products."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            groups[(p.shape[-2], p.shape[-1])].append(p)
        self.groups, self.momentum = list(groups.values()), momentum
        self.buffers = [torch.zeros_like(self._stack(group)) for group in self.groups]

    @staticmethod
    def _stack(tensors: list[nn.Parameter] | list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1, t.shape[-2], t.shape[-1]) for t in tensors])

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = self._stack([p.grad for p in group])  # type: ignore[misc]  # every parameter has a gradient here
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)).float()
            rows, columns = update.shape[-2:]
            pieces = update.split([p.numel() // (rows * columns) for p in group])
            scale = rate * max(1.0, rows / columns) ** 0.5
            for p, piece in zip(group, pieces, strict=True):
                p.mul_(1 - rate * decay).add_(piece.view_as(p), alpha=-scale)


class Optimiser:
    """Both, with one learning-rate factor."""

    def __init__(
        self, model: nn.Module, *, muon_rate: float, adam_rate: float, table_rate: float, decay: float
    ) -> None:
        matrices, tables, index, rest = [], [], [], []
        for name, p in model.named_parameters():
            if re.search(TABLES, name):
                tables.append(p)
            elif "indexer" in name:
                index.append(p)
            elif p.ndim < 2 or re.search(NOT_MUON, name):
                rest.append(p)
            else:
                matrices.append(p)
        self.muon, self.muon_rate, self.decay = Muon(matrices), muon_rate, decay
        groups = [
            {"params": tables, "lr": table_rate},
            {"params": index, "lr": adam_rate / 2},
            {"params": rest, "lr": adam_rate},
        ]
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
        self.base = [g["lr"] for g in self.adam.param_groups]
        self.parameters = [*matrices, *tables, *index, *rest]

    def step(self, factor: float) -> float:
        """One step at `factor` times the base rates; returns the gradient norm. Gradients are cleared."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for group, base in zip(self.adam.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        self.adam.step()
        self.muon.step(self.muon_rate * factor, self.decay)
        self.adam.zero_grad(set_to_none=True)
        for p in self.parameters:
            p.grad = None
        return float(norm) if not norm.is_cuda else 0.0

    def state(self) -> dict[str, object]:
        return {"adam": self.adam.state_dict(), "muon": self.muon.buffers}

    def load(self, state: dict[str, object]) -> None:
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]  # our own file, written by `state`
        for mine, saved in zip(self.muon.buffers, state["muon"], strict=True):  # type: ignore[call-overload]  # as above
            mine.copy_(saved)
