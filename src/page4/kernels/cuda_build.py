"""CUDA sources (`cuda/*.cu`) compiled by NVRTC, each specialisation once, and kept in the user's cache folder.

A compiled kernel is one file named by the hash of its source, every header that it includes, the target, the options
and the compiler's version. It holds the resource report of ptxas beside the image and is sealed with a hash of its own,
so that a file that is cut off or changed is compiled again instead of loaded. No GPU is needed to compile.

Sources include only files of their own folder: NVRTC's wheel brings no CUDA headers, and what a hash covers is then all
that is compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from page4.errors import KernelError, message
from page4.kernels import cpu_build, nvrtc

SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
# (source, arch) -> compilations of this process, cached files not counted: warm-up proves by it that none happen later.
compile_counts: Counter[tuple[str, str]] = Counter()
_LOG = logging.getLogger("page4")
# One for each file: threads compile different kernels at once, and one kernel once.
_locks: dict[Path, threading.Lock] = {}
_LOCK = threading.Lock()
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Resources:
    """What ptxas gave one kernel; `shared_bytes` is the static part, `stack_bytes` is local memory of any kind."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class CompiledKernel:
    """image: a cubin, or PTX text when `arch` is compute_XY; resources: by kernel name, empty for PTX."""

    source: str
    arch: str
    image: bytes
    resources: Mapping[str, Resources]
    compiler: tuple[int, int]

    @property
    def is_ptx(self) -> bool:
        """Whether the driver has to translate the image."""
        return self.arch.startswith("compute_")


def compile(source: str, *, arch: str, defines: Mapping[str, str | int] | None = None) -> CompiledKernel:
    """The compiled form of `source`, a file of `kernels/cuda`; compiled now unless the cache has it.

    arch: sm_XY for a cubin, compute_XY for PTX. Raises `KernelError` when no NVRTC here knows the target, for a source
    that does not exist or compile, and for a define that is no name.
    """
    library = nvrtc.library_for(arch)
    files = _files(source)
    options = (f"--gpu-architecture={arch}", *OPTIONS, *_defines(defines or {}))
    key = _key(files, options, library.version)
    path = cpu_build.cache_folder() / "cuda" / f"{Path(source).stem}-{arch}-{key}.kernel"
    with _LOCK:
        lock = _locks.setdefault(path, threading.Lock())
    with lock:
        found = _read(path, source, arch)
        if found is None:
            found = _compile(library, source, arch, files, options)
            _write(path, found)
    return found


def compile_all(requests: Iterable[tuple[str, str, Mapping[str, str | int]]], *, threads: int | None = None) -> None:
    """Fills the cache with many kernels at once; requests: (source, arch, defines). Raises as `compile`."""
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        started = [pool.submit(compile, source, arch=arch, defines=defines) for source, arch, defines in requests]
    for one in started:
        one.result()


def _compile(
    library: nvrtc.Library, source: str, arch: str, files: Mapping[str, bytes], options: tuple[str, ...]
) -> CompiledKernel:
    with _LOCK:
        compile_counts[source, arch] += 1
    headers = {name: text for name, text in files.items() if name != source}
    ptx = arch.startswith("compute_")
    output = nvrtc.compile_program(library, files[source], source, headers, options, ptx=ptx)
    return CompiledKernel(source, arch, output.image, resources_of(output.log), library.version)


def _files(source: str) -> dict[str, bytes]:
    """The source and every file that it includes, in the order of their first mention."""
    found: dict[str, bytes] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        try:
            found[name] = (SOURCES / name).read_bytes()
        except OSError:
            there = ", ".join(sorted(path.name for path in SOURCES.glob("*.cu*"))) or "none"
            allowed = f"a file of {SOURCES.name}: {there}"
            raise KernelError(message("source", allowed=allowed, got=name, do="install page4 again")) from None
        waiting += [name.decode() for name in _INCLUDE.findall(found[name])]
    return found


def _defines(defines: Mapping[str, str | int]) -> list[str]:
    for name in defines:
        if not _NAME.fullmatch(name):
            raise KernelError(message("define", allowed="a C name", got=repr(name), do="correct it"))
    # Sorted, so that the order of a mapping makes no second specialisation.
    return [f"--define-macro={name}={defines[name]}" for name in sorted(defines)]


def _key(files: Mapping[str, bytes], options: tuple[str, ...], version: tuple[int, int]) -> str:
    digest = hashlib.sha256()
    parts = [part for name, text in files.items() for part in (name.encode(), text)]
    for part in (*parts, *(option.encode() for option in options), repr(version).encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def resources_of(log: str) -> dict[str, Resources]:
    """The report of `ptxas -v` by kernel name."""
    found: dict[str, Resources] = {}
    name, frame = "", (0, 0, 0)
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            name = entry[1]
        elif sizes := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = (int(sizes[1]), int(sizes[2]), int(sizes[3]))
        elif name and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Resources(int(used[1]), *frame, int(shared[1]) if shared else 0)
            name = ""
    return found


def _read(path: Path, source: str, arch: str) -> CompiledKernel | None:
    """The cached kernel, or None where there is none that is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, seal = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != seal:
        return None
    head, _, image = body.partition(b"\n")
    facts = json.loads(head)
    resources = {name: Resources(**values) for name, values in facts["resources"].items()}
    return CompiledKernel(source, arch, image, resources, tuple(facts["compiler"]))


def _write(path: Path, kernel: CompiledKernel) -> None:
    """Staged beside its name, so that a reader sees a whole file or none; a cache that fails costs only time."""
    resources = {name: asdict(values) for name, values in kernel.resources.items()}
    facts = {"compiler": kernel.compiler, "resources": resources}
    body = json.dumps(facts).encode() + b"\n" + kernel.image
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(body + hashlib.sha256(body).digest())
        part.chmod(0o644)
        part.replace(path)
    except OSError as error:
        _LOG.warning("a compiled kernel could not be kept, every process compiles it again: %s", error)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
