"""Volta attention (`cuda/sm70_attend.cu`): which operands it takes, its tiles and splits, and its launches.

On compute capability 7.0 it runs as a cubin of NVRTC 12.x; its compute_70 PTX runs on every newer GPU, slower than what
is written for those, which is how it is tested. A launch needs no host synchronisation; what it allocates (workspace of
splits) is kept by device, stream and size. Nothing here imports torch until something is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from page4.errors import KernelError, message
from page4.kernels import cuda, cuda_build, nvrtc
from page4.kernels.plans import CATEGORY_ENTRIES, MAX_GROUP_ROWS, MAX_TILES

if TYPE_CHECKING:
    from torch import Tensor

# What `page4_sm70_abi` of the sources must answer; both change together.
ABI = 1
SOURCE, MERGE_SOURCE = "sm70_attend.cu", "sm70_merge.cu"
HEAD_DIMS = (64, 128, 256)
DTYPES = ("float16",)
KV_DTYPES = ("float16", "uint8")
WARPS = 8
ALIGNMENT_BYTES = 16
# Steps of eight blocks that one split takes. Constants, because a row's bits may not depend on the rows beside it:
# a full selection and its tail are 65 steps, so eight parts.
XQA_SPLIT_STEPS = 9
WINDOW_SPLIT_STEPS = 16
# Rows of one xqa launch: what bounds its workspace.
XQA_ROWS = 256
_workspaces: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Variant:
    """One specialisation of the sources."""

    head_dim: int
    e4m3: bool
    grouped: bool
    m_tiles: int
    zero_unattended: bool = True

    @property
    def defines(self) -> dict[str, str | int]:
        """As the sources spell it."""
        return {
            "HEAD_DIM": self.head_dim,
            "E4M3": int(self.e4m3),
            "GROUPED": int(self.grouped),
            "M_TILES": self.m_tiles,
            "ZERO_UNATTENDED": int(self.zero_unattended),
        }

    @property
    def warp_bytes(self) -> int:
        """Shared memory of one warp: a tile of Q and one of P, rows padded by 16 bytes."""
        return 8 * self.m_tiles * 2 * (self.head_dim + 8 + 4 * CATEGORY_ENTRIES + 8)

    @property
    def facts(self) -> list[int]:
        """What a build of this variant says of itself."""
        dim, zero = self.head_dim, int(self.zero_unattended)
        return [ABI, dim, int(self.e4m3), int(self.grouped), self.m_tiles, zero, self.warp_bytes, CATEGORY_ENTRIES]


@dataclass(frozen=True)
class Grouped:
    """A grouped plan on the device, see `plans.GroupedPlan`; all int32.

    rows: [G, M]; begins, ends: [G], entries of each group, multiples of 8 apart and a multiple of 8 each; blocks,
    masks: [T]; tile_sets: [T / 8]; max_steps: the most steps of eight entries that a group can have, for the host.
    """

    rows: Tensor
    begins: Tensor
    ends: Tensor
    blocks: Tensor
    masks: Tensor
    tile_sets: Tensor
    page_tokens: int
    heads_per_kv: int
    max_steps: int


def refusal(
    *,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    heads_per_kv: int,
    page_tokens: int = 16,
    group_rows: int = MAX_GROUP_ROWS,
    capability: tuple[int, int] = (7, 0),
) -> str | None:
    """None when these operands are served, else the reason, for people; dtypes as torch spells them."""
    if capability < (7, 0):
        return f"compute capability {capability[0]}.{capability[1]} has no matrix instruction, it begins with 7.0"
    if dtype not in DTYPES:
        return f"queries of {dtype}: Volta multiplies float16 only"
    if kv_dtype not in KV_DTYPES:
        return f"K/V of {kv_dtype}: Volta multiplies float16 only, and E4M3 is decoded to it"
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if page_tokens < 4 or page_tokens % 4:
        return f"a page of {page_tokens} tokens is not a whole number of 4-token blocks"
    if heads_per_kv < 1:
        return "query heads are not a multiple of KV heads"
    if not 1 <= group_rows <= MAX_GROUP_ROWS or -(-group_rows * heads_per_kv // 16) > MAX_TILES:
        return f"{group_rows} rows of {heads_per_kv} query heads a KV head are more than {MAX_TILES} tiles of 16"
    return nvrtc.refusal(arch_of(capability))


def layout_refusal(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> str | None:
    """None when the tensors lie as 16-byte loads need them, else the reason; q, gate: [R, H, D], k, v: [P, S, J, D]."""
    for name, tensor, alignment in (("q", q, 16), ("K", k, 16), ("V", v, 16), ("gate", gate, 4)):
        if tensor is None:
            continue
        size = tensor.element_size()
        if tensor.stride(-1) != 1:
            return f"{name} is not contiguous in its last axis"
        if tensor.data_ptr() % alignment or any(stride * size % alignment for stride in tensor.stride()[:-1]):
            return f"rows of {name} are not aligned to {alignment} bytes"
    return None


def arch_of(capability: tuple[int, int]) -> str:
    """What the sources are compiled to for a GPU: machine code for Volta, its PTX for newer ones."""
    return "sm_{}{}".format(*capability) if capability[0] == 7 and capability[1] < 5 else "compute_70"


def variant_of(
    head_dim: int, heads_per_kv: int, group_rows: int, *, e4m3: bool, grouped: bool, zero_unattended: bool = True
) -> Variant:
    """The specialisation that serves `group_rows` rows (1 for xqa); tiles of 8 query rows where all fit in one."""
    m_tiles = 1 if group_rows * heads_per_kv <= 8 else 2
    return Variant(head_dim, e4m3, grouped, m_tiles, zero_unattended)


def variants(head_dim: int, heads_per_kv: int, *, e4m3: bool) -> list[Variant]:
    """Every specialisation that a geometry can reach, for warm-up: xqa, and groups of 1 to 8 rows."""
    shapes = [(1, False), *((rows, True) for rows in range(1, MAX_GROUP_ROWS + 1))]
    found = [variant_of(head_dim, heads_per_kv, rows, e4m3=e4m3, grouped=grouped) for rows, grouped in shapes]
    return list(dict.fromkeys(found))


def warm(head_dim: int, heads_per_kv: int, *, e4m3: bool) -> None:
    """Compiles and loads on the current device all that a geometry can reach."""
    arch, found = arch_of(cuda.capability()), variants(head_dim, heads_per_kv, e4m3=e4m3)
    cuda_build.compile_all((SOURCE, arch, variant.defines) for variant in found)
    for variant in found:
        _attend_function(variant)
    _merge_function(head_dim, half=not e4m3)


def split_steps_of(rows_of_requests: tuple[int, ...] | None) -> int | None:
    """Steps of a split of the grouped route; None for no splits. Prefill has groups enough without them."""
    return WINDOW_SPLIT_STEPS if rows_of_requests and max(rows_of_requests) <= MAX_GROUP_ROWS else None


def attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Grouped,
    *,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    split_steps: int | None = None,
    zero_unattended: bool = True,
) -> None:
    """Route grouped: out [R, H, D] and lse [R, H] fp32 are written, zeros and -inf for rows of no group.

    q, gate: [R, H, D] fp16; k, v: [P, S, J, D] fp16, or uint8 with their scales [] fp32 on the device. split_steps: see
    `split_steps_of`. zero_unattended is off nowhere but in tests.
    """
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    places = plan.rows.shape[1]
    splits = 1 if split_steps is None else max(1, -(-plan.max_steps // split_steps))
    steps = plan.max_steps if split_steps is None else split_steps
    e4m3 = k_scale is not None
    variant = variant_of(
        q.shape[2], plan.heads_per_kv, places, e4m3=e4m3, grouped=True, zero_unattended=zero_unattended
    )
    planned = (plan.rows, plan.begins, plan.ends, plan.blocks, plan.masks, plan.tile_sets, 0, places)
    sizes = (plan.heads_per_kv, q.shape[1], plan.page_tokens // 4, max(1, steps), splits)
    space = _workspace(q, splits, half=not e4m3) if splits > 1 else None
    grid = (plan.rows.shape[0], k.shape[2])
    _launch(variant, grid, splits, places * plan.heads_per_kv, (
        *_strided(q), *_strided(k), *_strided(v), k_scale, v_scale, softmax_scale, *planned, *sizes,
        *_gate_of(gate), out, lse, *(space or (None, None)), 0 if space is None else space[1].shape[1],
    ))  # fmt: skip
    if space is not None:
        _merge(q, space, splits, plan.rows, plan.rows.numel(), gate, out, lse, half=not e4m3)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    page_tokens: int,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    split_steps: int = XQA_SPLIT_STEPS,
    zero_unattended: bool = True,
) -> None:
    """Route xqa; table: [R, V] int32, lengths: [R] int32 as in `plans.RowPlan`, the rest as `attend_grouped`."""
    for begin in range(0, q.shape[0], XQA_ROWS):
        part = slice(begin, begin + XQA_ROWS)
        _attend_rows(
            q[part], k, v, table[part], lengths[part], page_tokens, softmax_scale, k_scale, v_scale,
            None if gate is None else gate[part], out[part], None if lse is None else lse[part],
            split_steps, zero_unattended,
        )  # fmt: skip


def _attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    page_tokens: int,
    softmax_scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    split_steps: int,
    zero_unattended: bool,
) -> None:
    rows, width, heads = q.shape[0], table.shape[1], q.shape[1]
    heads_per_kv = heads // k.shape[2]
    splits = max(1, -(-width // (CATEGORY_ENTRIES * split_steps)))
    e4m3 = k_scale is not None
    variant = variant_of(q.shape[2], heads_per_kv, 1, e4m3=e4m3, grouped=False, zero_unattended=zero_unattended)
    space = _workspace(q, splits, half=not e4m3) if splits > 1 else None
    planned = (None, lengths, None, table, None, None, width, 1)
    sizes = (heads_per_kv, heads, page_tokens // 4, split_steps, splits)
    _launch(variant, (rows, k.shape[2]), splits, heads_per_kv, (
        *_strided(q), *_strided(k), *_strided(v), k_scale, v_scale, softmax_scale, *planned, *sizes,
        *_gate_of(gate), out, lse, *(space or (None, None)), 0 if space is None else space[1].shape[1],
    ))  # fmt: skip
    if space is not None:
        _merge(q, space, splits, None, rows, gate, out, lse, half=not e4m3)


def _strided(tensor: Tensor) -> Iterator[object]:
    """A tensor and its strides in elements, all but the last axis'."""
    yield tensor
    yield from tensor.stride()[:-1]


def _gate_of(gate: Tensor | None) -> tuple[object, ...]:
    return (None, 0, 0) if gate is None else tuple(_strided(gate))


def _launch(variant: Variant, grid: tuple[int, int], splits: int, query_rows: int, args: tuple[object, ...]) -> None:
    tiles = -(-query_rows // (8 * variant.m_tiles))
    warps = min(tiles, WARPS)
    grid_z = splits * -(-tiles // warps)
    function = _attend_function(variant)
    cuda.launch(function, (*grid, grid_z), (32, warps, 1), args, shared_bytes=warps * variant.warp_bytes)


def _merge(
    q: Tensor,
    space: tuple[Tensor, Tensor],
    splits: int,
    rows: Tensor | None,
    blocks: int,
    gate: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    *,
    half: bool,
) -> None:
    _, heads, dim = q.shape
    args = (*space, splits, rows, space[1].shape[1], heads, *_gate_of(gate), out, lse)
    cuda.launch(_merge_function(dim, half=half), (blocks, heads, 1), (dim // 2, 1, 1), args)


def _workspace(q: Tensor, splits: int, *, half: bool) -> tuple[Tensor, Tensor]:
    """part_out [splits, R', H, D] and part_lse [splits, R', H] fp32, R' the next power of two from R on.

    Kept by stream and never given back: a captured graph may hold the address.
    """
    import torch

    rows, heads, dim = q.shape
    rows = 1 << (rows - 1).bit_length()
    key = (q.device, cuda.stream_handle(q.device), rows, heads, dim, splits, half)
    if key not in _workspaces:
        dtype = torch.float16 if half else torch.float32
        parts = torch.empty(splits, rows, heads, dim, dtype=dtype, device=q.device)
        _workspaces[key] = parts, torch.empty(splits, rows, heads, dtype=torch.float32, device=q.device)
    return _workspaces[key]


def _attend_function(variant: Variant) -> cuda.Function:
    return _attend_on(cuda.current_device(), variant)


@functools.cache
def _attend_on(device: int, variant: Variant) -> cuda.Function:
    arch = arch_of(cuda.capability(device))
    check_build(_facts_of(arch, variant), variant)
    return cuda.function(SOURCE, "page4_sm70_attend", arch=arch, defines=variant.defines)


def _facts_of(arch: str, variant: Variant) -> list[int]:
    """What the build says of itself; asked once, when it is loaded, so a capture must find it loaded."""
    import torch

    facts = torch.zeros(8, dtype=torch.int32, device=cuda.device())
    query = cuda.function(SOURCE, "page4_sm70_abi", arch=arch, defines=variant.defines)
    cuda.launch(query, (1, 1, 1), (32, 1, 1), (facts,))
    return [int(fact) for fact in facts.tolist()]


def check_build(facts: list[int], variant: Variant) -> None:
    """Refuses a build that is not what its caller takes it for: another version of the interface, another variant."""
    if facts != variant.facts:
        do = "empty page4's cache folder; if that does not help, install page4 again"
        raise KernelError(message("page4_sm70_abi", allowed=variant.facts, got=facts, do=do))


@functools.cache
def _merge_on(device: int, head_dim: int, half: bool) -> cuda.Function:
    defines = {"HEAD_DIM": head_dim, "HALF_PARTS": int(half)}
    return cuda.function(MERGE_SOURCE, "page4_sm70_merge", arch=arch_of(cuda.capability(device)), defines=defines)


def _merge_function(head_dim: int, *, half: bool) -> cuda.Function:
    return _merge_on(cuda.current_device(), head_dim, half)
