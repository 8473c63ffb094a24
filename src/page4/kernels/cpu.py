"""The compiled kernels (`cpu/*.c`) behind tensors: they know pointers, sizes and nothing else.

Everything is fp32 with channel counts that are multiples of 16; `refusal` says what else keeps a layer on torch. The
structures mirror those of the C files, which document each call. A wrapper holds the tensors that its structure points
to; the operands of a call are contiguous unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from page4 import env
from page4.kernels import cpu_build

LANES = 16
# The longest window that the GDN kernel keeps on its stack.
MAX_WINDOW_ROWS = 16


def refusal(*tensors: Tensor, channels: Sequence[int] = ()) -> str | None:
    """None when the compiled kernels serve these tensors and channel counts, else why torch runs instead."""
    wanted = env.get("KERNELS")
    if wanted != "auto":
        return f"PAGE4_KERNELS is {wanted}"
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            return f"compiled for float32 on a CPU, not for {tensor.dtype} on {tensor.device.type}"
    odd = [count for count in channels if count % LANES or count <= 0]
    if odd:
        return f"compiled for multiples of {LANES} channels, not for {odd[0]}"
    return cpu_build.load()[1]


def _call(name: str, *arguments: object) -> int:
    library = cpu_build.load()[0]
    assert library is not None, "a kernel was called that refusal() refuses"
    function = getattr(library, name)
    function.restype = c_int64  # what a void function leaves there means nothing and is not looked at
    return int(function(*arguments))


def _pointer(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


class _Hyper(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("norm", "down", "up_transposed")),
        *((name, c_int64) for name in ("count", "hidden", "rank", "injections")),
        ("eps", c_float),
    ]


class Hyper:
    """norm: [C, hidden] (1 + w) / C, down: [rank + injections, C * hidden], up: [C * hidden, rank]."""

    def __init__(self, norm: Tensor, down: Tensor, up: Tensor, eps: float) -> None:
        self._held = (norm.contiguous(), down.contiguous(), up.t().contiguous())
        rank = up.shape[1]
        self._injections = down.shape[0] - rank
        pointers = (tensor.data_ptr() for tensor in self._held)
        self._struct = _Hyper(*pointers, *norm.shape, rank, self._injections, eps)

    def enter(
        self, streams: Tensor, block_out: Tensor | None = None, injection: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Streams [R, C, hidden], first increased in place by 2 * injection * block_out -> what `Hyper.enter` gives."""
        assert streams.is_contiguous(), "streams are read, and with block_out written, as they lie"
        rows, _, hidden = streams.shape
        mixed, out = streams.new_empty(rows, hidden), streams.new_empty(rows, self._injections, 1)
        operands = (streams, rows, block_out, injection, mixed, out)
        _call("page4_hyper_enter", byref(self._struct), *_pointers(operands))
        return mixed, out


def leave(streams: Tensor, block_out: Tensor, injection: Tensor) -> Tensor:
    """streams: [R, C, hidden], in place increased by 2 * injection [R, C, 1] * block_out [R, hidden]."""
    assert streams.is_contiguous(), "streams are written in place"
    _call("page4_hyper_leave", *_pointers((streams, block_out, injection, *streams.shape)))
    return streams


def _pointers(operands: Sequence[Tensor | int | None]) -> list[object]:
    return [c_int64(x) if isinstance(x, int) else _pointer(x) for x in operands]


class _Moe(Structure):
    _fields_ = [(name, c_int64) for name in ("experts", "chosen", "expert_width", "inner", "normalise")]


class Moe:
    """Between the two products of the dense form; `inner` counts all experts' channels and the shared one's."""

    def __init__(self, experts: int, chosen: int, expert_width: int, inner: int, normalise: bool) -> None:
        self._struct, self._inner = _Moe(experts, chosen, expert_width, inner, normalise), inner

    def activate(self, projected: Tensor) -> Tensor:
        """[R, 2 * inner + experts + 1] -> [R, inner]: routed, activated and weighed."""
        out = projected.new_empty(projected.shape[0], self._inner)
        _call("page4_moe_activate", byref(self._struct), *_pointers((projected, projected.shape[0], out)))
        return out


class _Gdn(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("conv", "rate", "dt_bias", "norm")),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "conv_dim")),
        *((name, c_int64) for name in ("row_stride", "silu_gate", "state_stride", "conv_stride")),
        ("eps", c_float),
    ]


class Gdn:
    """conv: [conv_dim, kernel], rate, dt_bias: [Hv], norm: [Dv]; heads: (Hk, Hv), dims: (Dk, Dv)."""

    def __init__(
        self,
        conv: Tensor,
        rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        *,
        heads: tuple[int, int],
        dims: tuple[int, int],
        silu_gate: bool,
        eps: float,
    ) -> None:
        self._held = (conv.t().contiguous(), rate.contiguous(), dt_bias.contiguous(), norm.contiguous())
        self._heads, self._value_dim, self._conv_dim = heads[1], dims[1], conv.shape[0]
        pointers = (tensor.data_ptr() for tensor in self._held)
        row = conv.shape[0] + heads[1] * dims[1] + 2 * heads[1]
        self._struct = _Gdn(*pointers, *heads, *dims, conv.shape[1], conv.shape[0], row, silu_gate, 0, 0, eps)

    def window(
        self, projected: Tensor, spans: Tensor, recurrent: Tensor, conv: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """projected: [R, conv_dim + Hv * Dv + 2 * Hv] of windows, spans: [n, 4] int64 -> heads [R, Hv * Dv].

        recurrent: [slots, Hv, Dk, Dv] and conv: [slots, conv_dim, kernel - 1] are strided views, each slot contiguous.
        Also returns what `commit` needs.
        """
        rows, width = projected.shape[0], self._heads * self._value_dim
        mixed, heads = projected.new_empty(rows, self._conv_dim), projected.new_empty(rows, width)
        updates, log_decay = projected.new_empty(rows, width), projected.new_empty(rows, self._heads)
        operands = (projected, spans, spans.shape[0], rows, recurrent, conv, mixed, heads, updates, log_decay)
        _call("page4_gdn_window", byref(self._over(recurrent, conv)), *_pointers(operands))
        return heads, (mixed, updates, log_decay)

    def commit(
        self,
        projected: Tensor,
        kept: tuple[Tensor, Tensor, Tensor],
        spans: Tensor,
        accepted: Tensor,
        recurrent: Tensor,
        conv: Tensor,
    ) -> None:
        """Advances both states by the first accepted[n] rows of each window; accepted: [n] int64."""
        mixed, updates, log_decay = kept
        operands = (projected, mixed, spans, accepted, spans.shape[0], recurrent, conv, updates, log_decay)
        _call("page4_gdn_commit", byref(self._over(recurrent, conv)), *_pointers(operands))

    def _over(self, recurrent: Tensor, conv: Tensor) -> _Gdn:
        """A structure of the call's own: one layer may serve several arenas, also at the same time."""
        struct = _Gdn.from_buffer_copy(self._struct)
        struct.state_stride, struct.conv_stride = recurrent.stride(0), conv.stride(0)
        return struct


class _Side(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("page_stride", "token_stride", "head_stride"))]


class _Cache(Structure):
    _fields_ = [
        ("k", _Side),
        ("v", _Side),
        ("page_tokens", c_int64),
        ("is_e4m3", c_int64),
        ("k_scale", c_float),
        ("v_scale", c_float),
    ]


class _Table(Structure):
    _fields_ = [("pages", c_void_p), ("row_stride", c_int64)]


def _cache(k: Tensor, v: Tensor, k_scale: float, v_scale: float) -> _Cache:
    """k, v: [P, S, J, D] views, fp32 or uint8 (E4M3)."""
    sides = (_Side(view.data_ptr(), *view.stride()[:3]) for view in (k, v))
    return _Cache(*sides, k.shape[1], k.dtype == torch.uint8, k_scale, v_scale)


def _table(block_table: Tensor) -> _Table:
    """block_table: [N, W] int32 of `_rows_of`, possibly some columns of a wider one."""
    return _Table(block_table.data_ptr(), block_table.stride(0))


def _rows_of(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 else table.contiguous()


class _Qsa(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q_norm", "k_norm", "index_q_norm", "index_k_norm")),
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "index_heads", "index_dim", "rotary", "row_stride")),
        ("eps", c_float),
    ]


class Qsa:
    """norms: q and k [D], index q and index k [E], 1 + w; the sizes as in `qsa.c`."""

    def __init__(
        self, norms: Sequence[Tensor], heads: int, kv_heads: int, index_heads: int, rotary: int, eps: float
    ) -> None:
        self._held = tuple(norm.contiguous() for norm in norms)
        self._heads, self._kv_heads, self._index_heads = heads, kv_heads, index_heads
        self._dim, self._index_dim = norms[0].shape[0], norms[2].shape[0]
        row = (2 * heads + 2 * kv_heads) * self._dim + (index_heads + 1) * self._index_dim
        sizes = (heads, kv_heads, self._dim, index_heads, self._index_dim, rotary, row)
        self._struct = _Qsa(*(norm.data_ptr() for norm in self._held), *sizes, eps)

    def queries(
        self, projected: Tensor, cos: Tensor, sin: Tensor, *, score: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Q [R, H, D], k [R, J, D] and index q [R, I, E] (None unless `score`), normed and turned."""
        rows = projected.shape[0]
        q = projected.new_empty(rows, self._heads, self._dim)
        k = projected.new_empty(rows, self._kv_heads, self._dim)
        index_q = projected.new_empty(rows, self._index_heads, self._index_dim) if score else None
        operands = (projected, rows, cos, sin, q, k, index_q)
        _call("page4_qsa_queries", byref(self._struct), *_pointers(operands))
        return q, k, index_q

    def append_kv(
        self,
        projected: Tensor,
        k: Tensor,
        places: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        scales: tuple[float, float],
        counters: Tensor | None,
    ) -> Tensor | None:
        """K and V of each row to pages, offsets [R] int64 of `caches`; [R] bool of the rows not finite for E4M3."""
        e4m3 = caches[0].dtype == torch.uint8
        nonfinite = torch.empty(k.shape[0], dtype=torch.bool) if e4m3 else None
        if e4m3 and counters is None:
            counters = torch.zeros(2, 2, dtype=torch.int64)
        operands = (projected, k, k.shape[0], *places, counters, nonfinite)
        _call("page4_append_kv", byref(self._struct), byref(_cache(*caches, *scales)), *_pointers(operands))
        return nonfinite

    def append_index(
        self,
        projected: Tensor,
        spans: Tensor,
        block_table: Tensor,
        turned: tuple[Tensor, Tensor],
        pooled: Tensor,
        ring: Tensor,
    ) -> None:
        """Raw index keys to the rings; the keys of completed blocks, turned by cos and sin [B, rotary], to pages."""
        page_tokens, block_table = 4 * pooled.shape[1], _rows_of(block_table)
        head = _pointers((projected, spans, spans.shape[0]))
        tail = _pointers((page_tokens, *turned, pooled, pooled.stride(0), ring, ring.stride(0)))
        _call("page4_append_index", byref(self._struct), *head, byref(_table(block_table)), *tail)


def select_blocks(
    index_q: Tensor, pooled: Tensor, block_table: Tensor, requests: Tensor, visible: Tensor, top_k: int
) -> tuple[Tensor, int | None]:
    """Ids [R, top_k] int32 of the best visible blocks, and the first row with a NaN score; see `select.c`."""
    rows, heads, dim = index_q.shape
    ids = torch.empty(rows, top_k, dtype=torch.int32)
    block_table, requests = _rows_of(block_table), requests.contiguous()
    head = _pointers((index_q, rows, heads, dim, pooled, pooled.stride(0), pooled.shape[1]))
    bad = _call("page4_select", *head, byref(_table(block_table)), *_pointers((requests, visible, top_k, ids)))
    return ids, None if bad < 0 else bad


def extend_blocks(ids: Tensor, counts: Tensor, selected_at: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [R, K + 2] and counts [R] int32 with the blocks that were completed since."""
    rows, width = ids.shape
    out, out_counts = torch.empty(rows, width + 2, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    counts, selected_at, positions = counts.contiguous(), selected_at.contiguous(), positions.contiguous()
    _call("page4_extend", *_pointers((ids, counts, selected_at, positions, rows, width, out, out_counts)))
    return out, out_counts


class _Attend(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "width")),
        ("logit_scale", c_float),
        ("v_scale", c_float),
    ]


class _Gate(Structure):
    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64)]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    logit_scale: float,
    v_scale: float,
    gate: Tensor | None,
    *,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of every row over its canonical selection and tail; gate: strided [R, H, D]. See `attend.c`."""
    rows, heads, dim = q.shape
    out, lse = torch.empty_like(q), q.new_empty(rows, heads) if want_lse else None
    block_table, positions, requests = _rows_of(block_table), positions.contiguous(), requests.contiguous()
    sizes = _Attend(heads, k.shape[2], dim, ids.shape[1], logit_scale, v_scale)
    gated = None if gate is None else byref(_Gate(gate.data_ptr(), gate.stride(0), gate.stride(1)))
    cache, head = _cache(k, v, 1.0, 1.0), _pointers((q, rows, ids, positions, requests))
    operands = (byref(sizes), byref(cache), *head, byref(_table(block_table)), gated, *_pointers((out, lse)))
    if _call("page4_attend", *operands):
        raise MemoryError(f"attention over {ids.shape[1]} blocks a row")
    return out, lse
