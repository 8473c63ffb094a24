"""The truth is checked too: against numbers worked out by hand and against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from page4.kernels import reference
from page4.kernels.reference import Partial

pytestmark = pytest.mark.usefixtures("one_thread")


def test_index_scores_by_hand() -> None:
    """Two heads, E = 4: sum of relu(q . k) / 2."""
    index_q = torch.tensor([[[1.0, 0, 0, 0], [0, -1, 0, 0]], [[0, 0, 2, 0], [0, 0, 0, 1]]])
    keys = torch.tensor([[3.0, 5, 1, -1], [-1, -4, 2, 2]])
    assert reference.index_scores(index_q, keys).tolist() == [[1.5, 2.0], [1.0, 3.0]]


def test_pooled_keys_are_means_of_complete_blocks() -> None:
    raw = torch.tensor([[1.0, 0], [2, 0], [3, 0], [6, 4], [100, 100]])
    assert reference.pool_keys(raw).tolist() == [[3.0, 1.0]]
    # In fp32: 65504 + 65504 is no fp16 number, their mean is.
    large = torch.full((4, 1), 65504.0, dtype=torch.float16)
    assert reference.pool_keys(large).tolist() == [[65504.0]]
    assert reference.pool_keys(large).dtype == torch.float16


def test_blocks_and_tail() -> None:
    assert reference.blocks_of([5, 1, 1, -1, 2, 3], 11) == [1, 2]
    assert [reference.tail_of(position) for position in (-1, 0, 2, 3, 6)] == [[], [0], [0, 1, 2], [], [4, 5, 6]]
    ids = torch.tensor([[1, -1], [0, -1], [-1, -1]])
    assert reference.expand_blocks(ids, torch.tensor([8, 4, -1])) == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4], []]


def test_partials_merge_like_one_softmax(generator: torch.Generator) -> None:
    q = torch.randn(2, 3, 8, generator=generator) * 5
    k, v = torch.randn(2, 2, 20, 8, generator=generator)
    on = torch.rand(3, 20, generator=generator) < 0.5
    on[0] = False
    logits = (q.double() @ k.double().transpose(1, 2)).masked_fill(~on, -math.inf)
    want = logits.softmax(-1).nan_to_num(0.0) @ v.double()
    for cuts in ([0, 20], [0, 1, 19, 20], [0, 7, 14, 20], list(range(21))):
        parts = [Partial.of(q, k[:, a:b], v[:, a:b], on[:, a:b]) for a, b in itertools.pairwise(cuts)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.merge(part)
        out, lse = whole.finish(2.0)
        assert (out.double() - 2 * want).abs().max() < 1e-5
        assert (lse.double() - logits.logsumexp(-1))[:, 1:].abs().max() < 1e-5
        assert (lse[:, 0] == -math.inf).all()
        assert not out[:, 0].any()


def test_a_nan_value_that_nobody_attends_to_leaks_through_a_product() -> None:
    """Why the kernels zero: the probability is exactly 0 and the result is NaN all the same."""
    q, k = torch.ones(1, 1, 4), torch.ones(1, 2, 4)
    v = torch.tensor([[[1.0] * 4, [math.nan] * 4]])
    out, _ = Partial.of(q, k, v, torch.tensor([[True, False]])).finish(1.0)
    assert out.isnan().all()
