"""Launch arguments, checked before they reach the driver, and the launch itself where there is a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from page4.errors import KernelError
from page4.kernels import cuda, nvrtc

needs_gpu = pytest.mark.skipif(cuda.refusal() is not None, reason=str(cuda.refusal()))


def function(*sizes: int) -> cuda.Function:
    return cuda.Function("kernel", "sm_70", None, 0, None, sizes)


def test_arguments_are_as_wide_as_the_kernel_declares_them() -> None:
    tensor = torch.zeros(3)
    args = (tensor, None, 5, 1 << 40, 2.5, True, ctypes.c_int64(7))
    pointer, null, narrow, wide, real, flag, given = cuda._arguments(function(8, 8, 4, 8, 4, 4, 8), args)
    assert (pointer, null) == (tensor.data_ptr(), 0)
    assert isinstance(narrow, ctypes.c_int32) and narrow.value == 5
    assert isinstance(wide, ctypes.c_int64) and wide.value == 1 << 40
    assert isinstance(real, ctypes.c_float) and real.value == 2.5
    assert isinstance(flag, ctypes.c_int32) and flag.value == 1
    assert isinstance(given, ctypes.c_int64)


@pytest.mark.parametrize(
    "sizes,args,words",
    [
        ((8, 4), (None,), "kernel: expected 2 arguments, got 1"),
        ((4,), (None,), "argument: expected 4 bytes, got NoneType None"),
        ((4,), (1 << 31,), "argument: expected 4 bytes, got int 2147483648"),
        ((8,), (2.5,), "argument: expected 8 bytes, got float 2.5"),
        ((4,), (ctypes.c_int64(1),), "argument: expected 4 bytes"),
        ((8,), ("text",), "argument: expected 8 bytes, got str text"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: tuple[int, ...], args: tuple[object, ...], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        cuda._arguments(function(*sizes), args)


def test_an_empty_grid_is_no_launch() -> None:
    cuda.launch(function(8), (0, 2, 1), (32, 1, 1), ())


def test_a_machine_without_a_gpu_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.refusal() == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_core_version", lambda: None)
    assert "pip install 'page4[gpu]'" in str(cuda.refusal())
    with pytest.raises(KernelError, match="CUDA kernels: expected cuda-core to load them"):
        cuda._loaded("e4m3_check.cu", "page4_e4m3_decode", "sm_90a", None, 0)


@needs_gpu
def test_a_function_is_loaded_once_and_runs_on_the_current_stream() -> None:
    arch = "sm_{}{}".format(*cuda.capability())
    if nvrtc.refusal(arch) is not None:
        pytest.skip(str(nvrtc.refusal(arch)))
    encoder = cuda.function("e4m3_check.cu", "page4_e4m3_encode", arch=arch)
    assert cuda.function("e4m3_check.cu", "page4_e4m3_encode", arch=arch) is encoder
    x, found = torch.full((64,), 2.0, device="cuda"), torch.zeros(64, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda.launch(encoder, (2, 1, 1), (32, 1, 1), (x, found, 64))
    stream.synchronize()
    assert (found == 0x40).all()
    found.zero_()
    cuda.launch(encoder, (2, 1, 1), (32, 1, 1), (x, found, 64), stream=stream)
    stream.synchronize()
    assert (found == 0x40).all()
    with pytest.raises(KernelError, match="3 arguments"):
        cuda.launch(encoder, (1, 1, 1), (32, 1, 1), (x,))
    with pytest.raises(KernelError, match=r"e4m3_check\.cu none: expected loaded for"):
        cuda.function("e4m3_check.cu", "none", arch=arch)
