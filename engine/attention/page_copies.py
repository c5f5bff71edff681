"""Copies KV pages that a beam shares until it writes to them, before a step's layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remora.engine.protocols import AttentionBackend, CopiesPages
from remora.engine.runner.inputs import Int32Array
from remora.kernels.memory import to_device


def copy_step_pages(attention: AttentionBackend, copies: Int32Array, device: torch.device) -> None:
    """Copy the pages of `StepInputs.copies` [2, M], if there are any."""
    if copies.size:
        sources, targets = to_device(np.ascontiguousarray(copies, np.int64), device)
        copy_pages(attention, sources, targets)


def copy_pages(attention: AttentionBackend, sources: Tensor, targets: Tensor) -> None:
    """Copy pages [M] of a backend that has pages to pages [M]."""
    assert isinstance(attention, CopiesPages), "this attention has no pages"
    attention.copy_pages(sources, targets)
