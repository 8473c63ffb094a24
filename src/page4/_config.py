"""Reads config.json into `geometry.Geometry`; every rejection names the key, what is allowed and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from page4.errors import ConfigError, message
from page4.geometry import (
    BLOCK_TOKENS,
    GdnGeometry,
    Geometry,
    IndexGeometry,
    LayerType,
    MoeGeometry,
    PleGeometry,
)

MAX_CONFIG_BYTES = 16 << 20
_MAX_SIZE = 1 << 31
_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
_LAYER_TYPES: dict[str, LayerType] = {"linear_attention": "gdn", "indexed_attention": "qsa", "full_attention": "qsa"}
_DTYPES = ("float32", "float16", "bfloat16")
_NO_DEFAULT = object()


def read_config(folder: Path) -> dict[str, Any]:
    """The mapping in `folder/config.json`. Raises `ConfigError`."""
    return read_config_file(folder / "config.json")


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a config file, whatever its name. Raises `ConfigError`."""
    if not path.is_file():
        _refuse(str(path), "a file", "none", "give the folder of a qwen4_exp checkpoint")
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        _refuse(str(path), f"at most {MAX_CONFIG_BYTES} bytes", f"{size} bytes", "restore config.json")
    try:
        config = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and huge integers
        _refuse(str(path), "a JSON object", f"{type(error).__name__}: {error}", "restore config.json")
    if not isinstance(config, dict):
        _refuse(str(path), "a JSON object", type(config).__name__, "restore config.json")
    return config


def geometry_from_config(config: Mapping[str, Any]) -> Geometry:
    """See `Geometry.from_config`."""
    _check_architecture(config)
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        _refuse("text_config", "an object", repr(inner), _CORRECT)
    keys = _Keys(config if inner is None else inner, outer=config)
    if inner is not None:
        _check_model_type("text_config.model_type", inner.get("model_type", "qwen4_exp_text"))
    _check_unquantised(keys)
    hidden_act = keys.choice("hidden_act", ("silu",), "silu")
    layer_types = _layer_types(keys)
    vocab_size = keys.size("vocab_size")
    head_dim = keys.size("head_dim", 256)
    rotary_dim, theta, sections = _rope(keys, head_dim)
    index = _index(keys, rotary_dim)
    eos = _token_ids(keys, vocab_size)
    geometry = Geometry(
        vocab_size=vocab_size,
        hidden_size=keys.size("hidden_size"),
        num_layers=len(layer_types),
        layer_types=layer_types,
        num_heads=keys.size("num_attention_heads"),
        num_kv_heads=keys.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        mrope_section=sections,
        attention_bias=keys.flag("attention_bias", False),
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        hc_count=keys.size("hc_count", 4, low=2),
        hc_lowrank=keys.size("hc_lowrank", 320),
        index=index,
        gdn=_gdn(keys, hidden_act),
        moe=_moe(keys),
        ple=_ple(keys, layer_types, vocab_size, eos),
        mtp_layers=keys.optional("mtp_num_hidden_layers", low=0, high=1),
        eos_token_ids=eos,
        bos_token_id=keys.optional("bos_token_id", low=0, high=vocab_size - 1),
        pad_token_id=keys.optional("pad_token_id", low=0, high=vocab_size - 1),
        max_positions=keys.size("max_position_embeddings", 32768),
        tie_word_embeddings=_tied(keys),
        dtype_name=_dtype_name(keys),
    )
    _check_divides("num_attention_heads", geometry.num_heads, "num_key_value_heads", geometry.num_kv_heads)
    return geometry


_CORRECT = "correct config.json"


def _refuse(what: str, allowed: str, got: object, do: str = _CORRECT) -> NoReturn:
    raise ConfigError(message(what, allowed=allowed, got=got, do=do))


class _Keys:
    """Typed reading of one mapping; `outer` is the whole config, for the few keys that may stand on either level."""

    def __init__(self, values: Mapping[str, Any], *, outer: Mapping[str, Any]) -> None:
        self.values = values
        self.outer = outer

    def get(self, key: str, default: object = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def either(self, key: str) -> Any:
        """The value on the inner level, else on the outer one."""
        value = self.values.get(key)
        return self.outer.get(key) if value is None else value

    def size(self, key: str, default: int | object = _NO_DEFAULT, *, low: int = 1, high: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        allowed = f"an integer from {low} to {high}"
        if value is _NO_DEFAULT:
            _refuse(key, allowed, "nothing", f"add {key} to config.json")
        return _integer(key, value, low, high)

    def optional(self, key: str, *, low: int, high: int) -> int | None:
        value = self.either(key)
        return None if value is None else _integer(key, value, low, high)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            _refuse(key, "true or false", repr(value))
        return value

    def positive(self, key: str, default: float) -> float:
        return _positive(key, self.get(key, default))

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        if value not in allowed:
            _refuse(key, " or ".join(allowed), repr(value), "page4 runs no other kind")
        return str(value)


def _integer(key: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(key, f"an integer from {low} to {high}", repr(value))
    return value


def _positive(key: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 < value < 1e30:
        _refuse(key, "a positive number", repr(value))
    return float(value)


def _check_divides(key: str, value: int, divisor_key: str, divisor: int) -> None:
    if value % divisor:
        _refuse(key, f"a multiple of {divisor_key} ({divisor})", value)


def _check_model_type(key: str, value: object) -> None:
    if value not in _MODEL_TYPES:
        _refuse(key, " or ".join(_MODEL_TYPES), repr(value), "page4 runs this architecture only")


def _check_architecture(config: Mapping[str, Any]) -> None:
    _check_model_type("model_type", config.get("model_type"))
    names = config.get("architectures")
    if names is None:
        return
    known = isinstance(names, list) and all(isinstance(name, str) and name.startswith("Qwen4Exp") for name in names)
    if not known:
        _refuse("architectures", "Qwen4Exp classes", repr(names), "page4 runs this architecture only")


def _check_unquantised(keys: _Keys) -> None:
    quantisation = keys.either("quantization_config")
    if quantisation is None:
        return
    only_cache = isinstance(quantisation, Mapping) and quantisation.get("quant_method") in (None, "compressed-tensors")
    if not only_cache or quantisation.get("config_groups"):
        _refuse("quantization_config", "none (16-bit or fp32 weights)", repr(quantisation), "use the unquantised model")


def _layer_types(keys: _Keys) -> tuple[LayerType, ...]:
    count = keys.size("num_hidden_layers", high=4096)
    names = keys.get("layer_types")
    if names is None:
        interval = keys.size("full_attention_interval", 4)
        names = ["linear_attention" if (i + 1) % interval else "indexed_attention" for i in range(count)]
    if not isinstance(names, list) or len(names) != count:
        got = f"{len(names)} names" if isinstance(names, list) else repr(names)
        _refuse("layer_types", f"a list of num_hidden_layers ({count}) names", got)
    unknown = sorted({str(name) for name in names if not isinstance(name, str) or name not in _LAYER_TYPES})
    if unknown:
        _refuse("layer_types", f"names among {', '.join(_LAYER_TYPES)}", ", ".join(unknown))
    kinds = tuple(_LAYER_TYPES[name] for name in names)
    if "qsa" not in kinds:
        _refuse("layer_types", "at least one indexed_attention layer", "none", "page4 runs models with QSA layers")
    return kinds


def _rope(keys: _Keys, head_dim: int) -> tuple[int, float, tuple[int, int, int] | None]:
    rope = keys.get("rope_parameters", keys.get("rope_scaling", {}))
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        _refuse("rope_parameters", "one object for all layers", repr(rope))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        _refuse("rope_parameters.rope_type", "default", repr(kind), "page4 extends no contexts; use the base model")
    theta = _positive("rope_theta", rope.get("rope_theta", keys.get("rope_theta", 10000.0)))
    factor = _positive(
        "partial_rotary_factor", rope.get("partial_rotary_factor", keys.get("partial_rotary_factor", 1.0))
    )
    if factor > 1.0:
        _refuse("partial_rotary_factor", "a number in (0, 1]", repr(factor))
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        _refuse("head_dim * partial_rotary_factor", "an even number of at least 2", f"{head_dim} * {factor}")
    return rotary_dim, theta, _mrope_section(rope)


def _mrope_section(rope: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The sections. Their sum is not checked: text gives all three axes one position, so they change nothing."""
    sections = rope.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list) or len(sections) != 3:
        _refuse("mrope_section", "a list of three integers", repr(sections))
    t, h, w = (_integer("mrope_section", value, 0, _MAX_SIZE) for value in sections)
    return t, h, w


def _index(keys: _Keys, rotary_dim: int) -> IndexGeometry:
    keys.size("indexer_kv_heads", high=1)
    ratio = keys.size("indexer_compress_ratio")
    if ratio != BLOCK_TOKENS:
        _refuse("indexer_compress_ratio", str(BLOCK_TOKENS), ratio, "page4 runs blocks of four tokens")
    budget = keys.size("indexer_budget")
    _check_divides("indexer_budget", budget, "indexer_compress_ratio", ratio)
    head_dim = keys.size("indexer_head_dim")
    if rotary_dim > head_dim:
        _refuse("indexer_head_dim", f"at least the rotary dims ({rotary_dim})", head_dim)
    return IndexGeometry(num_heads=keys.size("indexer_n_heads"), head_dim=head_dim, budget_tokens=budget)


def _gdn(keys: _Keys, hidden_act: str) -> GdnGeometry:
    gate = keys.choice("output_gate_type", ("silu", "sigmoid"), hidden_act)
    gdn = GdnGeometry(
        key_heads=keys.size("linear_num_key_heads", 16),
        value_heads=keys.size("linear_num_value_heads", 32),
        key_dim=keys.size("linear_key_head_dim", 128),
        value_dim=keys.size("linear_value_head_dim", 128),
        conv_kernel=keys.size("linear_conv_kernel_dim", 4, low=2, high=64),
        gate_activation=cast(Literal["silu", "sigmoid"], gate),
    )
    _check_divides("linear_num_value_heads", gdn.value_heads, "linear_num_key_heads", gdn.key_heads)
    return gdn


def _moe(keys: _Keys) -> MoeGeometry:
    num_experts = keys.size("num_experts")
    return MoeGeometry(
        num_experts=num_experts,
        top_k=keys.size("num_experts_per_tok", 10, high=num_experts),
        intermediate=keys.size("moe_intermediate_size"),
        shared_intermediate=keys.size("shared_expert_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", True),
    )


def _ple(keys: _Keys, layer_types: tuple[LayerType, ...], vocab_size: int, eos: tuple[int, ...]) -> PleGeometry | None:
    ids = keys.get("ple_layer_ids", [])
    if not isinstance(ids, list):
        _refuse("ple_layer_ids", "a list of 1-indexed layer ids", repr(ids))
    layers = tuple(sorted({_integer("ple_layer_ids", value, 1, len(layer_types)) - 1 for value in ids}))
    if not layers:
        return None
    wrong = [layer + 1 for layer in layers if layer_types[layer] != "gdn"]
    if wrong:
        _refuse("ple_layer_ids", "ids of linear_attention layers", wrong)
    if keys.get("eos_token_id") is None or not eos:
        _refuse("eos_token_id", "a token id beside ple_layer_ids", "nothing", "add eos_token_id to config.json")
    seed = keys.get("seed", 1234)
    ple = PleGeometry(
        layers=layers,
        embed_dim=keys.size("ple_embed_dim", keys.size("hidden_size")),
        conv_kernel=keys.size("ple_conv_kernel_size", 4, low=2, high=64),
        ngram_size=keys.size("ngram_size", 3, low=2, high=16),
        heads_per_ngram=keys.size("heads_per_ngram", 8, high=256),
        vocab_base=keys.size("ngram_vocab_size_base", 20_000_000, low=2),
        vocab_divisor=keys.size("make_ngram_vocab_size_divisible_by", 128),
        seed=_integer("seed", seed, -(1 << 63), (1 << 63) - 1),
        num_shards=keys.size("split_ngram_parts", 512),
        token_vocab_size=vocab_size,
        eos_token_id=eos[0],
    )
    _check_divides("ple_embed_dim", ple.embed_dim, "(ngram_size - 1) * heads_per_ngram", ple.num_heads)
    return ple


def _token_ids(keys: _Keys, vocab_size: int) -> tuple[int, ...]:
    value = keys.either("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_integer("eos_token_id", one, 0, vocab_size - 1) for one in values)


def _tied(keys: _Keys) -> bool:
    """The outer level decides when it says anything, as it owns the LM head."""
    key = "tie_word_embeddings"
    owner = keys if keys.outer.get(key) is None else _Keys(keys.outer, outer=keys.outer)
    return owner.flag(key, False)


def _dtype_name(keys: _Keys) -> Literal["float32", "float16", "bfloat16"]:
    value = next((v for v in map(keys.either, ("dtype", "torch_dtype")) if v is not None), "float32")
    if value not in _DTYPES:
        _refuse("dtype", " or ".join(_DTYPES), repr(value), "convert the checkpoint")
    return cast(Literal["float32", "float16", "bfloat16"], value)
