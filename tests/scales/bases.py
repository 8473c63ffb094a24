"""Small base checkpoints, packs and reports, written by hand: nothing here uses the package under test."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.checkpoint.files import good_file, write_index

INDEX = "model.safetensors.index.json"
PROVENANCE = "kvscales-provenance.json"
MANIFEST = "kvscales-manifest.json"
TARGET = "model-kvscales.safetensors"
DRAFT = "model-kvscales-mtp.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIDE_FILES = {
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b'{"size": 1}',
    "foo_config.json": b'{"foo": [1, 2]}',
    "assets/a.txt": b"a text",
}
TINY: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "architectures": ["Qwen4ExpForCausalLM"], "vocab_size": 64, "hidden_size": 8,
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4, "num_experts": 2, "num_experts_per_tok": 1,
    "hc_count": 2, "hc_lowrank": 2, "indexer_n_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_kv_heads": 1, "indexer_compress_ratio": 4, "mtp_num_hidden_layers": 1, "eos_token_id": 1,
}  # fmt: skip


def deep(layers: int) -> dict[str, Any]:
    """TINY with `layers` layers, one in four of them QSA."""
    types = ["indexed_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)]
    return {**TINY, "num_hidden_layers": layers, "layer_types": types}


def qsa_layers(config: Mapping[str, Any]) -> list[int]:
    return [i for i, kind in enumerate(config["layer_types"]) if kind == "indexed_attention"]


def base_tensors(config: Mapping[str, Any], seed: int, prefix: str = "model.", size: int = 300) -> dict[str, bytes]:
    rng = random.Random(seed)
    names = [f"{prefix}layers.{i}.mlp.weight" for i in range(config["num_hidden_layers"])]
    names += ["lm_head.weight", "mtp.fc_hidden.weight", "mtp.layers.0.mlp.weight", f"{prefix}embed_tokens.weight"]
    return {name: rng.randbytes(size) for name in names}


def make_base(
    folder: Path,
    *,
    seed: int = 0,
    config: Mapping[str, Any] = TINY,
    prefix: str = "model.",
    shards: int = 2,
    size: int = 300,
    drafted: bool = True,
) -> Path:
    """A base with side files; `shards` 0 is a single file without an index."""
    folder.mkdir(parents=True)
    tensors = base_tensors(config, seed, prefix, size)
    tensors = {name: value for name, value in tensors.items() if drafted or not name.startswith("mtp.")}
    if shards == 0:
        (folder / "model.safetensors").write_bytes(good_file(tensors))
    else:
        weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
        for shard in set(weight_map.values()):
            held = {name: value for name, value in tensors.items() if weight_map[name] == shard}
            (folder / shard).write_bytes(good_file(held))
        write_index(folder, weight_map, sum(map(len, tensors.values())))
    (folder / "config.json").write_text(json.dumps(config))
    for name, data in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ceil_to_fp32(value: Fraction) -> float:
    """The smallest fp32 number that is not below `value`, from its bits."""
    bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
    while Fraction(from_bits(bits)) >= value:
        bits -= 1
    return from_bits(bits + 1)


def from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def scale_of(max_abs: float) -> float:
    return ceil_to_fp32(Fraction(max_abs) / 448)


def scale_file(scales: Mapping[str, float], dtype: str = "F32", shape: tuple[int, ...] = ()) -> bytes:
    header: dict[str, Any] = {}
    for i, name in enumerate(scales):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [4 * i, 4 * i + 4]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(struct.pack("<f", value) for value in scales.values())


def max_abs_of(layer: int, side: str) -> float:
    """A number of its own for each layer and side, none of which divides by 448."""
    return 3.3 + layer + (0.25 if side == "v" else 0.0)


def make_pack(folder: Path, base: Path, config: Mapping[str, Any] = TINY, **changes: Any) -> Path:
    """A pack in the interchange format, with the keys that it must have; `changes` go into its manifest."""
    folder.mkdir(parents=True)
    places = [(layer, side) for layer in qsa_layers(config) for side in "kv"]
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": scale_of(max_abs_of(layer, side)) for layer, side in places
    }
    (folder / "scales.safetensors").write_bytes(scale_file(scales))
    manifest = {
        "schema_version": 1,
        "artifact_id": "by hand",
        "base_checkpoint": {"index_sha256": sha256(base / INDEX) if (base / INDEX).exists() else None},
        "scale_file": {
            "filename": "scales.safetensors",
            "sha256": sha256(folder / "scales.safetensors"),
            "tensor_count": len(scales),
            "tensor_names": list(scales),
        },
        "tensors": [{"layer": i, "kind": side, "max_abs": max_abs_of(i, side), "note": "kept"} for i, side in places],
        "made_by": "another tool",
    }
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    return folder


def make_report(path: Path, config: Mapping[str, Any] = TINY, factor: float = 2.0, **changes: Any) -> Path:
    """A report of all layers; the draft is layer num_hidden_layers."""
    layers = [*qsa_layers(config), config["num_hidden_layers"]]
    tensors = {}
    for layer in layers:
        for side in "kv":
            max_abs = factor * max_abs_of(layer, side)
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = {
                "max_abs": max_abs, "scale": scale_of(max_abs), "token_count": 100, "zeros": 3,
            }  # fmt: skip
    report = {"schema_version": 1, "kind": "page4-calibration-report", "counted_forwards": 4, "tensors": tensors}
    path.write_text(json.dumps({**report, **changes}))
    return path


def edit(path: Path, change: Any) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def forge(path: Path, change: Any) -> None:
    """Change a provenance in place as somebody who knows the format would: with its own hash made right again."""
    value = json.loads(path.read_text())
    change(value)
    value.pop("self_sha256", None)
    content = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**value, "self_sha256": hashlib.sha256(content).hexdigest()}))


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, mtime and content of everything in a folder, and of the folder."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {
        str(p.relative_to(folder)): (p.lstat().st_mode, p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in paths
    }
