"""A strict JSON scanner over bytes whose time and memory are linear in what it accepts and that never recurses.

`json.loads` builds every value before anybody can object to it: a hostile header of 100 MB becomes gigabytes of lists,
and a duplicate key disappears. This scanner is told what may come next and stops at the first byte that is not that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NoReturn

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"([^"\\\x00-\x1f]*(?:\\["\\/bfnrtu][^"\\\x00-\x1f]*)*)"')
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]{0,19})(?![0-9.eE])")
_SCALAR = re.compile(rb"true|false|null|-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,9})?")
_MAX_DEPTH = 64
_MAX_SKIPPED_BYTES = 1 << 20


class Scanner:
    """Reads one JSON text front to back; `fail(allowed, got)` raises the caller's error."""

    def __init__(self, text: bytes, fail: Callable[[str, str], NoReturn]) -> None:
        self.text = text
        self.position = 0
        self.fail = fail

    def peek(self) -> bytes:
        """The next byte that is not white space; empty at the end."""
        space = _SPACE.match(self.text, self.position)
        assert space is not None, "the pattern matches nothing at least"
        self.position = space.end()
        return self.text[self.position : self.position + 1]

    def punctuation(self, byte: bytes) -> None:
        """Consume one character."""
        if self.peek() != byte:
            self.expected(repr(byte.decode()))
        self.position += 1

    def expected(self, what: str) -> NoReturn:
        """Refuse what stands here."""
        found = self.text[self.position : self.position + 24]
        self.fail(f"{what} at byte {self.position}", repr(found)[1:] if found else "the end of the text")

    def string(self, max_bytes: int) -> str:
        """A string of at most `max_bytes` in its JSON form."""
        if self.peek() != b'"':
            self.expected("a string")
        match = _STRING.match(self.text, self.position, self.position + max_bytes + 2)
        if match is None:
            self.expected(f"a closed string of at most {max_bytes} bytes")
        raw = match.group(1)
        try:
            value: str = raw.decode("utf-8")
            if b"\\" in raw:
                value = json.loads(f'"{value}"')
                value.encode("utf-8")  # a lone surrogate is no text
        except ValueError:
            self.expected("a valid UTF-8 string")
        self.position = match.end()
        return value

    def integer(self) -> int:
        """An integer of at most 20 digits."""
        self.peek()
        match = _INTEGER.match(self.text, self.position)
        if match is None:
            self.expected("an integer")
        self.position = match.end()
        return int(match.group())

    def integers(self, max_count: int) -> tuple[int, ...]:
        """An array of integers."""
        values: list[int] = []
        for _ in self._items(b"[", b"]"):
            if len(values) == max_count:
                self.expected(f"at most {max_count} integers")
            values.append(self.integer())
        return tuple(values)

    def members(self, max_key_bytes: int) -> Iterator[str]:
        """The keys of an object, each once; the caller reads the value before it goes on."""
        seen: set[str] = set()
        for _ in self._items(b"{", b"}"):
            key = self.string(max_key_bytes)
            if key in seen:
                self.fail("each key once", f"{key!r} twice")
            seen.add(key)
            self.punctuation(b":")
            yield key

    def _items(self, opening: bytes, closing: bytes) -> Iterator[None]:
        self.punctuation(opening)
        if self.peek() == closing:
            self.position += 1
            return
        yield
        while self.goes_on(closing):
            yield

    def goes_on(self, closing: bytes) -> bool:
        """Consume what stands after an item: true for a comma, false for the closing bracket."""
        if self.peek() == closing:
            self.position += 1
            return False
        self.punctuation(b",")
        return True

    def skip(self) -> None:
        """Pass over one value of any kind, of at most 1 MiB."""
        self.peek()
        start, depth = self.position, 0
        while True:
            byte = self.peek()
            if byte in (b"{", b"["):
                depth += 1
                self.position += 1
            elif depth and byte in (b"}", b"]"):
                depth -= 1
                self.position += 1
            elif depth and byte in (b",", b":"):
                self.position += 1
            elif byte == b'"':
                self.string(_MAX_SKIPPED_BYTES)
            else:
                self._scalar()
            if depth > _MAX_DEPTH or self.position - start > _MAX_SKIPPED_BYTES:
                self.expected(f"a value of at most {_MAX_DEPTH} levels and {_MAX_SKIPPED_BYTES} bytes")
            if depth == 0:
                break
        try:
            json.loads(self.text[start : self.position].decode("utf-8"))  # small by now; checks commas and colons
        except ValueError as error:
            self.fail("valid JSON", str(error))

    def _scalar(self) -> None:
        match = _SCALAR.match(self.text, self.position)
        if match is None:
            self.expected("a value")
        self.position = match.end()

    def end(self) -> None:
        """Nothing but white space may follow."""
        if self.peek():
            self.expected("the end of the text")
