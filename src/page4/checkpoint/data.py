"""Tensor bytes, mapped from their files; still without torch."""

from __future__ import annotations

import mmap
from pathlib import Path

from page4.checkpoint.index import Checkpoint
from page4.errors import ShardError, message


class TensorBytes:
    """Reads the bytes of tensors of an open checkpoint; keeps one mapping a file until it is dropped."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, name: str) -> memoryview:
        """The bytes of one tensor, valid while the view lives. Raises `ShardError` if the file changed meanwhile."""
        header, entry = self._checkpoint.header(name), self._checkpoint.entry(name)
        start = header.data_start
        return memoryview(self._map(name, header.file_size))[start + entry.begin : start + entry.end]

    def release(self, name: str) -> None:
        """Give the memory of a tensor's pages back; a later view reads the file again."""
        entry, path = self._checkpoint.entry(name), self._checkpoint.path(name)
        start = self._checkpoint.header(name).data_start + entry.begin
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self._checkpoint.header(name).data_start + entry.end - first
        if hasattr(mmap, "MADV_DONTNEED") and path in self._maps and length > 0:
            self._maps[path].madvise(mmap.MADV_DONTNEED, first, length)

    def _map(self, name: str, file_size: int) -> mmap.mmap:
        path = self._checkpoint.path(name)
        if path not in self._maps:
            with path.open("rb") as file:
                # A private writable mapping, because torch warns about read-only buffers; nobody writes to it.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if len(mapped) != file_size:
                do = "do not change a checkpoint while it is loaded"
                raise ShardError(message(str(path), allowed=f"{file_size} bytes", got=f"{len(mapped)} bytes", do=do))
            self._maps[path] = mapped
        return self._maps[path]
