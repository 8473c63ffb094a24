"""`scales effect`: passes on a lane that uses its scales, and names the layers of every build that does not."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lanes import prompt_of
from tests.oracle import random_checkpoint

from page4 import cli
from page4.cache.rows import Rows
from page4.cache.storage import LayerKV
from page4.codec import Scale
from page4.errors import LaneError, UsageError
from page4.model.attention import Attended, Qsa, Queries
from page4.scales.calibrate import CalibrationOptions, calibrate
from page4.scales.effect import PROBES, EffectOptions, measure_effect
from page4.scales.overlay import build_overlay
from page4.scales.pack import make_pack
from page4.scales.shadow import ShadowKV
from page4.scales.sources import Sources
from page4.select import Selection

LAYERS = (1, 3)
DRAFT = 4


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of two QSA layers and a draft head, samples of token ids, and the overlay that a calibration gives."""
    root = tmp_path_factory.mktemp("effect")
    base = random_checkpoint(
        root / "base",
        seed=31,
        max_shard_bytes=1 << 20,
        vocab_size=24,
        indexer_budget=32,
        max_position_embeddings=512,
        ple_layer_ids=[],
        layer_types=["linear_attention", "indexed_attention"] * 2,
    )
    samples = [{"prompt_token_ids": prompt_of(length, seed)} for seed, length in enumerate((9, 60, 90), start=1)]
    (root / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    report = root / "calibration" / "calibration-report.json"
    calibrate(base, root / "samples.jsonl", report.parent, CalibrationOptions())
    make_pack(report, base, root / "pack")
    build_overlay(base, root / "pack", root / "overlay", Sources(draft_report=report))
    build_overlay(base, root / "pack", root / "prototype", Sources(draft_unit_scale=True))
    return root


def options(lane: Path, **more: Any) -> EffectOptions:
    return EffectOptions(prompts=lane / "samples.jsonl", new_tokens=12, **more)


def test_every_scale_of_a_good_lane_takes_effect(lane: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = measure_effect(lane / "overlay", options(lane), lambda done, total: seen.append((done, total)))
    assert found.faults == ()
    assert [(entry.layer, entry.side) for entry in found.scales] == [(i, s) for i in (*LAYERS, DRAFT) for s in "kv"]
    for entry in found.scales:
        assert [probe.probe for probe in entry.probes] == ["x1.3", "/32", "x4096", "x65536"]
        rounded, clipped, _, underflow = entry.probes
        assert 0.001 < entry.error < 0.15 and rounded.moved > 0.001
        assert min(clipped.growth, underflow.growth) >= 4
        assert max(probe.mismatch for probe in entry.probes) < 1e-4
    assert seen == [(n, 3 + 24) for n in range(1, 28)]
    assert found.target_logits is not None and found.draft_logits is not None
    assert 0 < found.target_logits < 0.2 and 0 < found.draft_logits < 0.3


def test_logits_move_behind_the_layers_that_were_probed(lane: Path) -> None:
    """A draft scale cannot change the target, and a target scale changes both."""
    found = measure_effect(lane / "overlay", options(lane))
    for entry in found.scales:
        clipped = entry.probes[1]
        assert clipped.target_logits is not None and clipped.draft_logits is not None
        assert (clipped.target_logits == found.target_logits) == (entry.layer == DRAFT)
        assert clipped.draft_logits != found.draft_logits


Change = Callable[[int, LayerKV], LayerKV]


class Elsewhere:
    """An arena whose layers have other scales."""

    def __init__(self, arena: Any, change: Change) -> None:
        self._arena, self._change = arena, change

    def layer_kv(self, layer: int) -> LayerKV:
        found: LayerKV = self._arena.layer_kv(layer)
        return self._change(layer, found) if found.is_e4m3 else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)


def break_build(monkeypatch: pytest.MonkeyPatch, *, writer: Change | None = None, reader: Change | None = None) -> None:
    """A build whose writer or reader takes its scales from somewhere else."""
    write, attend = Qsa._write, Qsa._attend

    def writes(self: Qsa, x: Any, segment: Any, turned: Any, arena: Any, **more: Any) -> Any:
        there: Any = Elsewhere(arena, writer) if writer else arena
        return write(self, x, segment, turned, there, **more)

    def attends(self: Qsa, queries: Any, rows: Any, arena: Any, reuse: Any) -> Any:
        there: Any = Elsewhere(arena, reader) if reader else arena
        return attend(self, queries, rows, there, reuse)

    monkeypatch.setattr(Qsa, "_write", writes)
    monkeypatch.setattr(Qsa, "_attend", attends)


def ones(*layers: int, sides: str = "kv") -> Change:
    """Scales of 1 in some layers."""

    def change(layer: int, layer_kv: LayerKV) -> LayerKV:
        values: dict[str, Any] = {f"{side}_scale": Scale(1.0) for side in sides} if layer in layers else {}
        return dataclasses.replace(layer_kv, **values)

    return change


def fixed(layers: tuple[int, ...], of: dict[int, tuple[Scale, Scale]]) -> Change:
    """Scales of the overlay, whatever the arena holds: what a reader does that has copied them at start."""

    def change(layer: int, layer_kv: LayerKV) -> LayerKV:
        return (
            dataclasses.replace(layer_kv, k_scale=of[layer][0], v_scale=of[layer][1]) if layer in layers else layer_kv
        )

    return change


def faulty_layers(lane: Path, monkeypatch: pytest.MonkeyPatch, kernels: str) -> set[int]:
    monkeypatch.setenv("PAGE4_KERNELS", kernels)
    found = measure_effect(lane / "overlay", options(lane))
    named = {
        int(n) for fault in found.faults for n in re.findall(r"^model\.layers\.(\d+)\.self_attn\.[kv]_scale: ", fault)
    }
    assert all(fault.startswith("model.layers.") for fault in found.faults)
    assert named == {entry.layer for entry in found.scales if entry.faults}
    return named


BROKEN: dict[str, tuple[set[int], dict[str, Change]]] = {
    "reader at 1": ({1, 3, 4}, {"reader": ones(1, 3, 4)}),
    "writer at 1": ({1, 3, 4}, {"writer": ones(1, 3, 4)}),
    "both at 1": ({1, 3, 4}, {"reader": ones(1, 3, 4), "writer": ones(1, 3, 4)}),
    "reader of one layer": ({3}, {"reader": ones(3)}),
    "writer of one layer": ({1}, {"writer": ones(1)}),
    "both of one layer": ({3}, {"reader": ones(3), "writer": ones(3)}),
    "reader of K": ({1}, {"reader": ones(1, sides="k")}),
    "reader of V": ({3}, {"reader": ones(3, sides="v")}),
    "K at 1 on both sides": ({3}, {"reader": ones(3, sides="k"), "writer": ones(3, sides="k")}),
    "V at 1 on both sides": ({1}, {"reader": ones(1, sides="v"), "writer": ones(1, sides="v")}),
    "draft at 1": ({4}, {"reader": ones(4), "writer": ones(4)}),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_build_that_forces_scales_is_caught_and_its_layers_named(
    lane: Path, monkeypatch: pytest.MonkeyPatch, case: str, kernels: str
) -> None:
    layers, changes = BROKEN[case]
    break_build(monkeypatch, **changes)
    assert faulty_layers(lane, monkeypatch, kernels) == layers


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("swapped", [(1, 3), (3, 4)], ids=["two layers", "a layer and the draft"])
def test_a_build_that_swaps_layers_is_caught(
    lane: Path, monkeypatch: pytest.MonkeyPatch, swapped: tuple[int, int], kernels: str
) -> None:
    def swap(self: Elsewhere, layer: int) -> LayerKV:
        found: LayerKV = self._arena.layer_kv(layer)
        other: LayerKV = self._arena.layer_kv(sum(swapped) - layer) if layer in swapped else found
        return dataclasses.replace(found, k_scale=other.k_scale, v_scale=other.v_scale) if found.is_e4m3 else found

    monkeypatch.setattr(Elsewhere, "layer_kv", swap)
    break_build(monkeypatch, reader=ones(), writer=ones())
    assert faulty_layers(lane, monkeypatch, kernels) == set(swapped)


@pytest.mark.usefixtures("one_thread")
def test_a_reader_that_keeps_the_scales_of_the_start_is_caught(lane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the overlay's own scales this build is right; only a probe can tell."""
    good = (lane / "overlay", options(lane))
    own = {(entry.layer, entry.side): Scale(entry.scale) for entry in measure_effect(*good).scales}
    pairs = {layer: (own[layer, "k"], own[layer, "v"]) for layer in (*LAYERS, DRAFT)}
    break_build(monkeypatch, reader=fixed((3,), pairs), writer=fixed((3,), pairs))
    found = measure_effect(*good)
    assert {entry.layer for entry in found.scales if entry.faults} == {3}
    assert all(fault.split(": ")[1] in {probe.name for probe in PROBES} for fault in found.faults)
    assert sum("attention does not change" in fault for fault in found.faults) == 2 * len(PROBES)


def test_a_refused_lane_is_not_probed(lane: Path) -> None:
    with pytest.raises(LaneError, match="prototype:"):
        measure_effect(lane / "prototype", options(lane))
    with pytest.raises(LaneError, match=r"no layers\.1\.self_attn\.k_scale"):
        measure_effect(lane / "base", options(lane))
    with pytest.raises(UsageError, match="num_samples"):
        options(lane, num_samples=0)


def test_scales_that_are_far_too_large_are_not_proven(lane: Path, tmp_path: Path) -> None:
    """A draft at 1: nothing clips at a 32nd, and the overlay says that nobody measured it."""
    found = measure_effect(lane / "prototype", options(lane, allow_prototype_scales=True))
    assert {entry.layer for entry in found.scales if entry.faults} == {DRAFT}
    assert any("/32: the error grows" in fault for fault in found.faults)


def test_the_command_prints_a_table_and_a_verdict(
    lane: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("scales", "effect", str(lane / "overlay"), "--prompts", str(lane / "samples.jsonl"))
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("yes") == 6 and "pass, every scale takes effect (6 scales, 159 tokens" in out
    assert cli.main([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["pass"] is True and len(value["scales"]) == 6 and value["limits"]["max_error"] == 0.15
    break_build(monkeypatch, reader=ones(3))
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert out.count("NO") == 2 and "fault: model.layers.3.self_attn.k_scale: prompts: attention is off by" in out
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["pass"] is False


def test_a_shadow_gives_attention_over_numbers() -> None:
    """Against sums written out: two rows of one head, values that E4M3 holds and values that it rounds."""
    pages = torch.zeros(2, 4, 1, 2)
    shadow = ShadowKV(LayerKV(pages, pages.clone()), (Scale(0.5), Scale(2.0)))
    rows = Rows(torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([[1]], dtype=torch.int32))
    k = torch.tensor([[[0.5, 0.0]], [[-0.5, 0.0]]])
    # 3.3 / 2 = 1.65 lies between 1.625 and 1.75: 1.625, so 3.25 is left of it.
    v = torch.tensor([[[3.3, 4.0]], [[0.0, 8.0]]])
    shadow.write(k, v, rows)
    none = Selection(torch.full((2, 1), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), True)
    q = torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]])
    gate = torch.full((2, 1, 2), 40.0)
    heads = shadow.attend(Attended(3, Queries(q, gate, None), none, rows, q))
    first = 1 / (1 + math.exp(-2.0 / math.sqrt(2)))
    expected = torch.tensor([[[3.25, 4.0]], [[3.25 * first, 4.0 * first + 8.0 * (1 - first)]]])
    torch.testing.assert_close(heads, expected, rtol=1e-6, atol=1e-6)
