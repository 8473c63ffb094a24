"""The compiled kernels of a CPU: built once by the machine's C compiler, kept in the user's cache folder.

A library is named by the hash of its sources, the compiler, the flags and the processor, so a new version, another
compiler or another machine on the same home folder builds its own. Without a compiler everything runs on torch, several
times slower for a few rows; `page4 doctor` says which.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fvisibility=hidden", "-fopenmp", "-shared", "-fPIC",
)  # fmt: skip
BUILD_SECONDS = 120
_LOG = logging.getLogger("page4")


@functools.cache
def built() -> tuple[Path | None, str | None]:
    """The library's file, built now if need be; or None and the reason why there is none. Does not import torch."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler is installed (gcc or clang)"
    try:
        return _build(compiler), None
    except (OSError, subprocess.SubprocessError) as error:
        return None, _warn(f"{compiler} failed: {getattr(error, 'stderr', None) or error}")


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why there is none."""
    path, reason = built()
    if path is None:
        return None, reason
    # torch loads its OpenMP runtime first, and the library asks for the same one by name: one pool of threads.
    import torch  # noqa: F401

    try:
        return ctypes.CDLL(str(path)), None
    except OSError as error:
        return None, _warn(f"{path.name} cannot be loaded: {error}")


def _warn(reason: str) -> str:
    reason = " ".join(reason.split())[:300]
    _LOG.warning("the compiled CPU kernels are off, torch runs instead: %s", reason)
    return reason


def _build(compiler: str) -> Path:
    sources = sorted(SOURCES.glob("*.c"))
    name = f"page4-cpu-{_key(compiler, [*sources, *sorted(SOURCES.glob('*.h'))])}.so"
    path = _folder() / name
    if path.is_file():
        return path
    # Staged beside its name, so that a build that is cut off, or a second one at the same time, leaves no half file.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=name, suffix=".part", delete=False) as staged:
        part = Path(staged.name)
    try:
        command = [compiler, *FLAGS, "-o", str(part), *map(str, sources), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        part.chmod(0o755)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _folder() -> Path:
    """`page4` in the user's cache folder, or a folder of this process where that cannot be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "page4"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(_process_folder().name)


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="page4-")


def _key(compiler: str, files: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=BUILD_SECONDS).stdout
    parts = [*(path.read_bytes() for path in files), version, " ".join(FLAGS).encode(), _processor().encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return platform.machine() + "\n".join(sorted(kept))
