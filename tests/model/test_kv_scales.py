"""K/V scales: every spelling consumed once or refused by name (B13), drafts never at 1 by silence (B14)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import oracle
from torch import Tensor

from page4.checkpoint import Checkpoint
from page4.codec import Scale
from page4.errors import LaneError, ScaleError
from page4.geometry import Geometry
from page4.model.kv_scales import Scales, resolve_scales

PAIRS = {
    "attention": ("self_attn.k_scale", "self_attn.v_scale"),
    "inner attention": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "fused projection": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
}
PREFIXES = ["", "model.", "model.language_model."]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.fixture
def resolve(tmp_path: Path) -> Any:
    """`resolve(tensors, ...)`: writes a folder with TINY's config and these tensors, and resolves its scales."""

    def run(tensors: dict[str, Tensor], **options: Any) -> Scales:
        config = {**oracle.TINY, **options.pop("config", {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"model.embed_tokens.weight": torch.zeros(2), **tensors}, tmp_path / "model.safetensors")
        options = {"kv_dtype": "fp8", "with_draft": False, **options}
        return resolve_scales(Checkpoint.open(tmp_path), Geometry.from_folder(tmp_path), **options)

    return run


def target(k: float = 0.25, v: float = 0.5) -> dict[str, Tensor]:
    return {"model.layers.3.self_attn.k_scale": scalar(k), "model.layers.3.self_attn.v_scale": scalar(v)}


def draft(k: float = 0.125, v: float = 2.0) -> dict[str, Tensor]:
    return {"mtp.layers.0.self_attn.k_scale": scalar(k), "mtp.layers.0.self_attn.v_scale": scalar(v)}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("spelling", PAIRS)
def test_every_spelling_gives_k_and_v(resolve: Any, spelling: str, prefix: str) -> None:
    k, v = PAIRS[spelling]
    tensors = {f"{prefix}layers.3.{k}": scalar(0.25), f"{prefix}layers.3.{v}": scalar(0.5)}
    assert resolve(tensors) == {3: (Scale(0.25), Scale(0.5))}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["self_attn.kv_scale", "self_attn.attn.kv_scale"])
def test_the_old_single_scale_serves_both_sides(resolve: Any, name: str, prefix: str) -> None:
    assert resolve({f"{prefix}layers.3.{name}": scalar(0.25)}) == {3: (Scale(0.25), Scale(0.25))}


@pytest.mark.parametrize("spelling", PAIRS)
def test_the_draft_is_the_layer_after_the_last(resolve: Any, spelling: str) -> None:
    k, v = PAIRS[spelling]
    tensors = {f"mtp.layers.0.{k}": scalar(0.125), f"mtp.layers.0.{v}": scalar(2.0), **target()}
    assert resolve(tensors, with_draft=True) == {3: (Scale(0.25), Scale(0.5)), 4: (Scale(0.125), Scale(2.0))}


def test_all_layers_of_a_deeper_model(resolve: Any) -> None:
    config = {"num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
    tensors = {
        f"model.layers.{layer}.self_attn.{side}_scale": scalar(2.0**-layer * (1 if side == "k" else 3))
        for layer in (3, 7)
        for side in "kv"
    }
    assert resolve(tensors, config=config) == {i: (Scale(2.0**-i), Scale(3 * 2.0**-i)) for i in (3, 7)}
    del tensors["model.layers.7.self_attn.v_scale"]
    with pytest.raises(ScaleError, match=r"no layers\.7\.self_attn\.v_scale"):
        resolve(tensors, config=config)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, ()), (torch.float32, (1,)), (torch.bfloat16, ()), (torch.float16, (1,))]
)
def test_stored_types(resolve: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {name: value.to(dtype).reshape(shape) for name, value in target(0.171875, 3.5).items()}
    assert resolve(tensors) == {3: (Scale(0.171875), Scale(3.5))}


REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "nothing": ({}, r"no layers\.3\.self_attn\.k_scale, layers\.3\.self_attn\.v_scale"),
    "v missing": ({"model.layers.3.self_attn.k_scale": scalar(0.25)}, r"no layers\.3\.self_attn\.v_scale"),
    "k missing": ({"model.layers.3.self_attn.v_scale": scalar(0.25)}, r"no layers\.3\.self_attn\.k_scale"),
    "layer too deep": ({**target(), "model.layers.9.self_attn.k_scale": scalar(1)}, r"model\.layers\.9\.self_attn"),
    "draft under its run-time number": ({**target(), "model.layers.4.self_attn.k_scale": scalar(1)}, r"layers\.4\."),
    "GDN layer": ({**target(), "model.layers.1.self_attn.k_scale": scalar(1)}, r"layers\.1\..*without a K/V cache"),
    "linear attention": ({**target(), "model.layers.1.linear_attn.k_scale": scalar(1)}, r"layers\.1\.linear_attn"),
    "second draft": ({**target(), "mtp.layers.1.self_attn.k_scale": scalar(1)}, r"mtp\.layers\.1\."),
    "k on the v projection": ({**target(), "model.layers.3.self_attn.v_proj.k_scale": scalar(1)}, r"v_proj\.k_scale"),
    "query scale": ({**target(), "model.layers.3.self_attn.q_scale": scalar(1)}, r"self_attn\.q_scale"),
    "probability scale": ({**target(), "model.layers.3.self_attn.attn.prob_scale": scalar(1)}, r"attn\.prob_scale"),
    "output scale": ({**target(), "model.layers.3.self_attn.k_proj.output_scale": scalar(1)}, r"output_scale"),
    "zero point": ({**target(), "model.layers.3.self_attn.k_zero_point": scalar(1)}, r"k_zero_point"),
    "padded layer number": ({**target(), "model.layers.03.self_attn.k_scale": scalar(1)}, r"layers\.03\."),
    "negative layer": ({**target(), "model.layers.-1.self_attn.k_scale": scalar(1)}, r"layers\.-1\."),
    "no layer": ({**target(), "model.self_attn.k_scale": scalar(1)}, r"model\.self_attn\.k_scale"),
    "two spellings": (
        {**target(), "model.layers.3.self_attn.attn.k_scale": scalar(0.25)},
        r"one tensor, got .*self_attn\.(attn\.)?k_scale and .*k_scale",
    ),
    "two prefixes": ({**target(), "layers.3.self_attn.k_scale": scalar(0.25)}, r"one tensor"),
    "old and new": ({**target(), "model.layers.3.self_attn.kv_scale": scalar(0.25)}, r"one tensor.*kv_scale"),
    "a vector": ({**target(), "model.layers.3.self_attn.k_scale": torch.ones(2)}, r"k_scale: .*F32 \[2\]"),
    "empty": ({**target(), "model.layers.3.self_attn.k_scale": torch.ones(0)}, r"F32 \[0\]"),
    "double": ({**target(), "model.layers.3.self_attn.k_scale": torch.tensor(1.0, dtype=torch.float64)}, r"F64"),
    "integer": ({**target(), "model.layers.3.self_attn.k_scale": torch.tensor(1)}, r"I64"),
} | {
    f"value {value}": (target(v=value), r"layers\.3\.self_attn\.v_scale")
    for value in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf)
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_placed_is_refused_by_name(resolve: Any, case: str) -> None:
    tensors, pattern = REFUSED[case]
    with pytest.raises(ScaleError, match=pattern) as error:
        resolve(tensors)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in ("nothing", "v missing", "k missing")])
def test_a_16_bit_cache_refuses_the_same_tensors(resolve: Any, case: str) -> None:
    with pytest.raises(ScaleError):
        resolve(REFUSED[case][0], kv_dtype="auto")


def test_a_16_bit_cache_needs_no_scales_and_uses_none(resolve: Any) -> None:
    for kv_dtype in ("auto", "bfloat16", "float16", torch.bfloat16):
        assert resolve({**target(), **draft()}, kv_dtype=kv_dtype, with_draft=True) == {}
        assert resolve({}, kv_dtype=kv_dtype, with_draft=True) == {}


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", torch.uint8, torch.float8_e4m3fn])
def test_the_names_of_an_e4m3_cache(resolve: Any, kv_dtype: str | torch.dtype) -> None:
    assert set(resolve(target(), kv_dtype=kv_dtype)) == {3}


def test_a_draft_without_scales_is_refused_unless_its_policy_is_stated(resolve: Any) -> None:
    with pytest.raises(ScaleError, match=r"mtp\.layers\.0\.self_attn\.k_scale.*--draft-kv-dtype"):
        resolve(target(), with_draft=True)
    assert set(resolve(target(), with_draft=True, draft_kv_dtype="auto")) == {3}
    assert set(resolve(target(), with_draft=True, draft_kv_dtype=torch.bfloat16)) == {3}
    assert set(resolve(target(), with_draft=False)) == {3}
    half = {**target(), "mtp.layers.0.self_attn.k_scale": scalar(0.125)}
    with pytest.raises(ScaleError, match=r"no mtp\.layers\.0\.self_attn\.v_scale"):
        resolve(half, with_draft=True)


def test_an_e4m3_draft_beside_a_16_bit_target(resolve: Any) -> None:
    scales = resolve({**target(), **draft()}, kv_dtype="auto", draft_kv_dtype="fp8", with_draft=True)
    assert scales == {4: (Scale(0.125), Scale(2.0))}


def test_draft_scales_stay_unused_without_a_draft(resolve: Any) -> None:
    assert set(resolve({**target(), **draft()}, with_draft=False)) == {3}


def test_unit_scales_serve_a_target_when_asked_for_and_never_a_draft(resolve: Any) -> None:
    assert resolve({}, allow_unit_scales=True) == {3: (Scale(1.0), Scale(1.0))}
    with pytest.raises(LaneError, match=r"of the draft.*no mtp\.layers\.0.*--draft-kv-dtype auto") as error:
        resolve({}, with_draft=True, allow_unit_scales=True)
    assert len(error.value.faults) == 1
    assert resolve({}, with_draft=True, draft_kv_dtype="auto", allow_unit_scales=True).keys() == {3}
    assert resolve(draft(), with_draft=True, allow_unit_scales=True)[4] == (Scale(0.125), Scale(2.0))


def test_all_faults_are_in_one_message(resolve: Any) -> None:
    tensors = {
        "model.layers.3.self_attn.k_scale": scalar(math.nan),
        "model.layers.9.self_attn.k_scale": scalar(1),
        "model.layers.3.self_attn.q_scale": scalar(1),
        "mtp.layers.0.self_attn.v_scale": torch.ones(2),
    }
    with pytest.raises(LaneError) as error:
        resolve(tensors, with_draft=True)
    expected = [
        "no layers.3.self_attn.v_scale", "model.layers.3.self_attn.k_scale", "model.layers.9.self_attn.k_scale",
        "model.layers.3.self_attn.q_scale", "mtp.layers.0.self_attn.v_scale: ",
        "of the draft: expected two for each of the layers [4], got no mtp.layers.0.self_attn.k_scale;",
    ]  # fmt: skip
    assert len(error.value.faults) == len(expected)
    for part in expected:
        assert sum(part in fault for fault in error.value.faults) == 1, part
    assert "refused, 6 faults: (1) " in str(error.value) and str(error.value).isprintable()


def test_unit_scales_never_complete_a_set(resolve: Any) -> None:
    with pytest.raises(ScaleError, match="v_scale"):
        resolve({"model.layers.3.self_attn.k_scale": scalar(0.25)}, allow_unit_scales=True)
    with pytest.raises(ScaleError, match="mtp"):
        resolve(target(), with_draft=True, allow_unit_scales=True)
    assert resolve({**target(), **draft()}, with_draft=True, allow_unit_scales=True)[3] == (Scale(0.25), Scale(0.5))


def test_each_layer_and_side_has_its_own_object(resolve: Any) -> None:
    (k, v), (draft_k, draft_v) = resolve({**target(), **draft()}, with_draft=True).values()
    assert len({id(scale) for scale in (k, v, draft_k, draft_v)}) == 4
    assert (k.tensor().item(), v.tensor().item()) == (0.25, 0.5)
