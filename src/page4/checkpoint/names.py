"""Tensor names: one canonical form for the prefixes in use, and the kind that a name belongs to.

Canonical names are `embed_tokens.weight`, `layers.N...`, `hyper_connection_mixer...`, `lm_head.weight` for the target
and `mtp...` for the draft.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["target", "draft", "vision", "scale"]

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_VISION = ("visual.", "vision_tower.", "vision_model.")


class TensorName(NamedTuple):
    """A checkpoint's name split into what it is and its canonical form."""

    kind: Kind
    canonical: str


def classify(name: str) -> TensorName:
    """The kind and the canonical form of a tensor name."""
    canonical = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
    if canonical.startswith(_VISION):
        return TensorName("vision", canonical)
    last = canonical.rpartition(".")[2]
    if (
        last.endswith(("_scale", "_zero_point"))
        and "_attn." in canonical
        and last not in ("weight_scale", "input_scale")
    ):
        return TensorName("scale", canonical)
    return TensorName("draft" if canonical.startswith("mtp.") else "target", canonical)
