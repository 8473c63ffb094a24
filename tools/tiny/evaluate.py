"""The figures of the embedded checkpoint on held-out text.

`python tools/tiny/evaluate.py ASSETS WORK/tokens.bin.xz` measures the exported bf16 weights in fp32 and prints JSON:
loss with QSA, dense attention and the 256 newest tokens; greedy tokens a target step with k drafts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import held_out_windows, read_tokens
from draft import TinyLM
from torch import Tensor

from model import DENSE, QSA, WINDOW, QsaLayer

CONTEXT, PROMPT, NEW, DRAFTS = 2048, 512, 128, 3


@torch.no_grad()
def losses(model: TinyLM, windows: Tensor, batch: int) -> dict[str, float]:
    """Mean loss of each attention mode, on all rows and on the second half of the context."""
    out: dict[str, float] = {}
    for mode in (QSA, DENSE, WINDOW):
        rows = torch.cat([row_losses(model, part, mode) for part in windows.split(batch)])
        out[mode], out[f"{mode}_second_half"] = rows.mean().item(), rows[:, CONTEXT // 2 :].mean().item()
    out["qsa_over_dense"] = out[QSA] / out[DENSE] - 1
    out["window_over_qsa"] = out[WINDOW] / out[QSA] - 1
    return out


def row_losses(model: TinyLM, windows: Tensor, mode: str) -> Tensor:
    logits = model.lm_head(model.target(windows[:, :-1], mode).hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1)


@torch.no_grad()
def greedy(model: TinyLM, prompts: Tensor, new: int) -> Tensor:
    """prompts followed by `new` greedy tokens, by plain recomputation (right padding is never visible)."""
    tokens = F.pad(prompts, (0, new))
    for at in range(prompts.shape[1], prompts.shape[1] + new):
        shown = -(-at // 64) * 64
        hidden = model.target(tokens[:, :shown]).hidden[:, at - 1]
        tokens[:, at] = model.lm_head(hidden).argmax(-1)
    return tokens


@torch.no_grad()
def matches(model: TinyLM, tokens: Tensor) -> Tensor:
    """right: [B, rows, k] bool, whether draft j of the window whose last verified row is i gives `tokens[i + j + 1]`.

    Rows run to `S - k - 1`. Later drafts are compared given right earlier ones, as a greedy verifier does.
    """
    rows = tokens.shape[1] - DRAFTS - 1
    streams = model.target(tokens[:, :rows]).streams
    hidden, *_ = model.drafts(streams, tokens[:, : rows + DRAFTS], DRAFTS)
    return torch.stack(
        [model.lm_head(h).argmax(-1) == tokens[:, j + 1 : rows + j + 1] for j, h in enumerate(hidden, 1)], -1
    )


def tokens_per_step(right: Tensor, first: int, last: int) -> tuple[float, list[float]]:
    """Mean tokens a target step and acceptance of each draft position, stepping through rows first..last."""
    steps, emitted, accepted = 0, 0, [0] * right.shape[-1]
    for sequence in right.cpu().tolist():
        row = first
        while row <= last:
            count = next((j for j, ok in enumerate(sequence[row]) if not ok), len(sequence[row]))
            for j in range(count):
                accepted[j] += 1
            steps, emitted, row = steps + 1, emitted + count + 1, row + count + 1
    return emitted / steps, [a / steps for a in accepted]


def zero_cutoffs(model: TinyLM, windows: Tensor) -> dict[str, float]:
    """Share of pruned rows, a QSA layer, whose last selected block scores 0: there only the tie order decides."""
    shares: dict[str, float] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, QsaLayer):

            def look(inner: Any, args: Any, out: tuple[Tensor, Tensor], name: str = name) -> None:
                scores = out[0]
                k = module_k(model)
                rows = torch.arange(scores.shape[1], device=scores.device)
                hidden = torch.arange(scores.shape[2], device=scores.device)[None] * 4 + 3 > rows[:, None]
                kth = scores.masked_fill(hidden, -1).topk(k, -1).values[:, k * 4 + 4 :, -1]
                shares[name] = (kth <= 0).float().mean().item()

            hooks.append(module.self_attn.indexer.register_forward_hook(look))
    with torch.no_grad():
        model.drafts(model.target(windows[:, :-4]).streams, windows, 1)
    for hook in hooks:
        hook.remove()
    return shares


def module_k(model: TinyLM) -> int:
    return int(model.config["indexer_budget"] // model.config["indexer_compress_ratio"])


def evaluate(
    model: TinyLM, held: Tensor, device: str, *, count: int = 96, prompts: int = 48, batch: int = 8
) -> dict[str, Any]:
    """All figures, in fp32."""
    model.eval()
    windows = held_out_windows(held, count, CONTEXT + 1, 2).to(device)
    figures: dict[str, Any] = {"windows": len(windows), "losses": losses(model, windows, batch)}
    figures["zero_cutoffs"] = zero_cutoffs(model, windows[:4])
    starts = held_out_windows(held, prompts, PROMPT, 1).to(device)
    text = greedy(model, starts, NEW + DRAFTS + 1)
    rate, positions = tokens_per_step(matches(model, text), PROMPT - 1, PROMPT + NEW - 6)
    figures["greedy"] = {"prompts": len(starts), "tokens_per_step": rate, "accepted": positions}
    right = torch.cat([matches(model, part) for part in windows.split(batch)])
    rate, positions = tokens_per_step(right, 256, CONTEXT - 8)
    figures["real_text"] = {"tokens_per_step": rate, "accepted": positions}
    figures["samples"] = [text[i, PROMPT - 32 :].tolist() for i in range(0, len(text), max(1, len(text) // 6))]
    return figures


if __name__ == "__main__":
    from parity import load

    torch.set_num_threads(2)
    _, held_tokens = read_tokens(Path(sys.argv[2]))
    result = evaluate(load(Path(sys.argv[1])), held_tokens, "cpu", batch=2)
    result.pop("samples")
    print(json.dumps(result, indent=1))
