"""Write a checkpoint folder with the tensor names that transformers saves, plus `mtp.*`.

`python tools/tiny/export.py ASSETS STATE.safetensors...` exports trained weights (files of one state dict);
`python tools/tiny/export.py ASSETS --random` writes random weights of the same shape.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from draft import TinyLM, initialise
from safetensors.torch import load_file, save_file
from shape import CONFIG, MAX_BYTES, ngram_head_sizes, ngram_multipliers
from torch import Tensor


def checkpoint_tensors(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The state dict in bf16 under public names: single experts, n-gram shards, hash constants."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        tensor = value.detach().to("cpu", torch.bfloat16)
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                stem = name.replace("gate_up_proj", f"{i}.")
                gate, up = both.chunk(2, 0)
                out[f"{stem}gate_proj.weight"], out[f"{stem}up_proj.weight"] = gate.clone(), up.clone()
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.replace('down_proj', str(i))}.down_proj.weight": w.clone() for i, w in enumerate(tensor)}
        elif name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            for i, part in enumerate(tensor.chunk(config["split_ngram_parts"], 0)):
                out[f"{stem}shard_{i}.weight"] = part.clone()
            stem = stem.removesuffix("ngram_embedding.")
            sizes = ngram_head_sizes(config)
            out[f"{stem}layer_multipliers"] = torch.tensor(ngram_multipliers(config))
            out[f"{stem}ngram_heads_vocab_sizes"] = torch.tensor(sizes)
            out[f"{stem}ngram_heads_offsets"] = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
        else:
            out[name] = tensor.contiguous()
    return out


def state_from_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `checkpoint_tensors`, in fp32."""
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    shards: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        shard = re.fullmatch(r"(.*ngram_embedding)\.shard_(\d+)\.weight", name)
        if expert:
            experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = tensor.float()
        elif shard:
            shards.setdefault(shard[1], {})[int(shard[2])] = tensor.float()
        elif tensor.is_floating_point():
            out[name] = tensor.float()
    for stem, parts in experts.items():
        rows = [parts[i] for i in range(len(parts))]
        out[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([r["gate"], r["up"]]) for r in rows])
        out[f"{stem}.down_proj"] = torch.stack([r["down"] for r in rows])
    for stem, pieces in shards.items():
        out[f"{stem}.weight"] = torch.cat([pieces[i] for i in range(len(pieces))])
    return out


def write(state: dict[str, Tensor], assets: Path) -> str:
    """Write config.json and model.safetensors; return the latter's sha256."""
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tensors = checkpoint_tensors(state, CONFIG)
    path = assets / "model.safetensors"
    save_file(dict(sorted(tensors.items())), path, metadata={"format": "pt"})
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"model.safetensors: expected at most {MAX_BYTES} bytes, got {size}; shrink the shape")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    print(f"{path}: {len(tensors)} tensors, {size} bytes, sha256 {digest}")
    return digest


def main(assets: Path, sources: list[str]) -> None:
    model = TinyLM(CONFIG)
    if sources == ["--random"]:
        initialise(model, 0)
        with torch.no_grad():  # a placeholder should not compute zeros
            for p in model.parameters():
                if p.ndim >= 2 and not p.any():
                    p.normal_(0, 0.02)
    else:
        state: dict[str, Tensor] = {}
        for source in sources:
            state |= load_file(source)
        model.load_state_dict({name: value.float() for name, value in state.items()})
    write(model.state_dict(), assets)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
