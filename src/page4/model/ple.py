"""Per-layer embedding: hashed n-grams of token ids, gated by the streams, with a dilated convolution of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from page4.cache.storage import Arena
from page4.geometry import Geometry
from page4.model.batch import StepBatch, row_spans
from page4.model.conv import causal_conv, window_after
from page4.model.delta import Accepted
from page4.model.groups import Group
from page4.model.linear import Linear
from page4.model.norms import rms_norm
from page4.model.weight_tree import PleWeights


@dataclass(frozen=True)
class PlePending:
    """conv_inputs: [n, state tokens + W, C * hidden] of a window, or only the last state tokens of a long span."""

    conv_inputs: Tensor


def shifted_tokens(batch: StepBatch, ngram_size: int, eos: int) -> list[Tensor]:
    """For s = 0 .. ngram_size - 1 the token s places before each row: [R] int64.

    An n-gram does not reach over an eos: from the first eos backwards every place holds eos. So it is before the
    request's first token.
    """
    context = ngram_size - 1
    history = torch.cat((batch.ngram_context.flatten(), batch.token_ids))
    before = batch.num_requests * context
    shifted = [batch.token_ids]
    for shift in range(1, ngram_size):
        index = [
            before + start + row - shift if row >= shift else (n + 1) * context + row - shift
            for n, (start, end) in enumerate(itertools.pairwise(batch.row_starts))
            for row in range(end - start)
        ]
        token = history[torch.tensor(index, device=history.device)]
        if shift > 1:
            token = torch.where(shifted[-1] == eos, eos, token)
        shifted.append(token)
    return shifted


def ngram_ids(shifted: list[Tensor], weights: PleWeights) -> Tensor:
    """Rows of the table for each row and n-gram head: [R, heads] int64; products wrap around in 64 bits."""
    ngrams = len(shifted) - 1
    sizes = weights.head_vocab_sizes.view(ngrams, -1)
    mixed, blocks = shifted[0] * weights.multipliers[0], []
    for n in range(ngrams):
        mixed = mixed ^ (shifted[n + 1] * weights.multipliers[n + 1])
        blocks.append(torch.remainder(mixed.unsqueeze(-1), sizes[n]))
    return torch.cat(blocks, -1) + weights.head_offsets


class Ple:
    """The embedding of one layer; `layer` is its index in the arena."""

    def __init__(self, weights: PleWeights, geometry: Geometry, layer: int) -> None:
        assert geometry.ple is not None
        self.layer, self.eps = layer, geometry.rms_norm_eps
        self.count, self.hidden = geometry.hc_count, geometry.hidden_size
        self.ngram_size, self.eos = geometry.ple.ngram_size, geometry.eos_token_ids[0]
        self.weights = weights
        self.kv_proj = Linear(weights.kv_proj)
        shape = (self.count, self.hidden)
        self.norm_key, self.norm_query = weights.norm_key.view(shape), weights.norm_query.view(shape)
        self.norm_conv = weights.norm_conv.view(shape)

    def forward(self, streams: Tensor, batch: StepBatch, arena: Arena) -> tuple[Tensor, tuple[PlePending, ...]]:
        """Adds the embedding to streams: [R, C, hidden] in place; one pending for each group of the batch."""
        ids = ngram_ids(shifted_tokens(batch, self.ngram_size, self.eos), self.weights)
        parts = [self._gated(streams[span], ids[span]) for span in row_spans(len(ids))]
        gated = parts[0] if len(parts) == 1 else torch.cat(parts)
        del parts
        local, pending = self._short_conv(rms_norm(gated, self.norm_conv, self.eps).flatten(1), batch.groups, arena)
        return streams.add_(gated.add_(local.view_as(gated))), pending

    def _gated(self, streams: Tensor, ids: Tensor) -> Tensor:
        """The value of each row's n-grams behind the gate of each stream: [R, C, hidden]."""
        embedding = F.embedding(ids, self.weights.table).flatten(1)
        key, value = self.kv_proj(embedding).split_with_sizes(self.weights.split, -1)
        key = rms_norm(key.view(-1, self.count, self.hidden), self.norm_key, self.eps)
        query = rms_norm(streams, self.norm_query, self.eps)
        gate = (key * query).sum(-1, keepdim=True) / self.hidden**0.5
        gate = gate.abs().clamp_min_(1e-6).sqrt_() * gate.sign()
        return torch.mul(gate.sigmoid_(), value.unsqueeze(1))

    def _short_conv(self, x: Tensor, groups: tuple[Group, ...], arena: Arena) -> tuple[Tensor, tuple[PlePending, ...]]:
        """x: [R, C * hidden] -> silu of the dilated convolution, same shape."""
        out, pending = torch.empty_like(x), []
        for group in groups:
            before = group.read(arena.ple(self.layer))
            inputs = torch.cat((before, group.gather(x)), 1)
            group.scatter(out, F.silu(causal_conv(inputs, self.weights.conv, dilation=self.ngram_size)))
            kept = inputs if group.is_window else inputs[:, inputs.shape[1] - before.shape[1] :].clone()
            pending.append(PlePending(kept))
        return out, tuple(pending)

    def commit(self, pending: PlePending, group: Group, accepted: Accepted | None, arena: Arena) -> None:
        """Advances this group's conv states by its accepted rows; None for a long span, which keeps all of them."""
        state = arena.ple(self.layer)
        if group.is_window:
            assert accepted is not None
            state[group.slots] = window_after(pending.conv_inputs, accepted.counts, state.shape[1])
        else:
            state[group.slots] = pending.conv_inputs
