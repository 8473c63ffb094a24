"""The shape of a qwen4_exp model as frozen objects without torch, parsed and checked once from config.json.

This is the only module that reads config keys (`_config.py` is its reader). Absent keys take the default of the
`qwen4_exp` config of transformers, except the sizes that no model can do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from page4 import ngram

BLOCK_TOKENS = 4
LayerType = Literal["gdn", "qsa"]


@dataclass(frozen=True)
class IndexGeometry:
    """The indexer of a QSA layer: `num_heads` query heads and one key head of `head_dim`."""

    num_heads: int
    head_dim: int
    budget_tokens: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def top_k_blocks(self) -> int:
        """Blocks that a row may select besides its tail."""
        return self.budget_tokens // self.block_tokens


@dataclass(frozen=True)
class GdnGeometry:
    """A Gated DeltaNet layer; `gate_activation` is that of its output gate."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate_activation: Literal["silu", "sigmoid"]

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class MoeGeometry:
    """Routed experts and one shared expert."""

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    norm_topk_prob: bool


@dataclass(frozen=True)
class PleGeometry:
    """Hashed n-gram embeddings. `layers` are 0-based; methods take the index into `layers`, not the layer."""

    layers: tuple[int, ...]
    embed_dim: int
    conv_kernel: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    vocab_divisor: int
    seed: int
    num_shards: int
    token_vocab_size: int
    eos_token_id: int

    @property
    def num_heads(self) -> int:
        """Hash heads: `heads_per_ngram` for each of the orders 2..ngram_size."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def head_dim(self) -> int:
        """Width of one table row."""
        return self.embed_dim // self.num_heads

    @property
    def conv_state_tokens(self) -> int:
        """Tokens that the dilated convolution looks back."""
        return (self.conv_kernel - 1) * self.ngram_size

    def head_vocab_sizes(self, ple_index: int) -> tuple[int, ...]:
        """Rows of each head's table, a prime each."""
        first = ple_index * self.num_heads
        return ngram.primes_from(self.vocab_base, first + self.num_heads)[first:]

    def head_offsets(self, ple_index: int) -> tuple[int, ...]:
        """First row of each head in the shared table."""
        sizes = self.head_vocab_sizes(ple_index)
        return tuple(sum(sizes[:head]) for head in range(len(sizes)))

    def table_rows(self, ple_index: int) -> int:
        """Rows of the shared table, padded to a multiple of `vocab_divisor`."""
        total = sum(self.head_vocab_sizes(ple_index))
        return -(-total // self.vocab_divisor) * self.vocab_divisor

    def multipliers(self, ple_index: int) -> tuple[int, ...]:
        """Hash multiplier of each n-gram position, newest token first."""
        return ngram.hash_multipliers(self.token_vocab_size, self.ngram_size, ple_index, self.seed)


@dataclass(frozen=True)
class Geometry:
    """Everything about a model's shape that the rest of page4 needs."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int] | None
    attention_bias: bool
    rms_norm_eps: float
    hc_count: int
    hc_lowrank: int
    index: IndexGeometry
    gdn: GdnGeometry
    moe: MoeGeometry
    ple: PleGeometry | None
    mtp_layers: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    max_positions: int
    tie_word_embeddings: bool
    dtype_name: Literal["float32", "float16", "bfloat16"]

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        """Layers of the target with sparse attention, ascending."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind == "qsa")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Layers of the target with Gated DeltaNet, ascending."""
        return tuple(layer for layer, kind in enumerate(self.layer_types) if kind == "gdn")

    @property
    def draft_layer(self) -> int:
        """Layer index of the MTP head at run time."""
        return self.num_layers

    @property
    def streams_dim(self) -> int:
        """Width of the hyper-connection streams of one token."""
        return self.hc_count * self.hidden_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Geometry:
        """Parse a config.json mapping, text-only or with `text_config`.

        Raises `ConfigError` that names the key, what is allowed and the value found.
        """
        from page4._config import geometry_from_config  # the reader builds these classes, so it cannot come first

        return geometry_from_config(config)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Geometry:
        """Parse `folder/config.json`. Raises `ConfigError`."""
        return cls.from_file(Path(folder) / "config.json")

    @classmethod
    def from_file(cls, path: Path) -> Geometry:
        """Parse a config file, whatever its name (a hub cache names files by their hash). Raises `ConfigError`."""
        from page4._config import read_config_file

        return cls.from_config(read_config_file(path))
