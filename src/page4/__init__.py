"""page4: sparse attention over an E4M3 paged cache, with exact MTP, for qwen4_exp checkpoints.

`import page4` loads neither torch nor any submodule: the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from page4.assets import embedded_checkpoint
    from page4.checkpoint import Checkpoint
    from page4.codec import Scale
    from page4.engine import LLM, CompletionOutput, RequestOutput, SamplingParams, StreamChunk
    from page4.errors import Page4Error
    from page4.geometry import Geometry

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "page4.checkpoint",
    "CompletionOutput": "page4.engine",
    "Geometry": "page4.geometry",
    "LLM": "page4.engine",
    "Page4Error": "page4.errors",
    "RequestOutput": "page4.engine",
    "SamplingParams": "page4.engine",
    "Scale": "page4.codec",
    "StreamChunk": "page4.engine",
    "embedded_checkpoint": "page4.assets",
}

__all__ = [
    "LLM",
    "Checkpoint",
    "CompletionOutput",
    "Geometry",
    "Page4Error",
    "RequestOutput",
    "SamplingParams",
    "Scale",
    "StreamChunk",
    "__version__",
    "embedded_checkpoint",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'page4' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
