"""Files that ship inside the package."""

from __future__ import annotations

from pathlib import Path


def embedded_checkpoint() -> Path:
    """Folder of the small trained qwen4_exp checkpoint in this package."""
    return Path(__file__).resolve().parent / "tiny"


def calibration_samples() -> Path:
    """JSONL samples that calibrate the embedded checkpoint."""
    return Path(__file__).resolve().parent / "calibration.jsonl"


def held_out_text() -> Path:
    """A text that was written for measurements: a library module with its documentation, in no training corpus."""
    return Path(__file__).resolve().parent / "shelf.py.txt"
