"""CUDA sources compiled by the C++ compiler over `cuda_emulator.h`, and launched on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from page4.kernels import cuda, cuda_build

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_name("cuda_emulator.h")
# Headers of inline PTX: the emulator has their functions.
REPLACED = ("half.cuh", "sm70_mma.cuh")
TYPES = '#pragma once\n#include "common.cuh"\n'
FLAGS = ("-std=c++20", "-O2", "-w", "-shared", "-fPIC")


@dataclass(frozen=True)
class Emulated:
    """A kernel of a library of its own."""

    name: str
    library: ctypes.CDLL
    argument_bytes: tuple[int, ...]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="page4-emulated-")


@functools.cache
def _library(source: str, kernels: tuple[str, ...], defines: tuple[tuple[str, object], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    for path in cuda_build.SOURCES.iterdir():
        (folder / path.name).write_text(TYPES if path.name in REPLACED else path.read_text())
    calls = "\n".join(f"EMULATED({kernel})" for kernel in kernels)
    # Its own `shared` is declared by the source, when it has one.
    dynamic = "extern __shared__" in (folder / source).read_text()
    memory = "uint4 shared[8192];\n#define shared_memory shared\n" if dynamic else "static char shared_memory[16];\n"
    (folder / "all.cpp").write_text(f'#include "{HEADER}"\n#include "{source}"\n{memory}{calls}\n')
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in defines)]
    library = folder / "all.so"
    subprocess.run([COMPILER, *flags, "-o", str(library), str(folder / "all.cpp")], check=True, timeout=300)
    return ctypes.CDLL(str(library))


KERNELS = {
    "sm70_attend.cu": ("page4_sm70_abi", "page4_sm70_attend"),
    "sm70_merge.cu": ("page4_sm70_merge",),
    "e4m3_check.cu": ("page4_e4m3_decode", "page4_e4m3_encode"),
}


def function(source: str, name: str, *, arch: str, defines: Mapping[str, str | int] | None = None) -> Emulated:
    """In the place of `cuda.function`."""
    assert arch == "sm_70"
    library = _library(source, KERNELS[source], tuple(sorted((defines or {}).items())))
    sizes = (ctypes.c_int * 64)()
    count = getattr(library, f"sizes_{name}")(sizes)
    return Emulated(name, library, tuple(sizes[:count]))


def launch(
    function: Emulated,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    dependent: bool = False,
    stream: object = None,
) -> None:
    """In the place of `cuda.launch`, arguments checked by it."""
    assert shared_bytes <= 96 << 10 and block[0] * block[1] <= 256
    values = [ctypes.c_int64(x) if isinstance(x, int) else x for x in cuda._arguments(function, args)]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    getattr(function.library, f"run_{function.name}")(pointers, (ctypes.c_int * 3)(*grid), (ctypes.c_int * 3)(*block))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of `cuda` runs emulated from here on, as on a device of compute capability 7.0."""
    monkeypatch.setattr(cuda, "function", function)
    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuda, "current_device", lambda: -1)
    monkeypatch.setattr(cuda, "capability", lambda device=None: (7, 0))
    monkeypatch.setattr(cuda, "stream_handle", lambda device=None: 0)
