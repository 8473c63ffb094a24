"""The exception tree: every error that page4 raises on purpose.

Each message is one line: what, allowed, got, do this (see `message`). `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Sequence


class Page4Error(Exception):
    """Base of all page4 errors."""

    exit_code = 3


class UsageError(Page4Error):
    """A flag, an environment value or a sampling parameter is not usable."""

    exit_code = 2


class RequestError(UsageError):
    """One request cannot be served: prompt too long, token id out of range, too many drafts."""


class CheckpointError(Page4Error):
    """A checkpoint folder cannot be read as it stands."""


class HeaderError(CheckpointError):
    """A safetensors header is malformed or hostile."""


class IndexFileError(CheckpointError):
    """`model.safetensors.index.json` is malformed or disagrees with its shards."""


class ShardError(CheckpointError):
    """A shard is missing, truncated, too long or a pointer file."""


class PathEscapeError(CheckpointError):
    """A file name leads outside the checkpoint."""


class TensorError(CheckpointError):
    """Tensors are missing, unexpected or of the wrong shape."""


class ConfigError(Page4Error):
    """`config.json` describes a model that page4 cannot run."""


class ScaleError(Page4Error):
    """A K/V scale is missing, invalid or belongs to no layer."""


class DocumentError(ScaleError):
    """A JSON file about scales cannot be used; `kind`: missing, unreadable, schema (another version), invalid, hash."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class LaneError(ScaleError):
    """A lane is not admitted; `faults` holds every reason, one line each, and the text all of them."""

    def __init__(self, what: str, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        many = len(self.faults) > 1
        listed = [f"({n}) {fault}" if many else fault for n, fault in enumerate(self.faults, start=1)]
        super().__init__(f"{_printable(what)}: refused, {len(self.faults)} fault{'s' * many}: {'; '.join(listed)}")


class CacheError(Page4Error):
    """The arena is too small, or a view of it does not have the expected form."""


class KernelError(Page4Error):
    """An operation was called with operands that no kernel accepts."""


class EngineError(Page4Error):
    """The engine cannot go on with a request or at all."""


_FIELD_CHARACTERS = 2000


def message(what: object, *, allowed: object, got: object, do: str) -> str:
    """One printable line that says what is wrong, what is allowed, what was found and what to do."""
    return f"{_printable(what)}: expected {_printable(allowed)}, got {_printable(got)}; {_printable(do)}"


def _printable(value: object) -> str:
    """Names come from files and requests: control characters are escaped and a huge one is cut in the middle."""
    text = str(value)
    if len(text) > _FIELD_CHARACTERS:
        half = _FIELD_CHARACTERS // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
