"""The gated delta rule in fp32: S <- exp(g) S, then S <- S + k (beta (v - S^T k))^T, read by q.

With G the running sum of g, the update of row i is k_i u_i^T decayed by exp(G_a - G_i), and u depends on earlier rows
only: (I + A) U = beta (V - exp(G) K S0) with A_ij = beta_i exp(G_i - G_j) k_i.k_j below the diagonal. So the state
after any first a rows of a window follows from S0, K, U and G, and no state is kept for each row.

Axes: n requests (or chunks), Hk key heads, Hv value heads (a multiple of Hk), W rows, Dk and Dv head dims.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64


@dataclass(frozen=True)
class DeltaWindow:
    """keys: [n, Hv, W, Dk], updates: [n, Hv, W, Dv] (u above), log_decay: [n, Hv, W] (G above), all fp32."""

    keys: Tensor
    updates: Tensor
    log_decay: Tensor


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[n, Hk, ...] -> [n, heads, ...]: value head h reads key head h // (Hv / Hk)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _pair_decay(log_decay: Tensor) -> Tensor:
    """[n, Hv, W] -> [n, Hv, W, W]: exp(G_i - G_j) for j <= i, else 0."""
    above = _above_diagonal(log_decay.shape[-1], log_decay.device)
    # Above the diagonal the difference can be large and positive: -inf goes in before exp.
    return (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).add_(above).exp_()


@functools.lru_cache(maxsize=64)
def _above_diagonal(width: int, device: torch.device) -> Tensor:
    """[W, W]: -inf above the diagonal, 0 elsewhere."""
    return torch.full((width, width), float("-inf"), device=device).triu_(1)


def _products(q: Tensor, k: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Reads (q_i.k_j decayed, j <= i) and the system A, both [n, Hv, W, W]; A's diagonal and above are not used."""
    n, key_heads, width, dim = k.shape
    both = torch.cat((q, k), 2).view(n * key_heads, 2 * width, dim)
    dots = torch.bmm(both, k.reshape(n * key_heads, width, dim).transpose(1, 2))
    dots = _repeat_heads(dots.view(n, key_heads, 2 * width, width), decay.shape[1])
    reads = dots[:, :, :width] * decay
    return reads, (dots[:, :, width:] * decay).mul_(beta.unsqueeze(-1))


def delta_window(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, DeltaWindow]:
    """A short window without advancing the state.

    q, k: [n, Hk, W, Dk] (normalised; q scaled), v: [n, Hv, W, Dv], log_decay, beta: [n, Hv, W] (g of each row),
    state: [n, Hv, Dk, Dv] -> out: [n, Hv, W, Dv] and what `advance` needs.
    """
    heads, width = v.shape[1], v.shape[2]
    log_decay = log_decay.cumsum(-1)
    keys = _repeat_heads(k, heads)
    reads, system = _products(q, k, _pair_decay(log_decay), beta)
    old = torch.matmul(torch.cat((_repeat_heads(q, heads), keys), 2), state)
    decay = log_decay.exp().unsqueeze(-1)
    rhs = torch.addcmul(v, old[:, :, width:], decay, value=-1).mul_(beta.unsqueeze(-1))
    updates = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = torch.matmul(reads, updates).addcmul_(old[:, :, :width], decay)
    return out, DeltaWindow(keys, updates, log_decay)


def advance(window: DeltaWindow, state: Tensor, accepted: Tensor) -> Tensor:
    """The state after exactly the first `accepted` rows: [n] int64 in 0..W; state: [n, Hv, Dk, Dv] is not modified.

    Rows after the accepted ones are replaced by zeros before any product, so not even a NaN of theirs gets through.
    """
    width = window.log_decay.shape[-1]
    kept = torch.arange(width, device=accepted.device) < accepted.unsqueeze(1)
    kept = kept[:, None, :]
    total = F.pad(window.log_decay, (1, 0)).gather(-1, accepted[:, None, None].expand(-1, state.shape[1], 1))
    weight = (total - window.log_decay).masked_fill_(~kept, float("-inf")).exp_()
    keys = torch.where(kept.unsqueeze(-1), window.keys * weight.unsqueeze(-1), 0.0)
    updates = torch.where(kept.unsqueeze(-1), window.updates, 0.0)
    return torch.matmul(keys.transpose(-1, -2), updates).addcmul_(state, total.exp().unsqueeze(-1))


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One long span in chunks of CHUNK_ROWS; returns out [T, Hv, Dv] and the state after its last row [Hv, Dk, Dv].

    q, k: [T, Hk, Dk], v: [T, Hv, Dv], log_decay, beta: [T, Hv], state: [Hv, Dk, Dv] (not modified).
    """
    length, heads = v.shape[:2]
    # Padding rows have k = 0, beta = 0 and g = 0: they change neither the state nor its decay.
    q, k, v, log_decay, beta = (_chunked(x) for x in (q, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
    log_decay, beta = log_decay.squeeze(-1).cumsum(-1), beta.squeeze(-1)
    keys = _repeat_heads(k, heads)
    reads, system = _products(q, k, _pair_decay(log_decay), beta)
    decay = log_decay.exp().unsqueeze(-1)
    rhs = torch.cat((v, keys * decay), -1).mul_(beta.unsqueeze(-1))
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    fresh, known = solved.split_with_sizes((v.shape[-1], keys.shape[-1]), -1)
    # Both read the state at the chunk's start, so they go into one product.
    readers = torch.cat((known, _repeat_heads(q, heads) * decay), 2)
    writers = keys.mul((log_decay[..., -1:] - log_decay).exp_().unsqueeze(-1)).transpose(-1, -2)
    state, out = state.clone(), torch.empty_like(v)
    for chunk in range(v.shape[0]):
        old = torch.bmm(readers[chunk], state)
        updates = fresh[chunk] - old[:, :CHUNK_ROWS]
        torch.baddbmm(old[:, CHUNK_ROWS:], reads[chunk], updates, out=out[chunk])
        state.mul_(decay[chunk, :, -1:]).baddbmm_(writers[chunk], updates)
    return out.transpose(1, 2).flatten(0, 1)[:length], state


def _chunked(x: Tensor) -> Tensor:
    """[T, heads, d] -> [chunks, heads, CHUNK_ROWS, d], zeros at the end."""
    padding = -x.shape[0] % CHUNK_ROWS
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.view(-1, CHUNK_ROWS, *x.shape[1:]).transpose(1, 2).contiguous()
