"""Causal depthwise convolution over a window and the inputs before it."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(inputs: Tensor, weight: Tensor, *, dilation: int = 1) -> Tensor:
    """inputs: [n, (kernel - 1) * dilation + T, channels], weight: [channels, kernel] -> [n, T, channels].

    Output t reads inputs t, t + dilation, .., t + (kernel - 1) * dilation; the last of these is its own row.
    """
    kernel = weight.shape[-1]
    length = inputs.shape[1] - (kernel - 1) * dilation
    out = inputs[:, :length] * weight[:, 0]
    for tap in range(1, kernel):
        out.addcmul_(inputs[:, tap * dilation : tap * dilation + length], weight[:, tap])
    return out


def window_after(inputs: Tensor, accepted: Tensor, length: int) -> Tensor:
    """The `length` inputs before the first row that was not accepted.

    inputs: [n, length + T, channels] (state, then rows), accepted: [n] int64 in 0..T -> [n, length, channels].
    """
    if inputs.shape[0] == 1 and inputs.device.type == "cpu":  # no gather, and reading a CPU number waits for nothing
        return inputs.narrow(1, int(accepted), length)
    index = accepted.unsqueeze(1) + torch.arange(length, device=inputs.device)
    return inputs.gather(1, index.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
