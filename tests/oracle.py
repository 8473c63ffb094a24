"""The independent oracle of the tests: random transformers checkpoints, and what transformers says about them.

Sums of ReLUs tie at exactly 0 all the time, and transformers leaves such ties to `Tensor.topk`, whose answer is
arbitrary. DESIGN section 3 orders them (lower block id first), so the oracle runs transformers inside `total_order`.

Nothing here imports page4. `random_checkpoint` writes a folder, `oracle_logits` and `oracle_greedy` run transformers on
a folder, `oracle_mtp` and `oracle_drafts` run the multi-token-prediction head (which transformers lacks) from
transformers' own layers, on whole sequences, without a cache.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

TINY: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "output_gate_type": "silu",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hc_count": 2,
    "hc_lowrank": 24,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mtp_num_hidden_layers": 1,
}


class MtpHead(nn.Module):
    """The MTP head of DESIGN section 3, from transformers' modules; parameter names as on disk behind `mtp.`."""

    def __init__(self, config: Qwen4ExpTextConfig) -> None:
        super().__init__()
        hidden, streams = config.hidden_size, config.hidden_size * config.hc_count
        self.hc_count = config.hc_count
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = hf.Qwen4ExpTextRMSNorm(hidden, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = hf.Qwen4ExpTextRMSNorm(streams, eps=config.rms_norm_eps)
        qsa_layer = config.layer_types.index("indexed_attention")
        self.layers = nn.ModuleList([hf.Qwen4ExpTextDecoderLayer(config, qsa_layer)])
        self.hyper_connection_mixer = hf.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.rotary = hf.Qwen4ExpTextRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, streams: Tensor) -> Tensor:
        """embeddings: [T, hidden] of t_{i+1}, streams: [T, hc * hidden] h_i -> streams [T, hc * hidden]."""
        length = embeddings.shape[0]
        e = self.fc_embedding(self.pre_fc_norm_embedding(embeddings))
        g = self.pre_fc_norm_hidden(streams).unflatten(-1, (self.hc_count, -1))
        x = (self.fc_hidden(g) + e.unsqueeze(-2)).flatten(-2)[None]
        positions = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        output: Tensor = self.layers[0](x, self.rotary(x, positions), attention_mask=causal)
        return output[0]


def make_config(**overrides: Any) -> Qwen4ExpTextConfig:
    """TINY with overrides, as transformers' text config."""
    fields = {**TINY, **overrides}
    fields.pop("architectures")
    fields.pop("model_type")
    config = Qwen4ExpTextConfig(**fields)
    config._attn_implementation = "sdpa"
    return config


def _fill(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random values whose spread does not vanish or explode: every tensor, norms and convolutions too, matters."""
    x = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * x
    if "norm" in name:
        return 0.2 * x
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(-1.5, 1.5, generator=generator)
    if name.endswith("dt_bias"):
        return torch.empty(shape).uniform_(-3.0, 0.5, generator=generator)
    if name.endswith("bias"):
        return 0.1 * x
    if "conv1d" in name:
        return 0.4 * x
    if "embed" in name:
        return 0.7 * x
    spread = 2.5 if ("lm_head" in name or "mlp.gate." in name) else 1.2
    return x * (spread * shape[-1] ** -0.5)


def _randomise(module: nn.Module, generator: torch.Generator, *, tied: bool = False) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_fill(name, parameter.shape, generator))
            if tied and name.endswith("embed_tokens.weight"):  # else a token would mostly predict itself
                parameter.mul_(3.5 * parameter.shape[-1] ** -0.5)


def random_tensors(config: Qwen4ExpTextConfig, seed: int, *, mtp: bool) -> dict[str, Tensor]:
    """Random weights by transformers' names (`model.*`, `lm_head.weight`), and `mtp.*` when asked for."""
    generator = torch.Generator().manual_seed(seed)
    model = hf.Qwen4ExpForCausalLM(config)
    _randomise(model, generator, tied=config.tie_word_embeddings)
    tensors = {name: value for name, value in model.state_dict().items() if "ngram_heads_" not in name}
    tensors = {name: value for name, value in tensors.items() if "layer_multipliers" not in name}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if mtp:
        head = MtpHead(config)
        _randomise(head, generator)
        tensors |= {f"mtp.{name}": value for name, value in head.state_dict().items()}
    return tensors


def _split(tensors: dict[str, Tensor], *, experts: str, ple_shards: int) -> dict[str, Tensor]:
    """Names as on disk: fused experts or one tensor an expert; the PLE table whole (0) or in shards."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("ngram_embedding.weight") and ple_shards:
            for i, part in enumerate(value.chunk(ple_shards)):
                out[name.replace(".weight", f".shard_{i}.weight")] = part
        elif name.endswith("experts.gate_up_proj") and experts == "split":
            for i, expert in enumerate(value):
                gate, up = expert.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out[f"{stem}{i}.gate_proj.weight"], out[f"{stem}{i}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj") and experts == "split":
            for i, expert in enumerate(value):
                out[f"{name.removesuffix('down_proj')}{i}.down_proj.weight"] = expert
        else:
            out[name] = value
    return {name: value.clone().contiguous() for name, value in out.items()}


def _save(folder: Path, tensors: dict[str, Tensor], max_shard_bytes: int | None) -> None:
    if max_shard_bytes is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if shards[-1] and size + value.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def random_checkpoint(
    folder: Path | str,
    *,
    seed: int,
    prefix: str = "model.",
    max_shard_bytes: int | None = None,
    mtp: bool = True,
    experts: str = "fused",
    ple_shards: int = 2,
    wrapped: bool = False,
    dtype: torch.dtype = torch.float32,
    extra: dict[str, Tensor] | None = None,
    **config_overrides: Any,
) -> Path:
    """Writes config.json and random weights of TINY with `config_overrides` into `folder`, and returns the folder.

    prefix: "model." or "model.language_model."; experts: "fused" or "split"; ple_shards: 0 keeps the table whole;
    wrapped: config.json holds the text config under `text_config`; extra: more tensors, names as given.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        **TINY,
        **config_overrides,
        "dtype": str(dtype).removeprefix("torch."),
        "split_ngram_parts": ple_shards or 1,
    }
    if not mtp:
        fields.pop("mtp_num_hidden_layers")
    config = make_config(**fields)
    tensors = _split(random_tensors(config, seed, mtp=mtp), experts=experts, ple_shards=ple_shards)
    floats = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    named = {re.sub(r"^model\.", prefix, name): value for name, value in floats.items()}
    _save(folder, named | (extra or {}), max_shard_bytes)
    if wrapped:
        fields = {
            "model_type": "qwen4_exp",
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "text_config": fields,
            "tie_word_embeddings": fields["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return folder


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a folder by transformers' names: prefix `model.`, experts fused, PLE shards joined."""
    raw: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        raw |= load_file(file)
    raw = {name.replace("model.language_model.", "model."): value for name, value in raw.items()}
    groups: dict[str, dict[int, Tensor]] = {}
    out: dict[str, Tensor] = {}
    for name, value in raw.items():
        if found := re.search(r"ngram_embedding\.shard_(\d+)\.weight$", name):
            groups.setdefault(name[: found.start()] + "ngram_embedding.weight", {})[int(found[1])] = value
        elif found := re.search(r"experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$", name):
            groups.setdefault(name[: found.start()] + "experts." + found[2], {})[int(found[1])] = value
        else:
            out[name] = value
    for name, parts in groups.items():
        ordered = [parts[i] for i in sorted(parts)]
        out[name] = torch.cat(ordered) if name.endswith(".weight") else torch.stack(ordered)
    for name in [n for n in out if n.endswith("experts.gate_proj")]:
        stem = name.removesuffix("gate_proj")
        out[stem + "gate_up_proj"] = torch.cat([out.pop(name), out.pop(stem + "up_proj")], dim=1)
    return out


def read_config(folder: Path | str) -> Qwen4ExpTextConfig:
    """The text config of a folder."""
    fields = json.loads((Path(folder) / "config.json").read_text())
    fields = dict(fields.get("text_config", fields))
    for key in ("architectures", "model_type"):
        fields.pop(key, None)
    config = Qwen4ExpTextConfig(**fields)
    config._attn_implementation = "sdpa"
    return config


@functools.lru_cache(maxsize=24)
def _models(folder: str, dtype: torch.dtype) -> tuple[hf.Qwen4ExpForCausalLM, MtpHead | None]:
    config = read_config(folder)
    tensors = {name: value for name, value in read_tensors(folder).items() if "_scale" not in name}
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    model = hf.Qwen4ExpForCausalLM(config)
    if config.tie_word_embeddings:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    target = {n: v for n, v in tensors.items() if not n.startswith("mtp.") and ".visual." not in n}
    missing, unexpected = model.to(dtype).load_state_dict(target, strict=False)
    assert not unexpected, unexpected
    assert not [name for name in missing if "ple_embedding" not in name or "ngram_embedding" in name], missing
    drafts = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
    head = None
    if drafts:
        head = MtpHead(config).to(dtype)
        head.load_state_dict(drafts)
        head.eval()
    return model.eval(), head


def oracle_model(folder: Path | str, dtype: torch.dtype = torch.float32) -> hf.Qwen4ExpForCausalLM:
    """transformers' model of the folder (cached; do not modify it)."""
    return _models(str(folder), dtype)[0]


def oracle_head(folder: Path | str, dtype: torch.dtype = torch.float32) -> MtpHead:
    """The MTP reference head of the folder (cached)."""
    head = _models(str(folder), dtype)[1]
    assert head is not None, f"{folder} holds no mtp tensors"
    return head


@contextlib.contextmanager
def total_order() -> Iterator[None]:
    """Inside, the indexer's top-k (the only `Tensor.topk` of the model) breaks ties by the lower index."""

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        values, indices = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    before = torch.Tensor.topk
    torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = before


@torch.no_grad()
@total_order()
def oracle_logits(folder: Path | str, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, V] fp32: one forward over all of `ids`, no cache."""
    output = oracle_model(folder, dtype)(torch.tensor([ids]), use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


@torch.no_grad()
@total_order()
def oracle_greedy(folder: Path | str, ids: list[int], n: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """The next `n` argmax tokens after `ids`; eos does not stop it."""
    model = oracle_model(folder, dtype)
    output = model(torch.tensor([ids]), use_cache=True)
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(int(output.logits[0, -1].argmax()))
        if len(tokens) < n:
            output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens


@torch.no_grad()
@total_order()
def oracle_streams(folder: Path | str, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, hc * hidden]: what enters the target's final hyper-connection mixer."""
    model = oracle_model(folder, dtype)
    seen: list[Tensor] = []
    hook = model.model.hyper_connection_mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        model(torch.tensor([ids]), use_cache=False)
    finally:
        hook.remove()
    return seen[0][0]


def _draft_logits(folder: Path | str, streams: Tensor, dtype: torch.dtype) -> Tensor:
    mixed = oracle_head(folder, dtype).hyper_connection_mixer(streams)
    logits: Tensor = oracle_model(folder, dtype).lm_head(mixed).float()
    return logits


@torch.no_grad()
@total_order()
def oracle_mtp(folder: Path | str, ids: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """First-iteration drafts: for i in 0..T-2 the head on (h_i, t_{i+1}).

    Returns streams [T-1, hc * hidden] and logits [T-1, V] fp32 (row i drafts token i+2).
    """
    head, model = oracle_head(folder, dtype), oracle_model(folder, dtype)
    h = oracle_streams(folder, ids, dtype)
    streams = head(model.model.embed_tokens(torch.tensor(ids[1:])), h[:-1])
    return streams, _draft_logits(folder, streams, dtype)


@torch.no_grad()
@total_order()
def oracle_drafts(folder: Path | str, ids: list[int], k: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """k greedy draft tokens after `ids`: iteration 1 selects, the others reuse its selection plus all newer tokens."""
    head, model = oracle_head(folder, dtype), oracle_model(folder, dtype)
    h = oracle_streams(folder, ids, dtype)[:-1]
    tokens, last = list(ids[1:]), len(ids) - 2
    indexer = head.layers[0].self_attn.indexer
    select = indexer.forward

    def reuse(*args: Any, **kwargs: Any) -> Tensor:
        mask: Tensor = select(*args, **kwargs).clone()
        for row in range(last + 1, mask.shape[-1]):
            mask[..., row, :] = mask[..., last, :]
            mask[..., row, last + 1 : row + 1] = True
        return mask

    indexer.forward = reuse
    drafts: list[int] = []
    try:
        for _ in range(k):
            streams = head(model.model.embed_tokens(torch.tensor(tokens)), h)
            drafts.append(int(_draft_logits(folder, streams[-1:], dtype).argmax()))
            tokens.append(drafts[-1])
            h = torch.cat([h, streams[-1:]])
    finally:
        indexer.forward = select
    return drafts
