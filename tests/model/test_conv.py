from __future__ import annotations

import pytest
import torch

from page4.model.conv import causal_conv, window_after


@pytest.mark.parametrize(("kernel", "dilation"), [(4, 1), (3, 1), (4, 3), (2, 2), (1, 1)])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_equals_a_sum_over_taps(generator: torch.Generator, kernel: int, dilation: int, length: int) -> None:
    state = (kernel - 1) * dilation
    inputs = torch.randn(2, state + length, 6, generator=generator)
    weight = torch.randn(6, kernel, generator=generator)
    want = torch.zeros(2, length, 6, dtype=torch.float64)
    for t in range(length):
        for tap in range(kernel):
            want[:, t] += inputs[:, t + tap * dilation].double() * weight[:, tap].double()
    torch.testing.assert_close(causal_conv(inputs, weight, dilation=dilation).double(), want, rtol=0, atol=1e-5)


def test_b30_last_three_inputs_after_one_accepted_draft() -> None:
    """Inputs 1..7 committed (5, 6, 7 kept), window 8, 9, 10, 11, the verified token and one draft accepted: 7, 8, 9."""
    inputs = torch.tensor([5.0, 6, 7, 8, 9, 10, 11]).view(1, 7, 1)
    kept = {a: window_after(inputs, torch.tensor([a]), 3).flatten().tolist() for a in range(5)}
    assert kept == {0: [5, 6, 7], 1: [6, 7, 8], 2: [7, 8, 9], 3: [8, 9, 10], 4: [9, 10, 11]}


def test_each_request_keeps_its_own_window() -> None:
    inputs = torch.arange(12.0).view(2, 6, 1)
    assert window_after(inputs, torch.tensor([0, 3]), 3).squeeze(-1).tolist() == [[0, 1, 2], [9, 10, 11]]
