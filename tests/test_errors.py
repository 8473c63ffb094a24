"""The exception tree: one base, exit codes, one-line messages."""

from __future__ import annotations

import inspect

import pytest

from page4 import errors
from page4.errors import Page4Error

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
USAGE = {errors.UsageError, errors.RequestError}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_the_base_an_exit_code_and_a_docstring(cls: type[Page4Error]) -> None:
    assert issubclass(cls, Page4Error)
    assert cls.exit_code == (2 if cls in USAGE else 3)
    assert cls.__doc__


def test_checkpoint_errors_are_one_family() -> None:
    family = {errors.HeaderError, errors.IndexFileError, errors.ShardError, errors.PathEscapeError, errors.TensorError}
    assert set(errors.CheckpointError.__subclasses__()) == family


def test_a_message_says_what_allowed_got_and_what_to_do() -> None:
    text = errors.message("k_cache", allowed="[P, S, J, 256] uint8", got="[8, 16, 2, 128] uint8", do="pass the arena's")
    assert text == "k_cache: expected [P, S, J, 256] uint8, got [8, 16, 2, 128] uint8; pass the arena's"


def test_a_message_is_one_printable_line_whatever_it_names() -> None:
    text = errors.message("name\nsecond", allowed="x", got="a\0b\x1b[31m\r\n", do="y")
    assert text.isprintable() and "\\n" in text and "\\x00" in text and "\\x1b" in text


def test_a_message_is_bounded() -> None:
    text = errors.message("tensor", allowed="x", got="n" * 100_000, do="y")
    assert len(text) < 10_000 and text.endswith("; y")
