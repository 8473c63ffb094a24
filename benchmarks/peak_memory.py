"""Peak memory of page4 alone: 8 prompts together in a fresh process. Arguments: FOLDER DTYPE PROMPT_TOKENS THREADS.

Prints one JSON object. `ratio` sets what the run added to an interpreter with torch imported against weights + arena;
`ratio_whole_process` leaves the imports in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import prompts
import torch
from lane import Lane

import page4
from page4.cli.memory import peak_memory_bytes

REQUESTS = 8
NEW_TOKENS = 16


def main() -> None:
    """Run and print."""
    folder, dtype, length, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    batch = prompts.windows(prompts.tokens(folder), length, REQUESTS)
    # Code counts as imports, not as the run's: the engine's modules, and the libraries that a first product loads.
    assert page4.LLM is not None
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    imports = peak_memory_bytes()
    lane = Lane(folder, dtype, 3, max_model_len=length + NEW_TOKENS, max_num_seqs=REQUESTS)
    loaded = peak_memory_bytes()
    lane.generate_all(batch, NEW_TOKENS)
    peak = peak_memory_bytes()
    weights, arena = lane.llm.weight_bytes, lane.llm.arena_bytes
    print(
        json.dumps(
            {
                "requests": REQUESTS,
                "prompt_tokens": length,
                "weights_bytes": weights,
                "arena_bytes": arena,
                "peak_bytes": peak,
                "peak_after_imports_bytes": imports,
                "peak_after_loading_bytes": loaded,
                "peak_above_imports_bytes": peak - imports,
                "ratio": round((peak - imports) / (weights + arena), 3),
                "ratio_whole_process": round(peak / (weights + arena), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
