"""Kernels: pointers and tensors only. The operations own validation, choice and allocation; this is the registry.

              on a CPU                          on a GPU
    select    cpu (select.c), torch_select      triton_select (scores), cuda_select (the best blocks)
    plan      torch_planner                     torch_planner
    attend    cpu (attend.c), torch_attend      triton_attend (generic), sm70 on Volta
    writers   cpu (qsa.c), the torch code of `cache`                            triton_cache
    layers    cpu (hyper.c, gdn.c, moe.c), the torch code of `model`            the torch code of `model`

The compiled CPU kernels serve float32 where a C compiler is installed; `gpu` chooses on a GPU. PAGE4_KERNELS=torch
leaves both out, PAGE4_KERNELS=reference runs every operation on `reference`, its readable truth. Nothing here imports
torch.
"""

from __future__ import annotations

import importlib.util

from page4 import env
from page4.kernels import cpu_build
from page4.kernels.plans import MAX_HEADS_PER_KV

ROUTES: dict[str, tuple[str, ...]] = {
    "select": ("blocks",),
    "plan": ("xqa", "grouped"),
    "attend": ("generic", "xqa", "grouped"),
}
DTYPES = ("float32", "float16", "bfloat16")
# uint8 is what E4M3 elements are stored as.
KV_DTYPES = (*DTYPES, "uint8")
DEVICES = ("cpu", "cuda")
# Routes of attend that have a kernel on a GPU.
GPU_ROUTES = ("generic",)
_KERNELS = {"select": "torch_select", "plan": "torch_planner", "attend": "torch_attend"}
_COMPILED = {("select", "blocks"): "cpu/select.c", ("attend", "generic"): "cpu/attend.c"}
_GPU = {
    "select": "triton_select with cuda/select.cu, or alone without cuda-core",
    "plan": "torch_planner",
    "attend": "triton_attend, cuda/sm70_attend.cu on compute capability 7.0 and 7.2",
}


def reference_wanted() -> bool:
    """Whether PAGE4_KERNELS asks for the truth."""
    return env.get("KERNELS") == "reference"


def compiled_refusal() -> str | None:
    """None when the compiled CPU kernels are on, else why they are off; builds them when they are not there yet."""
    wanted = env.get("KERNELS")
    return f"PAGE4_KERNELS is {wanted}" if wanted != "auto" else cpu_build.built()[1]


def gpu_refusal() -> str | None:
    """None when GPU kernels are on and can be compiled here, else why torch runs on a GPU too."""
    wanted = env.get("KERNELS")
    if wanted not in ("auto", "triton"):
        return f"PAGE4_KERNELS is {wanted}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed (pip install 'page4[gpu]')"


def supports(
    op: str,
    route: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_dtype: str = "float32",
    heads_per_kv: int = 1,
    page_tokens: int = 16,
) -> str | None:
    """None when a kernel of this version serves these operands, else the reason why not, for people.

    op, route: keys and values of `ROUTES`; dtype: of q; kv_dtype: of the stored elements, uint8 for E4M3.
    """
    if op not in ROUTES:
        return f"no operation is called {op}: there are {', '.join(ROUTES)}"
    if route not in ROUTES[op]:
        return f"{op} has no route {route}: it has {', '.join(ROUTES[op])}"
    if device not in DEVICES:
        return f"no kernel for {device} in this version, only for {', '.join(DEVICES)}"
    if dtype not in DTYPES:
        return f"queries of {dtype} are not computed, only {', '.join(DTYPES)}"
    if kv_dtype not in KV_DTYPES:
        return f"K/V of {kv_dtype} are not stored, only {', '.join(KV_DTYPES)}"
    if page_tokens < 4 or page_tokens % 4:
        return f"a page of {page_tokens} tokens is not a whole number of 4-token blocks"
    if heads_per_kv < 1:
        return "query heads are not a multiple of KV heads"
    if device == "cuda" and op == "attend":
        if route not in GPU_ROUTES:
            return f"no GPU kernel of this route in this version, only of {', '.join(GPU_ROUTES)}"
        if (reason := gpu_refusal()) is not None:
            return reason
    if route == "grouped" and heads_per_kv > MAX_HEADS_PER_KV:
        return f"{heads_per_kv} query heads a KV head are more than the {MAX_HEADS_PER_KV} that 31 tiles hold"
    return None


def table() -> list[dict[str, str]]:
    """Which kernel runs each route of each operation now: {op, route, kernel, device}, for `page4 doctor`."""
    return [
        {"op": op, "route": route, "kernel": _kernel(op, route, device), "device": device}
        for device in DEVICES
        for op, routes in ROUTES.items()
        for route in routes
        if device == "cpu" or op != "attend" or route in GPU_ROUTES
    ]


def _kernel(op: str, route: str, device: str) -> str:
    if reference_wanted():
        return "reference"
    if device == "cuda":
        return _GPU[op] if gpu_refusal() is None else _KERNELS[op]
    compiled = _COMPILED.get((op, route))
    if compiled is None or compiled_refusal() is not None:
        return _KERNELS[op]
    return f"{compiled} for float32, {_KERNELS[op]} otherwise"
