"""The engine: continuous batching, exact MTP, sampling. `LLM` is its face; names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from page4.engine.llm import LLM
    from page4.engine.metrics import EngineMetrics
    from page4.engine.output import CompletionOutput, RequestOutput, StreamChunk, Usage
    from page4.engine.params import SamplingParams

_HOMES = {
    "LLM": "page4.engine.llm",
    "CompletionOutput": "page4.engine.output",
    "EngineMetrics": "page4.engine.metrics",
    "RequestOutput": "page4.engine.output",
    "SamplingParams": "page4.engine.params",
    "StreamChunk": "page4.engine.output",
    "Usage": "page4.engine.output",
}

__all__ = ["LLM", "CompletionOutput", "EngineMetrics", "RequestOutput", "SamplingParams", "StreamChunk", "Usage"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'page4.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
