"""The names and shapes of every tensor of a qwen4_exp checkpoint, as the code that builds the weight tree."""

from __future__ import annotations

import torch
from torch import Tensor

from page4.geometry import Geometry, PleGeometry
from page4.model._tensor_source import TensorSource
from page4.model.weight_tree import (
    DraftWeights,
    GdnWeights,
    HyperWeights,
    LayerWeights,
    MixerWeights,
    MoeWeights,
    PleWeights,
    QsaWeights,
    TargetWeights,
)


def build_target(geometry: Geometry, source: TensorSource) -> TargetWeights:
    """Everything but the MTP head."""
    embed = source.tensor("embed_tokens.weight", (geometry.vocab_size, geometry.hidden_size))
    layers = tuple(
        _layer(geometry, source, f"layers.{layer}.", kind, layer) for layer, kind in enumerate(geometry.layer_types)
    )
    return TargetWeights(
        embed=embed,
        layers=layers,
        mixer=_mixer(geometry, source, "hyper_connection_mixer."),
        lm_head=_lm_head(geometry, source, embed),
    )


def build_draft(geometry: Geometry, source: TensorSource) -> DraftWeights:
    """The MTP head."""
    hidden = geometry.hidden_size
    return DraftWeights(
        fc_embedding=source.tensor("mtp.fc_embedding.weight", (hidden, hidden)),
        fc_hidden=source.tensor("mtp.fc_hidden.weight", (hidden, hidden)),
        norm_embedding=_norm(source, "mtp.pre_fc_norm_embedding.weight", hidden),
        norm_hidden=_norm(source, "mtp.pre_fc_norm_hidden.weight", geometry.streams_dim),
        layer=_layer(geometry, source, "mtp.layers.0.", "qsa", None),
        mixer=_mixer(geometry, source, "mtp.hyper_connection_mixer."),
    )


def _lm_head(geometry: Geometry, source: TensorSource, embed: Tensor) -> Tensor:
    name = "lm_head.weight"
    if not geometry.tie_word_embeddings:
        return source.tensor(name, (geometry.vocab_size, geometry.hidden_size))
    if source.has(name):  # some writers store a tied matrix twice
        if source.has("embed_tokens.weight") and not source.same(name, "embed_tokens.weight"):
            source.problem(f"{name} differs from embed_tokens.weight although tie_word_embeddings is true")
        source.take_duplicate(name)
    return embed


def _norm(source: TensorSource, name: str, dim: int) -> Tensor:
    """1 + w in fp32, w first rounded to the model dtype as the reference model holds it."""
    return source.tensor(name, (dim,)).float().add_(1.0)


def _mixer(geometry: Geometry, source: TensorSource, prefix: str) -> MixerWeights:
    streams, rank = geometry.streams_dim, geometry.hc_lowrank
    return MixerWeights(
        norm=_norm(source, f"{prefix}hc_norm.weight", streams),
        down=source.tensor(f"{prefix}input_mix_weight_down.weight", (rank, streams)),
        up=source.tensor(f"{prefix}input_mix_weight_up.weight", (streams, rank)),
    )


def _hyper(geometry: Geometry, source: TensorSource, prefix: str) -> HyperWeights:
    streams, rank = geometry.streams_dim, geometry.hc_lowrank
    down = [
        (f"{prefix}input_mix_weight_down.weight", rank),
        (f"{prefix}block_inject_weight.weight", geometry.hc_count),
    ]
    return HyperWeights(
        norm=_norm(source, f"{prefix}hc_norm.weight", streams),
        down=source.rows(down, (streams,)),
        up=source.tensor(f"{prefix}input_mix_weight_up.weight", (streams, rank)),
    )


def _layer(geometry: Geometry, source: TensorSource, prefix: str, kind: str, layer: int | None) -> LayerWeights:
    """One decoder layer; `layer` is None for the draft's, which never has PLE."""
    ple = geometry.ple
    has_ple = ple is not None and layer is not None and layer in ple.layers
    return LayerWeights(
        attn_hyper=_hyper(geometry, source, f"{prefix}attn_hyper_connection."),
        mlp_hyper=_hyper(geometry, source, f"{prefix}mlp_hyper_connection."),
        gdn=_gdn(geometry, source, f"{prefix}linear_attn.") if kind == "gdn" else None,
        qsa=_qsa(geometry, source, f"{prefix}self_attn.") if kind == "qsa" else None,
        moe=_moe(geometry, source, f"{prefix}mlp."),
        ple=_ple(geometry, ple, source, f"{prefix}ple.", layer) if has_ple and ple and layer is not None else None,
    )


def _gdn(geometry: Geometry, source: TensorSource, prefix: str) -> GdnWeights:
    gdn, hidden = geometry.gdn, geometry.hidden_size
    value_rows = gdn.value_heads * gdn.value_dim
    split = (gdn.conv_dim, value_rows, gdn.value_heads, gdn.value_heads)
    names = [f"{prefix}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    conv = source.empty((gdn.conv_dim, gdn.conv_kernel))
    source.fill(conv, f"{prefix}conv1d.weight", (gdn.conv_dim, 1, gdn.conv_kernel))
    return GdnWeights(
        in_proj=source.rows(list(zip(names, split, strict=True)), (hidden,)),
        split=split,
        conv=conv,
        a_log=source.tensor(f"{prefix}A_log", (gdn.value_heads,), torch.float32),
        dt_bias=source.tensor(f"{prefix}dt_bias", (gdn.value_heads,), torch.float32),
        norm=source.tensor(f"{prefix}norm.weight", (gdn.value_dim,)),
        out_proj=source.tensor(f"{prefix}out_proj.weight", (hidden, value_rows)),
    )


def _qsa(geometry: Geometry, source: TensorSource, prefix: str) -> QsaWeights:
    index, dim, hidden = geometry.index, geometry.head_dim, geometry.hidden_size
    kv_rows = geometry.num_kv_heads * dim
    split = (geometry.num_heads * 2 * dim, kv_rows, kv_rows, (index.num_heads + 1) * index.head_dim)
    modules = [f"{prefix}{part}_proj" for part in ("q", "k", "v")]
    names = [f"{module}.weight" for module in modules] + [f"{prefix}indexer.index_qk_proj.weight"]
    in_bias = o_bias = None
    if geometry.attention_bias:
        in_bias = source.empty((sum(split),)).zero_()
        for module, part in zip(modules, torch.split(in_bias, list(split)), strict=False):  # the indexer has none
            source.fill(part, f"{module}.bias")
        o_bias = source.tensor(f"{prefix}o_proj.bias", (hidden,))
    return QsaWeights(
        in_proj=source.rows(list(zip(names, split, strict=True)), (hidden,)),
        split=split,
        in_bias=in_bias,
        q_norm=_norm(source, f"{prefix}q_norm.weight", dim),
        k_norm=_norm(source, f"{prefix}k_norm.weight", dim),
        index_q_norm=_norm(source, f"{prefix}indexer.q_layernorm.weight", index.head_dim),
        index_k_norm=_norm(source, f"{prefix}indexer.k_layernorm.weight", index.head_dim),
        o_proj=source.tensor(f"{prefix}o_proj.weight", (hidden, geometry.num_heads * dim)),
        o_bias=o_bias,
    )


def _moe(geometry: Geometry, source: TensorSource, prefix: str) -> MoeWeights:
    moe, hidden = geometry.moe, geometry.hidden_size
    router = [(f"{prefix}gate.weight", moe.num_experts), (f"{prefix}shared_expert_gate.weight", 1)]
    shared = [(f"{prefix}shared_expert.{part}_proj.weight", moe.shared_intermediate) for part in ("gate", "up")]
    gate_up, down = _experts(geometry, source, f"{prefix}experts.")
    return MoeWeights(
        router=source.rows(router, (hidden,)),
        gate_up=gate_up,
        down=down,
        shared_gate_up=source.rows(shared, (hidden,)),
        shared_down=source.tensor(f"{prefix}shared_expert.down_proj.weight", (hidden, moe.shared_intermediate)),
    )


def _experts(geometry: Geometry, source: TensorSource, prefix: str) -> tuple[Tensor, Tensor]:
    """Routed experts, stored fused or one by one."""
    moe, hidden = geometry.moe, geometry.hidden_size
    gate_up = source.empty((moe.num_experts, 2 * moe.intermediate, hidden))
    down = source.empty((moe.num_experts, hidden, moe.intermediate))
    if source.has(f"{prefix}gate_up_proj") or source.has(f"{prefix}down_proj"):
        source.fill(gate_up, f"{prefix}gate_up_proj")
        source.fill(down, f"{prefix}down_proj")
        return gate_up, down
    for expert in range(moe.num_experts):
        source.fill(gate_up[expert, : moe.intermediate], f"{prefix}{expert}.gate_proj.weight")
        source.fill(gate_up[expert, moe.intermediate :], f"{prefix}{expert}.up_proj.weight")
        source.fill(down[expert], f"{prefix}{expert}.down_proj.weight")
    return gate_up, down


def _ple(geometry: Geometry, ple: PleGeometry, source: TensorSource, prefix: str, layer: int) -> PleWeights:
    ple_index, hidden, streams = ple.layers.index(layer), geometry.hidden_size, geometry.streams_dim
    embedding = f"{prefix}ple_embedding."
    split = (streams, hidden)
    projections = [(f"{prefix}key_proj.weight", streams), (f"{prefix}value_proj.weight", hidden)]
    conv = source.empty((streams, ple.conv_kernel))
    source.fill(conv, f"{prefix}conv1d.weight", (streams, 1, ple.conv_kernel))
    return PleWeights(
        table=_ngram_table(ple, source, f"{embedding}ngram_embedding.", ple.table_rows(ple_index)),
        multipliers=source.integers(f"{embedding}layer_multipliers", ple.multipliers(ple_index)),
        head_vocab_sizes=source.integers(f"{embedding}ngram_heads_vocab_sizes", ple.head_vocab_sizes(ple_index)),
        head_offsets=source.integers(f"{embedding}ngram_heads_offsets", ple.head_offsets(ple_index)),
        kv_proj=source.rows(projections, (ple.embed_dim,)),
        split=split,
        norm_key=_norm(source, f"{prefix}norm_key.weight", streams),
        norm_query=_norm(source, f"{prefix}norm_query.weight", streams),
        norm_conv=_norm(source, f"{prefix}norm_conv.weight", streams),
        conv=conv,
    )


def _ngram_table(ple: PleGeometry, source: TensorSource, prefix: str, rows: int) -> Tensor:
    """The n-gram table, whole or as shards in numeric order that add up to it."""
    numbers = source.numbered(f"{prefix}shard_", ".weight")
    if not numbers or source.has(f"{prefix}weight"):
        return source.tensor(f"{prefix}weight", (rows, ple.head_dim))
    names = [f"{prefix}shard_{number}.weight" for number in range(numbers[-1] + 1)]
    absent = [name for name in names if not source.has(name)]
    held = sum(source.rows_of(name) for name in names if source.has(name))
    if absent or held != rows:
        names += [f"{prefix}shard_{number}.weight" for number in range(len(names), ple.num_shards) if held < rows]
        for name in names:
            if source.has(name):
                source.tensor(name, (source.rows_of(name), ple.head_dim))
            else:
                source.missing(name)
        if held != rows:
            source.problem(f"{prefix}shard_*.weight hold {held} rows, not {rows}")
        return source.empty((0, ple.head_dim))
    return source.rows([(name, source.rows_of(name)) for name in names], (ple.head_dim,))
