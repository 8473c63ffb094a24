"""The weight loader: values against the tensors as the safetensors package reads them, and every refusal by name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import oracle
from torch import Tensor

from page4.checkpoint import Checkpoint
from page4.errors import ConfigError, TensorError
from page4.geometry import Geometry
from page4.model.weight_tree import LayerWeights, Weights
from page4.model.weights import load_model, read_weights

SMALL: dict[str, Any] = {"hidden_size": 32, "ple_embed_dim": 64, "vocab_size": 64, "num_experts": 3, "hc_lowrank": 8}
Change = Callable[[dict[str, Tensor]], None]


def read(folder: Path, dtype: torch.dtype = torch.float32, *, with_draft: bool = True) -> Weights:
    return read_weights(Checkpoint.open(folder), Geometry.from_folder(folder), dtype, with_draft=with_draft)


def write(folder: Path, change: Change | None = None, **options: Any) -> Path:
    """A small single-file checkpoint whose tensors `change` may edit, by their names on disk."""
    oracle.random_checkpoint(folder, **{"seed": 3, **SMALL, **options})
    if change is not None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return folder


def edit_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def flatten(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from flatten(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from flatten(getattr(value, field.name), f"{path}.{field.name}")


def check_layer(layer: LayerWeights, t: Callable[[str], Tensor]) -> None:
    """Every field of a layer from its tensors on disk; `t` reads one by its name in the layer, in the model dtype."""

    def same(field: Tensor, *names: str) -> None:
        assert torch.equal(field, torch.cat([t(name) for name in names])), names

    def norm(field: Tensor, name: str) -> None:
        assert field.dtype is torch.float32 and torch.equal(field, 1 + t(name).float()), name

    for hyper, prefix in ((layer.attn_hyper, "attn"), (layer.mlp_hyper, "mlp")):
        prefix += "_hyper_connection"
        norm(hyper.norm, f"{prefix}.hc_norm.weight")
        same(hyper.down, f"{prefix}.input_mix_weight_down.weight", f"{prefix}.block_inject_weight.weight")
        same(hyper.up, f"{prefix}.input_mix_weight_up.weight")
    moe = layer.moe
    same(moe.router, "mlp.gate.weight", "mlp.shared_expert_gate.weight")
    same(moe.gate_up, "mlp.experts.gate_up_proj")
    same(moe.down, "mlp.experts.down_proj")
    same(moe.shared_gate_up, "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight")
    same(moe.shared_down, "mlp.shared_expert.down_proj.weight")
    if (gdn := layer.gdn) is not None:
        parts = [f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
        same(gdn.in_proj, *parts)
        assert gdn.split == tuple(t(name).shape[0] for name in parts)
        assert torch.equal(gdn.conv, t("linear_attn.conv1d.weight").squeeze(1))
        same(gdn.norm, "linear_attn.norm.weight")
        same(gdn.out_proj, "linear_attn.out_proj.weight")
    if (qsa := layer.qsa) is not None:
        parts = [f"self_attn.{part}_proj.weight" for part in ("q", "k", "v", "indexer.index_qk")]
        same(qsa.in_proj, *parts)
        assert qsa.split == tuple(t(name).shape[0] for name in parts)
        same(qsa.o_proj, "self_attn.o_proj.weight")
        norm(qsa.q_norm, "self_attn.q_norm.weight")
        norm(qsa.k_norm, "self_attn.k_norm.weight")
        norm(qsa.index_q_norm, "self_attn.indexer.q_layernorm.weight")
        norm(qsa.index_k_norm, "self_attn.indexer.k_layernorm.weight")
        if qsa.in_bias is not None and qsa.o_bias is not None:
            zero = torch.zeros(qsa.split[3], dtype=qsa.in_bias.dtype)
            q, k, v = (t(f"self_attn.{part}_proj.bias") for part in "qkv")
            assert torch.equal(qsa.in_bias, torch.cat([q, k, v, zero]))
            same(qsa.o_bias, "self_attn.o_proj.bias")
    if (ple := layer.ple) is not None:
        same(ple.table, "ple.ple_embedding.ngram_embedding.weight")
        same(ple.kv_proj, "ple.key_proj.weight", "ple.value_proj.weight")
        assert torch.equal(ple.conv, t("ple.conv1d.weight").squeeze(1))
        for part in ("key", "query", "conv"):
            norm(getattr(ple, f"norm_{part}"), f"ple.norm_{part}.weight")


def check_tree(folder: Path, weights: Weights, dtype: torch.dtype) -> None:
    tensors = oracle.read_tensors(folder)
    if "embed_tokens.weight" in tensors:  # a checkpoint without prefix
        tensors |= {f"model.{name}": value for name, value in tensors.items()}

    def reader(prefix: str) -> Callable[[str], Tensor]:
        return lambda name: tensors[prefix + name].to(dtype)

    target = weights.target
    assert torch.equal(target.embed, reader("model.")("embed_tokens.weight"))
    for i, layer in enumerate(target.layers):
        check_layer(layer, reader(f"model.layers.{i}."))
        if layer.gdn is not None:
            for field, name in ((layer.gdn.a_log, "A_log"), (layer.gdn.dt_bias, "dt_bias")):
                stored = tensors[f"model.layers.{i}.linear_attn.{name}"]
                assert field.dtype is torch.float32 and torch.equal(field, stored.float())
    mixers = [(target.mixer, "model.hyper_connection_mixer.")]
    if (draft := weights.draft) is not None:
        check_layer(draft.layer, reader("mtp.layers.0."))
        mixers.append((draft.mixer, "mtp.hyper_connection_mixer."))
        t = reader("mtp.")
        assert torch.equal(draft.fc_embedding, t("fc_embedding.weight"))
        assert torch.equal(draft.fc_hidden, t("fc_hidden.weight"))
        assert torch.equal(draft.norm_embedding, 1 + t("pre_fc_norm_embedding.weight").float())
        assert torch.equal(draft.norm_hidden, 1 + t("pre_fc_norm_hidden.weight").float())
    for mixer, prefix in mixers:
        t = reader(prefix)
        assert torch.equal(mixer.norm, 1 + t("hc_norm.weight").float())
        assert torch.equal(mixer.down, t("input_mix_weight_down.weight"))
        assert torch.equal(mixer.up, t("input_mix_weight_up.weight"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "single file": {},
    "sharded": {"max_shard_bytes": 30_000},
    "language_model prefix": {"prefix": "model.language_model.", "wrapped": True},
    "no prefix": {"prefix": ""},
    "experts apart": {"experts": "split", "max_shard_bytes": 30_000},
    "whole table": {"ple_shards": 0},
    "twelve table shards": {"ple_shards": 12},
    "no draft": {"mtp": False},
    "no PLE": {"ple_layer_ids": []},
    "two PLE layers": {"ple_layer_ids": [1, 3]},
    "attention bias": {"attention_bias": True},
    "bf16 on disk": {"dtype": torch.bfloat16},
    "fp16 on disk": {"dtype": torch.float16},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_lands_in_its_field(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    folder = write(tmp_path / "m", **LAYOUTS[layout])
    weights = read(folder, dtype)
    check_tree(folder, weights, dtype)
    assert (weights.draft is not None) == (layout != "no draft")
    stored = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert set(weights.report.loaded) == stored and weights.report.ignored == ()
    assert len(weights.report.loaded) == len(stored)
    for path, tensor in flatten(weights):
        assert tensor.is_contiguous(), path
        assert tensor.dtype in (dtype, torch.float32, torch.int64), path


def test_the_derived_integers_of_ple(tmp_path: Path) -> None:
    folder = write(tmp_path, ple_layer_ids=[1, 3])
    for index, layer in enumerate((0, 2)):
        ple = read(folder).target.layers[layer].ple
        theirs = oracle.hf.Qwen4ExpTextNGramEmbedding(oracle.read_config(folder), 64, layer, index)
        assert ple is not None
        assert torch.equal(ple.multipliers, theirs.layer_multipliers)
        assert torch.equal(ple.head_vocab_sizes, theirs.ngram_heads_vocab_sizes)
        assert torch.equal(ple.head_offsets, theirs.ngram_heads_offsets)


def test_reads_what_transformers_saves(tmp_path: Path) -> None:
    """save_pretrained writes experts apart, table shards and the PLE buffers."""
    torch.manual_seed(0)
    config = oracle.make_config(**SMALL)
    oracle.hf.Qwen4ExpForCausalLM(config).save_pretrained(tmp_path, max_shard_size="50KB")
    weights = read(tmp_path, with_draft=False)
    check_tree(tmp_path, weights, torch.float32)
    assert any(name.endswith("layer_multipliers") for name in weights.report.loaded)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5


# The draft ---------------------------------------------------------------------------------------------------------


def test_an_absent_key_means_a_draft_when_its_tensors_exist(tmp_path: Path) -> None:
    folder = write(tmp_path)
    edit_config(folder, mtp_num_hidden_layers=...)
    assert read(folder).draft is not None


def test_a_draft_nobody_asked_for_is_ignored_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path)
    weights = read(folder, with_draft=False)
    ignored = dict(weights.report.ignored)
    assert weights.draft is None and all(name.startswith("mtp.") for name in ignored)
    assert "mtp.fc_hidden.weight" in ignored and "not asked for" in ignored["mtp.fc_hidden.weight"]
    edit_config(folder, mtp_num_hidden_layers=0)
    weights = read(folder)
    assert weights.draft is None and "no draft" in dict(weights.report.ignored)["mtp.fc_hidden.weight"]


def test_a_declared_draft_without_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, mtp=False)
    edit_config(folder, mtp_num_hidden_layers=1)
    with pytest.raises(TensorError, match=r"missing mtp\.fc_embedding\.weight"):
        read(folder)
    assert read(folder, with_draft=False).draft is None


# Ignored -----------------------------------------------------------------------------------------------------------


def test_vision_scales_and_rotary_buffers_are_ignored_with_a_reason(tmp_path: Path) -> None:
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": torch.zeros(2, 2),
        "model.layers.3.self_attn.k_scale": torch.tensor(0.25),
        "model.rotary_emb.inv_freq": torch.zeros(4),
    }
    ignored = dict(read(write(tmp_path, extra=extra)).report.ignored)
    assert set(ignored) == set(extra)
    assert "vision" in ignored["model.visual.blocks.0.attn.qkv.weight"]
    assert "scale" in ignored["model.layers.3.self_attn.k_scale"]


def test_tensors_outside_the_index_are_ignored_with_their_file(tmp_path: Path) -> None:
    folder = write(tmp_path, max_shard_bytes=30_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"]["lm_head.weight"]
    stored = load_file(folder / shard)
    save_file({**stored, "model.stray.weight": torch.zeros(3)}, folder / shard)
    assert read(folder).report.ignored == (("model.stray.weight", f"not listed in the index for {shard}"),)


# Refusals ----------------------------------------------------------------------------------------------------------


def drop(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, value)


TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
REFUSED: dict[str, tuple[Change, dict[str, Any], list[str]]] = {
    "one missing": (drop("model.layers.3.self_attn.q_proj.weight"), {}, ["missing model.layers.3.self_attn.q_proj"]),
    "several missing": (
        drop("lm_head.weight", "model.layers.0.linear_attn.A_log", "mtp.fc_hidden.weight"),
        {},
        ["missing", "lm_head.weight", "layers.0.linear_attn.A_log", "mtp.fc_hidden.weight"],
    ),
    "unexpected": (put("model.layers.0.linear_attn.extra", torch.zeros(2)), {}, ["unexpected", "linear_attn.extra"]),
    "layer too many": (put("model.layers.4.mlp.gate.weight", torch.zeros(3, 32)), {}, ["model.layers.4.mlp.gate"]),
    "second draft": (put("mtp.layers.1.mlp.gate.weight", torch.zeros(3, 32)), {}, ["mtp.layers.1.mlp.gate.weight"]),
    "QSA tensor in a GDN layer": (
        put("model.layers.0.self_attn.q_norm.weight", torch.zeros(64)), {}, ["model.layers.0.self_attn.q_norm.weight"],
    ),
    "wrong shape": (
        put("model.layers.0.linear_attn.A_log", torch.zeros(5)), {}, ["layers.0.linear_attn.A_log", "[5]", "[4]"],
    ),
    "transposed": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}), {}, ["lm_head.weight", "[32, 64]"],
    ),
    "conv without its middle axis": (
        lambda t: t.update({k: t[k].squeeze(1) for k in ["model.layers.0.linear_attn.conv1d.weight"]}),
        {}, ["conv1d.weight", "[256, 4]", "[256, 1, 4]"],
    ),
    "integer weights": (put("lm_head.weight", torch.zeros(64, 32, dtype=torch.int8)), {}, ["lm_head.weight", "I8"]),
    "fp8 weights": (
        put("lm_head.weight", torch.zeros(64, 32).to(torch.float8_e4m3fn)), {}, ["lm_head.weight", "F8_E4M3"],
    ),
    "weight scale": (put("lm_head.weight_scale", torch.tensor(1.0)), {}, ["unexpected lm_head.weight_scale"]),
    "two prefixes": (
        put("model.language_model.embed_tokens.weight", torch.zeros(64, 32)),
        {}, ["both", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"],
    ),
    "expert missing": (
        drop("model.layers.0.mlp.experts.1.up_proj.weight"), {"experts": "split"}, ["missing", "experts.1.up_proj"],
    ),
    "expert too many": (
        put("model.layers.0.mlp.experts.3.up_proj.weight", torch.zeros(32, 32)),
        {"experts": "split"}, ["unexpected", "experts.3.up_proj"],
    ),
    "fused and apart": (
        put("model.layers.0.mlp.experts.0.up_proj.weight", torch.zeros(32, 32)),
        {}, ["unexpected", "experts.0.up_proj"],
    ),
    "half fused": (drop("model.layers.0.mlp.experts.down_proj"), {}, ["missing", "experts.down_proj"]),
    "table shard missing in the middle": (drop(f"{TABLE}.shard_1.weight"), {"ple_shards": 4}, ["missing", "shard_1"]),
    "last table shard missing": (drop(f"{TABLE}.shard_3.weight"), {"ple_shards": 4}, ["missing", "shard_3", "rows"]),
    "table missing": (drop(f"{TABLE}.weight"), {"ple_shards": 0}, ["missing", "ngram_embedding.weight"]),
    "table whole and in shards": (
        lambda t: t.update({f"{TABLE}.weight": torch.cat([t[f"{TABLE}.shard_{i}.weight"] for i in range(2)])}),
        {}, ["unexpected", "shard_0", "shard_1"],
    ),
    "table too long": (put(f"{TABLE}.shard_2.weight", torch.zeros(16, 8)), {}, ["rows, not"]),
    "table rows too narrow": (
        lambda t: t.update({f"{TABLE}.shard_{i}.weight": t[f"{TABLE}.shard_{i}.weight"][:, :4] for i in range(2)}),
        {}, ["shard_0.weight has shape", ", 4]", ", 8]"],
    ),
    "wrong multipliers": (
        put("model.layers.1.ple.ple_embedding.layer_multipliers", torch.tensor([1, 3, 5])),
        {}, ["layer_multipliers is [1, 3, 5]", "the config gives"],
    ),
    "wrong table sizes": (
        put("model.layers.1.ple.ple_embedding.ngram_heads_vocab_sizes", torch.zeros(3, dtype=torch.int64)),
        {}, ["ngram_heads_vocab_sizes", "[3]", "[8]"],
    ),
    "float offsets": (
        put("model.layers.1.ple.ple_embedding.ngram_heads_offsets", torch.zeros(8)), {}, ["ngram_heads_offsets", "F32"],
    ),
    "tied but different": (
        put("lm_head.weight", torch.zeros(64, 32)), {"tie_word_embeddings": True}, ["lm_head.weight differs"],
    ),
    "bias missing": (
        drop("model.layers.3.self_attn.o_proj.bias"), {"attention_bias": True}, ["missing", "o_proj.bias"],
    ),
    "bias unexpected": (
        put("model.layers.3.self_attn.q_proj.bias", torch.zeros(256)), {}, ["unexpected", "q_proj.bias"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, options, words = REFUSED[case]
    folder = write(tmp_path, change, **options)

    def no_copy(*args: object) -> None:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr("torch.frombuffer", _only_small(torch.frombuffer, no_copy))
    with pytest.raises(TensorError) as error:
        read(folder)
    text = str(error.value)
    assert text.isprintable() and all(word in text for word in words), text


def _only_small(original: Callable[..., Tensor], refuse: Callable[..., None]) -> Callable[..., Tensor]:
    """The few PLE integers may be read to be compared; weights may not."""

    def wrapper(buffer: memoryview, **kwargs: Any) -> Tensor:
        if len(buffer) > 64:
            refuse()
        return original(buffer, **kwargs)

    return wrapper


def test_one_error_names_everything(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["model.stray"] = torch.zeros(1)
        tensors["model.hyper_connection_mixer.hc_norm.weight"] = torch.zeros(3)

    with pytest.raises(TensorError) as error:
        read(write(tmp_path, change))
    assert re.search(
        r"missing lm_head\.weight; unexpected model\.stray; .*hc_norm\.weight has shape \[3\]", str(error.value)
    )


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path / "once", tie_word_embeddings=True)
    weights = read(folder)
    assert weights.target.lm_head is weights.target.embed
    twice = write(
        tmp_path / "twice",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
        tie_word_embeddings=True,
    )
    weights = read(twice)
    assert weights.target.lm_head is weights.target.embed and "lm_head.weight" in weights.report.loaded


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float64"):
        read(write(tmp_path), torch.float64)


def test_load_model_gives_the_report(tmp_path: Path) -> None:
    model = load_model(write(tmp_path), torch.float32, with_draft=False)
    assert model.draft is None and model.dtype is torch.float32
    assert model.load_report.loaded and model.load_report.ignored
