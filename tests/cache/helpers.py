"""What the tests of the cache share: a small geometry, and E4M3 worked out in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from page4.cache.rows import Rows
from page4.geometry import Geometry

CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "architectures": ["Qwen4ExpForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [3],
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 24,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 0,
    "dtype": "float32",
}


def geometry(**changes: Any) -> Geometry:
    """2 GDN and 2 QSA layers (1 and 3; the draft is 4), with some config keys changed."""
    return Geometry.from_config({**CONFIG, **changes})


def production() -> Geometry:
    """The attention, GDN and PLE shapes of the public model."""
    return geometry(
        vocab_size=248320,
        hidden_size=2560,
        num_hidden_layers=48,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
        num_attention_heads=24,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        hc_count=4,
        hc_lowrank=320,
        ple_layer_ids=[2],
        ple_embed_dim=2560,
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
    )


def _magnitudes() -> list[Fraction]:
    """Values of the bytes 0x00..0x7E: sign 1, exponent 4 (bias 7), mantissa 3."""
    values = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        value = Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0 else Fraction(8 + mantissa, 8)
        values.append(value if exponent == 0 else value * Fraction(2) ** (exponent - 7))
    return values


MAGNITUDES = _magnitudes()


def fp32_quotient(x: float, scale: float) -> float:
    """x / scale rounded once to fp32, from the exact quotient."""
    exact = Fraction(x) / Fraction(scale)
    if exact == 0:
        return math.copysign(0.0, x)
    exponent = max(math.floor(math.log2(abs(exact))) - 24, -149)
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    unit = Fraction(2) ** exponent
    return math.copysign(float(round(exact / unit) * unit), x)  # Fraction rounds half to even


def exact_byte(x: float, scale: float) -> int:
    """The E4M3 byte of a finite x: the nearest value to the fp32 quotient, ties to the even byte, at most 448."""
    quotient = fp32_quotient(x, scale)
    sign = 0x80 if math.copysign(1.0, quotient) < 0 else 0
    size = min(abs(Fraction(quotient)), Fraction(448))
    best = min(range(0x7F), key=lambda byte: (abs(MAGNITUDES[byte] - size), byte & 1))
    return sign | best


def make_rows(
    spans: list[tuple[int, int]],
    tables: list[list[int]],
    *,
    host: bool = True,
    padding: int = 0,
    order: list[int] | None = None,
) -> Rows:
    """Rows of spans (first position, length), one a request, with padding rows at the end; `order` shuffles them."""
    positions = [first + i for first, length in spans for i in range(length)] + [-1] * padding
    requests = [n for n, (_, length) in enumerate(spans) for _ in range(length)] + [0] * padding
    if order is not None:
        positions, requests = [positions[i] for i in order], [requests[i] for i in order]
    width = max(len(table) for table in tables)
    starts = [0]
    for _, length in spans:
        starts.append(starts[-1] + length)
    assert not (host and (padding or order)), "the host fields describe rows in order"
    return Rows(
        positions=torch.tensor(positions),
        request_of_row=torch.tensor(requests),
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        row_starts=tuple(starts) if host else None,
        first_positions=tuple(first for first, _ in spans) if host else None,
    )


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of the tensor's elements in order."""
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
