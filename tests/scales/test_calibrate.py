"""Whole calibrations of a small checkpoint: what is seen, what is written, what is refused, what resumes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.lanes import Lane
from tests.scales.runs import (
    LAYERS,
    NAMES,
    report_bytes,
    run,
    small_checkpoint,
    spoiled_checkpoint,
    token_samples,
    tree,
)

from page4.assets import calibration_samples, embedded_checkpoint
from page4.errors import Page4Error, ScaleError, UsageError
from page4.model.batch import RowSpan, StepBatch
from page4.scales import calibrate as module
from page4.scales.calibrate import CalibrationOptions, Progress, calibrate
from page4.scales.observe import Observer, qsa_layers
from page4.scales.partial import Partial, Shard
from page4.scales.report import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_layer_sees_every_token_once(tmp_path: Path) -> None:
    samples = token_samples()
    report = run(tmp_path / "out", samples).report
    tokens = sum(len(sample["prompt_token_ids"]) for sample in samples)
    assert list(report["tensors"]) == NAMES
    assert report["tokens"] == tokens
    assert report["counted_forwards"] == report["samples"]["count"] == 10
    for name, tensor in report["tensors"].items():
        assert name == f"model.layers.{tensor['layer']}.self_attn.{tensor['kind']}_scale"
        assert tensor["tokens"] == tokens
        assert tensor["values"] == tokens * 64 == sum(tensor["log2_histogram"].values()) + tensor["zeros"]
        assert tensor["clipped"] == 0 and tensor["clip_rate"] == 0.0
        assert [shard["name"] for shard in tensor["shards"]] == [f"shard-000{n}-of-0003" for n in (1, 2, 3)]
        assert sum(shard["tokens"] for shard in tensor["shards"]) == tokens
        assert max(shard["max_abs"] for shard in tensor["shards"]) == tensor["max_abs"]


def test_what_is_observed_is_what_the_cache_stores(tmp_path: Path) -> None:
    """A plain loop over the model writes the same sample; its cache holds the largest values."""
    ids = [random.Random(1).randrange(3, 64) for _ in range(77)]
    report = run(tmp_path / "out", [{"prompt_token_ids": ids}]).report
    lane = Lane(small_checkpoint())
    sequence = lane.add()
    batch, output = lane.forward([(sequence, ids)])
    following = [*ids[1:], int(lane.model.logits(output.streams)[-1].argmax())]
    assert lane.model.draft is not None
    draft_batch = StepBatch.build([RowSpan(following, 0, sequence.pages, sequence.slot)], lane.geometry)
    lane.model.draft.forward(draft_batch, output.streams, lane.arena)
    for layer in LAYERS:
        kv = lane.arena.layer_kv(layer)
        for side, view in (("k", kv.k), ("v", kv.v)):
            stored = view[torch.tensor(sequence.pages)].flatten(0, 1)[: len(ids)]
            want = float(stored.abs().max())
            assert report["tensors"][f"model.layers.{layer}.self_attn.{side}_scale"]["max_abs"] == pytest.approx(want)
    assert batch.num_rows == 77


@pytest.mark.parametrize(("rule", "clips"), [("absmax", False), ("percentile:99", True), ("mse", None)])
def test_the_report_is_the_same_bytes_for_samples_in_another_order(
    tmp_path: Path, rule: str, clips: bool | None
) -> None:
    samples = token_samples(12)
    first = run(tmp_path / "a", samples, rule=rule)
    random.Random(9).shuffle(samples)
    run(tmp_path / "b", samples, rule=rule)
    assert report_bytes(tmp_path / "a") == report_bytes(tmp_path / "b")
    accepted = sum(tensor["clipped"] for tensor in first.report["tensors"].values())
    assert first.report["accepted_clips"] == accepted
    assert clips is None or clips == (accepted > 0)


def test_poisoned_memory_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a", token_samples())
    monkeypatch.setenv("PAGE4_POISON", "0x7F")
    run(tmp_path / "b", token_samples())
    assert report_bytes(tmp_path / "a") == report_bytes(tmp_path / "b")


def test_eight_requests_a_batch_change_values_by_rounding_only(tmp_path: Path) -> None:
    samples = token_samples(16)
    one = run(tmp_path / "one", samples, shard_size=16).report
    many = run(tmp_path / "many", samples, shard_size=16, batch_size=8).report
    assert many["counted_forwards"] < one["counted_forwards"]
    for name in NAMES:
        assert many["tensors"][name]["tokens"] == one["tensors"][name]["tokens"]
        assert many["tensors"][name]["max_abs"] == pytest.approx(one["tensors"][name]["max_abs"], rel=1e-5)
    assert one["rounding"]["max_abs_relative"] == ROUNDING["float32"] == 1e-5


def test_eight_requests_a_batch_on_the_embedded_checkpoint(tmp_path: Path) -> None:
    """What the report calls `rounding`, on a trained model and the shipped samples."""
    reports = []
    for size in (1, 8):
        options = CalibrationOptions(batch_size=size, max_seq_length=80, mix={"tool": 1, "text": 20})
        out = tmp_path / str(size)
        reports.append(calibrate(embedded_checkpoint(), calibration_samples(), out, options).report)
    assert reports[0]["tokens"] == reports[1]["tokens"]
    assert reports[0]["samples"] == reports[1]["samples"]
    assert len(reports[0]["tensors"]) == 6
    for name, tensor in reports[0]["tensors"].items():
        assert reports[1]["tensors"][name]["max_abs"] == pytest.approx(tensor["max_abs"], rel=1e-5)


def test_b20_observers_change_no_bit_of_the_output() -> None:
    ids = [random.Random(2).randrange(3, 64) for _ in range(70)]
    found = []
    for watched in (False, True):
        lane, observer = Lane(small_checkpoint()), Observer()
        sequence = lane.add()
        if watched:
            with observer.attached(lane.model), observer.counting("calibration", request="r"):
                found.append(lane.step([(sequence, ids)])[0])
            assert observer.take()[0][3, "k"].tokens == 70
        else:
            found.append(lane.step([(sequence, ids)])[0])
        assert all(layer.observer is None for layer in qsa_layers(lane.model))
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


def test_a_report_says_what_it_was_made_of(tmp_path: Path) -> None:
    report = run(tmp_path / "out", token_samples(3)).report
    written = json.loads(report_bytes(tmp_path / "out"))
    assert written == json.loads(json.dumps(report))
    assert (report["kind"], report["schema_version"], report["rule"]) == ("page4-calibration-report", 1, "absmax")
    assert report["base_checkpoint"]["index_sha256"] is None
    assert list(report["base_checkpoint"]["shards"]) == ["model.safetensors"]
    assert len(report["base_checkpoint"]["tensors_sha256"]) == 64  # what tells a re-sharded base from another model
    text = report_bytes(tmp_path / "out").decode()
    assert str(tmp_path) not in text and "date" not in text
    facts = json.loads((tmp_path / "out" / "calibration-run.json").read_text())
    assert facts["expected_rounding"]["max_abs_relative"] == 1e-5
    assert {"date", "device", "duration_seconds", "versions"} <= facts.keys()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "calibration-report.json",
        "calibration-run.json",
    ]


def failing_after(shards: int) -> Callable[[Partial, Shard], None]:
    """`Partial.save`, until that many shards are saved."""
    save, saved = Partial.save, []

    def wrapper(partial: Partial, shard: Shard) -> None:
        if len(saved) == shards:
            raise OSError("disk full")
        save(partial, shard)
        saved.append(shard.name)

    return wrapper


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A run that ends after its second shard."""
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "save", failing_after(2))
        with pytest.raises(OSError, match="disk full"):
            run(out, token_samples(), **options)
    assert [path.name for path in out.iterdir()] == [".partial"]


def test_a_rerun_goes_on_from_the_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", token_samples())
    interrupted(tmp_path / "out", monkeypatch)
    resumed = run(tmp_path / "out", token_samples())
    assert (whole.resumed_shards, resumed.resumed_shards, resumed.shards) == (0, 2, 3)
    assert report_bytes(tmp_path / "out") == report_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "samples"),
        ({"rule": "mse"}, r"rule mse \(was absmax\)"),
        ({"dtype": "bfloat16"}, "dtype bfloat16"),
    ],
)
def test_other_arguments_do_not_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    interrupted(tmp_path / "out", monkeypatch)
    with pytest.raises(UsageError, match=words):
        run(tmp_path / "out", token_samples(), **options)
    fresh = run(tmp_path / "out", token_samples(), restart=True, **options)
    assert fresh.resumed_shards == 0
    run(tmp_path / "other", token_samples(), **options)
    assert report_bytes(tmp_path / "out") == report_bytes(tmp_path / "other")


def test_a_damaged_shard_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "out", monkeypatch)
    shard = tmp_path / "out" / ".partial" / "shard-0001-of-0003.json"
    text = shard.read_text()
    for broken in ("", "[]", text[:-20], text.replace('"zeros": 0', '"zeros": 1')):
        shard.write_text(broken)
        with pytest.raises(ScaleError, match=r"shard-0001-of-0003\.json: .*--restart"):
            run(tmp_path / "out", token_samples())
    shard.write_text(text)
    assert run(tmp_path / "out", token_samples()).resumed_shards == 2


def test_shards_that_an_interrupted_restart_left_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "out", monkeypatch)
    (tmp_path / "out" / ".partial" / "settings.json").unlink()
    assert run(tmp_path / "out", token_samples(), rule="mse").resumed_shards == 0


def test_a_finished_report_is_never_replaced_by_another(tmp_path: Path) -> None:
    run(tmp_path / "out", token_samples())
    before = report_bytes(tmp_path / "out")
    run(tmp_path / "out", token_samples())
    assert report_bytes(tmp_path / "out") == before
    with pytest.raises(UsageError, match="a report of another run"):
        run(tmp_path / "out", token_samples(), rule="mse")
    assert report_bytes(tmp_path / "out") == before
    run(tmp_path / "out", token_samples(), rule="mse", restart=True)
    assert report_bytes(tmp_path / "out") != before


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with Partial(tmp_path / "out", {}, restart=False), pytest.raises(UsageError, match="under way"):
        run(tmp_path / "out", token_samples())


def test_b18_a_layer_that_bypasses_the_observer_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page4.scales.observe.qsa_layers", lambda model: qsa_layers(model)[:-1])
    with pytest.raises(ScaleError, match=r"model\.layers\.4\.self_attn\.k_scale: saw no token"):
        run(tmp_path / "out", token_samples())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("mtp.layers.0.self_attn.v_proj.weight", r"layers\.4\.self_attn\.v_scale: \d+ values are not finite"),
        ("model.layers.3.self_attn.k_proj.weight", r"\d+ values of model\.layers\.3\.self_attn\.k_scale"),
        ("model.layers.0.linear_attn.out_proj.weight", "expected finite K, V and scores"),
    ],
)
def test_values_that_are_no_numbers_leave_no_file(tmp_path: Path, tensor: str, words: str) -> None:
    with pytest.raises(ScaleError, match=words):
        run(tmp_path / "out", token_samples(), model=spoiled_checkpoint(tmp_path / "spoiled", tensor))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_draft_head_has_the_scales_of_the_target(tmp_path: Path) -> None:
    report = run(tmp_path / "out", token_samples(3), model=small_checkpoint(mtp=False)).report
    assert list(report["tensors"]) == NAMES[:2]


def test_progress_tells_every_token_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "out", monkeypatch)
    totals: list[int] = []
    counts: list[int] = []
    run(tmp_path / "out", token_samples(), progress=Progress(totals.append, counts.append))
    tokens = sum(len(sample["prompt_token_ids"]) for sample in token_samples())
    assert totals == [tokens] and sum(counts) == tokens
    assert 0 < counts[0] < tokens, "the finished shards count at once"


@pytest.mark.parametrize("inside", [".", "sub/folder"])
def test_nothing_is_written_into_the_checkpoint(inside: str) -> None:
    before = tree(small_checkpoint())
    with pytest.raises(UsageError, match="--out: expected a folder apart from MODEL"):
        module._check_out(small_checkpoint(), small_checkpoint() / inside)
    assert tree(small_checkpoint()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"batch_size": -1}, "batch_size"),
        ({"rule": "max"}, "rule"),
        ({"dtype": "int8"}, "dtype"),
        ({"mix": {"tool": 1}}, "--mix tool"),
    ],
)
def test_bad_arguments_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(module, "load_model", None)
    with pytest.raises(Page4Error, match=words):
        run(tmp_path / "out", token_samples(), **options)
    assert not (tmp_path / "out").exists()


def test_long_samples_run_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows give the counts of one chunk, the draft's too, and nearly its values."""
    samples = token_samples(4, seed=5)
    whole = run(tmp_path / "whole", samples).report
    init = module.SampleLane.__init__

    def short_steps(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options, step_rows=16)

    monkeypatch.setattr(module.SampleLane, "__init__", short_steps)
    cut = run(tmp_path / "cut", samples).report
    assert cut["counted_forwards"] > whole["counted_forwards"]
    for name in NAMES:
        assert cut["tensors"][name]["tokens"] == whole["tensors"][name]["tokens"]
        assert cut["tensors"][name]["max_abs"] == pytest.approx(whole["tensors"][name]["max_abs"], rel=1e-4)
