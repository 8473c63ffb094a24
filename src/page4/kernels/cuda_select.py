"""The best blocks of each row by `cuda/select.cu`, exact and in one pass over the scores; scoring is `triton_select`'s.

One thread block a row. How many threads, and whether shared memory keeps the row, follows from the longest row.
"""

import torch
from torch import Tensor

from page4.kernels import cuda, cuda_build, nvrtc, triton_select

SOURCE, NAME = "select.cu", "select_top"
# (columns up to, threads, whether the row is kept in shared memory).
VARIANTS = ((8192, 256, 1), (16384, 512, 1), (32768, 1024, 1), (1 << 24, 1024, 0))
# Shared memory of the kernel itself, and up to which sum with the dynamic part no launch has to ask.
STATIC_BYTES = 12560


def refusal(capability: tuple[int, int] | None, max_visible_bound: int = 0) -> str | None:
    """None when the kernel can be built for a device and serves rows that see so many blocks, else the reason."""
    if capability is None or tuple(capability) < (7, 0):
        return f"built for compute capability 7.0 or newer, got {capability}"
    columns = triton_select.num_columns(max_visible_bound)
    threads, keep = variant(columns, capability)
    if shared_bytes(columns, threads, keep) > _allowed_bytes(capability):
        return f"rows of {columns} blocks need more shared memory than compute capability {capability} has"
    return nvrtc.refusal(arch_of(capability))


def _allowed_bytes(capability: tuple[int, int]) -> int:
    """Dynamic shared memory that a block may ask for."""
    known = {(7, 0): 96, (7, 2): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
    return (known.get(tuple(capability), 99 if capability[0] > 7 else 64) << 10) - STATIC_BYTES


def arch_of(capability: tuple[int, int]) -> str:
    """The target of a device: its own machine code."""
    return f"sm_{capability[0]}{capability[1]}"


def variant(columns: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Threads, and 1 when the row is kept in shared memory, for rows of `columns` scores."""
    threads, keep = next((threads, keep) for limit, threads, keep in VARIANTS if columns <= limit)
    return threads, int(keep and shared_bytes(columns, threads, 1) <= _allowed_bytes(capability))


def shared_bytes(columns: int, threads: int, keep: int) -> int:
    """Dynamic shared memory: the row when it is kept, and two bytes for every quad of whole rounds of the threads."""
    words = -(-columns // (16 * threads)) * threads
    return 4 * columns * keep + 8 * words


def build(max_columns: int, capability: tuple[int, int]) -> None:
    """Compiles every variant that rows of up to `max_columns` scores can reach, for warm-up."""
    limits = [limit for limit, _, _ in VARIANTS if limit < max_columns]
    for threads, keep in dict.fromkeys(variant(columns, capability) for columns in (1, *limits, max_columns)):
        cuda_build.compile(SOURCE, arch=arch_of(capability), defines={"THREADS": threads, "KEEP": keep})


def top_blocks(scores: Tensor, positions: Tensor, top_k: int, ids: Tensor, counts: Tensor, bad: Tensor) -> None:
    """As `triton_select.top_blocks`."""
    rows, columns = scores.shape
    capability = cuda.capability(scores.device)
    threads, keep = variant(columns, capability)
    kernel = cuda.function(SOURCE, NAME, arch=arch_of(capability), defines={"THREADS": threads, "KEEP": keep})
    cuda.launch(
        kernel,
        (rows,),
        (threads,),
        (scores, columns, positions, top_k, ids, counts, bad),
        shared_bytes=shared_bytes(columns, threads, keep),
        dependent=capability >= (9, 0),
    )


def select_blocks(
    index_q: Tensor,
    pooled: Tensor,
    block_table: Tensor,
    requests: Tensor,
    positions: Tensor,
    top_k: int,
    max_visible_bound: int,
    workspace: Tensor,
    *,
    window: int = triton_select.WIDE_ROWS,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `triton_select.select_blocks`, with this file's kernel for the best blocks."""
    places = (index_q, pooled, block_table, requests, positions, top_k, max_visible_bound, workspace)
    return triton_select.select_blocks(*places, window=window, out=out, top=top_blocks)
