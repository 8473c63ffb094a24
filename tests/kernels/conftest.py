"""Triton kernels run on the GPU when there is one, else in Triton's interpreter, which has to be asked for first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
