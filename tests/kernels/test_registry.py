"""What kernels say they serve."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from page4.kernels import KV_DTYPES, ROUTES, supports, table


def test_every_production_shape_is_served() -> None:
    for op, routes in ROUTES.items():
        for route in routes:
            for kv_dtype in KV_DTYPES:
                for heads_per_kv in (12, 6, 3, 62):
                    assert supports(op, route, kv_dtype=kv_dtype, heads_per_kv=heads_per_kv) is None


@pytest.mark.parametrize(
    "op,route,operands,words",
    [
        ("sample", "xqa", {}, "no operation is called sample"),
        ("attend", "fast", {}, "attend has no route fast: it has generic, xqa, grouped"),
        ("select", "xqa", {}, "select has no route xqa"),
        ("attend", "xqa", {"device": "cuda"}, "no GPU kernel of this route"),
        ("attend", "xqa", {"device": "tpu"}, "no kernel for tpu"),
        ("attend", "xqa", {"dtype": "int8"}, "queries of int8"),
        ("attend", "xqa", {"kv_dtype": "int8"}, "K/V of int8"),
        ("plan", "xqa", {"page_tokens": 18}, "18 tokens is not a whole number of 4-token blocks"),
        ("attend", "xqa", {"heads_per_kv": 0}, "not a multiple of KV heads"),
        ("attend", "grouped", {"heads_per_kv": 63}, "63 query heads a KV head"),
    ],
)
def test_reasons(op: str, route: str, operands: dict[str, object], words: str) -> None:
    reason = supports(op, route, **operands)  # type: ignore[arg-type]  # mixed keyword types of the table above
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_table_names_what_runs(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    entries = table()
    on_cpu = [(e["op"], e["route"]) for e in entries if e["device"] == "cpu"]
    assert on_cpu == [(op, route) for op, routes in ROUTES.items() for route in routes]
    on_gpu = [(e["op"], e["route"]) for e in entries if e["device"] == "cuda"]
    assert on_gpu == [("select", "blocks"), ("plan", "xqa"), ("plan", "grouped"), ("attend", "generic")]
    assert ({e["kernel"] for e in entries} == {"reference"}) == (kernels == "reference")
    json.dumps(entries)


def test_a_gpu_without_triton_runs_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports("attend", "generic", device="cuda", kv_dtype="uint8", heads_per_kv=12) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert supports("attend", "generic", device="cuda") == "Triton is not installed (pip install 'page4[gpu]')"
    assert {e["kernel"] for e in table() if e["device"] == "cuda"} == {"torch_select", "torch_planner", "torch_attend"}
    monkeypatch.setenv("PAGE4_KERNELS", "torch")
    assert supports("attend", "generic", device="cuda") == "PAGE4_KERNELS is torch"


def test_asking_does_not_import_torch() -> None:
    code = "import sys, page4.kernels as k; k.table(), k.supports('attend', 'xqa'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
