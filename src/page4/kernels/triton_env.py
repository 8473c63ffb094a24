"""Triton where it is installed; kernel files import it from here, so that their refusals can be asked anywhere.

With TRITON_INTERPRET=1, set before this module is imported, the kernels run on the CPU in Triton's interpreter: slowly,
for tests.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # the kernels of this file are then only names
    triton = tl = None

# Types of scalar arguments, as Triton spells them: a size is not another kernel for passing 2**31.
i32, i64, fp32 = "i32", "i64", "fp32"
MIN_CAPABILITY = (7, 5)


def jit(function: Callable[..., Any] | None = None, *, vary: Sequence[str] = ()) -> Any:
    """triton.jit; `vary` names what changes from step to step and so specialises nothing.

    Integers, and tensors of places that may begin anywhere in a larger one, so that their alignment says nothing.
    """
    if function is None:
        return lambda found: jit(found, vary=vary)
    return (
        function
        if triton is None
        else triton.jit(function, do_not_specialize=[*vary], do_not_specialize_on_alignment=[*vary])
    )


def interpreted() -> bool:
    """Whether the kernels run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(device: str, capability: tuple[int, int] | None) -> str | None:
    """None when Triton kernels run on the device ("cuda" with its compute capability, "cpu"), else the reason."""
    if triton is None:
        return "Triton is not installed (pip install 'page4[gpu]')"
    if device == "cpu":
        return None if interpreted() else "Triton runs on a CPU in its interpreter only (TRITON_INTERPRET=1, for tests)"
    if device != "cuda":
        return f"no Triton kernels for {device}"
    if capability is None or tuple(capability) < MIN_CAPABILITY:
        return f"Triton kernels need compute capability 7.5 or newer, got {capability}"
    return None


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
