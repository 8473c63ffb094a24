"""Geometry against the production figures, transformers' derivations and a list of rejections."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from page4 import ngram
from page4.errors import ConfigError
from page4.geometry import Geometry

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248046,
    "dtype": "bfloat16",
}


def test_the_production_geometry() -> None:
    geometry = Geometry.from_config(TEXT)
    assert geometry.qsa_layers == tuple(range(3, 48, 4)) and len(geometry.gdn_layers) == 36
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.rotary_dim) == (24, 2, 256, 64)
    assert (geometry.rope_theta, geometry.mrope_section) == (1e7, (11, 11, 10))
    assert (geometry.index.num_heads, geometry.index.head_dim, geometry.index.top_k_blocks) == (4, 128, 512)
    assert geometry.gdn.conv_dim == 2 * 16 * 128 + 48 * 128 and geometry.gdn.gate_activation == "silu"
    assert geometry.moe.num_experts == 512 and geometry.moe.top_k == 10 and geometry.moe.norm_topk_prob
    assert geometry.ple is not None and geometry.ple.layers == (1,) and geometry.ple.conv_state_tokens == 9
    assert (geometry.draft_layer, geometry.mtp_layers, geometry.streams_dim) == (48, 1, 10240)
    assert geometry.eos_token_ids == (248046,) and geometry.dtype_name == "bfloat16"


def test_text_config_form_equals_the_text_only_form() -> None:
    outer = {
        "model_type": "qwen4_exp",
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "vision_config": {"depth": 27, "hidden_size": 1152},
        "text_config": TEXT,
        "tie_word_embeddings": False,
    }
    assert Geometry.from_config(outer) == Geometry.from_config(TEXT)
    assert Geometry.from_config({**outer, "tie_word_embeddings": True}).tie_word_embeddings


def test_layer_names_and_the_interval_say_the_same() -> None:
    indexed = {**TEXT, "layer_types": (["linear_attention"] * 3 + ["indexed_attention"]) * 12}
    interval = {**TEXT, "layer_types": None, "full_attention_interval": 4}
    assert Geometry.from_config(indexed) == Geometry.from_config(TEXT) == Geometry.from_config(interval)


def test_absent_keys() -> None:
    config = {key: value for key, value in TEXT.items() if key not in ("mtp_num_hidden_layers", "ple_layer_ids")}
    geometry = Geometry.from_config({**config, "eos_token_id": None, "rope_parameters": None, "head_dim": 128})
    assert geometry.mtp_layers is None and geometry.ple is None and geometry.eos_token_ids == ()
    assert (geometry.rope_theta, geometry.rotary_dim, geometry.mrope_section) == (10000.0, 128, None)


def test_old_rope_keys() -> None:
    config = {**TEXT, "rope_parameters": None, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config["rope_scaling"] = {"type": "default", "mrope_section": [24, 20, 20]}
    geometry = Geometry.from_config(config)
    assert (geometry.rope_theta, geometry.rotary_dim, geometry.mrope_section) == (1e6, 128, (24, 20, 20))


def test_eos_may_be_a_list_and_ple_uses_the_first() -> None:
    geometry = Geometry.from_config({**TEXT, "eos_token_id": [7, 5]})
    assert geometry.eos_token_ids == (7, 5)
    assert geometry.ple is not None and geometry.ple.eos_token_id == 7


@pytest.mark.parametrize(
    ("vocab", "base", "heads", "size", "layers", "seed"),
    [
        (4096, 1000, 2, 3, [2], 1234),
        (97, 2, 3, 4, [1, 2, 3], 7),
        (1, 50, 1, 2, [1], -5),
        (200_000, 65_536, 8, 3, [2, 3], 0),
    ],
)
def test_ngram_integers_equal_transformers(
    vocab: int, base: int, heads: int, size: int, layers: list[int], seed: int
) -> None:
    oracle = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = {**TEXT, "vocab_size": vocab, "ngram_vocab_size_base": base, "heads_per_ngram": heads, "eos_token_id": 0}
    embed = 8 * heads * (size - 1)
    config |= {"ngram_size": size, "ple_layer_ids": layers, "seed": seed, "ple_embed_dim": embed}
    geometry = Geometry.from_config(config)
    text = oracle.Qwen4ExpTextConfig(
        **{k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype")}
    )
    assert geometry.ple is not None
    for index, layer in enumerate(geometry.ple.layers):
        theirs = oracle.Qwen4ExpTextNGramEmbedding(text, embed, layer, index)
        assert list(geometry.ple.head_vocab_sizes(index)) == theirs.ngram_heads_vocab_sizes.tolist()
        assert list(geometry.ple.head_offsets(index)) == theirs.ngram_heads_offsets.tolist()
        assert list(geometry.ple.multipliers(index)) == theirs.layer_multipliers.tolist()
        assert (geometry.ple.table_rows(index), geometry.ple.head_dim) == tuple(theirs.ngram_embedding.weight.shape)


def test_primes_equal_a_sieve() -> None:
    limit = 30_000
    composite = {multiple for p in range(2, 174) for multiple in range(p * p, limit, p)}
    assert [n for n in range(limit) if ngram.is_prime(n)] == [n for n in range(2, limit) if n not in composite]
    assert ngram.is_prime(2**61 - 1) and not ngram.is_prime(2**61 + 1)
    assert not ngram.is_prime(3215031751)  # a strong pseudoprime to 2, 3, 5 and 7


def with_value(path: str, value: object) -> dict[str, Any]:
    config = copy.deepcopy(TEXT)
    *parents, key = path.split(".")
    target = config
    for parent in parents:
        target = target[parent]
    target[key] = value
    return config


REJECTED: list[tuple[str, object, str]] = [
    ("model_type", "qwen3_next", "model_type.*qwen3_next"),
    ("model_type", None, "model_type"),
    ("architectures", ["LlamaForCausalLM"], "architectures.*LlamaForCausalLM"),
    ("text_config", [1], "text_config"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config.*fp8"),
    ("vocab_size", 0, "vocab_size.*got 0"),
    ("vocab_size", None, "vocab_size.*got nothing"),
    ("hidden_size", -2560, "hidden_size.*-2560"),
    ("hidden_size", "2560", "hidden_size.*'2560'"),
    ("hidden_size", 2560.0, "hidden_size.*2560.0"),
    ("hidden_size", True, "hidden_size.*True"),
    ("hidden_size", 2**40, "hidden_size"),
    ("num_hidden_layers", 47, r"layer_types.*\(47\).*48 names"),
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("layer_types", "linear_attention", "layer_types"),
    ("layer_types", ["sliding_attention"] * 48, "sliding_attention"),
    ("layer_types", ["linear_attention"] * 48, "at least one indexed_attention"),
    ("layer_types", [[1]] + ["full_attention"] * 47, "layer_types"),
    ("num_attention_heads", 23, "num_attention_heads.*multiple.*23"),
    ("num_key_value_heads", 0, "num_key_value_heads"),
    ("head_dim", 0, "head_dim"),
    ("rms_norm_eps", 0, "rms_norm_eps"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps.*nan"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps"),
    ("hidden_act", "gelu", "hidden_act.*gelu"),
    ("output_gate_type", "tanh", "output_gate_type.*tanh"),
    ("attention_bias", 1, "attention_bias"),
    ("hc_count", 1, "hc_count.*got 1"),
    ("hc_lowrank", 0, "hc_lowrank"),
    ("rope_parameters", 3, "rope_parameters"),
    ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "rope_parameters"),
    ("rope_parameters.rope_type", "yarn", "rope_type.*yarn"),
    ("rope_parameters.rope_theta", -1, "rope_theta.*-1"),
    ("rope_parameters.partial_rotary_factor", 1.5, "partial_rotary_factor.*1.5"),
    ("rope_parameters.partial_rotary_factor", 0.004, "even number"),
    ("rope_parameters.partial_rotary_factor", 65 / 256, "even number"),
    ("rope_parameters.partial_rotary_factor", 1.0, r"indexer_head_dim.*\(256\).*128"),
    ("rope_parameters.mrope_section", [11, 11], "mrope_section"),
    ("rope_parameters.mrope_section", [11, -1, 22], "mrope_section.*-1"),
    ("indexer_n_heads", None, "indexer_n_heads.*nothing"),
    ("indexer_kv_heads", 2, "indexer_kv_heads.*got 2"),
    ("indexer_budget", 2050, "indexer_budget.*2050"),
    ("indexer_budget", 0, "indexer_budget"),
    ("indexer_compress_ratio", 8, "indexer_compress_ratio.*got 8"),
    ("linear_num_value_heads", 40, "linear_num_value_heads.*40"),
    ("linear_conv_kernel_dim", 0, "linear_conv_kernel_dim"),
    ("num_experts", 0, "num_experts"),
    ("num_experts_per_tok", 513, "num_experts_per_tok.*512.*513"),
    ("moe_intermediate_size", 0, "moe_intermediate_size"),
    ("norm_topk_prob", "yes", "norm_topk_prob"),
    ("ple_layer_ids", [0], "ple_layer_ids.*got 0"),
    ("ple_layer_ids", [49], "ple_layer_ids.*got 49"),
    ("ple_layer_ids", [4], r"linear_attention layers.*\[4\]"),
    ("ple_layer_ids", 2, "ple_layer_ids"),
    ("ple_embed_dim", 2561, "ple_embed_dim.*2561"),
    ("ngram_size", 1, "ngram_size"),
    ("ngram_vocab_size_base", 2**62, "ngram_vocab_size_base"),
    ("eos_token_id", None, "eos_token_id"),
    ("eos_token_id", [], "eos_token_id"),
    ("eos_token_id", 248320, "eos_token_id.*248320"),
    ("eos_token_id", "</s>", "eos_token_id"),
    ("pad_token_id", -1, "pad_token_id"),
    ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers.*got 2"),
    ("tie_word_embeddings", "no", "tie_word_embeddings"),
    ("dtype", "float8_e4m3fn", "dtype.*float8"),
    ("max_position_embeddings", 0, "max_position_embeddings"),
]


@pytest.mark.parametrize(("path", "value", "pattern"), REJECTED, ids=[f"{p}={v!r:.30}" for p, v, _ in REJECTED])
def test_rejections_name_the_key_and_the_value(path: str, value: object, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as error:
        Geometry.from_config(with_value(path, value))
    assert str(error.value).isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(TEXT)), JSON)
def test_any_value_is_taken_or_refused_with_one_error_type(key: str, value: object) -> None:
    try:
        geometry = Geometry.from_config({**TEXT, key: value})
    except ConfigError as error:
        assert str(error).isprintable()
    else:
        assert dataclasses.is_dataclass(geometry)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"3", b'{"model_type": ' + b"9" * 5000 + b"}"]
)
def test_unreadable_config_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json|model_type"):
        Geometry.from_folder(tmp_path)


def test_reads_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json.*none"):
        Geometry.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    assert Geometry.from_folder(tmp_path) == Geometry.from_config(TEXT)


def test_geometry_and_checkpoints_need_no_torch() -> None:
    modules = "page4, page4.geometry, page4.checkpoint, page4.env, page4._config"
    code = f"import sys, {modules}; print({{'torch', 'numpy'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
