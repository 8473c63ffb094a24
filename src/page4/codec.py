"""E4M3 (fp8 e4m3fn): values, encoding with saturation and counts, and the `Scale` that both directions share.

A byte is sign 1, exponent 4 (bias 7), mantissa 3; exponent 0 is subnormal (steps of 2**-9), 0x7F and 0xFF are NaN, the
largest magnitude is 448. A cached x is stored as encode(x / scale) and read as decode(byte) * scale.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from page4 import _scale_math
from page4.errors import KernelError, ScaleError, message

MAX_E4M3 = _scale_math.MAX_E4M3
NAN_BYTES = (0x7F, 0xFF)
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scale:
    """The number that one side (K or V) of one layer is divided by when written and multiplied by when read.

    `value` is rounded to fp32 at construction. Raises `ScaleError` unless it is then finite and positive.
    """

    value: float
    _tensors: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        value = _scale_math.to_fp32(float(self.value))
        if not (math.isfinite(value) and value > 0.0):
            allowed = "a finite positive fp32 number"
            raise ScaleError(message("scale", allowed=allowed, got=repr(self.value), do="calibrate the scales again"))
        object.__setattr__(self, "value", value)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The value as `[] fp32` on `device`; always the same tensor, so a captured graph may keep its address."""
        key = torch.device(device)
        if key not in self._tensors:
            # Filled on the device: a copy from the host would wait for it, and break a capture.
            self._tensors[key] = torch.full((), self.value, dtype=torch.float32, device=key)
        return self._tensors[key]

    @classmethod
    def from_max_abs(cls, max_abs: float) -> Scale:
        """The smallest fp32 scale that clips nothing up to `max_abs`: ceil_to_fp32(max_abs / 448).

        Raises `ScaleError` when `max_abs` is not finite and positive.
        """
        return cls(_scale_math.scale_of(max_abs))


@dataclass(frozen=True)
class EncodeStats:
    """What an encode had to do: `clipped` finite values saturated at 448, `nonfinite` inputs. Both `[] int64`."""

    clipped: Tensor
    nonfinite: Tensor


def encode(x: Tensor, scale: Scale, *, counters: Tensor | None = None) -> Tensor:
    """E4M3 bytes of x / scale: the division in fp32, then round to nearest even, saturating at +-448.

    x: any shape, fp32 | fp16 | bf16. Returns the same shape, uint8. An infinity saturates and a NaN becomes a NaN byte;
    both are counted as non-finite. `counters: [2] int64` is increased in place by (clipped, nonfinite), without a host
    sync. Raises `KernelError` for another dtype.
    """
    _check_float(x)
    # A 0-dim tensor on x's device, because CUDA turns a division by a host scalar into a product with its reciprocal.
    quotient = x.float() / scale.tensor(x.device)
    if counters is not None:
        stats = _count(x, quotient)
        counters += torch.stack((stats.clipped, stats.nonfinite))
    return _saturate(quotient)


def encode_sides(x: Tensor, scales: tuple[Scale, Scale], *, counters: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`encode` of K and V at once, in half the operations, and which rows had an input that is not finite.

    x: [2, R, J, D], K and V; counters: [2, 2] int64, a row for each side. Returns ([2, R, J, D] uint8, [R] bool).
    """
    _check_float(x)
    quotient = x.float() / torch.stack([scale.tensor(x.device) for scale in scales]).view(2, 1, 1, 1)
    finite = (x.abs() < math.inf).sum((2, 3))
    if counters is not None:
        # What is within 448 is finite, so the difference of the two counts is what is finite and clipped.
        finite_of_side, within = finite.sum(1), (quotient.abs() <= MAX_E4M3).sum((1, 2, 3))
        counters += torch.stack((finite_of_side - within, x[0].numel() - finite_of_side), 1)
    return _saturate(quotient), (finite < x.shape[2] * x.shape[3]).any(0)


def _saturate(quotient: Tensor) -> Tensor:
    return quotient.clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def count(x: Tensor, scale: Scale) -> EncodeStats:
    """The counts of `encode(x, scale)` alone."""
    _check_float(x)
    return _count(x, x.float() / scale.tensor(x.device))


def _count(x: Tensor, quotient: Tensor) -> EncodeStats:
    finite = torch.isfinite(x)
    return EncodeStats(clipped=((quotient.abs() > MAX_E4M3) & finite).sum(), nonfinite=(~finite).sum())


def decode(byte: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The value of each byte, exact in every float dtype; the scale is the caller's to multiply.

    byte: any shape, uint8, or K/V views [P, S, J, D]. Returns the same shape in `dtype`. Raises `KernelError`.
    """
    if byte.dtype != torch.uint8:
        do = "pass the bytes that encode returned"
        raise KernelError(message("byte", allowed="uint8", got=byte.dtype, do=do))
    # Looking values up is three times faster on a CPU than torch's cast from float8_e4m3fn.
    return table(dtype, byte.device).index_select(0, byte.reshape(-1).int()).view(byte.shape)


def table(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """`[256]`: the value of every byte. Shared by all callers; do not write to it."""
    return _table(dtype, torch.device(device))


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(dtype).to(device)


def _check_float(x: Tensor) -> None:
    if x.dtype not in _FLOAT_DTYPES:
        raise KernelError(message("x", allowed="float32, float16 or bfloat16", got=x.dtype, do="cast it first"))
