"""`page4 doctor`: complete, honest about what is off, and silent about secrets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import page4
from page4 import cli, env
from page4.cli import routes


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PAGE4_GROUPED", "0")
    assert cli.main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hf_secret" not in out
    value: dict[str, Any] = json.loads(out)
    return value


def test_versions_and_devices(report: dict[str, Any]) -> None:
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["page4"] == page4.__version__
    cpu = report["devices"][0]
    assert cpu["name"] == "cpu"
    assert cpu["memory_bytes"] > 1 << 28
    assert cpu["cpus"] >= 1


def test_every_variable_is_listed_with_its_value(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["environment"]}
    assert {variable.name for variable in env.VARIABLES} <= set(rows)
    assert (rows["PAGE4_GROUPED"]["value"], rows["PAGE4_GROUPED"]["source"]) == ("0", "PAGE4_GROUPED")
    assert (rows["PAGE4_KERNELS"]["value"], rows["PAGE4_KERNELS"]["source"]) == ("auto", "default")
    assert rows["HF_TOKEN"]["value"] == "(hidden)"


def test_every_step_has_a_route_and_reasons_against_the_others(report: dict[str, Any]) -> None:
    assert {row["step"].split(",")[0] for row in report["routes"]} == {"decode", "verify", "prefill"}
    for row in report["routes"]:
        assert row["why"]
        assert {row["route"], *row["others"]} - {None} == {"generic", "xqa", "grouped"}
        assert all(row["others"].values())
        if row["device"] == "cpu":
            assert row["route"] is not None
            assert row["shapes"] == ["24/2 x 256", "12/1 x 256", "6/1 x 256", "3/1 x 256"]
            assert set(row["kv_dtypes"]) in ({"float32", "fp8_e4m3"}, {"float16", "bfloat16"}, set(routes.KV_DTYPES))
        else:
            assert row["route"] == "generic"
            assert "no GPU kernel of this route in this version" in row["others"]["grouped"]
    assert {(row["op"], row["route"]) for row in report["kernels"]} >= {("attend", "grouped"), ("plan", "xqa")}
    # The grouped route was switched off above: nothing may be said to use it.
    assert "grouped" not in {row["route"] for row in report["routes"]}
    assert "PAGE4_GROUPED=0" in report["off"].values()


def test_the_embedded_checkpoint_is_described(report: dict[str, Any]) -> None:
    facts = report["checkpoint"]
    assert facts["readable"] is True
    assert (facts["layers"], facts["qsa_layers"], facts["draft_layers"], facts["budget_tokens"]) == (8, 2, 1, 256)


def test_text_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SM70_QSA_GROUPED_PAGE4", "1")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("versions", "PAGE4_POISON", "VLLM_SM70_QSA_GROUPED", "routes of attend", "prefill, 2048 rows", "off"):
        assert word in out
    assert "\x1b" not in out
