"""Which lanes run: overlays bound to their base, measured scales, drafts over E4M3 on request; or a refusal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import SMALL
from tests.engine.lanes import E4M3, make_llm, prompt_of, tokens, with_scales
from tests.oracle import random_checkpoint
from tests.scales.bases import INDEX, make_pack, make_report, max_abs_of, scale_of

from page4.engine import llm as llm_module
from page4.errors import LaneError, UsageError
from page4.scales.overlay import build_overlay
from page4.scales.sources import Sources


@dataclass(frozen=True)
class Overlays:
    """A base, a calibrated overlay of it, and one whose draft scales are a prototype."""

    base: Path
    calibrated: Path
    prototype: Path


@pytest.fixture
def overlays(tmp_path: Path) -> Overlays:
    made = Overlays(tmp_path / "base", tmp_path / "calibrated", tmp_path / "prototype")
    random_checkpoint(made.base, seed=11, max_shard_bytes=1 << 20, **SMALL)
    config = json.loads((made.base / "config.json").read_text())
    make_pack(tmp_path / "pack", made.base, config)
    report = tmp_path / "report.json"
    make_report(report, config)
    build_overlay(made.base, tmp_path / "pack", made.calibrated, Sources(draft_report=report))
    build_overlay(made.base, tmp_path / "pack", made.prototype, Sources(draft_unit_scale=True))
    return made


@pytest.fixture
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read or an arena was made before the refusal")

    monkeypatch.setattr(llm_module, "load_model", never)
    monkeypatch.setattr(llm_module, "Arena", never)


def refused(folder: Path, k: int, **options: Any) -> LaneError:
    with pytest.raises(LaneError) as caught:
        make_llm(folder, k, **options)
    assert str(caught.value).isprintable() and caught.value.exit_code == 3
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value


def test_an_overlay_runs_with_its_scales(overlays: Overlays) -> None:
    """The writer's and the reader's scale are one object with the value of the pack, the draft's that of the report."""
    llm = make_llm(overlays.calibrated, 3, **E4M3)
    geometry, arena = llm.geometry, llm.core.arena
    expected = {layer: [scale_of(max_abs_of(layer, side)) for side in "kv"] for layer in geometry.qsa_layers}
    expected[geometry.draft_layer] = [scale_of(2 * max_abs_of(geometry.draft_layer, side)) for side in "kv"]
    assert set(arena.layout.kv) == set(expected)
    for layer, (k, v) in expected.items():
        layer_kv = arena.layer_kv(layer)
        assert layer_kv.k_scale is not None and layer_kv.v_scale is not None
        assert (layer_kv.k_scale.value, layer_kv.v_scale.value) == (k, v)
        assert layer_kv.k_scale is llm.lane.scales[layer][0] and layer_kv.v_scale is llm.lane.scales[layer][1]
    lane = llm.lane.as_object()
    assert (lane["scale_source"], lane["artifact_id"], lane["drafts"]) == ("overlay", "by hand", 3)
    assert (lane["kv_dtype"], lane["draft_kv_dtype"], lane["warnings"]) == ("fp8_e4m3", "fp8_e4m3", [])
    assert lane["admitted_by"] == "opt-in (--e4m3-mtp)"
    prompt = prompt_of(40, 3)
    assert tokens(llm, prompt, 12) == tokens(make_llm(overlays.calibrated, 0, kv_cache_dtype="fp8"), prompt, 12)


@pytest.mark.usefixtures("nothing_is_allocated")
def test_drafts_over_e4m3_need_an_opt_in(overlays: Overlays, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto", "draft_kv_dtype": "fp8"}):
        error = refused(overlays.calibrated, 2, **options)
        assert len(error.faults) == 1 and "--e4m3-mtp or PAGE4_E4M3_MTP=1" in error.faults[0]
    monkeypatch.setenv("PAGE4_E4M3_MTP", "1")
    refused(overlays.calibrated, 2, kv_cache_dtype="fp8", e4m3_mtp=False)


@pytest.mark.parametrize("name", ["PAGE4_E4M3_MTP", "VLLM_QWEN4EXP_QSA_E4M3_MTP"])
def test_the_environment_can_opt_in(overlays: Overlays, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert make_llm(overlays.calibrated, 1, kv_cache_dtype="fp8").lane.admitted_by == "opt-in (PAGE4_E4M3_MTP)"
    monkeypatch.setenv(name, "yes")
    with pytest.raises(UsageError, match=name):
        make_llm(overlays.calibrated, 1, kv_cache_dtype="fp8")


def test_other_lanes_need_none(overlays: Overlays) -> None:
    for k, options in ((0, {"kv_cache_dtype": "fp8"}), (2, {}), (0, {})):
        lane = make_llm(overlays.calibrated, k, **options).lane
        assert lane.admitted_by == "every lane without E4M3 K/V under drafts"
        assert lane.scale_source == ("overlay" if options else "none")


def test_scales_that_nobody_measured_are_refused_where_they_would_be_used(
    overlays: Overlays, caplog: pytest.LogCaptureFixture
) -> None:
    error = refused(overlays.prototype, 2, **E4M3)
    assert len(error.faults) == 1 and "--allow-prototype-scales" in error.faults[0]
    for side in "kv":
        assert f"mtp.layers.0.self_attn.{side}_scale (prototype:" in error.faults[0]
    assert make_llm(overlays.prototype, 0, kv_cache_dtype="fp8").lane.prototypes == ()
    assert make_llm(overlays.prototype, 2, **E4M3, draft_kv_dtype="auto").lane.prototypes == ()
    lane = make_llm(overlays.prototype, 2, **E4M3, allow_prototype_scales=True).lane
    assert len(lane.prototypes) == 2 and len(lane.warnings) == 1 and "nobody measured" in lane.warnings[0]
    assert lane.warnings[0] in caplog.messages


@pytest.mark.usefixtures("nothing_is_allocated")
def test_all_faults_come_at_once_and_before_any_weight(overlays: Overlays) -> None:
    data = bytearray((overlays.prototype / "model-kvscales.safetensors").read_bytes())
    data[-4] ^= 1
    (overlays.prototype / "model-kvscales.safetensors").write_bytes(data)
    with (overlays.prototype / INDEX).open("a") as index:
        index.write("\n")
    error = refused(overlays.prototype, 2, kv_cache_dtype="fp8")
    expected = (f"{INDEX}: expected SHA-256", "model-kvscales.safetensors: expected SHA-256", "prototype:", "opt-in")
    for part in expected:
        assert sum(part in fault for fault in error.faults) == 1, part
    assert len(error.faults) == len(expected)


@pytest.mark.usefixtures("nothing_is_allocated")
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("options", [{}, E4M3], ids=["16 bits", "e4m3"])
def test_an_overlay_of_another_base_never_runs(overlays: Overlays, k: int, options: dict[str, Any]) -> None:
    path = next(overlays.base.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = refused(overlays.calibrated, k, **options)
    assert "another checkpoint of the same shape" in str(error)


@pytest.mark.usefixtures("nothing_is_allocated")
@pytest.mark.parametrize("side", ["k", "v"])
def test_a_draft_with_half_its_scales_is_refused_by_name(small: Path, tmp_path: Path, side: str) -> None:
    name = f"mtp.layers.0.self_attn.{side}_scale"
    error = refused(with_scales(small, tmp_path, skip=(name,)), 2, **E4M3)
    assert f"got no {name};" in str(error) and "--draft-kv-dtype auto" in str(error)


def test_unit_scales_are_said(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm(small, 2, **E4M3, draft_kv_dtype="auto", allow_unit_scales=True)
    lane = llm.lane.as_object()
    assert (lane["scale_source"], lane["draft_kv_dtype"]) == ("unit", "float32")
    assert lane["unit_layers"] == list(llm.geometry.qsa_layers)
    assert len(lane["warnings"]) == 1 and "nothing is calibrated" in lane["warnings"][0]
    assert lane["warnings"][0] in caplog.messages
    assert {entry.scale for entry in llm.metrics.kv} == {1.0}
    error = refused(small, 2, **E4M3, allow_unit_scales=True)
    assert "K/V scales of the draft" in error.faults[0] and len(error.faults) == 1


def test_scales_inside_a_checkpoint_are_used_and_named_so(small_e4m3: Path) -> None:
    llm = make_llm(small_e4m3, 2, **E4M3)
    assert (llm.lane.scale_source, llm.lane.artifact_id) == ("checkpoint", None)
    values = [entry.scale for entry in llm.metrics.kv]
    assert values == pytest.approx([0.0047 + 0.0009 * n for n in range(len(values))], rel=1e-6)
