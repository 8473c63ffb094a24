"""A vectorised qwen4_exp text model for training: all rows at once, parameters named as in the checkpoint.

The mathematics is that of the transformers model (which loops over rows in Python); the draft head is described in
`draft.py`. Selection is exact: a mask over blocks, with ties cut towards the lower block id.
Axes: B sequences, S tokens, C hidden, N streams, H heads, D head dim, M blocks, E index dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from gdn import GatedDeltaNet
from shape import ngram_head_sizes, ngram_multipliers, ngram_table_rows
from torch import Tensor, nn

DENSE, QSA, WINDOW = "dense", "qsa", "window"
INDEX_MARGIN = 1.0


class RMSNorm(nn.Module):
    """`x / rms(x) * (1 + weight)`, over the last axis or over groups of it."""

    def __init__(self, dim: int, eps: float, group: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps, self.group = eps, group or dim

    def forward(self, x: Tensor) -> Tensor:
        y = x.float().unflatten(-1, (-1, self.group))
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return (y * (1.0 + self.weight.float())).type_as(x)


def rope_tables(config: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin: [S, rotary] fp32 for `positions: [S]`."""
    rope = config["rope_parameters"]
    dim = int(config["head_dim"] * rope["partial_rotary_factor"])
    frequency = rope["rope_theta"] ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[:, None].float() * frequency
    return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of `x: [B, S, heads, dim]` on its first rotary dims."""
    cos, sin = (t[:, None, :] for t in table)
    dim = cos.shape[-1]
    first, rest = x[..., :dim].float(), x[..., dim:]
    left, right = first.chunk(2, -1)
    turned = first * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned.type_as(x), rest], -1)


class HyperConnection(nn.Module):
    """Mix the residual streams into one input; for a block, also give the weights that inject its output."""

    def __init__(self, config: dict[str, Any], *, inject: bool) -> None:
        super().__init__()
        self.count, hidden = config["hc_count"], config["hidden_size"]
        wide = self.count * hidden
        self.hc_norm = RMSNorm(wide, config["rms_norm_eps"], hidden)
        self.input_mix_weight_down = nn.Linear(wide, config["hc_lowrank"], bias=False)
        self.input_mix_weight_up = nn.Linear(config["hc_lowrank"], wide, bias=False)
        self.block_inject_weight = nn.Linear(wide, self.count, bias=False) if inject else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self.hc_norm(streams)
        low = F.silu(self.input_mix_weight_down(normed) / self.count)
        gate = torch.sigmoid(self.input_mix_weight_up(low))
        mixed = (gate * normed).unflatten(-1, (self.count, -1)).mean(-2)
        if self.block_inject_weight is None:
            return mixed, None
        return mixed, 2 * torch.sigmoid(self.block_inject_weight(normed) / self.count)


def inject(streams: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    """Add a block's output to every stream, weighted."""
    return streams + (output.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2).type_as(streams)


class Router(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config["num_experts"], config["hidden_size"]))


class Experts(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        count, hidden, inner = config["num_experts"], config["hidden_size"], config["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MoE(nn.Module):
    """Top-k experts and a shared one. All experts run on all rows: at this size that is one large product."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.top_k, self.count = config["num_experts_per_tok"], config["num_experts"]
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_expert = SwiGLU(config["hidden_size"], config["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(config["hidden_size"], 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = torch.softmax(F.linear(x, self.gate.weight).float(), -1)
        top, ids = torch.topk(probs, self.top_k, -1)
        weights = torch.zeros_like(probs).scatter(-1, ids, top / top.sum(-1, keepdim=True))
        share = (weights > 0).float().flatten(0, -2).mean(0) / self.top_k
        balance = self.count * (share * probs.flatten(0, -2).mean(0)).sum()
        gate, up = F.linear(x, self.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.count, -1)).chunk(2, -1)
        inner = F.silu(gate) * up * weights.unsqueeze(-1).type_as(up)
        routed = F.linear(inner.flatten(-2), self.experts.down_proj.transpose(0, 1).flatten(1))
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x), balance


class Indexer(nn.Module):
    """Scores of every block for every query."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.dim = config["indexer_n_heads"], config["indexer_head_dim"]
        self.ratio = config["indexer_compress_ratio"]
        self.index_qk_proj = nn.Linear(config["hidden_size"], (self.heads + 1) * self.dim, bias=False)
        self.q_layernorm = RMSNorm(self.dim, config["rms_norm_eps"])
        self.k_layernorm = RMSNorm(self.dim, config["rms_norm_eps"])

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """scores and their leaky form (for gradients only): [B, S, M] fp32, M = S // 4 whole blocks; not masked."""
        q, k = self.index_qk_proj(x).split([self.heads * self.dim, self.dim], -1)
        q = rotate(self.q_layernorm(q.unflatten(-1, (self.heads, self.dim))), table)
        whole = k.shape[1] // self.ratio * self.ratio
        pooled = k[:, :whole].unflatten(1, (-1, self.ratio)).float().mean(2).type_as(k)
        starts = (table[0][: whole : self.ratio], table[1][: whole : self.ratio])
        keys = rotate(self.k_layernorm(pooled).unsqueeze(2), starts).squeeze(2)
        products = torch.matmul(q.transpose(1, 2), keys.transpose(1, 2).unsqueeze(1))
        scale = math.sqrt(self.dim)
        return F.relu(products).float().sum(1) / scale, F.leaky_relu(products, 0.1).float().sum(1) / scale


def select_mask(scores: Tensor, positions: Tensor, top_k: int, ratio: int, *, exact: bool) -> Tensor:
    """chosen: [B, S, M] bool, the best complete blocks of each row; ties to the lower id when `exact`."""
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    complete = blocks[None, :] * ratio + ratio - 1 <= positions[:, None]
    masked = scores.masked_fill(~complete, -1.0)
    count = min(top_k, scores.shape[-1])
    if exact:
        ids = torch.sort(masked, dim=-1, descending=True, stable=True).indices[..., :count]
    else:
        ids = torch.topk(masked, count, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ids, True) & complete


class Attention(nn.Module):
    """Gated grouped-query attention over the selected blocks and the tail."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, self.heads, self.dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        if config["num_key_value_heads"] != 1:
            raise ValueError("num_key_value_heads: expected 1, the shape that this model trains")
        self.ratio = config["indexer_compress_ratio"]
        self.top_k = config["indexer_budget"] // self.ratio
        self.q_proj = nn.Linear(hidden, self.heads * self.dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden, self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, config["rms_norm_eps"])
        self.indexer = Indexer(config)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q: [B, H, S, D], gate: [B, S, H*D], k and v: [B, S, D]."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.dim)).chunk(2, -1)
        q = rotate(self.q_norm(q), table).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x)).unsqueeze(2), table).squeeze(2)
        return q, gate.flatten(-2), k, self.v_proj(x)

    def visible(self, scores: Tensor, positions: Tensor, mode: str, open_: Tensor | None) -> Tensor:
        """mask: [B or 1, S, S] bool, what each row attends to in this mode; `open_` (a bool scalar) lifts QSA."""
        row, column = positions[:, None], positions[None, :]
        causal = (column <= row)[None]
        if mode == DENSE:
            return causal
        if mode == WINDOW:
            return causal & (row - column < self.config["indexer_budget"])[None]
        chosen = select_mask(scores, positions, self.top_k, self.ratio, exact=not self.training)
        tail = column >= (row + 1) // self.ratio * self.ratio
        rest = len(positions) - chosen.shape[-1] * self.ratio
        shown = F.pad(chosen.repeat_interleave(self.ratio, -1), (0, rest)) | tail[None]
        return (shown if open_ is None else shown | open_) & causal

    def index_loss(self, scores: Tensor, leaky: Tensor, logits: Tensor, positions: Tensor) -> Tensor:
        """KL of the index distribution from the dense attention on complete blocks, heads summed; q.k detached.

        Softmax does not see a shift, a ReLU does: without the second term most scores end at exactly 0, where they are
        tied and have no gradient. It keeps the scores of complete blocks above a margin.
        """
        blocks = torch.arange(scores.shape[-1], device=scores.device)
        complete = blocks[None, :] * self.ratio + self.ratio - 1 <= positions[:, None]
        with torch.no_grad():
            causal = positions[None, :] <= positions[:, None]
            dense = torch.softmax(logits.detach().float().masked_fill(~causal, -math.inf), -1).mean(1)
            target = dense.unflatten(-1, (-1, self.ratio)).sum(-1) * complete
            target = target / target.sum(-1, keepdim=True).clamp_min(1e-6)
        logq = torch.log_softmax(scores.masked_fill(~complete, -1e9), -1)
        kl = torch.where(target > 0, target * (target.clamp_min(1e-9).log() - logq), 0.0).sum(-1)
        below = F.relu(INDEX_MARGIN - leaky) * complete
        return kl.mean() + below.sum() / (complete.sum() * len(scores))

    def forward(
        self, x: Tensor, positions: Tensor, mode: str, *, learn: bool, open_: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Output [B, S, C], index loss, and (mask, k, v) for the later draft iterations."""
        table = rope_tables(self.config, positions)
        q, gate, k, v = self.project(x, table)
        scores, leaky = self.indexer(x.detach(), table)
        mask = self.visible(scores.detach(), positions, mode, open_)
        logits = torch.matmul(q, k.transpose(1, 2).unsqueeze(1)) * self.dim**-0.5
        probs = torch.softmax(logits.float().masked_fill(~mask[:, None], -math.inf), -1).type_as(v)
        out = torch.matmul(probs, v.unsqueeze(1)).transpose(1, 2).flatten(-2) * torch.sigmoid(gate)
        loss = self.index_loss(scores, leaky, logits, positions) if learn else scores.new_zeros(())
        return self.o_proj(out), loss, mask, k, v

    def again(
        self, x: Tensor, positions: Tensor, mask: Tensor, k: Tensor, v: Tensor, newer: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A later draft iteration: row i sits `len(newer) + 1` tokens after row i of the first iteration, and attends
        to what that row selected (k, v), to its own window's tokens in between (`newer`) and to itself."""
        table = rope_tables(self.config, positions)
        q, gate, k_own, v_own = self.project(x, table)
        scale = self.dim**-0.5
        old = (torch.matmul(q, k.transpose(1, 2).unsqueeze(1)) * scale).float().masked_fill(~mask[:, None], -math.inf)
        pairs = [*newer, (k_own, v_own)]
        own = [(q * key.unsqueeze(1)).float().sum(-1, keepdim=True) * scale for key, _ in pairs]
        probs = torch.softmax(torch.cat([old, *own], -1), -1).type_as(v)
        out = torch.matmul(probs[..., : -len(pairs)], v.unsqueeze(1))
        for i, (_, value) in enumerate(pairs):
            out = out + probs[..., i - len(pairs), None] * value.unsqueeze(1)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate)), k_own, v_own


class NGramEmbedding(nn.Module):
    """Hashed embeddings of the 2- and 3-grams that end at each token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        sizes = ngram_head_sizes(config)
        self.order, self.heads, self.eos = config["ngram_size"], config["heads_per_ngram"], config["eos_token_id"]
        self.multipliers = ngram_multipliers(config)
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)
        self.register_buffer("offsets", torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]), persistent=False)
        self.ngram_embedding = nn.Embedding(ngram_table_rows(config), config["ple_embed_dim"] // len(sizes))

    def hash_ids(self, tokens: Tensor) -> Tensor:
        """ids: [B, S, heads] int64 of `tokens: [B, S]`; a document's start and an eos before reset the context."""
        batch, length = tokens.shape
        context = tokens.new_full((batch, self.order - 1), self.eos)
        history = torch.cat([context, tokens], 1)
        shifted, broken = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
        for shift in range(1, self.order):
            previous = history[:, self.order - 1 - shift : self.order - 1 - shift + length]
            broken = broken | (previous == self.eos)
            shifted.append(torch.where(broken, self.eos, previous))
        mixed, ids = shifted[0] * self.multipliers[0], []
        for n in range(1, self.order):
            mixed = mixed ^ (shifted[n] * self.multipliers[n])
            part = slice((n - 1) * self.heads, n * self.heads)
            ids.append(torch.remainder(mixed.unsqueeze(-1), self.sizes[part]) + self.offsets[part])
        return torch.cat(ids, -1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.ngram_embedding(ids).flatten(-2)
        return out


class PLE(nn.Module):
    """Add gated n-gram features, and a dilated convolution of them, to every stream."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.count, self.hidden, self.dilation = config["hc_count"], config["hidden_size"], config["ngram_size"]
        wide, eps = self.count * self.hidden, config["rms_norm_eps"]
        self.ple_embedding = NGramEmbedding(config)
        self.key_proj = nn.Linear(config["ple_embed_dim"], wide, bias=False)
        self.value_proj = nn.Linear(config["ple_embed_dim"], self.hidden, bias=False)
        self.norm_key = RMSNorm(wide, eps, self.hidden)
        self.norm_query = RMSNorm(wide, eps, self.hidden)
        self.norm_conv = RMSNorm(wide, eps, self.hidden)
        self.conv1d = nn.Conv1d(
            wide, wide, config["ple_conv_kernel_size"], groups=wide, dilation=self.dilation, bias=False
        )

    def forward(self, streams: Tensor, ids: Tensor) -> Tensor:
        features = self.ple_embedding(ids).type_as(streams)
        key = self.norm_key(self.key_proj(features)).unflatten(-1, (self.count, -1))
        query = self.norm_query(streams).unflatten(-1, (self.count, -1))
        gate = (key * query).float().sum(-1, keepdim=True) / math.sqrt(self.hidden)
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        value = (torch.sigmoid(gate).type_as(streams) * self.value_proj(features).unsqueeze(-2)).flatten(-2)
        normed, out = self.norm_conv(value), value.float() * 0
        taps = self.conv1d.weight.shape[-1]
        for tap in range(taps):
            back = (taps - 1 - tap) * self.dilation
            out = out + F.pad(normed, (0, 0, back, 0))[:, : normed.shape[1]] * self.conv1d.weight[:, 0, tap]
        return streams + value.type_as(streams) + F.silu(out).type_as(streams)


class GdnLayer(nn.Module):
    """A recurrent decoder layer; the PLE, where there is one, runs before it."""

    def __init__(self, config: dict[str, Any], *, ple: bool) -> None:
        super().__init__()
        self.ple = PLE(config) if ple else None
        self.linear_attn = GatedDeltaNet(config)
        self.mlp = MoE(config)
        self.attn_hyper_connection = HyperConnection(config, inject=True)
        self.mlp_hyper_connection = HyperConnection(config, inject=True)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = self.attn_hyper_connection(streams)
        streams = inject(streams, self.linear_attn(x), weights)
        x, weights = self.mlp_hyper_connection(streams)
        out, balance = self.mlp(x)
        return inject(streams, out, weights), balance


class QsaLayer(nn.Module):
    """An attention decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MoE(config)
        self.attn_hyper_connection = HyperConnection(config, inject=True)
        self.mlp_hyper_connection = HyperConnection(config, inject=True)

    def _mlp(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = self.mlp_hyper_connection(streams)
        out, balance = self.mlp(x)
        return inject(streams, out, weights), balance

    def forward(
        self, streams: Tensor, positions: Tensor, mode: str, learn: bool, open_: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """streams, balance loss, index loss, and (mask, k, v) as `Attention.forward`."""
        x, weights = self.attn_hyper_connection(streams)
        out, index_loss, mask, k, v = self.self_attn(x, positions, mode, learn=learn, open_=open_)
        streams, balance = self._mlp(inject(streams, out, weights))
        return streams, balance, index_loss, mask, k, v

    def again(
        self,
        streams: Tensor,
        positions: Tensor,
        mask: Tensor,
        k: Tensor,
        v: Tensor,
        newer: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, ...]:
        """streams, balance loss, own k and v of a later draft iteration."""
        x, weights = self.attn_hyper_connection(streams)
        out, k_own, v_own = self.self_attn.again(x, positions, mask, k, v, newer)
        streams, balance = self._mlp(inject(streams, out, weights))
        return streams, balance, k_own, v_own


class Body(nn.Module):
    """Embedding, decoder layers and the final mixer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(
            QsaLayer(config) if kind == "full_attention" else GdnLayer(config, ple=i + 1 in config["ple_layer_ids"])
            for i, kind in enumerate(config["layer_types"])
        )
        self.hyper_connection_mixer = HyperConnection(config, inject=False)
