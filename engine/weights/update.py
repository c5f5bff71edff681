"""Replaces the weights of a running engine with new ones of the same model.

The new weights are loaded, checked and packed in any thread while the old ones serve. The engine's
thread swaps them between two requests: an error changes nothing, and no request sees both. Memory
must hold two copies meanwhile. Only for one rank on a CPU; on a GPU the KV cache takes the memory,
and captured graphs hold the weights' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.engine.models.checkpoint import read_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import LOAD_FORMATS, filling, open_model
from remora.engine.plugins import import_callable
from remora.engine.protocols import Fill
from remora.engine.runner.forward import DTYPES, build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.weights.from_function import GivenWeights

Opened = AbstractContextManager[tuple[DecoderModel, Fill]]

SLACK = 1.15  # memory that loading needs, per byte of weights


class NewWeights:
    """Builds forward passes of new weights for a runner.

    free_bytes:  returns the memory that is free now
    """

    def __init__(
        self,
        config: ServeConfig,
        plan: EnginePlan,
        model: DecoderConfig,
        table: InputBatch,
        runner: LocalRunner,
        *,
        free_bytes: Callable[[], int],
    ) -> None:
        """Import the configured weight loaders. Raises ConfigError."""
        self._roots = [Path(root).expanduser().resolve() for root in config.model.weight_roots]
        self._loaders = {
            path: import_callable(f"model.weight_loaders: {path}", path)
            for path in config.model.weight_loaders
        }
        self._plan, self._model = plan, model
        self._table, self._runner = table, runner
        self._free_bytes = free_bytes

    def prepare(self, source: str, load_format: str | None) -> Callable[[], None]:
        """Load new weights; returns a function that swaps them in.

        source:       a folder or GGUF file below the roots, or the argument of a loader
        load_format:  format of the source, or the name of a loader; None = detect it
        Call the result once, on the engine's thread, while no request is open.
        Raises ConfigError; nothing has changed then.
        """
        shape = DecoderModel(self._model, dtype=DTYPES[self._plan.dtype], device="meta")
        needed = sum(shard.memory.nbytes for shard in shape.tensors().values())
        self._check_memory(max(needed, self._plan.weight_bytes))
        torch.set_num_threads(self._plan.num_threads)  # of this thread
        opened: Opened
        if load_format in self._loaders:
            opened = self._ask(load_format, source)
        else:
            opened = self._read(source, load_format or "auto")
        with opened as (model, fill):
            built = build_forward(
                model, self._plan, self._table, cache_dir() / "kernels", fill=fill
            )
        return partial(self._runner.exchange, built.forward, built.token_sampler)

    def _check_memory(self, num_bytes: int) -> None:
        needed, free = int(num_bytes * SLACK), self._free_bytes()
        if free < needed:
            raise ConfigError(
                f"new weights need {needed / 2**30:.2f} GiB in addition to the current ones, and "
                f"{free / 2**30:.2f} GiB are free: restart the server with them instead"
            )

    @contextmanager
    def _ask(self, loader: str, source: str) -> Iterator[tuple[DecoderModel, Fill]]:
        try:
            weights = GivenWeights(self._loaders[loader](source), loader)
        except ConfigError:
            raise
        except Exception as error:  # the operator's code may raise anything
            raise ConfigError(f"{loader} failed: {type(error).__name__}: {error}") from error
        plan = self._plan
        model = DecoderModel(self._model, dtype=DTYPES[plan.dtype], device=plan.device)
        num_threads = plan.loading.num_threads
        with filling(model, weights, show_progress=False, num_threads=num_threads) as fill:
            yield model, fill

    def _below_roots(self, source: str) -> Path:
        try:
            path = Path(source).resolve()
            if any(path.is_relative_to(root) for root in self._roots):
                path.stat()
                return path
        except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: a circle of links
            raise ConfigError(f"{source!r} cannot be opened: {error}") from error
        raise ConfigError(f"{source} is below none of model.weight_roots")

    def _read(self, source: str, load_format: str) -> Opened:
        if load_format not in LOAD_FORMATS:
            known = ", ".join((*LOAD_FORMATS, *self._loaders))
            raise ConfigError(f"load_format is {load_format!r}; this server allows {known}")
        if not self._roots:
            raise ConfigError("model.weight_roots is not set: no weights are read from files")
        path = self._below_roots(source)
        loading = self._plan.loading
        if read_config(path, loading.config_overrides) != self._model:
            raise ConfigError(f"the config.json of {source} does not describe the served model")
        return open_model(
            path,
            dtype=DTYPES[self._plan.dtype],
            load_format=load_format,
            device=self._plan.device,
            show_progress=False,
            loading=loading,
        )
