"""Which route of attend serves which step on which shape, and why not the others, for `page4 doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from page4 import env
from page4.attend import choose_route

# Rows of each request in a step.
STEPS: dict[str, tuple[int, ...]] = {
    "decode, 1 request": (1,),
    "decode, 16 requests": (1,) * 16,
    "verify, 1 x 4 rows": (4,),
    "verify, 16 x 4 rows": (4,) * 16,
    "prefill, 2048 rows": (2048,),
}
KV_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3")


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
    """One entry for each kind of step: the route, why, and why not each of the others."""
    entries = []
    for step, rows in STEPS.items():
        route, why = choose_route(rows, grouped_allowed=env.get("GROUPED"))
        entries.append(
            {
                "device": "cpu",
                "shapes": [str(shape) for shape in SHAPES],
                "kv_dtypes": list(KV_DTYPES),
                "step": step,
                "route": route,
                "why": why,
                "others": others(route, why),
            }
        )
    return entries


def others(route: str, why: str) -> dict[str, str]:
    """Why each route that was not chosen was not: on a CPU every route can serve every step."""
    reasons = {
        "generic": "splits one row over many processors, which a CPU step has no use for",
        "xqa": "would gather the blocks that neighbouring rows share once for each row",
        "grouped": why,
    }
    return {name: reason for name, reason in reasons.items() if name != route}
