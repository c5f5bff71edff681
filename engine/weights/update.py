"""Other weights for an engine that runs: the same model, trained on.

They are loaded, checked and packed beside those that serve, in any thread, and take their place
between two requests, in the engine's: a fault leaves everything as it was, and no request sees
both.
Memory must hold two copies meanwhile. On one rank of a CPU; on a GPU the KV cache has the memory,
and graphs remember where weights lie.
"""

from __future__ import annotations

from collections.abc import Callable
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
from remora.engine.models.registry import LOAD_FORMATS, fill_model, load_model
from remora.engine.plugins import import_callable
from remora.engine.runner.forward import DTYPES, build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.weights.from_function import GivenWeights

SLACK = 1.15  # of memory, for what loading needs beside the weights


class NewWeights:
    """Makes forward passes of other weights, and gives them to a runner.

    free_bytes:  tells how much memory could be taken now
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
        """Import what the configuration names. Raises ConfigError."""
        self._roots = [Path(root).expanduser().resolve() for root in config.model.weight_roots]
        self._loaders = {
            path: import_callable(f"model.weight_loaders: {path}", path)
            for path in config.model.weight_loaders
        }
        self._plan, self._model = plan, model
        self._table, self._runner = table, runner
        self._free_bytes = free_bytes

    def prepare(self, source: str, load_format: str | None) -> Callable[[], None]:
        """Load other weights; returns what puts them in the place of those that serve.

        source:       a folder or GGUF file below the roots, or what a loader is given
        load_format:  how it is read, or the name of a loader; None = by what the source is
        The result is to be called once, on the engine's thread, while no request is open.
        Raises ConfigError; nothing has changed then.
        """
        shape = DecoderModel(self._model, dtype=DTYPES[self._plan.dtype], device="meta")
        needed = sum(shard.memory.nbytes for shard in shape.tensors().values())
        self._check_memory(max(needed, self._plan.weight_bytes))
        torch.set_num_threads(self._plan.num_threads)  # of this thread
        if load_format in self._loaders:
            model = self._ask(load_format, source)
        else:
            model = self._read(source, load_format or "auto")
        built = build_forward(model, self._plan, self._table, cache_dir() / "kernels")
        return partial(self._runner.exchange, built.forward, built.token_sampler)

    def _check_memory(self, num_bytes: int) -> None:
        needed, free = int(num_bytes * SLACK), self._free_bytes()
        if free < needed:
            raise ConfigError(
                f"other weights need {needed / 2**30:.2f} GiB beside those that serve, and "
                f"{free / 2**30:.2f} GiB are free: restart the server with them instead"
            )

    def _ask(self, loader: str, source: str) -> DecoderModel:
        try:
            weights = GivenWeights(self._loaders[loader](source), loader)
        except ConfigError:
            raise
        except Exception as error:  # the operator's code may raise anything
            raise ConfigError(f"{loader} failed: {type(error).__name__}: {error}") from error
        plan = self._plan
        model = DecoderModel(self._model, dtype=DTYPES[plan.dtype], device=plan.device)
        fill_model(model, weights, show_progress=False, num_threads=plan.loading.num_threads)
        return model

    def _read(self, source: str, load_format: str) -> DecoderModel:
        if load_format not in LOAD_FORMATS:
            known = ", ".join((*LOAD_FORMATS, *self._loaders))
            raise ConfigError(f"load_format is {load_format!r}; this server takes {known}")
        if not self._roots:
            raise ConfigError("model.weight_roots is not set: no weights are read from files")
        path = Path(source).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
            raise ConfigError(f"{source} lies below none of model.weight_roots")
        loading = self._plan.loading
        if read_config(path, loading.config_overrides) != self._model:
            raise ConfigError(
                f"the config.json of {source} describes another model than the one that is served"
            )
        return load_model(
            path,
            dtype=DTYPES[self._plan.dtype],
            load_format=load_format,
            device=self._plan.device,
            show_progress=False,
            loading=loading,
        )
