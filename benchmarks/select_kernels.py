"""Select on a GPU: scoring and the exact best blocks, beside vLLM's scoring alone, in one process on the same tensors.

    python benchmarks/select_kernels.py --peers DIR [--json FILE]

bf16 keys, 4 index heads of 128, pages of 16 tokens, 512 blocks a row; CUDA-graph replay, median of 20. Every selection
is checked against fp32 scores before it is timed. `floor us` is the larger of two bounds at the ceilings measured on
one H200 (4.25 TB/s, 790 TFLOP/s): bytes (keys once, scores written and read) and products.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from page4.kernels import cuda_select, triton_select

HEADS, DIM, TOP_K, PAGE = 4, 128, 512, 16
BYTES_PER_US, FLOP_PER_US = 4.25e6, 790e6


@dataclass(frozen=True)
class Case:
    name: str
    requests: int
    rows_each: int
    context: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_each

    @property
    def blocks(self) -> int:
        return self.context // 4

    def floor_us(self) -> float:
        scores = self.rows * self.blocks
        nbytes = self.requests * self.blocks * DIM * 2 + 8 * scores
        return max(nbytes / BYTES_PER_US, 2 * scores * HEADS * DIM / FLOP_PER_US)


CASES = (
    Case("1 row 8k", 1, 1, 8192),
    Case("1 row 128k", 1, 1, 131072),
    Case("16 requests 32k", 16, 1, 32768),
    Case("16 windows of 4, 32k", 16, 4, 32768),
    Case("64 requests 32k", 64, 1, 32768),
    Case("2048 rows 32k", 1, 2048, 32768),
    Case("8192 rows 32k", 1, 8192, 32768),
    Case("2048 rows 128k", 1, 2048, 131072),
)


@dataclass(frozen=True)
class Operands:
    index_q: Tensor
    pooled: Tensor
    table: Tensor
    requests: Tensor
    positions: Tensor


def operands(case: Case) -> Operands:
    pages = case.requests * case.blocks // 4
    return Operands(
        torch.randn(case.rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16),
        torch.randn(pages, 4, DIM, device="cuda", dtype=torch.bfloat16),
        torch.randperm(pages, device="cuda").view(case.requests, -1).int(),
        torch.arange(case.requests, device="cuda").repeat_interleave(case.rows_each),
        torch.full((case.rows,), case.context - 1, device="cuda"),
    )


def graph_us(call: Callable[[], Any], replays: int = 20, calls: int = 1) -> float:
    """Median time of one call in replays of a graph of `calls`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times[3:])[replays // 2]


def check(case: Case, at: Operands, ids: Tensor) -> float:
    """How far below the best block left out the worst block taken is, in fp32 scores, over some rows."""
    worst = 0.0
    for row in {0, case.rows // 2, case.rows - 1}:
        keys = at.pooled[at.table[at.requests[row]].long()].view(-1, DIM)
        scores = (at.index_q[row].float() @ keys.float().T).relu().sum(0) / math.sqrt(DIM)
        taken = torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, ids[row].long(), True)
        assert int(taken.sum()) == TOP_K and bool((ids[row].diff() > 0).all())
        worst = max(worst, float(scores[~taken].max() - scores[taken].min()))
    return worst


def page4_calls(case: Case, at: Operands) -> dict[str, Callable[[], Any]]:
    size = triton_select.workspace_bytes(case.rows, case.blocks)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = triton_select.empty_selection(case.rows, TOP_K, workspace.device)
    places = (at.index_q, at.pooled, at.table, at.requests, at.positions, TOP_K, case.blocks, workspace)
    window = {"window": case.rows_each}

    def without_top() -> None:
        triton_select.select_blocks(*places, **window, out=out, top=lambda *_: None)

    return {
        "select": lambda: cuda_select.select_blocks(*places, **window, out=out),
        "score only": without_top,
        "select, Triton only": lambda: triton_select.select_blocks(*places, **window, out=out),
    }


def vllm_call(vllm: Any, case: Case, at: Operands) -> Callable[[], Any]:
    """Its scoring alone: its top-k cannot run apart from the rest of the package."""
    keys, visible = at.pooled.unsqueeze(2), torch.full((case.rows,), case.blocks, dtype=torch.int32, device="cuda")
    out = torch.empty(case.rows, TOP_K, dtype=torch.int32, device="cuda")
    vllm.indexer._topk = lambda *_, **__: None
    if case.rows_each <= 8:
        some = (at.index_q, keys, at.table, visible, 4 * TOP_K, 4, case.rows_each, out)
        return lambda: vllm.indexer.qsa_select_paged_decode(*some)
    starts = torch.arange(0, case.rows + 1, case.rows_each, device="cuda", dtype=torch.int32)
    rest = (at.index_q, keys, at.table, starts, visible, 4 * TOP_K, 4, case.rows_each, out, case.context)
    return lambda: vllm.indexer.qsa_select_paged_prefill(*rest)


def times(name: str, call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Of a graph of one call; and of four where one is so short that the graph's own launch counts."""
    found = {f"{name} us": round(graph_us(call), 1)}
    return found if calls == 1 else found | {f"{name} us, {calls} a graph": round(graph_us(call, calls=calls), 1)}


def run(vllm: Any = None, cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    """One record a case: microseconds of each implementation, the bound, the error of the check."""
    records = []
    for case in cases:
        torch.manual_seed(0)
        at = operands(case)
        calls = 4 if case.rows <= 64 else 1
        record: dict[str, Any] = {"case": case.name, "rows": case.rows, "blocks": case.blocks}
        for name, call in page4_calls(case, at).items():
            result = call()
            if result is not None:
                record["left_out_above_taken"] = check(case, at, result[0])
            record |= times(name, call, calls)
        if vllm is not None:
            record |= times("vllm score only", vllm_call(vllm, case, at), calls)
        record["floor us"] = round(case.floor_us(), 1)
        records.append(record)
        print(json.dumps(record), flush=True)
        del at
        torch.cuda.empty_cache()
    return records


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with peer_shim.py and vllm/")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vllm = None
    if arguments.peers is not None:
        sys.path.insert(0, str(arguments.peers))
        import peer_shim

        vllm = peer_shim.load_vllm(str(arguments.peers / "vllm"))
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": driver_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/select_kernels.py" + (" --peers DIR" if vllm is not None else ""),
    }
    print(json.dumps(machine), flush=True)
    records = run(vllm)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**machine, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
