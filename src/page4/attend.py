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
from page4.kernels import torch_fast
from page4.select import Selection, visible_blocks

Route = Literal["auto", "generic", "xqa", "grouped"]
GROUP_ROWS = 8
FEW_ROWS = 8
MAX_ROWS_AT_ONCE = 64
# K and V that one chunk of tiles gathers.
WORKSPACE_BYTES = 48 << 20
route_counts: Counter[str] = Counter()


def choose_route(rows_of_requests: tuple[int, ...] | None, *, grouped_allowed: bool) -> tuple[str, str]:
    """The route for a step on a CPU, and why: (route, reason)."""
    if rows_of_requests is None:
        return "xqa", "rows are not known on the host to be neighbours"
    if max(rows_of_requests, default=0) <= 1:
        return "xqa", "one row a request shares nothing"
    if sum(rows_of_requests) <= FEW_ROWS:
        return "xqa", "a few rows are gathered sooner than their union is found"
    if not grouped_allowed:
        return "xqa", "PAGE4_GROUPED is 0"
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a step's rows.

    q: [R, H, D]; layer_kv: K/V [P, S, J, D] and their scales; gate: [R, H, D], the output is multiplied by its sigmoid.
    `softmax_scale` defaults to 1 / sqrt(D). Returns out [R, H, D] in q's dtype, and lse [R, H] fp32 on request. Padding
    rows give zeros and an lse of -inf. Raises `KernelError` when operands do not fit.
    """
    _check(q, layer_kv, selection, rows, gate)
    if route == "auto":
        route = choose_route(rows.lengths(), grouped_allowed=bool(env.get("GROUPED")))[0]  # type: ignore[assignment]
    route_counts[route] += 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    width = GROUP_ROWS if route == "grouped" else 1
    if width == 1 and not return_lse and rows.row_starts is not None and rows.num_rows <= MAX_ROWS_AT_ONCE:
        out = _row_by_row(q, layer_kv, selection, rows, scale)
    else:
        out, lse = _tiled(q, layer_kv, selection, rows, width, scale)
    if gate is not None:
        out.mul_(gate.float().sigmoid())
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


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


def _row_by_row(q: Tensor, layer_kv: LayerKV, selection: Selection, rows: Rows, scale: float) -> Tensor:
    """Every row with its own blocks, then its tail block: no union to find. Only for steps without padding rows."""
    positions = rows.positions.unsqueeze(1)
    blocks = torch.cat((selection.block_ids.long(), visible_blocks(positions)), 1)
    tokens = (blocks * 4).unsqueeze(-1) + torch.arange(4, device=blocks.device)
    # Also off: the tail block of a row that just completed a block, whose page may not even exist.
    attended = ((tokens >= 0) & (tokens <= positions.unsqueeze(-1))).flatten(1)
    blocks = torch.minimum(blocks.clamp_min_(0), positions // 4)
    page_blocks = layer_kv.page_tokens // 4
    page = rows.block_table[rows.request_of_row.unsqueeze(1), blocks // page_blocks].long()
    k, v = torch_fast.gather_blocks(layer_kv.k, layer_kv.v, page, blocks % page_blocks, ~attended)
    k_scale = 1.0 if layer_kv.k_scale is None else layer_kv.k_scale.value
    v_scale = 1.0 if layer_kv.v_scale is None else layer_kv.v_scale.value
    return torch_fast.row_attention(q.float(), k, v, attended, scale * k_scale, v_scale)


def _tiled(
    q: Tensor, layer_kv: LayerKV, selection: Selection, rows: Rows, width: int, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    tiles = _tile_rows(rows, width)
    k_scale = 1.0 if layer_kv.k_scale is None else layer_kv.k_scale.value
    v_scale = 1.0 if layer_kv.v_scale is None else layer_kv.v_scale.value
    token_bytes = 8 * layer_kv.k.shape[2] * layer_kv.k.shape[3]
    step = max(1, WORKSPACE_BYTES // max(1, token_bytes * 4 * (selection.block_ids.shape[1] + 2 * width)))
    for start in range(0, tiles.shape[0], step):
        index = tiles[start : start + step]
        real = index >= 0
        safe = index.clamp_min(0)
        positions = rows.positions[safe].masked_fill_(~real, -1)
        block_ids, members = _union(selection.block_ids[safe], positions)
        k, v, attended = _gather(layer_kv, block_ids, members, positions, rows, rows.request_of_row[safe[:, 0]])
        part, part_lse = torch_fast.gathered_attention(q[safe].float(), k, v, attended, scale * k_scale, v_scale)
        out[index[real]] = part[real]
        lse[index[real]] = part_lse[real]
    return out, lse


def _tile_rows(rows: Rows, width: int) -> Tensor:
    """[T, width] int64 rows of each tile, -1 after the last; a tile never mixes requests."""
    device = rows.positions.device
    lengths = rows.lengths()
    if width == 1 or lengths is None or rows.row_starts is None:
        return torch.arange(rows.num_rows, device=device).unsqueeze(1)
    width = min(width, max(lengths, default=1))
    starts = [s for first, n in zip(rows.row_starts, lengths, strict=False) for s in range(first, first + n, width)]
    ends = [first + n for first, n in zip(rows.row_starts, lengths, strict=False) for _ in range(0, n, width)]
    tiles = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(width, device=device)
    return tiles.masked_fill_(tiles >= torch.tensor(ends, device=device).unsqueeze(1), -1)


def _union(ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks that any row of a tile attends to: ids [T, M, K], positions [T, M] -> [T, U] int64, members [T, M, U].

    The tail is the block after the complete ones. Entries after a tile's last block repeat its first with no member.
    """
    tail = visible_blocks(positions)
    most = int(tail.max()) + 1
    trash = torch.full_like(tail, most)
    tail = torch.where((positions + 1) % 4 > 0, tail, trash).unsqueeze(-1)
    columns = torch.cat((torch.where(ids < 0, trash.unsqueeze(-1), ids), tail), dim=-1)
    member = torch.zeros(*positions.shape, most + 1, dtype=torch.bool, device=ids.device)
    member.scatter_(2, columns, True)
    union = member[..., :most].any(1)
    counts = union.sum(1)
    blocks = torch_fast.ids_of_mask(union, counts, max(1, int(counts.max()))).long()
    padding = blocks < 0
    blocks = torch.where(padding, blocks[:, :1].clamp_min(0), blocks)
    members = member.gather(2, blocks.unsqueeze(1).expand(-1, positions.shape[1], -1))
    return blocks, members.logical_and_(~padding.unsqueeze(1))


def _gather(
    layer_kv: LayerKV, blocks: Tensor, members: Tensor, positions: Tensor, rows: Rows, requests: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V [T * J, W, D] fp32 of the tiles' blocks with unattended tokens zeroed, and attended [T, M, W]."""
    tokens = blocks.unsqueeze(-1) * 4 + torch.arange(4, device=blocks.device)
    attended = members.unsqueeze(-1) & (tokens.unsqueeze(1) <= positions.view(*positions.shape, 1, 1))
    attended = attended.flatten(2)
    tokens = tokens.flatten(1)
    page = rows.block_table[requests.unsqueeze(1), tokens // layer_kv.page_tokens].long()
    offset = tokens % layer_kv.page_tokens
    return (*torch_fast.gather_tokens(layer_kv.k, layer_kv.v, page, offset, ~attended.any(1)), attended)
