"""Filling a model's memory from a source of named tensors.

Every tensor of the model is filled and every tensor of the source is used, or loading fails before
a byte is read, with all the names in one message. Knows nothing of file formats.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from remora.configs.errors import ConfigError

logger = logging.getLogger(__name__)

# Not weights: rotary frequencies follow from the config, and old files store them all the same.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")
MAX_NAMES_SHOWN = 8


class WeightSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names."""

    label: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading any."""
        ...

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor once, file after file; each is good until the next is asked for."""
        ...


def fill(
    tensors: Mapping[str, Tensor],
    source: WeightSource,
    *,
    unused: frozenset[str] = frozenset(),
    show_progress: bool,
) -> None:
    """Copy the source into `tensors`, converting to their dtype and device.

    unused:  names that the source may have and the model has no use for (a tied head)
    Raises ConfigError when names or shapes do not agree.
    """
    shapes = source.shapes()
    _check(tensors, shapes, source.label, unused)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    started = time.perf_counter()
    bar = progress_bar(f"Loading {source.label}", total_bytes, show_progress)
    with torch.inference_mode(), bar as advance:
        for name, tensor in source.read():
            destination = tensors.get(name)
            if destination is not None:
                destination.copy_(tensor)
                advance(destination.nbytes)
    logger.info(
        "loaded %d tensors (%.0f MB) from %s in %.1f s",
        len(tensors),
        total_bytes / 1e6,
        source.label,
        time.perf_counter() - started,
    )


@contextmanager
def progress_bar(label: str, total_bytes: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes on standard error, when that is a terminal; yields what advances it."""
    if not (show and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(label, total=total_bytes)
    with bar:
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _check(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    label: str,
    unused: frozenset[str],
) -> None:
    missing = [name for name in tensors if name not in shapes]
    extra = [
        name
        for name in shapes
        if name not in tensors and name not in unused and not DERIVED.search(name)
    ]
    misshaped = [
        f"{name} is {list(shapes[name])} instead of {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (
            ("missing", missing),
            ("not part of the model", extra),
            ("of another shape than config.json says", misshaped),
        )
        if names
    ]
    if problems:
        raise ConfigError(
            f"the weights in {label} do not fit the model that its config describes. "
            + ". ".join(problems)
            + ". Is the config from another checkpoint?"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN])
    hidden = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
