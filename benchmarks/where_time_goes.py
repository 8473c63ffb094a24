"""Where the time of a prefill and of a decode goes: torch's profiler over one call of each.

python benchmarks/where_time_goes.py                 operators by their own time
python benchmarks/where_time_goes.py --python        Python functions by their own time (cProfile)
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial

import prompts
import torch
from lane import Lane

import page4


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=14, help="lines of each table")
    parser.add_argument("--python", action="store_true", help="Python functions instead of operators")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = page4.embedded_checkpoint()
    ids = prompts.tokens(folder)
    batch = prompts.windows(ids, 256, 8)
    for k in (0, 3):
        lane = Lane(folder, options.dtype, k, max_model_len=2304)
        cases: dict[str, Callable[[], object]] = {
            "prefill of 2048 tokens": partial(lane.generate, prompts.window(ids, 2048), 1),
            "decode of 128 tokens after 64": partial(lane.generate, ids[:64], 128),
            "8 requests of 256 + 64 tokens": partial(lane.generate_all, batch, 64),
        }
        for name, action in cases.items():
            action()
            start = time.perf_counter()
            action()
            print(f"\n== k = {k}: {name}: {time.perf_counter() - start:.3f} s without the profiler")
            (python_functions if options.python else operators)(action, options.rows)


def operators(action: Callable[[], object], rows: int) -> None:
    """Operators by self time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{'operator':40} {'calls':>8} {'self ms':>10} {'share':>7}   of {total / 1000:.0f} ms")
    for event in events[:rows]:
        spent = event.self_cpu_time_total
        print(f"{event.key[:40]:40} {event.count:8} {spent / 1000:10.1f} {spent / total:7.1%}")


def python_functions(action: Callable[[], object], rows: int) -> None:
    """Python functions by self time."""
    with cProfile.Profile() as profile:
        action()
    pstats.Stats(profile).sort_stats("tottime").print_stats(rows)


if __name__ == "__main__":
    main()
