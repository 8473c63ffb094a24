"""What a caller of `LLM` asks for, checked: data types, speculation, limits."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from page4 import env
from page4.engine.admission import check_drafts
from page4.errors import UsageError, message
from page4.geometry import Geometry

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
E4M3_NAMES = ("fp8", "fp8_e4m3")


def compute_dtype(name: str, geometry: Geometry, device: torch.device) -> torch.dtype:
    """The activations' type. `auto` is float32 on a CPU, where it is exact and as fast, else the checkpoint's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[geometry.dtype_name]
    if name not in DTYPES:
        allowed = f"auto, {', '.join(DTYPES)}"
        raise UsageError(message("dtype", allowed=allowed, got=repr(name), do="choose one of them"))
    return DTYPES[name]


def cache_dtype(what: str, name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of stored K/V: `auto` is the activations', uint8 stands for E4M3."""
    if name == "auto":
        return dtype
    if name in E4M3_NAMES:
        return torch.uint8
    if name not in DTYPES:
        allowed = f"auto, {', '.join((*DTYPES, *E4M3_NAMES))}"
        raise UsageError(message(what, allowed=allowed, got=repr(name), do="choose one of them"))
    return DTYPES[name]


def num_drafts(config: Mapping[str, Any] | None, *, has_draft: bool) -> int:
    """K of a speculative_config such as {"method": "mtp", "num_speculative_tokens": 3}; None is 0.

    Raises `UsageError` for another method or an unknown key, `RequestError` for a k that cannot be.
    """
    if config is None:
        return 0
    if not isinstance(config, Mapping):
        do = 'pass {"method": "mtp", "num_speculative_tokens": k}'
        raise UsageError(message("speculative_config", allowed="a mapping or None", got=repr(config), do=do))
    known = ("method", "num_speculative_tokens")
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            do = f"did you mean {near[0]}?" if near else "leave it out"
            raise UsageError(message("speculative_config", allowed=" and ".join(known), got=repr(key), do=do))
    method = config.get("method", "mtp")
    if method != "mtp":
        do = "page4 drafts with the checkpoint's own MTP head"
        raise UsageError(message("speculative_config method", allowed="mtp", got=repr(method), do=do))
    drafts = config.get("num_speculative_tokens")
    if isinstance(drafts, bool) or not isinstance(drafts, int):
        do = "say how many tokens to draft"
        raise UsageError(message("num_speculative_tokens", allowed="an integer", got=repr(drafts), do=do))
    check_drafts(drafts, has_draft=has_draft)
    return drafts


def check_count(what: str, value: object, least: int = 1) -> None:
    """Raise `UsageError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        do = f"set {what} within this range"
        raise UsageError(message(what, allowed=f"an integer of {least} or more", got=repr(value), do=do))


def device_of(name: str) -> torch.device:
    """The device called `name`. Raises `UsageError` when torch knows none of that name."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        do = "choose one of them"
        raise UsageError(message("device", allowed="cpu or cuda", got=repr(name), do=do)) from error


def set_threads() -> None:
    """Give torch the threads that PAGE4_THREADS allows."""
    threads = env.get("THREADS")
    if threads is not None:
        torch.set_num_threads(threads)
