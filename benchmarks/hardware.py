"""What a figure was measured on: goes into every result file."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("page4", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe(threads: int) -> dict[str, Any]:
    """Processor, memory, versions, commit, date and command line of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
    }


def installed(name: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the working tree, with `+` when files differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def cpu_name() -> str:
    """Model name of the processor and the instruction sets that matter here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts.get("flags", "").split())
    named = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    ids = f"family {facts.get('cpu family')} model {facts.get('model')}"
    return f"{facts.get('model name', 'unknown')} ({ids}; {', '.join(named)})"
