"""The token stream, random training windows and the fixed held-out windows."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import torch
from shape import END_OF_TEXT
from torch import Tensor


def read_tokens(path: Path) -> tuple[Tensor, Tensor]:
    """Train and held-out streams, int32, from the file that `tokenizer.py` writes."""
    with lzma.open(path, "rb") as file:
        payload = file.read()
    sizes = np.frombuffer(payload[:16], dtype=np.int64)
    tokens = torch.from_numpy(np.frombuffer(payload[16:], dtype=np.uint16).astype(np.int32))
    return tokens[: sizes[0]], tokens[sizes[0] :]


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """windows: [count, length] int64 at uniform offsets of the stream."""
    starts = torch.randint(0, len(tokens) - length, (count,), generator=generator, device=tokens.device)
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


def held_out_windows(held: Tensor, count: int, length: int, per_document: int) -> Tensor:
    """windows: [count, length] int64, each inside one document, evenly spread over the documents long enough."""
    ends = (held == END_OF_TEXT).nonzero().flatten().tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    offsets = [
        start + piece * length
        for start, end in zip(starts, ends, strict=True)
        for piece in range(min(per_document, (end - start) // length))
    ]
    picked = [offsets[i * len(offsets) // count] for i in range(min(count, len(offsets)))]
    return torch.stack([held[offset : offset + length].long() for offset in picked])
