"""The PAGE4_* table: defaults, values, aliases, refusals."""

from __future__ import annotations

import pytest

from page4 import env
from page4.errors import UsageError

NAMES = [name for v in env.VARIABLES for name in (v.name, *v.aliases)]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert env.get("KERNELS") == "auto"
    assert env.get("POISON") is None
    assert env.get("GROUPED") is True
    assert env.get("PLAN_REPOINT") is True
    assert env.get("THREADS") is None
    env.check()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("KERNELS", "reference", "reference"),
        ("POISON", "0x7F", 0x7F),
        ("POISON", "0xff", 0xFF),
        ("POISON", "0", 0),
        ("POISON", "off", None),
        ("GROUPED", "0", False),
        ("PLAN_REPOINT", "0", False),
        ("THREADS", "2", 2),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"PAGE4_{name}", text)
    assert env.get(name) == value  # type: ignore[call-overload]  # the name is a parameter of the test
    env.check()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PAGE4_KERNELS", "fast"),
        ("PAGE4_KERNELS", ""),
        ("PAGE4_POISON", "0x100"),
        ("PAGE4_POISON", "-1"),
        ("PAGE4_POISON", "yes"),
        ("PAGE4_GROUPED", "true"),
        ("PAGE4_PLAN_REPOINT", "2"),
        ("PAGE4_THREADS", "0"),
        ("PAGE4_THREADS", "1.5"),
        ("VLLM_SM70_QSA_GROUPED_PAGE4", "on"),
        ("VLLM_SM70_QSA_GROUPED_PAD_FIX", ""),
    ],
)
def test_a_bad_value_is_an_error_with_name_value_and_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as error:
        env.check()
    assert name in str(error.value) and repr(text) in str(error.value) and "expected" in str(error.value)


def test_an_alias_counts_and_may_not_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SM70_QSA_GROUPED_PAGE4", "0")
    assert env.get("GROUPED") is False
    monkeypatch.setenv("PAGE4_GROUPED", "0")
    assert env.get("GROUPED") is False
    monkeypatch.setenv("PAGE4_GROUPED", "1")
    with pytest.raises(UsageError, match="unset VLLM_SM70_QSA_GROUPED_PAGE4 or PAGE4_GROUPED"):
        env.get("GROUPED")


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"PAGE4_KERNEL\b.*did you mean PAGE4_KERNELS\?"):
        env.check({"PAGE4_KERNEL": "auto"})
    with pytest.raises(UsageError, match="did you mean PAGE4_POISON"):
        env.check({"PAGE4_POISION": "0x7F"})
    env.check({"PAGE3_KERNEL": "auto", "PATH": "x"})
