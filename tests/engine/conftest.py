"""Checkpoints that the end-to-end tests of the engine share: small, random, with an MTP head and few tokens."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from tests.engine.lanes import with_scales
from tests.oracle import random_checkpoint

# Few tokens, so that drafts of a random head are accepted now and then; budget 32, so that prompts above 35 are pruned.
SMALL = {"vocab_size": 24, "indexer_budget": 32, "max_position_embeddings": 512}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with 24 tokens, no PLE apart: all parts of the model are there."""
    return random_checkpoint(tmp_path_factory.mktemp("small"), seed=11, **SMALL)


@pytest.fixture(scope="session")
def small_two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, two QSA layers, no PLE."""
    return random_checkpoint(
        tmp_path_factory.mktemp("small_two"),
        seed=12,
        **{**SMALL, "num_key_value_heads": 2, "num_attention_heads": 4, "ple_layer_ids": []},
        layer_types=["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    )


@pytest.fixture(scope="session")
def small_e4m3(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small` with K/V scales of its target and its draft."""
    return with_scales(small, tmp_path_factory.mktemp("small_e4m3"))


@pytest.fixture(scope="session")
def small_two_heads_e4m3(small_two_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small_two_heads` with K/V scales of its target and its draft."""
    return with_scales(small_two_heads, tmp_path_factory.mktemp("small_two_e4m3"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread_in_this_folder() -> Generator[None, None, None]:
    """As `one_thread`, for the engines that fixtures share too: waking a second thread costs more than these models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
