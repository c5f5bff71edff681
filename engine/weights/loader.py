"""Fills a model's memory from a WeightSource, at once or part by part.

Every tensor of the model must be filled and every tensor of the source used; otherwise loading
fails before a byte is read, with all names in one message. A rank checks the whole model and reads
its shard. Knows no file formats.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.observe.progress import progress_bar
from remora.engine.parallel.shard import Shard
from remora.engine.protocols import QuantisedSource, WeightSource, quantised_tensors
from remora.kernels.quantised.weight_kinds import WeightKind

logger = logging.getLogger(__name__)

# Not weights: old files store rotary frequencies, which follow from the config.
DERIVED = re.compile(r"rotary_emb\.inv_freq$")
MAX_NAMES_SHOWN = 8


class Filling:
    """Copies a source's tensors into a model's memory, converted to its dtype and device.

    A context manager and a `Fill`: calls fill parts on demand, and the exit fills the rest.
    References to filled memory are dropped.
    """

    def __init__(
        self,
        tensors: Mapping[str, Shard],
        source: WeightSource,
        *,
        expected: Mapping[str, tuple[int, ...]] | None = None,
        unused: frozenset[str] = frozenset(),
        show_progress: bool,
        num_threads: int = 1,
    ) -> None:
        """Compare names and shapes; nothing is read.

        expected:  shapes of the whole model's tensors; None = `tensors` are all of them
        unused:    names that the source may have and the model does not use (a tied head)
        num_threads:  threads that copy, a tensor each at a time
        Raises ConfigError if names or shapes differ.
        """
        if expected is None:
            expected = whole_shapes(tensors)
        _check(expected, source.shapes(), source.label, unused)
        self._left = dict(tensors)
        self._source, self._num_threads = source, num_threads
        self._quantised = quantised_tensors(source).keys() & tensors.keys()
        self._num_tensors = len(tensors)
        self._num_bytes = sum(shard.memory.nbytes for shard in tensors.values())
        self._num_skipped, self._seconds = 0, 0.0
        self._bar = progress_bar(
            f"Loading {source.label}", self._num_bytes, show_progress, in_bytes=True
        )

    def __enter__(self) -> Self:
        """Show the progress bar."""
        self._advance = self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        """Fill the rest, unless there was an error."""
        try:
            if kind is None:
                self()
        finally:
            self._bar.__exit__(None, None, None)
        if kind is None:
            logger.info(
                "loaded %d tensors (%.0f MB) from %s in %.1f s",
                self._num_tensors - self._num_skipped,
                self._num_bytes / 1e6,
                self._source.label,
                self._seconds,
            )

    def __call__(self, names: Collection[str] | None = None) -> None:
        """Fill these tensors if they are not filled yet; None = all. Raises ConfigError."""
        started = time.perf_counter()
        asked = self._left.keys() if names is None else self._left.keys() & names
        some = {name: self._left.pop(name) for name in list(asked)}
        for name in _filled(some, self._source, self._num_threads):
            self._advance(some[name].memory.nbytes)
        self._seconds += time.perf_counter() - started

    def quantised(self) -> Set[str]:
        """Return the names of quantised tensors."""
        return self._quantised

    def kinds(self, names: Collection[str]) -> dict[str, WeightKind]:
        """Read these tensors as they are stored, unless filled yet; they are not filled then."""
        started, found = time.perf_counter(), {}
        wanted = self._quantised & self._left.keys() & set(names)
        if wanted and isinstance(self._source, QuantisedSource):
            for name, kind in self._source.kinds(wanted):
                found[name] = kind
                self._advance(self._left.pop(name).memory.nbytes)
        self._seconds += time.perf_counter() - started
        return found

    def skip(self, names: Collection[str]) -> None:
        """Count these tensors as loaded and drop the references to their memory."""
        for name in self._left.keys() & set(names):
            num_bytes = self._left.pop(name).memory.nbytes
            self._num_skipped, self._num_bytes = self._num_skipped + 1, self._num_bytes - num_bytes
            self._advance(num_bytes)


def fill(
    tensors: Mapping[str, Shard],
    source: WeightSource,
    *,
    unused: frozenset[str] = frozenset(),
    show_progress: bool,
    num_threads: int = 1,
) -> None:
    """Fill all of a whole model at once; see `Filling`."""
    with Filling(
        tensors, source, unused=unused, show_progress=show_progress, num_threads=num_threads
    ):
        pass


def _filled(tensors: Mapping[str, Shard], source: WeightSource, num_threads: int) -> Iterator[str]:
    """Fill the tensors; yield the name of each one that is filled."""
    if not tensors:
        return

    def fill_one(name: str, tensor: Tensor) -> str:
        _check_dtype(name, tensor, tensors[name].memory.dtype, source.label)
        with torch.inference_mode():
            tensors[name].fill(tensor)
        return name

    if num_threads == 1:
        for name, tensor in source.read(tensors.keys()):
            yield fill_one(name, tensor)
        return
    running: deque[Future[str]] = deque()
    with ThreadPoolExecutor(num_threads, "weights") as pool:
        for name, tensor in source.read(tensors.keys()):
            if len(running) == num_threads:
                yield running.popleft().result()
            running.append(pool.submit(fill_one, name, tensor))
        for one in running:
            yield one.result()


def _check_dtype(name: str, tensor: Tensor, wanted: torch.dtype, label: str) -> None:
    """Raise ConfigError for quantised codes and 8-bit floats, which cannot be copied as numbers."""
    if tensor.dtype == wanted or (tensor.is_floating_point() and tensor.dtype.itemsize > 1):
        return
    found, expected = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, wanted))
    raise ConfigError(
        f"{name} in {label} is stored as {found}; expected {expected} or another float of 16 bits "
        "or more. If the checkpoint is quantised, use the original one."
    )


def whole_shapes(tensors: Mapping[str, Shard]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole tensors of these shards."""
    return {name: shard.shape for name, shard in tensors.items()}


def _check(
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    label: str,
    unused: frozenset[str],
) -> None:
    missing = [name for name in expected if name not in shapes]
    extra = [
        name
        for name in shapes
        if name not in expected and name not in unused and not DERIVED.search(name)
    ]
    misshaped = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
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
