"""Tensor names with every prefix in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from page4.checkpoint import classify
from page4.checkpoint.hashes import sha256_of_bytes, sha256_of_file


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model.", "language_model."])
def test_prefixes_are_stripped(prefix: str) -> None:
    assert classify(f"{prefix}layers.3.mlp.gate.weight") == ("target", "layers.3.mlp.gate.weight")
    assert classify(f"{prefix}lm_head.weight") == ("target", "lm_head.weight")
    assert classify(f"{prefix}mtp.layers.0.mlp.gate.weight") == ("draft", "mtp.layers.0.mlp.gate.weight")
    assert classify(f"{prefix}layers.3.self_attn.k_scale") == ("scale", "layers.3.self_attn.k_scale")
    assert classify(f"{prefix}mtp.layers.0.self_attn.attn.v_scale").kind == "scale"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("visual.merger.norm.weight", "vision"),
        ("model.vision_tower.patch_embed.weight", "vision"),
        ("model.layers.0.visual.weight", "target"),
        ("model.layers.3.self_attn.k_proj.k_scale", "scale"),
        ("model.layers.3.self_attn.q_scale", "scale"),
        ("model.layers.3.self_attn.k_proj.output_scale", "scale"),
        ("model.layers.1.linear_attn.k_scale", "scale"),
        ("model.layers.3.self_attn.k_proj.weight_scale", "target"),
        ("model.mtp_norm.weight", "target"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert classify(name).kind == kind


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of_file(tmp_path / "x") == sha256_of_bytes(b"abc") == known
