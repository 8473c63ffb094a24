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
SEGMENT_ROWS = 8 * CHUNK_ROWS


@dataclass(frozen=True)
class DeltaWindow:
    """keys: [n, Hv, W, Dk], updates: [n, Hv, W, Dv] (u above), log_decay: [n, Hv, W] (G above), all fp32."""

    keys: Tensor
    updates: Tensor
    log_decay: Tensor


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[n, Hk, ...] -> [n, heads, ...]: value head h reads key head h // (Hv / Hk)."""
    if x.shape[1] == heads:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], *x.shape[2:]).reshape(x.shape[0], heads, *x.shape[2:])


def _pair_decay(log_decay: Tensor) -> Tensor:
    """[n, Hv, W] -> [n, Hv, W, W]: exp(G_i - G_j) for j <= i, else 0."""
    above = _above_diagonal(log_decay.shape[-1], log_decay.device)
    # Above the diagonal the difference can be large and positive: -inf goes in before exp.
    return (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).add_(above).exp_()


@functools.lru_cache(maxsize=64)
def _above_diagonal(width: int, device: torch.device) -> Tensor:
    """[W, W]: -inf above the diagonal, 0 elsewhere."""
    return torch.full((width, width), float("-inf"), device=device).triu_(1)


def delta_window(qk: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, DeltaWindow]:
    """A short window without advancing the state.

    qk: [n, Hk, 2 * W, Dk] (W queries, scaled, then W keys; all normalised), v: [n, Hv, W, Dv], log_decay, beta:
    [n, Hv, W] (g of each row), state: [n, Hv, Dk, Dv] -> out: [n, Hv, W, Dv] and what `advance` needs.
    """
    n, heads, width, value_dim = v.shape
    log_decay = log_decay.cumsum(-1)
    both = _repeat_heads(qk, heads).reshape(n * heads, 2 * width, -1)
    keys = both[:, width:]
    dots = torch.bmm(both, keys.transpose(1, 2)).view(n, heads, 2, width, width)
    reads, system = dots.mul_(_pair_decay(log_decay).unsqueeze(2)).unbind(2)
    system.mul_(beta.unsqueeze(-1))
    old = torch.bmm(both, state.reshape(n * heads, -1, value_dim)).view(n, heads, 2 * width, value_dim)
    decay = log_decay.exp().unsqueeze(-1)
    rhs = torch.addcmul(v, old[:, :, width:], decay, value=-1).mul_(beta.unsqueeze(-1))
    updates = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = torch.matmul(reads, updates).addcmul_(old[:, :, :width], decay)
    return out, DeltaWindow(keys.view(n, heads, width, -1), updates, log_decay)


@dataclass(frozen=True)
class Accepted:
    """The rows that a commit keeps, for windows of W rows: counts [n] int64, kept [n, 1, W] bool."""

    counts: Tensor
    kept: Tensor

    @classmethod
    def of(cls, counts: Tensor, width: int) -> Accepted:
        """counts: [n] int64, each in 0..width."""
        return cls(counts, (torch.arange(width, device=counts.device) < counts.unsqueeze(1)).unsqueeze(1))


def advance(window: DeltaWindow, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """What turns S0 into the state after exactly the accepted rows: decay [n, Hv, 1, 1], update [n, Hv, Dk, Dv].

    S = decay * S0 + update. Rows after the accepted ones are replaced by zeros before any product, so not even a NaN
    of theirs gets through.
    """
    last = (accepted.counts - 1).clamp_min_(0)[:, None, None].expand(-1, window.log_decay.shape[1], 1)
    total = window.log_decay.gather(-1, last).masked_fill_(accepted.counts[:, None, None] == 0, 0.0)
    weight = (total - window.log_decay).masked_fill_(~accepted.kept, float("-inf")).exp_()
    kept = accepted.kept.unsqueeze(-1)
    keys = torch.where(kept, window.keys * weight.unsqueeze(-1), 0.0)
    updates = torch.where(kept, window.updates, 0.0)
    return total.exp_().unsqueeze(-1), torch.matmul(keys.transpose(-1, -2), updates)


def delta_chunks(qk: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """A segment of a long span -> out [T, Hv, Dv]; advances `state` [Hv, Dk, Dv] in place by all its rows.

    qk: [T, 2 * Hk, Dk] (query heads, scaled, then key heads; normalised), v: [T, Hv, Dv], log_decay, beta: [T, Hv].
    The workspace grows with T: a caller passes SEGMENT_ROWS rows at a time, which also stay in a CPU core's cache.
    """
    length, heads = v.shape[:2]
    # Padding rows have k = 0, beta = 0 and g = 0: they change neither the state nor its decay.
    qk, v, log_decay, beta = (_chunked(x) for x in (qk, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
    log_decay = log_decay.squeeze(-1).cumsum(-1)
    q, k = qk.chunk(2, 1)
    system = _repeat_heads(torch.matmul(k, k.transpose(2, 3)), heads)
    reads = _repeat_heads(torch.matmul(q, k.transpose(2, 3)), heads)
    pairs, decay = _pair_decay(log_decay), log_decay.exp().unsqueeze(-1)
    reads, system = reads * pairs, (system * pairs).mul_(beta)
    keys = _repeat_heads(k, heads)
    rhs = torch.cat((v, keys * decay), -1).mul_(beta)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    fresh, known = solved.split_with_sizes((v.shape[-1], keys.shape[-1]), -1)
    # Both read the state at the chunk's start, so they go into one product.
    readers = torch.cat((known, _repeat_heads(q, heads) * decay), 2)
    writers = keys.mul((log_decay[..., -1:] - log_decay).exp_().unsqueeze(-1)).transpose(-1, -2)
    out = torch.empty_like(v)
    for chunk in range(v.shape[0]):
        old = torch.bmm(readers[chunk], state)
        updates = fresh[chunk] - old[:, :CHUNK_ROWS]
        torch.baddbmm(old[:, CHUNK_ROWS:], reads[chunk], updates, out=out[chunk])
        state.mul_(decay[chunk, :, -1:]).baddbmm_(writers[chunk], updates)
    return out.transpose(1, 2).flatten(0, 1)[:length]


def _chunked(x: Tensor) -> Tensor:
    """[T, heads, d] -> [chunks, heads, CHUNK_ROWS, d], zeros at the end."""
    padding = -x.shape[0] % CHUNK_ROWS
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    return x.view(-1, CHUNK_ROWS, *x.shape[1:]).transpose(1, 2).contiguous()
