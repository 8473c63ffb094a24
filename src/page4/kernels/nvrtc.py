"""NVRTC, called directly: which library compiles for which target, and one compilation.

cuda-core compiles through cuda.bindings, which loads one libnvrtc: the one of its own major version. CUDA 13 dropped
Volta, so a machine with CUDA 13 needs a 12.x library beside it for sm_70, and cuda-core cannot choose between two. The
calls are a dozen, so they are made here with ctypes, for every target in the same way; cuda-core loads and launches.
The wheels nvidia-cuda-nvrtc (13.x) and nvidia-cuda-nvrtc-cu12 can be installed side by side.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from dataclasses import dataclass
from pathlib import Path

from page4.errors import KernelError, message

# Newest first: what a target does not need an old one for takes the newest that is there.
MAJORS = (13, 12)
# CUDA 13 compiles for compute capability 7.5 and newer.
OLDEST_OF_13 = 75
_ARCH = re.compile(r"(sm|compute)_(\d+)[af]?")
INSTALL = {13: "pip install nvidia-cuda-nvrtc", 12: "pip install nvidia-cuda-nvrtc-cu12"}


@dataclass(frozen=True)
class Library:
    """A loaded libnvrtc. `version` is (major, minor); `capabilities` as 70, 90."""

    handle: ctypes.CDLL
    path: str
    version: tuple[int, int]
    capabilities: tuple[int, ...]


def capability(arch: str) -> int:
    """90 of sm_90a. Raises `KernelError` for what is no target."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        do = "name the GPU's compute capability"
        raise KernelError(message("arch", allowed="sm_XY or compute_XY, as sm_70 or sm_90a", got=repr(arch), do=do))
    return int(found[2])


def majors_for(arch: str) -> tuple[int, ...]:
    """Major versions that may compile for a target, the preferred one first."""
    return MAJORS if capability(arch) >= OLDEST_OF_13 else tuple(major for major in MAJORS if major < 13)


def library_for(arch: str) -> Library:
    """The newest NVRTC here that compiles for `arch`. Raises `KernelError` that says what to install."""
    found = [library for major in majors_for(arch) if (library := _load(major)) is not None]
    for library in found:
        if capability(arch) in library.capabilities:
            return library
    majors = majors_for(arch)
    got = ", ".join("{}.{}".format(*library.version) for library in found) or "none"
    allowed = f"a libnvrtc of CUDA {' or '.join(map(str, majors))} that knows it"
    raise KernelError(message(f"NVRTC for {arch}", allowed=allowed, got=got, do=INSTALL[majors[0]]))


def refusal(arch: str) -> str | None:
    """None when this machine can compile for `arch`, else why not, for people."""
    try:
        library_for(arch)
    except KernelError as error:
        return str(error)
    return None


@functools.cache
def _load(major: int) -> Library | None:
    for path in (*_files(major), f"libnvrtc.so.{major}"):
        try:
            handle = ctypes.CDLL(path)
            version = (c_int(), c_int())
            handle.nvrtcVersion(byref(version[0]), byref(version[1]))
            return Library(handle, path, (version[0].value, version[1].value), _capabilities(handle))
        except (OSError, AttributeError):
            continue  # a library that cannot be loaded, or is none: the next place may have a whole one
    return None


def _files(major: int) -> Iterator[str]:
    """Wheels along sys.path, then the toolkits that the environment names, then the usual folder."""
    for entry in sys.path:
        yield from map(str, sorted(Path(entry or ".").glob(f"nvidia/*/lib/libnvrtc.so.{major}")))
    toolkits = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    for toolkit in (*toolkits, *sorted(Path("/usr/local").glob("cuda*"), reverse=True)):
        for lib in ("lib64", "lib"):
            path = toolkit / lib / f"libnvrtc.so.{major}"
            if path.exists():
                yield str(path)


def _capabilities(handle: ctypes.CDLL) -> tuple[int, ...]:
    count = c_int()
    handle.nvrtcGetNumSupportedArchs(byref(count))
    values = (c_int * count.value)()
    handle.nvrtcGetSupportedArchs(values)
    return tuple(values)


@dataclass(frozen=True)
class Output:
    """image: a cubin for sm_XY, PTX text for compute_XY; log: what the compiler and ptxas said."""

    image: bytes
    log: str


def compile_program(
    library: Library, source: bytes, name: str, headers: Mapping[str, bytes], options: Sequence[str], *, ptx: bool
) -> Output:
    """One compilation; headers: contents by the names that #include gives. Raises `KernelError` with the log."""
    nvrtc = library.handle
    program = c_void_p()
    names = (c_char_p * len(headers))(*(header.encode() for header in headers))
    texts = (c_char_p * len(headers))(*headers.values())
    _check(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), source, name.encode(), len(headers), texts, names), name)
    try:
        flags = (c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        log = _read(nvrtc, program, "ProgramLog", name).rstrip(b"\0").decode(errors="replace")
        _check(nvrtc, status, name, log)
        return Output(_read(nvrtc, program, "PTX" if ptx else "CUBIN", name), log)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _read(nvrtc: ctypes.CDLL, program: c_void_p, what: str, name: str) -> bytes:
    size = c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size)), name)
    buffer = create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), name)
    return buffer.raw[: size.value]


def _check(nvrtc: ctypes.CDLL, status: int, name: str, log: str = "") -> None:
    if status == 0:
        return
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    said = " ".join(f"{nvrtc.nvrtcGetErrorString(status).decode()} {log}".split())
    raise KernelError(message(name, allowed="a source that compiles", got=said, do="correct it, or report this line"))
