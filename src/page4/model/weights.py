"""Loads a checkpoint into the tree of `weight_tree`: every tensor consumed once, ignored by name or refused by name.

The tree is described once, in `_Builder`, and built twice: first on the meta device against the headers, which collects
everything that is missing, unexpected or of the wrong shape before any memory is allocated; then for real.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from page4.checkpoint import Checkpoint, classify
from page4.errors import ConfigError, TensorError, message
from page4.geometry import Geometry
from page4.model._builder import build_draft, build_target
from page4.model._tensor_source import TensorSource
from page4.model.weight_tree import DraftWeights, LoadReport, Weights

if TYPE_CHECKING:
    from page4.model.decoder import Model

__all__ = ["LoadReport", "load_model", "read_weights"]


def load_model(
    folder: Path | str, dtype: torch.dtype, device: torch.device | str = "cpu", *, with_draft: bool = True
) -> Model:
    """Load a checkpoint folder as a `Model`. Raises `ConfigError`, `CheckpointError` before anything is allocated."""
    from page4.model.decoder import Model

    geometry = Geometry.from_folder(folder)
    weights = read_weights(Checkpoint.open(folder), geometry, dtype, device, with_draft=with_draft)
    return Model(weights, geometry, dtype, device)


def read_weights(
    checkpoint: Checkpoint,
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    with_draft: bool = True,
) -> Weights:
    """Read all weights of a model, each once, converted to `dtype` while they are copied.

    Raises `TensorError` that names every missing, unexpected and wrongly shaped tensor.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(message("dtype", allowed="float32, float16 or bfloat16", got=dtype, do="choose one of them"))
    source = TensorSource(checkpoint, dtype, torch.device(device))
    with_draft = with_draft and _has_draft(geometry, source)
    ignored = _ignored(geometry, checkpoint, source, with_draft=with_draft)
    _build(geometry, source.checking(), with_draft=with_draft, ignored=ignored)
    return _build(geometry, source, with_draft=with_draft, ignored=ignored)


def _has_draft(geometry: Geometry, source: TensorSource) -> bool:
    """Whether to load the MTP head: what the config says, else what the file holds."""
    if geometry.mtp_layers is None:
        return any(name.startswith("mtp.") for name in source.names())
    return geometry.mtp_layers > 0


def _ignored(
    geometry: Geometry, checkpoint: Checkpoint, source: TensorSource, *, with_draft: bool
) -> tuple[tuple[str, str], ...]:
    """Tensors that are left alone on purpose, with the reason."""
    ignored = [(name, f"not listed in the index for {shard}") for name, shard in checkpoint.unlisted]
    for name in checkpoint.names():
        kind, canonical = classify(name)
        if kind == "vision":
            ignored.append((name, "vision; page4 runs text only"))
        elif kind == "scale":
            ignored.append((name, "K/V scale; resolved apart from the weights"))
        elif kind == "draft" and not with_draft:
            ignored.append(
                (name, "draft head not asked for" if geometry.mtp_layers != 0 else "the config has no draft")
            )
        elif canonical.endswith("rotary_emb.inv_freq"):
            ignored.append((name, "derived from the config"))
        else:
            continue
        source.skip(canonical)
    return tuple(ignored)


def _build(
    geometry: Geometry, source: TensorSource, *, with_draft: bool, ignored: tuple[tuple[str, str], ...]
) -> Weights:
    target = build_target(geometry, source)
    draft: DraftWeights | None = build_draft(geometry, source) if with_draft else None
    loaded = source.finish()
    if source.problems:
        do = "use the config.json of these weights"
        got = "; ".join(source.problems)
        raise TensorError(message(str(source.folder), allowed="the tensors that config.json describes", got=got, do=do))
    return Weights(target=target, draft=draft, report=LoadReport(loaded=loaded, ignored=ignored))
