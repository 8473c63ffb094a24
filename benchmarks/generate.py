"""Speed and memory of `LLM.generate` against transformers' `generate`, on one checkpoint in one run.

    python benchmarks/generate.py --against transformers --json
    python benchmarks/generate.py --against transformers --dtype bfloat16 --save cpu-bf16

Four measurements, each after a warm-up call, the sides in turn, medians of `--repeats` rounds:

* prefill: 2,048 tokens. transformers: one forward that fills its cache; page4: a whole request with one new token.
* decode: greedy, one request. Time of N + 1 new tokens less the time of 1, so the prompt drops out on both sides.
* together: 8 requests from prompt to last token. transformers runs them one after another.
* memory: peak of a process of its own that runs 8 prompts of 2,048 tokens, against weights + arena.

The tokens of every side are compared; a ratio above 1 means that page4 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import report
from hardware import describe

RESULTS = Path(__file__).parent / "results"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=["transformers", "nothing"], default="transformers", help="the peer")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the one inside the package)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="shorter prompts and outputs, 1 repeat: only to try the script"
    )
    parser.add_argument("--only", choices=["prefill", "decode", "together", "memory"], action="append")
    parser.add_argument("--json", action="store_true", help="print the JSON object instead of a table")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, save; exit code 1 when tokens differ in float32."""
    options = parse(argv)
    # Before torch starts: its pools read these once.
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    os.environ.setdefault("MKL_NUM_THREADS", str(options.threads))
    os.environ["PAGE4_THREADS"] = str(options.threads)
    import torch
    from measure import Sizes, measure

    import page4

    torch.set_num_threads(options.threads)
    folder = options.model or page4.embedded_checkpoint()
    sizes = Sizes.quick() if options.quick else Sizes(repeats=options.repeats)
    result: dict[str, Any] = {
        **describe(options.threads),
        "model": folder.name,
        "dtype": options.dtype,
        "sizes": vars(sizes),
        **measure(folder, options.dtype, sizes, options.threads, options.against, options.only),
    }
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.save}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2) if options.json else report.table(result))
    return 1 if options.dtype == "float32" and not all(report.equalities(result)) else 0


if __name__ == "__main__":
    sys.exit(main())
