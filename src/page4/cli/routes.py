"""Which route of attend serves which step on which shape, and why not the others, for `page4 doctor`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from page4 import env
from page4.attend import choose_route
from page4.kernels import ROUTES, compiled_refusal, supports

# Rows of each request in a step.
STEPS: dict[str, tuple[int, ...]] = {
    "decode, 1 request": (1,),
    "decode, 16 requests": (1,) * 16,
    "verify, 1 x 4 rows": (4,),
    "verify, 16 x 4 rows": (4,) * 16,
    "prefill, 2048 rows": (2048,),
}
# As people name them, and as the elements are stored.
KV_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8_e4m3": "uint8"}
DEVICES = ("cpu", "cuda")
# What the compiled CPU kernels read.
COMPILED_KV = ("float32", "uint8")


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads and head dim of one rank."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} x {self.head_dim}"


# The production model at TP1, TP2, TP4 (also the embedded checkpoint) and TP8.
SHAPES = (Shape(24, 2, 256), Shape(12, 1, 256), Shape(6, 1, 256), Shape(3, 1, 256))


def table() -> list[dict[str, Any]]:
    """One entry for each answer on each device: the step, the route that serves it (None: no route does), why, why
    not each of the others, and all shapes and K/V types that this answer holds for.
    """
    entries: list[dict[str, Any]] = []
    for device, step, shape, kv_dtype in itertools.product(DEVICES, STEPS, SHAPES, KV_DTYPES):
        found = {"device": device, "step": step, **answer(device, STEPS[step], shape, KV_DTYPES[kv_dtype])}
        same = next((entry for entry in entries if all(entry[key] == value for key, value in found.items())), None)
        if same is None:
            same = {**found, "shapes": [], "kv_dtypes": []}
            entries.append(same)
        for key, value in (("shapes", str(shape)), ("kv_dtypes", kv_dtype)):
            if value not in same[key]:
                same[key].append(value)
    return entries


def answer(device: str, rows: tuple[int, ...], shape: Shape, stored: str) -> dict[str, Any]:
    """The route of one step, and the reason against each of the others."""
    heads_per_kv = shape.heads // shape.kv_heads
    refusals = {
        route: supports("attend", route, device=device, kv_dtype=stored, heads_per_kv=heads_per_kv)
        for route in ROUTES["attend"]
    }
    if all(refusals.values()):
        return {"route": None, "why": "no route serves it", "others": refusals}
    if device == "cuda":
        return {"route": "generic", "why": "the route with a GPU kernel in this version", "others": dropped(refusals)}
    # As for float32 queries; the other types run on torch.
    compiled = stored in COMPILED_KV and compiled_refusal() is None
    route, why = choose_route(rows, grouped_allowed=env.get("GROUPED"), heads_per_kv=heads_per_kv, compiled=compiled)
    slower = (
        {
            "xqa": "lays out a table of each row's blocks, which the compiled kernel does without",
            "grouped": "joins the blocks of neighbouring rows, which a core's cache does as well",
        }
        if compiled
        else {
            "generic": "splits one row over many processors, which a CPU step has no use for",
            "xqa": "would gather the blocks that neighbouring rows share once for each row",
            "grouped": why,
        }
    )
    others = {name: refusal or slower[name] for name, refusal in refusals.items() if name != route}
    return {"route": route, "why": why, "others": others}


def dropped(refusals: dict[str, str | None]) -> dict[str, str]:
    """The refusals of those that refuse."""
    return {name: refusal for name, refusal in refusals.items() if refusal is not None}
