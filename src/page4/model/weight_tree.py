"""The weights of a model as a tree of frozen dataclasses: what `weights.read_weights` fills and the layers read.

Projections that read the same input lie in one matrix, rows in the order that the field's comment gives, so that a
decode step makes few small products; `split` gives the row counts. Norm weights of the (1 + w) kind are stored as fp32
`1 + w` (w first rounded to the model dtype), ready to multiply. Everything else has the model dtype unless the comment
says otherwise.

Axes: Hid hidden size, C hyper-connection streams, R their low rank, H query heads, J KV heads, D head dim, I index
heads, E index head dim, X experts, F expert intermediate size, Fs that of the shared expert, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MixerWeights:
    """A hyper-connection mixer without injection: the one before the LM head."""

    norm: Tensor  # [C*Hid] fp32, 1 + w, normalised in C groups of Hid
    down: Tensor  # [R, C*Hid]
    up: Tensor  # [C*Hid, R]


@dataclass(frozen=True)
class HyperWeights:
    """A hyper-connection around a block: input mix and injection weights."""

    norm: Tensor  # [C*Hid] fp32, 1 + w, normalised in C groups of Hid
    down: Tensor  # [R + C, C*Hid]: input mix, then block_inject_weight
    up: Tensor  # [C*Hid, R]


@dataclass(frozen=True)
class GdnWeights:
    """Gated DeltaNet: Hk key heads of Dk, Hv value heads of Dv; conv_dim = 2*Hk*Dk + Hv*Dv."""

    in_proj: Tensor  # [conv_dim + Hv*Dv + Hv + Hv, Hid]: q | k | v (convolved), z, b, a
    split: tuple[int, int, int, int]  # rows of qkv, z, b, a
    conv: Tensor  # [conv_dim, kernel]
    a_log: Tensor  # [Hv] fp32
    dt_bias: Tensor  # [Hv] fp32
    norm: Tensor  # [Dv] plain weight (no 1 + w)
    out_proj: Tensor  # [Hid, Hv*Dv]


@dataclass(frozen=True)
class QsaWeights:
    """Query Sparse Attention with its indexer."""

    in_proj: Tensor  # [H*2D + J*D + J*D + (I+1)*E, Hid]: per head q | gate, then k, v, index q heads | index key
    split: tuple[int, int, int, int]  # rows of q|gate, k, v, index q|k
    in_bias: Tensor | None  # [same rows], 0 for the index rows; None without attention_bias
    q_norm: Tensor  # [D] fp32, 1 + w
    k_norm: Tensor  # [D] fp32, 1 + w
    index_q_norm: Tensor  # [E] fp32, 1 + w
    index_k_norm: Tensor  # [E] fp32, 1 + w
    o_proj: Tensor  # [Hid, H*D]
    o_bias: Tensor | None  # [Hid]


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts and the shared expert."""

    router: Tensor  # [X + 1, Hid]: router, then shared_expert_gate
    gate_up: Tensor  # [X, 2F, Hid]
    down: Tensor  # [X, Hid, F]
    shared_gate_up: Tensor  # [2Fs, Hid]
    shared_down: Tensor  # [Hid, Fs]


@dataclass(frozen=True)
class PleWeights:
    """Hashed n-gram embedding of one layer; Eg = embed_dim / n-gram heads, n = ngram_size."""

    table: Tensor  # [table rows, Eg]
    multipliers: Tensor  # [n] int64
    head_vocab_sizes: Tensor  # [n-gram heads] int64
    head_offsets: Tensor  # [n-gram heads] int64
    kv_proj: Tensor  # [C*Hid + Hid, embed_dim]: key, then value
    split: tuple[int, int]  # rows of key, value
    norm_key: Tensor  # [C*Hid] fp32, 1 + w, C groups
    norm_query: Tensor  # [C*Hid] fp32, 1 + w, C groups
    norm_conv: Tensor  # [C*Hid] fp32, 1 + w, C groups
    conv: Tensor  # [C*Hid, kernel], dilation n


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: exactly one of `gdn` and `qsa` is set."""

    attn_hyper: HyperWeights
    mlp_hyper: HyperWeights
    gdn: GdnWeights | None
    qsa: QsaWeights | None
    moe: MoeWeights
    ple: PleWeights | None


@dataclass(frozen=True)
class TargetWeights:
    """The main model. With tied embeddings `lm_head is embed`."""

    embed: Tensor  # [V, Hid]
    layers: tuple[LayerWeights, ...]
    mixer: MixerWeights
    lm_head: Tensor  # [V, Hid]


@dataclass(frozen=True)
class DraftWeights:
    """The MTP head; its `layer` is a QSA layer without PLE."""

    fc_embedding: Tensor  # [Hid, Hid]
    fc_hidden: Tensor  # [Hid, Hid], shared by the C streams
    norm_embedding: Tensor  # [Hid] fp32, 1 + w
    norm_hidden: Tensor  # [C*Hid] fp32, 1 + w, normalised over the whole vector
    layer: LayerWeights
    mixer: MixerWeights


@dataclass(frozen=True)
class LoadReport:
    """What happened to every tensor of the checkpoint: `loaded` names, and `ignored` names with their reason.

    Missing, unexpected and wrongly shaped tensors never get here: they are refused in one `TensorError`.
    """

    loaded: tuple[str, ...]
    ignored: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Weights:
    """A whole checkpoint in memory."""

    target: TargetWeights
    draft: DraftWeights | None
    report: LoadReport
