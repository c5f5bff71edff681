"""Models as most tests load them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import load_model


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    **options: Any,
) -> DecoderModel:
    """Load a model, or a rank's share of it; `options` as of `load_model`."""
    return load_model(
        path, dtype=dtype, load_format=load_format, device=device, show_progress=False, **options
    )


load_f32 = partial(load, dtype=torch.float32)
