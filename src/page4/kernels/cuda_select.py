"""The best blocks of each row by `cuda/select.cu`, exact and in one pass over the scores; scoring is `triton_select`'s.

One thread block a row. How many threads, and how many scores each holds in registers, follows from the longest row.
"""

import torch
from torch import Tensor

from page4.kernels import cuda, cuda_build, nvrtc, triton_select

SOURCE, NAME = "select.cu", "select_top"
# (columns up to, threads, scores a thread in registers): the last reads its scores from memory in every pass.
VARIANTS = ((4096, 512, 8), (8192, 512, 16), (16384, 1024, 16), (32768, 1024, 32), (1 << 24, 1024, 0))


def refusal(capability: tuple[int, int] | None) -> str | None:
    """None when the kernel can be built for a device of this compute capability, else the reason."""
    if capability is None or tuple(capability) < (7, 0):
        return f"built for compute capability 7.0 or newer, got {capability}"
    return nvrtc.refusal(arch_of(capability))


def arch_of(capability: tuple[int, int]) -> str:
    """The target of a device: its own machine code."""
    return f"sm_{capability[0]}{capability[1]}"


def variant(columns: int) -> tuple[int, int]:
    """Threads, and scores a thread in registers, for rows of `columns` scores."""
    return next((threads, values) for limit, threads, values in VARIANTS if columns <= limit)


def shared_bytes(columns: int, threads: int) -> int:
    """Dynamic shared memory: two words for every 32 columns, for whole rounds of the threads."""
    words = -(-columns // 32)
    return 8 * (-(-words // threads) * threads)


def build(max_columns: int, capability: tuple[int, int]) -> None:
    """Compiles every variant that rows of up to `max_columns` scores can reach, for warm-up."""
    for columns, threads, values in VARIANTS:
        cuda_build.compile(SOURCE, arch=arch_of(capability), defines={"THREADS": threads, "VALUES": values})
        if columns >= max_columns:
            return


def top_blocks(scores: Tensor, positions: Tensor, top_k: int, ids: Tensor, counts: Tensor, bad: Tensor) -> None:
    """As `triton_select.top_blocks`."""
    rows, columns = scores.shape
    capability = cuda.capability(scores.device)
    threads, values = variant(columns)
    kernel = cuda.function(SOURCE, NAME, arch=arch_of(capability), defines={"THREADS": threads, "VALUES": values})
    cuda.launch(
        kernel,
        (rows,),
        (threads,),
        (scores, columns, positions, top_k, ids, counts, bad),
        shared_bytes=shared_bytes(columns, threads),
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
