"""Small calibrations that the tests of scales share: checkpoints, sample files, runs."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tests.oracle import random_checkpoint

from page4.scales.calibrate import Calibration, CalibrationOptions, Progress, calibrate
from page4.scales.schema import REPORT_NAME

# One QSA layer in four and a draft head; budget 32, so that samples above 35 tokens are pruned.
SMALL: dict[str, Any] = {"vocab_size": 64, "indexer_budget": 32, "max_position_embeddings": 512}
LAYERS = (3, 4)
NAMES = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in LAYERS for side in "kv"]


@functools.cache
def small_checkpoint(*, seed: int = 11, mtp: bool = True) -> Path:
    """A random checkpoint, written once a session."""
    folder = Path(tempfile.mkdtemp(prefix="page4-small-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return random_checkpoint(folder, seed=seed, mtp=mtp, **SMALL)


def spoiled_checkpoint(folder: Path, tensor: str) -> Path:
    """A copy of the small checkpoint with one NaN in one tensor."""
    shutil.copytree(small_checkpoint(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    return folder


def token_samples(count: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of 1 to 90 token ids."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(3, 64) for _ in range(rng.randint(1, 90))]} for _ in range(count)]


def write_lines(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def run(
    out: Path,
    samples: list[dict[str, Any]],
    *,
    model: Path | None = None,
    restart: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Calibration:
    """Calibrate the small checkpoint on samples, four a shard."""
    prompts = write_lines(out.with_name(out.name + ".jsonl"), samples)
    settings = CalibrationOptions(**{"shard_size": 4, **options})
    return calibrate(model or small_checkpoint(), prompts, out, settings, restart=restart, progress=progress)


def report_bytes(out: Path) -> bytes:
    return (out / REPORT_NAME).read_bytes()


def tree(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, mode and modification time of every file of a folder, and of the folder itself."""
    found = {path.name: (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns) for path in folder.iterdir()}
    return {**found, ".": (b"", folder.stat().st_mode, folder.stat().st_mtime_ns)}
