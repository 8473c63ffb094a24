"""The most memory that this process has held."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Peak resident memory of the process, in bytes.

    Linux keeps it for each address space as VmHWM. `ru_maxrss` is the fallback: after fork and exec it still holds the
    parent's peak, so a small child of a large process would report too much.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no procfs: another system
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
