"""The compiled kernels of a CPU: built once by the machine's C compiler, kept in the user's cache folder.

A library is named by the hash of its sources, the compiler, the flags and the processor, so a new version, another
compiler or another machine on the same home folder builds its own. Without a compiler everything runs on torch, several
times slower for a few rows; `page4 doctor` says which.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
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
        return None, _warn(f"{compiler} failed: {_said(error)}")


def _said(error: OSError | subprocess.SubprocessError) -> str:
    """In a few words, without the command."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return error.stderr.strip() or f"exit status {error.returncode}"
    return str(error)


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or None and the reason why there is none."""
    path, reason = built()
    if path is None:
        return None, reason
    # torch loads its OpenMP runtime first, and the library asks for the same one by name: one pool of threads.
    importlib.import_module("torch")

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
    path = cache_folder() / name
    if path.is_file() and _is_whole(path):
        return path
    # Staged beside its name, so that a build that is cut off, or a second one at the same time, leaves no half file.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=name, suffix=".part", delete=False) as staged:
        part = Path(staged.name)
    try:
        _run([compiler, *FLAGS, "-o", str(part), *map(str, sources), "-lm"])
        _seal(part)
        part.chmod(0o755)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS)
    return done.stdout


def _seal(path: Path) -> None:
    """Appends the hash of a library to it, which a loader does not look at."""
    with path.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path) -> bool:
    """Whether a library is as it was sealed: to load one that is cut off kills the process (SIGBUS)."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def cache_folder() -> Path:
    """`page4` in the user's cache folder, or a folder of this process where that cannot be written."""
    try:
        # A user without an entry in the password file and without HOME has no home: RuntimeError.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "page4"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):
        return Path(_process_folder().name)


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="page4-")


def _key(compiler: str, files: list[Path]) -> str:
    version = _run([compiler, "--version"])
    parts = [*(path.read_bytes() for path in files), version.encode(), " ".join(FLAGS).encode(), _processor().encode()]
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
