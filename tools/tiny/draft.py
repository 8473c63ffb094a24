"""The whole model: the target, and the draft head (MTP) unrolled on its own outputs.

Row i of the first iteration takes the target's streams at position i and the token t_{i+1} and predicts t_{i+2}. Row i
of iteration j sits at position i + j - 1, takes the streams of iteration j - 1 and the token t_{i+j}, and predicts
t_{i+j+1}. Given that the earlier drafts were right, real tokens are what it sees at run time, so the parallel form is
exact, not an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model import QSA, Body, HyperConnection, QsaLayer, RMSNorm


@dataclass
class TargetOutput:
    """streams: [B, S, N*C] before the mixer; hidden: [B, S, C] after it; losses of the layers, summed."""

    streams: Tensor
    hidden: Tensor
    balance: Tensor
    index: Tensor


class DraftHead(nn.Module):
    """Projections, one QSA decoder layer and its own mixer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps, self.count = config["hidden_size"], config["rms_norm_eps"], config["hc_count"]
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden * self.count, eps)
        self.layers = nn.ModuleList([QsaLayer(config)])
        self.hyper_connection_mixer = HyperConnection(config, inject=False)

    def enter(self, streams: Tensor, embedding: Tensor) -> Tensor:
        """The layer's input streams from the previous streams and the next token's embedding."""
        e = self.fc_embedding(self.pre_fc_norm_embedding(embedding))
        g = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, (self.count, -1)))
        return (g + e.unsqueeze(-2)).flatten(-2)


class TinyLM(nn.Module):
    """`model.*`, `lm_head.*` and `mtp.*` of the checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.mtp = DraftHead(config)

    def embed(self, tokens: Tensor) -> Tensor:
        out = self.model.embed_tokens(tokens)
        return out.to(torch.get_autocast_dtype(out.device.type)) if torch.is_autocast_enabled(out.device.type) else out

    def target(
        self, tokens: Tensor, mode: str = QSA, *, learn: bool = False, open_: Tensor | None = None
    ) -> TargetOutput:
        """The target over `tokens: [B, S]`, S a multiple of 4. `open_` (a bool scalar) lifts the selection."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        streams = self.embed(tokens).repeat(1, 1, self.config["hc_count"])
        balance = index = streams.new_zeros((), dtype=torch.float32)
        for layer in self.model.layers:
            if isinstance(layer, QsaLayer):
                streams, more, kl, *_ = layer(streams, positions, mode, learn, open_)
                index = index + kl
            else:
                if layer.ple is not None:
                    streams = layer.ple(streams, layer.ple.ple_embedding.hash_ids(tokens))
                streams, more = layer(streams)
            balance = balance + more
        hidden, _ = self.model.hyper_connection_mixer(streams)
        return TargetOutput(streams, hidden, balance, index)

    def drafts(
        self,
        streams: Tensor,
        tokens: Tensor,
        iterations: int,
        mode: str = QSA,
        *,
        learn: bool = False,
        open_: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """hidden [B, S, C] of each iteration for lm_head, balance and index losses.

        streams: [B, S, N*C] of the target; tokens: [B, S + iterations], the input tokens and those after them.
        """
        length = streams.shape[1]
        positions = torch.arange(length, device=tokens.device)
        layer, hidden, newer = self.mtp.layers[0], [], []
        x = self.mtp.enter(streams, self.embed(tokens[:, 1 : length + 1]))
        x, balance, index, mask, k, v = layer(x, positions, mode, learn, open_)
        hidden.append(self.mtp.hyper_connection_mixer(x)[0])
        for j in range(2, iterations + 1):
            x = self.mtp.enter(x, self.embed(tokens[:, j : length + j]))
            x, more, k_own, v_own = layer.again(x, positions + j - 1, mask, k, v, newer)
            newer = [*newer, (k_own, v_own)]
            balance = balance + more
            hidden.append(self.mtp.hyper_connection_mixer(x)[0])
        return hidden, balance, index


@torch.no_grad()
def initialise(model: TinyLM, seed: int) -> None:
    """Random weights: outputs of blocks start at zero, decays between 1e-3 and 0.1 a token times A in 1..16."""
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 2)[-2]
        if name.endswith("A_log"):
            p.copy_(torch.empty_like(p).uniform_(1, 16).log())
        elif name.endswith("dt_bias"):
            dt = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))
            p.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif name.endswith("ple.conv1d.weight") or leaf in ("out_proj", "o_proj") or "down_proj" in name:
            p.zero_()
        elif "conv1d" in name:
            p.normal_(0, 0.3)
        elif "embed_tokens" in name:
            p.normal_(0, 0.5)
        elif "ngram_embedding" in name:
            p.normal_(0, 0.3)
        elif leaf in ("gate", "shared_expert_gate", "block_inject_weight", "lm_head") or "input_mix" in name:
            p.normal_(0, 0.02)
        elif p.ndim >= 2:
            p.normal_(0, p.shape[-1] ** -0.5)
