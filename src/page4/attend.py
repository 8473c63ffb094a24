"""attend: softmax attention of each row over its selected tokens in the paged cache.

out = softmax(q . k / sqrt(D)) . v over the selected blocks and the tail; with E4M3 K/V the logits are multiplied by
k_scale once and the output by v_scale once, and probabilities are never quantised. A byte that no row of a tile attends
to cannot change an output: its K and V are zeroed before they enter a product, since 0 * NaN is NaN.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, overload

import torch
from torch import Tensor

from page4 import env
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.errors import KernelError, message
from page4.kernels import cpu, gpu, reference, reference_wanted, supports, torch_attend
from page4.plan import GROUP_ROWS, MAX_HEADS_PER_KV, GroupedPlan, RowPlan, plan_grouped, plan_rows
from page4.select import Selection

Route = Literal["auto", "generic", "xqa", "grouped"]
# Up to this many rows are gathered one by one sooner than their union is planned (see docs/decisions.md).
FEW_ROWS = 8
# Blocks of one partition of the xqa route: a full selection of 512 blocks and its tail makes five.
PARTITION_BLOCKS = 128
route_counts: Counter[str] = Counter()


def choose_route(
    rows_of_requests: tuple[int, ...] | None,
    *,
    grouped_allowed: bool,
    heads_per_kv: int = 1,
    compiled: bool = False,
) -> tuple[Route, str]:
    """The route for a step on a CPU, and why: (route, reason); compiled: see `is_compiled`."""
    if compiled:
        return "generic", "the compiled kernel reads each row's blocks from the pages: nothing to gather or to plan"
    if rows_of_requests is None:
        return "xqa", "rows are not known on the host to be neighbours"
    if max(rows_of_requests, default=0) <= 1:
        return "xqa", "one row a request shares nothing"
    if sum(rows_of_requests) <= FEW_ROWS:
        return "xqa", "a few rows are gathered sooner than their union is found"
    if not grouped_allowed:
        return "xqa", "PAGE4_GROUPED is 0"
    if heads_per_kv > MAX_HEADS_PER_KV:
        return "xqa", f"more than {MAX_HEADS_PER_KV} query heads a KV head"
    return "grouped", "neighbouring rows share most of their blocks"


@overload
def attend(
    q: Tensor,
    layer_kv: LayerKV,
    selection: Selection,
    rows: Rows,
    *,
    gate: Tensor | None = None,
    softmax_scale: float | None = None,
    route: Route = "auto",
    return_lse: Literal[False] = False,
    zero_unattended: bool = True,
    repoint_padding: bool | None = None,
    splits: int = 1,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    layer_kv: LayerKV,
    selection: Selection,
    rows: Rows,
    *,
    gate: Tensor | None = None,
    softmax_scale: float | None = None,
    route: Route = "auto",
    return_lse: Literal[True],
    zero_unattended: bool = True,
    repoint_padding: bool | None = None,
    splits: int = 1,
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    layer_kv: LayerKV,
    selection: Selection,
    rows: Rows,
    *,
    gate: Tensor | None = None,
    softmax_scale: float | None = None,
    route: Route = "auto",
    return_lse: bool = False,
    zero_unattended: bool = True,
    repoint_padding: bool | None = None,
    splits: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a step's rows.

    q: [R, H, D]; layer_kv: K/V [P, S, J, D] and their scales; gate: [R, H, D], the output is multiplied by its sigmoid.
    `softmax_scale` defaults to 1 / sqrt(D). `splits` cuts the selection of the generic route into that many parts.
    Returns out [R, H, D] in q's dtype, and lse [R, H] fp32 on request. Padding rows, and rows whose selection and tail
    are empty, give zeros and an lse of -inf. `repoint_padding` (None: PAGE4_PLAN_REPOINT) and `zero_unattended` are the
    two defences of DESIGN section 4; the second is off nowhere but in tests. Raises `KernelError` when operands do not
    fit or the route cannot serve them.
    """
    _check(q, layer_kv, selection, rows, gate)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    heads_per_kv = q.shape[1] // layer_kv.k.shape[2]
    compiled = splits == 1 and zero_unattended and is_compiled(q, layer_kv)
    on_gpu = gpu.attend_refusal(q, layer_kv.k) is None
    if route == "auto" and on_gpu:
        route = "generic"
    elif route == "auto":
        allowed = bool(env.get("GROUPED"))
        chosen = choose_route(
            rows.lengths(),
            grouped_allowed=allowed,
            heads_per_kv=heads_per_kv,
            compiled=compiled and selection.canonical,
        )
        route = chosen[0]
    else:
        _check_route(route, q, layer_kv, splits)
    route_counts[route] += 1
    logit_scale = scale if layer_kv.k_scale is None else scale * layer_kv.k_scale.value
    v_scale = 1.0 if layer_kv.v_scale is None else layer_kv.v_scale.value
    if route == "generic" and on_gpu:
        plan = plan_rows(selection, rows, layer_kv.page_tokens, repoint_padding=repoint_padding)
        sides = None
        if layer_kv.k_scale is not None and layer_kv.v_scale is not None:
            sides = (layer_kv.k_scale, layer_kv.v_scale)
        out, lse = gpu.attend_rows(
            *(q, (layer_kv.k, layer_kv.v), plan, scale, sides, gate),
            splits=splits if splits > 1 else None,
            want_lse=return_lse,
            zero_unattended=zero_unattended,
        )
        gate = None
    elif route == "generic" and compiled:
        out, lse = _compiled(q, layer_kv, selection, rows, logit_scale, v_scale, gate, want_lse=return_lse)
        gate = None
    elif route == "grouped":
        # Windows of 4 rows in groups of 8 would be half empty.
        group_rows = max(1, min(GROUP_ROWS, max(rows.lengths() or (GROUP_ROWS,))))
        grouped = plan_grouped(
            selection,
            rows,
            layer_kv.page_tokens,
            heads_per_kv,
            group_rows=group_rows,
            repoint_padding=repoint_padding,
        )
        out, lse = _grouped(q, layer_kv, grouped, logit_scale, v_scale, zero_unattended, return_lse)
    else:
        plan = plan_rows(selection, rows, layer_kv.page_tokens, repoint_padding=repoint_padding)
        parts = splits if route == "generic" else None
        out, lse = _row_by_row(q, layer_kv, plan, logit_scale, v_scale, parts, zero_unattended, return_lse)
    if gate is not None:
        out.mul_(gate.float().sigmoid())
    out = out.to(q.dtype)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def is_compiled(q: Tensor, layer_kv: LayerKV) -> bool:
    """Whether the compiled kernel serves q [R, H, D] over this cache: fp32 queries, fp32 or E4M3 K/V."""
    stored = () if layer_kv.is_e4m3 else (layer_kv.k,)
    on_cpu = layer_kv.k.device.type == "cpu"
    return on_cpu and q.is_contiguous() and cpu.refusal(q, *stored, channels=(q.shape[2],)) is None


def _compiled(
    q: Tensor,
    layer_kv: LayerKV,
    selection: Selection,
    rows: Rows,
    logit_scale: float,
    v_scale: float,
    gate: Tensor | None,
    *,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    rows.check_within(layer_kv.page_tokens)
    ids = selection.as_canonical(rows.positions).block_ids.contiguous()
    if gate is not None and (gate.dtype != q.dtype or gate.stride(2) != 1):
        gate = gate.to(q.dtype).contiguous()
    places = (rows.positions, rows.request_of_row, rows.block_table)
    operands = (q, layer_kv.k, layer_kv.v, ids, *places, logit_scale, v_scale, gate)
    return cpu.attend_blocks(*operands, want_lse=want_lse)


def _grouped(
    q: Tensor,
    layer_kv: LayerKV,
    plan: GroupedPlan,
    logit_scale: float,
    v_scale: float,
    zero_unattended: bool,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    operands = (q, layer_kv.k, layer_kv.v, plan, logit_scale, v_scale, zero_unattended)
    return (
        reference.attend_grouped(*operands) if reference_wanted() else torch_attend.attend_grouped(*operands, want_lse)
    )


def _row_by_row(
    q: Tensor,
    layer_kv: LayerKV,
    plan: RowPlan,
    logit_scale: float,
    v_scale: float,
    splits: int | None,
    zero_unattended: bool,
    want_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Route generic with its number of splits, or xqa (None)."""
    operands = (q, layer_kv.k, layer_kv.v, plan, logit_scale, v_scale)
    partition, partial_dtype = PARTITION_BLOCKS, torch.float32 if layer_kv.is_e4m3 else q.dtype
    if splits is not None:
        if reference_wanted():
            return reference.attend_generic(*operands, splits)
        partition, partial_dtype = -(-plan.table.shape[1] // splits), torch.float32
    if reference_wanted():
        return reference.attend_rows(*operands, partition, partial_dtype, zero_unattended)
    if splits is None and partial_dtype == torch.float32:
        # Nothing is rounded between partitions, and one processor gains nothing from them.
        partition = plan.table.shape[1]
    return torch_attend.attend_rows(*operands, partition, partial_dtype, zero_unattended, want_lse)


def _check(q: Tensor, layer_kv: LayerKV, selection: Selection, rows: Rows, gate: Tensor | None) -> None:
    kv_heads, dim = layer_kv.k.shape[2:]
    if q.ndim != 3 or q.shape[0] != rows.num_rows or q.shape[2] != dim or q.shape[1] % kv_heads:
        allowed = f"[{rows.num_rows}, a multiple of {kv_heads}, {dim}]"
        raise KernelError(message("q", allowed=allowed, got=list(q.shape), do="pass one row a token"))
    if selection.block_ids.shape[0] != rows.num_rows:
        allowed = f"[{rows.num_rows}, K]"
        got = list(selection.block_ids.shape)
        raise KernelError(message("selection", allowed=allowed, got=got, do="select for the same rows"))
    if gate is not None and gate.shape != q.shape:
        raise KernelError(message("gate", allowed=list(q.shape), got=list(gate.shape), do="pass one gate a query"))


def _check_route(route: Route, q: Tensor, layer_kv: LayerKV, splits: int) -> None:
    reason = supports(
        "attend",
        route,
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        kv_dtype=str(layer_kv.k.dtype).removeprefix("torch."),
        heads_per_kv=q.shape[1] // layer_kv.k.shape[2],
        page_tokens=layer_kv.page_tokens,
    )
    if reason is not None:
        raise KernelError(
            message("route", allowed="one that serves these operands", got=f"{route}: {reason}", do="use route auto")
        )
    if splits < 1:
        raise KernelError(message("splits", allowed="1 or more", got=splits, do="use 1"))
