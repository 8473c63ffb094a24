"""Gated DeltaNet over whole sequences, in chunks.

Within a chunk the delta rule is a unit lower triangular system; its inverse and the scan over chunks are custom
operators (opaque to torch.compile, with hand-written gradients), so that a layer stays one graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


@torch.library.custom_op("tiny::invert_unit_lower", mutates_args=())
def invert_unit_lower(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower `lower: [X, L, L]` fp32, L a power of two.

    Doubles the size of the inverted diagonal blocks at each level: no intermediate grows beyond the inverse itself,
    unlike the product of (I + lower^2^i), which overflows when keys repeat.
    """
    size = lower.shape[-1]
    index = torch.arange(size, device=lower.device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.autocast(lower.device.type, enabled=False):
        out = torch.eye(size, device=lower.device).expand_as(lower).contiguous()
        half = 1
        while half < size:
            row, column = index[:, None] // half, index[None, :] // half
            corner = lower * ((row == column + 1) & (row % 2 == 1))
            out = out - torch.bmm(torch.bmm(out, corner), out) if half > 1 else out - corner
            half *= 2
    torch.backends.cuda.matmul.allow_tf32 = before
    return out


@invert_unit_lower.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _invert_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _invert_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    turned = inverse.transpose(1, 2)
    return -torch.bmm(torch.bmm(turned, grad), turned).tril(-1)


invert_unit_lower.register_autograd(_invert_backward, setup_context=_invert_setup)


@torch.library.custom_op("tiny::scan", mutates_args=())
def scan(u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks: `v_n = u_n - w_n S_n`, `S_{n+1} = decay_n S_n + k_n^T v_n`, `S_0 = 0`.

    u: [X, N, L, Dv], w and k: [X, N, L, Dk], decay: [X, N] -> v: [X, N, L, Dv], S before each chunk: [X, N, Dk, Dv].
    """
    rows, chunks = decay.shape
    v = torch.empty_like(u)
    states = u.new_empty(rows, chunks, k.shape[-1], u.shape[-1])
    state = u.new_zeros(rows, k.shape[-1], u.shape[-1])
    with torch.autocast(u.device.type, enabled=False):
        for n in range(chunks):
            states[:, n] = state
            fresh = torch.baddbmm(u[:, n], w[:, n], state, alpha=-1)
            v[:, n] = fresh
            state = torch.baddbmm(state * decay[:, n, None, None], k[:, n].transpose(1, 2), fresh)
    return v, states


@scan.register_fake
def _(u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(u), u.new_empty(*decay.shape, k.shape[-1], u.shape[-1])


@torch.library.custom_op("tiny::scan_backward", mutates_args=())
def scan_backward(
    grad_v: Tensor, grad_states: Tensor, v: Tensor, states: Tensor, w: Tensor, k: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `scan` for u, w, k and decay."""
    chunks = decay.shape[1]
    grad_u = torch.empty_like(v)
    after = torch.empty_like(states)  # gradient of the state after each chunk
    state = torch.zeros_like(states[:, 0])
    with torch.autocast(v.device.type, enabled=False):
        for n in reversed(range(chunks)):
            after[:, n] = state
            fresh = torch.baddbmm(grad_v[:, n], k[:, n], state)
            grad_u[:, n] = fresh
            carried = torch.addcmul(grad_states[:, n], state, decay[:, n, None, None])
            state = torch.baddbmm(carried, w[:, n].transpose(1, 2), fresh, alpha=-1)
        grad_w = -torch.matmul(grad_u, states.transpose(-1, -2))
        grad_k = torch.matmul(v, after.transpose(-1, -2))
        grad_decay = (states * after).sum((-1, -2))
    return grad_u, grad_w, grad_k, grad_decay


@scan_backward.register_fake
def _(
    grad_v: Tensor, grad_states: Tensor, v: Tensor, states: Tensor, w: Tensor, k: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(w), torch.empty_like(k), torch.empty_like(decay)


def _scan_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    _, w, k, decay = inputs
    ctx.save_for_backward(*output, w, k, decay)


def _scan_backward(ctx: Any, grad_v: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor, Tensor] = scan_backward(
        grad_v.contiguous(), grad_states.contiguous(), *ctx.saved_tensors
    )
    return grads


scan.register_autograd(_scan_backward, setup_context=_scan_setup)


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule in fp32. q, k: [B, Hk, S, D]; v: [B, Hv, S, D]; log_decay, beta: [B, Hv, S] -> like v."""
    batch, heads, length, _ = v.shape
    repeat = heads // q.shape[1]
    q, k = (x.unflatten(2, (-1, CHUNK)) for x in (l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)))
    v, total, beta = (
        v.unflatten(2, (-1, CHUNK)),
        log_decay.unflatten(2, (-1, CHUNK)).cumsum(-1),
        beta.unflatten(2, (-1, CHUNK)),
    )
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(upper, -torch.inf).exp()
    kk = torch.matmul(k, k.transpose(-1, -2)).repeat_interleave(repeat, 1)
    qk = torch.matmul(q, k.transpose(-1, -2)).repeat_interleave(repeat, 1) * pair
    k, q = k.repeat_interleave(repeat, 1), q.repeat_interleave(repeat, 1)
    system = (kk * pair * beta.unsqueeze(-1)).tril(-1)
    inverse = invert_unit_lower(system.flatten(0, 2).contiguous()).unflatten(0, system.shape[:3])
    u = torch.matmul(inverse, v * beta.unsqueeze(-1))
    w = torch.matmul(inverse, k * (beta * total.exp()).unsqueeze(-1))
    end = total[..., -1:]
    to_end = k * (end - total).exp().unsqueeze(-1)
    flat = [x.flatten(0, 1).contiguous() for x in (u, w, to_end, end.squeeze(-1).exp())]
    fresh, states = scan(*flat)
    fresh, states = fresh.unflatten(0, (batch, heads)), states.unflatten(0, (batch, heads))
    out = torch.matmul(q * total.exp().unsqueeze(-1), states) + torch.matmul(qk, fresh)
    return out.flatten(2, 3)[:, :, :length]


class GatedDeltaNet(nn.Module):
    """Short convolution, delta rule, gated norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.k_heads, self.v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.dim, self.eps = config["linear_key_head_dim"], config["rms_norm_eps"]
        self.key, self.value = self.k_heads * self.dim, self.v_heads * config["linear_value_head_dim"]
        mixed = 2 * self.key + self.value
        self.in_proj_qkv = nn.Linear(hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.v_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.v_heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, config["linear_conv_kernel_dim"], groups=mixed, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.v_heads))
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config["linear_value_head_dim"]))
        self.out_proj = nn.Linear(self.value, hidden, bias=False)

    def convolve(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution and SiLU of `x: [B, S, channels]`, one shifted product a tap."""
        taps = self.conv1d.weight.shape[-1]
        out = torch.zeros_like(x, dtype=torch.float32)
        for tap in range(taps):
            out = (
                out
                + F.pad(x, (0, 0, taps - 1 - tap, 0))[:, : x.shape[1]].float() * self.conv1d.weight[:, 0, tap].float()
            )
        return F.silu(out)

    def forward(self, x: Tensor) -> Tensor:
        _, length, _ = x.shape
        pad = -length % CHUNK
        qkv = self.convolve(self.in_proj_qkv(x))
        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        beta = torch.sigmoid(self.in_proj_b(x).float())
        qkv, log_decay, beta = (F.pad(t, (0, 0, 0, pad)) if pad else t for t in (qkv, log_decay, beta))
        q, k, v = qkv.split([self.key, self.key, self.value], -1)
        q, k, v = (t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in (q, k, v))
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q, k, v, log_decay.transpose(1, 2), beta.transpose(1, 2))
        out = out.transpose(1, 2)[:, :length]
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm.weight.float()
        out = (out.flatten(-2) * F.silu(self.in_proj_z(x).float())).to(x.dtype)
        projected: Tensor = self.out_proj(out)
        return projected
