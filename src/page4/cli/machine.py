"""Facts about this machine and installation, for `page4 doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from page4 import env, kernels
from page4.errors import Page4Error

PACKAGES = ("page4", "torch", "numpy", "tokenizers", "jinja2", "transformers", "huggingface_hub", "triton", "vllm")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
# Variables of others that change what page4 does; a token is never shown.
FOREIGN = {
    "HF_HOME": "where huggingface_hub keeps its cache",
    "HF_HUB_OFFLINE": "1: no network for models",
    "HF_TOKEN": "token for private models",
    "NO_COLOR": "no colour in any output",
    "OMP_NUM_THREADS": "CPU threads of torch, unless PAGE4_THREADS is set",
}
SECRET = {"HF_TOKEN"}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None where one is not installed."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}


def package_version(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """The CPU, then every CUDA device that torch sees."""
    import torch

    cpu = {
        "name": "cpu",
        "model": cpu_model(),
        "cpus": usable_cpus(),
        "torch_threads": env.get("THREADS") or torch.get_num_threads(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "features": cpu_features(),
        "memory_bytes": memory_bytes(),
    }
    found = [cpu]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        capability = f"sm_{facts.major}{facts.minor}"
        found.append(
            {"name": f"cuda:{index}", "model": facts.name, "capability": capability, "memory_bytes": facts.total_memory}
        )
    return found


def cpu_facts() -> dict[str, str]:
    """The last processor's entry in /proc/cpuinfo; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def cpu_model() -> str:
    """The processor's name."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets that matter to matrix products."""
    facts = cpu_facts()
    present = set((facts.get("flags") or facts.get("Features") or "").split())
    return [flag for flag in CPU_FLAGS if flag in present]


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def environment() -> list[dict[str, Any]]:
    """Every variable that page4 reads, its value now, and where the value is from."""
    rows: list[dict[str, Any]] = []
    for variable in env.VARIABLES:
        source = next((name for name in (variable.name, *variable.aliases) if name in os.environ), "default")
        value = os.environ.get(source, variable.default)
        rows.append({"name": variable.name, "value": value, "source": source, "help": variable.help})
    for name, meaning in FOREIGN.items():
        given = os.environ.get(name)
        shown = "(hidden)" if given and name in SECRET else given
        rows.append({"name": name, "value": shown, "source": "not set" if given is None else name, "help": meaning})
    return rows


def embedded_checkpoint() -> dict[str, Any]:
    """Whether the checkpoint in the package can be read, and its shape."""
    from page4.checkpoint import Checkpoint
    from page4.cli.models import embedded
    from page4.geometry import Geometry

    try:
        folder = embedded()
        checkpoint, geometry = Checkpoint.open(folder), Geometry.from_folder(folder)
    except (Page4Error, OSError) as error:
        return {"readable": False, "reason": str(error)}
    return {
        "readable": True,
        "tensors": len(list(checkpoint.names())),
        "layers": geometry.num_layers,
        "qsa_layers": len(geometry.qsa_layers),
        "draft_layers": geometry.mtp_layers or 0,
        "budget_tokens": geometry.index.budget_tokens,
    }


def features_off() -> dict[str, str]:
    """Features that do not run here, and why."""
    import torch

    off = {
        "vLLM plugin": "not in this version",
        "HTTP server": "not in this version",
        "prefix cache": "not in this version",
    }
    if torch.cuda.is_available():
        off["CUDA devices"] = "used with --device cuda, not by default"
    gpu = kernels.gpu_refusal()
    if gpu is not None:
        off["GPU kernels"] = gpu
    if importlib.util.find_spec("huggingface_hub") is None:
        off["models by hub name"] = "huggingface_hub is not installed (pip install 'page4[hub]')"
    compiled = kernels.compiled_refusal()
    if compiled is not None:
        off["compiled CPU kernels"] = compiled
    if not env.get("GROUPED"):
        off["grouped route"] = "PAGE4_GROUPED=0"
    if not env.get("PLAN_REPOINT"):
        off["planner's padding defence"] = "PAGE4_PLAN_REPOINT=0"
    return off
