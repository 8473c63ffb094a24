"""What the tests of the compiled CPU kernels share: when they run, and comparisons of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from page4.kernels import cpu_build

needs_compiler = pytest.mark.skipif(cpu_build.load()[0] is None, reason=f"not compiled: {cpu_build.load()[1]}")


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal shapes and bytes, NaN included."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(got.numpy().tobytes() == want.numpy().tobytes())


def assert_threads_agree(run: Callable[[], Sequence[Tensor]]) -> None:
    """`run` gives the same bits on one thread, on two and on three."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Close to a float64 oracle, relative to the larger of 1 and what is wanted."""
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
