"""The shape of the embedded checkpoint: its config.json, and the facts derived from it.

QSA is the production shape at TP4 (6 query heads, 1 KV head, head dim 256, 4 x 128 index heads) with a budget of
256 tokens; everything else is as small as 32,000,000 bytes of bf16 allow.
"""

from __future__ import annotations

import math
from typing import Any

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_BYTES = 32_000_000

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 256,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "silu",
    "hidden_act": "silu",
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": 128,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 8000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 2,
    "seed": 1234,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _splitmix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) & _MASK


def ngram_multipliers(config: dict[str, Any]) -> list[int]:
    """Odd 63-bit multipliers of the n-gram hash of PLE module 0, one for each token of the n-gram."""
    half = max(1, ((1 << 63) - 1) // config["vocab_size"] // 2)
    return [
        2 * (_splitmix((config["seed"] + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(config["ngram_size"])
    ]


def ngram_head_sizes(config: dict[str, Any]) -> list[int]:
    """Rows of each hashed n-gram head of PLE module 0: the first primes from the base upwards."""
    sizes: list[int] = []
    candidate = config["ngram_vocab_size_base"]
    while len(sizes) < (config["ngram_size"] - 1) * config["heads_per_ngram"]:
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    return sizes


def ngram_table_rows(config: dict[str, Any]) -> int:
    """Rows of the whole n-gram table, padded to the divisor."""
    divisor = int(config["make_ngram_vocab_size_divisible_by"])
    return math.ceil(sum(ngram_head_sizes(config)) / divisor) * divisor
