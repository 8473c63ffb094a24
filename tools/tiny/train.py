"""Train the embedded checkpoint for a given time, evaluate it and write its weights.

Losses: next token; the three draft iterations (half text, half the target's distribution); KL of each indexer from the
dense attention it must reproduce; router balance. Selection is active from the start but for a short dense warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import random_windows, read_tokens
from draft import TinyLM, initialise
from evaluate import evaluate
from export import state_from_checkpoint
from optimise import Optimiser
from safetensors.torch import load_file, save_file
from shape import CONFIG
from torch import Tensor

from model import QSA, QsaLayer

START = time.time()
DRAFT_WEIGHTS = (1.0, 0.8, 0.6)


def token_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of `hidden @ weight.T` and the logits."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten()), logits


def draft_loss(hidden: Tensor, weight: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    """Half cross entropy with the text, half with the target's distribution."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    hard = F.nll_loss(logp.flatten(0, 1), target.flatten())
    soft = -(torch.softmax(teacher.float(), -1) * logp).sum(-1).mean()
    return 0.5 * (hard + soft)


def compile_parts(model: TinyLM) -> None:
    """Compile each kind of layer once; layers of one kind share the code."""
    global token_loss, draft_loss
    torch._dynamo.config.cache_size_limit = 32
    torch._dynamo.config.suppress_errors = True  # a layer that does not compile runs as it is
    for layer in [*model.model.layers, *model.mtp.layers]:
        if isinstance(layer, QsaLayer):
            layer.again = torch.compile(layer.again, dynamic=False)  # type: ignore[method-assign]  # the compiled form
        elif layer.ple is not None:
            layer.ple.compile(dynamic=False)
        layer.compile(dynamic=False)
    token_loss = torch.compile(token_loss, dynamic=False)
    draft_loss = torch.compile(draft_loss, dynamic=False)


def step_losses(
    model: TinyLM, batch: Tensor, length: int, open_: Tensor, args: argparse.Namespace
) -> dict[str, Tensor]:
    """All losses of `batch: [B, length + 4]`, and their weighted sum as "total"."""
    out = model.target(batch[:, :length], learn=True, open_=open_)
    weight = model.lm_head.weight
    loss, logits = token_loss(out.hidden, weight, batch[:, 1 : length + 1])
    streams = out.streams * args.draft_gradient + out.streams.detach() * (1 - args.draft_gradient)
    hidden, balance, index = model.drafts(streams, batch[:, : length + 3], 3, QSA, learn=True, open_=open_)
    rows, drafts = length - 3, []
    for j, h in enumerate(hidden, 1):
        teacher = logits[:, j : rows + j].detach()
        drafts.append(draft_loss(h[:, :rows], weight, batch[:, j + 1 : rows + j + 1], teacher))
    draft = sum(w * d for w, d in zip(DRAFT_WEIGHTS, drafts, strict=True)) / sum(DRAFT_WEIGHTS)
    total = loss + args.draft_weight * draft + args.balance * (out.balance + balance) + out.index + index
    return {
        "total": total,
        "loss": loss.detach(),
        "draft1": drafts[0].detach(),
        "draft3": drafts[2].detach(),
        "index": ((out.index + index) / 3).detach(),
        "balance": (out.balance / 8).detach(),
    }


def save_weights(model: TinyLM, folder: Path, stem: str) -> None:
    """bf16 weights in two files under 16 MiB each."""
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    parts: list[dict[str, Tensor]] = [{}, {}]
    for name, value in sorted(state.items(), key=lambda item: -item[1].numel()):
        smaller = min(parts, key=lambda part: sum(t.numel() for t in part.values()))
        smaller[name] = value
    for i, part in enumerate(parts):
        save_file(part, folder / f"{stem}-{i}.safetensors")


def rate_factor(args: argparse.Namespace, step: int) -> float:
    """Warm-up by steps, constant, then linear to 0 over the last `--cool` seconds before `--seconds`."""
    warm = min(1.0, (step + 1) / args.warm)
    left = (args.seconds - (time.time() - START)) / args.cool if args.cool else 1.0
    return warm * args.rate * max(0.0, min(1.0, left))


def train(model: TinyLM, optimiser: Optimiser, tokens: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run until the time is over; returns the log."""
    device = tokens.device
    generator = torch.Generator(device=device).manual_seed(args.seed)
    log, saved, began, last = [], False, 0.0, (time.time(), 0)
    step = 0
    while time.time() - START < args.seconds and step < args.max_steps:
        cooling = args.cool and time.time() - START > args.seconds - args.cool
        if cooling and not saved:
            save_state(model, optimiser, args)
            saved = True
        batch = random_windows(tokens, args.batch, args.length + 4, generator)
        open_ = torch.tensor(step < args.dense_steps, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            losses = step_losses(model, batch, args.length, open_, args)
        losses["total"].backward()
        factor = rate_factor(args, step)
        optimiser.step(factor)
        step += 1
        if step == 1 or step % args.log_every == 0:
            row = {k: round(v.item(), 4) for k, v in losses.items()}
            now = time.time()
            rate = (step - last[1]) * args.batch * args.length / (now - last[0])
            began, last = began or now, (now, step)
            row |= {
                "step": step,
                "seconds": round(now - START, 1),
                "rate": round(factor, 4),
                "tokens_per_s": round(rate),
            }
            log.append(row)
            print(json.dumps(row), flush=True)
    if not saved:
        save_state(model, optimiser, args)
    return log


def save_state(model: TinyLM, optimiser: Optimiser, args: argparse.Namespace) -> None:
    """Everything needed to go on at full rate: on this machine's disk, and as bf16 weights in the output folder."""
    if args.state:
        torch.save({"model": model.state_dict(), "optimiser": optimiser.state()}, args.state)
    if args.keep:
        save_weights(model, args.out, "before")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="full training state, read when it exists, and written")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="weights to start from without a state")
    parser.add_argument("--keep", action="store_true", help="also write the weights from before the cool-down")
    parser.add_argument("--seconds", type=float, default=300, help="stop training this long after the start")
    parser.add_argument("--cool", type=float, default=0, help="seconds of cool-down before that")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--dense-steps", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--draft-weight", type=float, default=0.6)
    parser.add_argument("--draft-gradient", type=float, default=0.25)
    parser.add_argument("--balance", type=float, default=0.003)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--windows", type=int, default=96)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    train_tokens, held = read_tokens(args.tokens)
    model = TinyLM(CONFIG)
    initialise(model, args.seed)
    model.to(device)
    optimiser = Optimiser(model, muon_rate=0.015, adam_rate=2e-3, table_rate=4e-3, decay=0.05)
    if args.state and args.state.exists():
        state = torch.load(args.state, map_location=device)
        model.load_state_dict(state["model"])
        optimiser.load(state["optimiser"])
        print("resumed the full state")
    elif args.weights:
        weights: dict[str, Tensor] = {}
        for path in args.weights:
            weights |= load_file(path)
        public = any(".experts.0." in name for name in weights)
        model.load_state_dict(state_from_checkpoint(weights) if public else {k: v.float() for k, v in weights.items()})
        print("resumed weights")
    print(
        f"loaded after {time.time() - START:.1f} s; {sum(p.numel() for p in model.parameters())} parameters", flush=True
    )
    if not args.no_compile:
        compile_parts(model)
    log = train(model.train(), optimiser, train_tokens.to(device), args)
    save_weights(model, args.out, "final")
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    print(f"trained after {time.time() - START:.1f} s, peak {peak:.1f} GiB", flush=True)
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    record |= {"arguments": {k: str(v) for k, v in vars(args).items()}, "log": log, "peak_gib": peak}
    (args.out / "log.json").write_text(json.dumps(record, indent=1) + "\n")
    if args.windows:
        torch.set_float32_matmul_precision("highest")
        plain = TinyLM(CONFIG).to(device)
        plain.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()})
        record["figures"] = evaluate(plain, held, device, count=args.windows, prompts=args.prompts)
        (args.out / "log.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps({k: v for k, v in record["figures"].items() if k != "samples"}), flush=True)
    print(f"done after {time.time() - START:.1f} s", flush=True)


if __name__ == "__main__":
    main()
