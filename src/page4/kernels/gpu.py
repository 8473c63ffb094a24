"""The GPU kernels behind tensors: which of them serve the operands at hand, and their calls with room for results.

On a GPU Triton and CUDA C++ kernels run; PAGE4_KERNELS=triton leaves out the latter, and runs Triton's on a CPU too, in
its interpreter, for tests. Every refusal is a reason for people, and then torch runs. Triton is imported when it is
wanted, never before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from page4 import env
from page4.codec import Scale
from page4.kernels.plans import RowPlan

Scales = tuple[Scale, Scale]
BLOCK_TOKENS = 4


def wanted(device: torch.device) -> bool:
    """Whether GPU kernels are to run on a device at all."""
    kernels = env.get("KERNELS")
    return kernels == "triton" or (kernels == "auto" and device.type == "cuda")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _facts(tensor: Tensor) -> tuple[str, tuple[int, int] | None]:
    return tensor.device.type, capability(tensor.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------- writers


def append_refusal(k: Tensor, cache: Tensor) -> str | None:
    """None when a kernel writes k [R, J, D] to cache [P, S, J, D]."""
    if not wanted(k.device):
        return _unwanted(k.device)
    from page4.kernels import triton_cache

    return triton_cache.refusal(*_facts(k), _name(k.dtype), _name(cache.dtype), *cache.shape[2:])


def append_kv(
    k: Tensor,
    v: Tensor,
    caches: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor, Tensor],
    scales: Scales | None,
    counters: Tensor | None,
) -> Tensor | None:
    """k, v: [R, J, D]; places: positions, requests [R] int64, block_table [N, W] int32.

    Returns [R] bool, the rows with a non-finite input, for an E4M3 cache.
    """
    from page4.kernels import triton_cache

    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    device = k.device
    if scales is None:
        triton_cache.append_kv(k, v, *caches, *places, None, None, None)
        return None
    nonfinite = torch.empty(k.shape[0], dtype=torch.bool, device=device)
    if counters is None:
        counters = torch.zeros(2, 2, dtype=torch.int64, device=device)
    tensors = (scales[0].tensor(device), scales[1].tensor(device))
    triton_cache.append_kv(k, v, *caches, *places, tensors, counters, nonfinite)
    return nonfinite


def append_index(
    pooled: Tensor,
    ring: Tensor,
    raw_keys: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    state_slots: Tensor,
    norm_and_rope: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """pooled: [P, S / 4, E]; ring: [slots, 16, E]; raw_keys: [R, E]; norm_and_rope sees every row's block mean."""
    from page4.kernels import triton_cache

    raw_keys = raw_keys if raw_keys.stride(-1) == 1 else raw_keys.contiguous()
    triton_cache.append_index(pooled, ring, raw_keys, *places, state_slots, norm_and_rope)


# -------------------------------------------------------------------------------------------------------------- select


def select_refusal(index_q: Tensor, pooled: Tensor) -> str | None:
    """None when kernels select for index_q [R, I, E] over pooled [P, S / 4, E]."""
    if not wanted(index_q.device):
        return _unwanted(index_q.device)
    from page4.kernels import triton_select

    dtypes, page_tokens = (_name(index_q.dtype), _name(pooled.dtype)), pooled.shape[1] * BLOCK_TOKENS
    return triton_select.refusal(*_facts(index_q), *dtypes, *index_q.shape[1:], page_tokens)


def select_blocks(
    index_q: Tensor,
    pooled: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    max_visible: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Places as of `append_kv`; max_visible: blocks that no row sees more of; window: rows of a request together.

    Returns ids [R, K] int32, counts [R] int32, and [R] bool, rows with a NaN among their scores, which select nothing.
    """
    from page4.kernels import cuda, cuda_select, triton_select

    positions, requests, block_table = places
    built = env.get("KERNELS") == "auto" and cuda.refusal() is None
    module = (
        cuda_select if built and cuda_select.refusal(capability(index_q.device), max_visible) is None else triton_select
    )
    size = triton_select.workspace_bytes(index_q.shape[0], max_visible)
    workspace = torch.empty(size, dtype=torch.uint8, device=index_q.device)
    index_q = index_q if index_q.stride(-1) == 1 else index_q.contiguous()
    operands = (index_q, pooled, block_table, requests, positions, top_k, max_visible, workspace)
    ids, counts, bad = module.select_blocks(*operands, window=window)
    return ids, counts, bad.view(torch.bool)


# -------------------------------------------------------------------------------------------------------------- attend


VOLTA = ((7, 0), (7, 2))


def attend_refusal(q: Tensor, cache: Tensor) -> str | None:
    """None when a kernel attends with q [R, H, D] over cache [P, S, J, D], row by row."""
    if not wanted(q.device):
        return _unwanted(q.device)
    if capability(q.device) in VOLTA:
        return _volta_refusal(q, cache)
    from page4.kernels import triton_attend

    group = q.shape[1] // cache.shape[2]
    return triton_attend.refusal(*_facts(q), _name(q.dtype), _name(cache.dtype), group, q.shape[2], cache.shape[1])


def _volta_refusal(q: Tensor, cache: Tensor) -> str | None:
    """Why the CUDA C++ kernels for Volta, where Triton has no matrix products, do not serve."""
    from page4.kernels import cuda, sm70

    if (reason := cuda.refusal()) is not None:
        return reason
    facts = {"dtype": _name(q.dtype), "kv_dtype": _name(cache.dtype), "head_dim": q.shape[2]}
    group, page_tokens = q.shape[1] // cache.shape[2], cache.shape[1]
    return sm70.refusal(**facts, heads_per_kv=group, page_tokens=page_tokens) or sm70.layout_refusal(q, cache, cache)


def attend_rows(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    plan: RowPlan,
    softmax_scale: float,
    scales: Scales | None,
    gate: Tensor | None,
    *,
    splits: int | None,
    want_lse: bool,
    zero_unattended: bool,
) -> tuple[Tensor, Tensor | None]:
    """Row by row, the gate's sigmoid included: out [R, H, D] in q's dtype, lse [R, H] fp32; splits None: chosen."""
    from page4.kernels import triton_attend

    rows, heads, dim = q.shape
    device = q.device
    if capability(device) in VOLTA:
        return _attend_volta(q, caches, plan, softmax_scale, scales, gate, want_lse=want_lse, zero=zero_unattended)
    if splits is None:
        splits = triton_attend.num_splits(rows * caches[0].shape[2], BLOCK_TOKENS * plan.table.shape[1])
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device) if want_lse else None
    size = triton_attend.workspace_bytes(rows, heads, dim, splits)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    q, gate = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, gate))
    pair = None if scales is None else (scales[0].tensor(device), scales[1].tensor(device))
    triton_attend.attend_generic(
        *(q, *caches, plan.table, plan.lengths, softmax_scale, pair, out, workspace),
        splits=splits,
        gate=gate,
        lse=lse,
        zero=zero_unattended,
    )
    return out, lse


def _attend_volta(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    plan: RowPlan,
    softmax_scale: float,
    scales: Scales | None,
    gate: Tensor | None,
    *,
    want_lse: bool,
    zero: bool,
) -> tuple[Tensor, Tensor | None]:
    """`attend_rows` by `sm70`, whose splits follow from the plan alone."""
    from page4.kernels import sm70

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(*q.shape[:2], dtype=torch.float32, device=q.device) if want_lse else None
    k_scale, v_scale = (None, None) if scales is None else (scale.tensor(q.device) for scale in scales)
    if gate is not None and sm70.layout_refusal(q, *caches, gate) is not None:
        gate = gate.contiguous()
    sm70.attend_rows(
        *(q, *caches, plan.table.int().contiguous(), plan.lengths.int()),
        page_tokens=plan.page_tokens,
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        gate=gate,
        out=out,
        lse=lse,
        zero_unattended=zero,
    )
    return out, lse


def _unwanted(device: torch.device) -> str:
    return f"no GPU kernels on {device.type} with PAGE4_KERNELS={env.get('KERNELS')}"
