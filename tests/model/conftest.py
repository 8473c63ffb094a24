from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import oracle

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(name, **options)` writes a random checkpoint once a session and returns its folder."""
    made: dict[str, Path] = {}

    def make(name: str, **options: Any) -> Path:
        if name not in made:
            made[name] = oracle.random_checkpoint(tmp_path_factory.mktemp("checkpoint") / name, **options)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny(checkpoints: Checkpoints) -> Path:
    return checkpoints("tiny", seed=1)
