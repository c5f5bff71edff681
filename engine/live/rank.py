"""One rank's weights, which change while the engine runs, and its memory, which may be released.

New weights are loaded, checked and packed in any thread while the old ones serve; they are put in
place while no step runs. Memory must hold two copies meanwhile, unless the old ones have been
released. On a CPU only: a GPU's memory is taken by the KV cache, and captured graphs hold the
weights' addresses. Knows no requests, no other ranks and no versions.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.planning.plan import EnginePlan
from remora.engine.live.asleep import AsleepForward
from remora.engine.live.patched import PatchedWeights
from remora.engine.live.source import LiveSource
from remora.engine.models.architectures import parse_config
from remora.engine.models.checkpoint import QUANTIZATION, is_gguf, read_config, read_raw_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.load import LOAD_FORMATS, filling, open_model, open_stored
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.plugins import import_callable
from remora.engine.protocols import Fill, ForwardPass, WeightSource
from remora.engine.runner.forward import DTYPES, BuiltForward, build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.sampling.token_sampler import HostTokenSampler, TokenSampler
from remora.engine.weights.from_function import GivenWeights
from remora.engine.weights.packed_cache import PackedCache
from remora.engine.weights.rename_tensors import RenamedWeights
from remora.kernels import sampling as sampling_kernels
from remora.kernels.memory import forget, trim

Loaders = Mapping[str, Callable[[str], Any]]

SLACK = 1.15  # memory that loading needs, per byte of weights
WEIGHTS, KV_CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, GRAPHS)


class HoldsForward(Protocol):
    """What runs a rank's steps."""

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass in use."""

    @property
    def group(self) -> Group:
        """The group of the rank."""

    def exchange(self, forward: ForwardPass, token_sampler: TokenSampler) -> None:
        """Replace the forward pass and close the old one, while no step runs."""


@runtime_checkable
class HoldsPages(Protocol):
    """A forward pass whose memory for K and V is known."""

    def page_memory(self) -> list[Tensor]:
        """Return that memory."""


def import_loaders(paths: Iterable[str]) -> Loaders:
    """Import the functions of model.weight_loaders. Raises ConfigError."""
    return {path: import_callable(f"model.weight_loaders: {path}", path) for path in paths}


class RankWeights:
    """The weights and the KV memory of one rank.

    source:    what is served, or will be after waking; None = it was forgotten
    released:  tags of the memory that is released
    """

    def __init__(
        self,
        plan: EnginePlan,
        model: DecoderConfig,
        table: InputBatch,
        holder: HoldsForward,
        *,
        layout: Layout = WHOLE,
        loaders: Loaders,
        free_bytes: Callable[[], int],
        packed: PackedCache | None = None,
    ) -> None:
        """Begin with the plan's weights.

        free_bytes:  returns the memory that is free now
        packed:      packed weights of the plan's checkpoint
        """
        self._plan, self._model = plan, model
        self._table, self._holder, self._layout = table, holder, layout
        self._loaders, self._free_bytes, self._packed = loaders, free_bytes, packed
        self._first = LiveSource(path=str(plan.model_path), load_format=plan.load_format)
        self.source: LiveSource | None = self._first
        self.released: frozenset[str] = frozenset()
        self._staged: dict[str, tuple[LiveSource, BuiltForward]] = {}

    def prepare(self, name: str, source: LiveSource) -> None:
        """Load and pack weights under a name, in any thread. Raises ConfigError."""
        if WEIGHTS not in self.released:
            self._check_memory()
        self._staged[name] = source, self._build(source)

    def install(self, name: str) -> None:
        """Serve prepared weights; call it while no step runs."""
        source, built = self._staged.pop(name)
        self._holder.exchange(built.forward, built.token_sampler)
        self.source = source
        self.released -= {WEIGHTS}
        del built
        give_memory_back()

    def discard(self, name: str) -> None:
        """Drop prepared weights, if they are there."""
        staged = self._staged.pop(name, None)
        if staged is not None:
            staged[1].forward.close()
        del staged
        give_memory_back()

    def release(self, tags: frozenset[str], forgets: bool) -> None:
        """Free the memory of tags; call it while no step runs and no prefix is cached.

        K and V have no memory while the weights have none.
        forgets:  whether the weights will be supplied by an update
        """
        if WEIGHTS in tags and WEIGHTS not in self.released:
            self._holder.exchange(AsleepForward(), HostTokenSampler(sampling_kernels))
        elif KV_CACHE in tags:
            self._forget_pages()
        if forgets:
            self.source = None
        self.released |= tags
        give_memory_back()

    def prepare_waking(self, name: str) -> None:
        """Load released weights again, under a name, in any thread. Raises ConfigError."""
        assert self.source is not None, "the weights were forgotten"
        self._staged[name] = self.source, self._build(self.source)

    def wake(self, tags: frozenset[str]) -> None:
        """Mark memory as in use; forgotten weights stay released."""
        self.released -= tags if self.source is not None else tags - {WEIGHTS}

    def close(self) -> None:
        """Drop what was prepared."""
        for name in list(self._staged):
            self.discard(name)

    @contextmanager
    def open(self, source: LiveSource) -> Iterator[tuple[DecoderModel, Fill]]:
        """Open a source: the model, and what fills it. Raises ConfigError."""
        plan = self._plan
        if source.patches or source.load_format in self._loaders:
            weights = self.tensors(source)
            model = DecoderModel(
                self._model, dtype=DTYPES[plan.dtype], device=plan.device, layout=self._layout
            )
            threads = plan.loading.num_threads
            with filling(model, weights, show_progress=False, num_threads=threads) as fill:
                yield model, fill
            return
        assert source.path is not None
        if source.load_format not in LOAD_FORMATS:
            known = ", ".join((*LOAD_FORMATS, *self._loaders))
            raise ConfigError(f"load_format is {source.load_format!r}; this server allows {known}")
        self._check_config(source.path)
        with open_model(
            Path(source.path),
            dtype=DTYPES[plan.dtype],
            load_format=source.load_format,
            device=plan.device,
            show_progress=False,
            layout=self._layout,
            loading=plan.loading,
        ) as opened:
            yield opened

    def tensors(self, source: LiveSource) -> WeightSource:
        """Open a source's tensors under the model's names. Raises ConfigError."""
        weights = self.stored(source)
        rules = self._model.rules
        return RenamedWeights(weights, rules) if rules else weights

    def stored(self, source: LiveSource) -> WeightSource:
        """Open a source's tensors under the names of the checkpoint. Raises ConfigError."""
        base = None
        if source.path is not None and source.load_format in self._loaders:
            base = self._ask(source.load_format, source.path)
        elif source.path is not None:
            base = self._files(Path(source.path), source.load_format)
        if base is None or source.patches:
            return PatchedWeights(base, source.patches)
        return base

    def stored_in_files(self, source: LiveSource) -> WeightSource:
        """Open a source's tensors as `stored` does. Raises ConfigError for those of a loader."""
        if source.path is not None and source.load_format in self._loaders:
            raise ConfigError(
                f"the weights come from {source.load_format}, which makes them anew at each call; "
                "save them with /save_weights, and load the folder on both servers"
            )
        return self.stored(source)

    def raw_config(self) -> str:
        """Return the model's config.json, with configured changes."""
        return json.dumps(
            read_raw_config(self._plan.model_path, self._plan.loading.config_overrides)
        )

    def check_config(self, raw: Mapping[str, Any]) -> None:
        """Raise ConfigError, with what differs, unless a config.json is the served model's."""
        found = parse_config({**raw, **self._plan.loading.config_overrides})
        differing = [
            f.name
            for f in fields(found)
            if f.compare and getattr(found, f.name) != getattr(self._model, f.name)
        ]
        if differing:
            raise ConfigError(
                f"its config.json does not describe the served model: {', '.join(differing)} "
                f"differ{'s' if len(differing) == 1 else ''}"
            )

    def _ask(self, loader: str, argument: str) -> WeightSource:
        try:
            return GivenWeights(self._loaders[loader](argument), loader)
        except ConfigError:
            raise
        except Exception as error:  # the operator's code may raise anything
            raise ConfigError(f"{loader} failed: {type(error).__name__}: {error}") from error

    def _files(self, path: Path, load_format: str) -> WeightSource:
        """Open a checkpoint whose tensors can be replaced one by one."""
        loading = self._plan.loading
        if load_format == "dummy" or is_gguf(path):
            kind = "random weights are" if load_format == "dummy" else "a GGUF file is"
        elif read_raw_config(path, loading.config_overrides).get(QUANTIZATION):
            kind = "a quantised checkpoint is"
        else:
            return open_stored(path, load_format, loading)
        raise ConfigError(
            f"{kind} served, of which no single tensors can be replaced or saved: it needs an "
            "unquantised checkpoint in safetensors or PyTorch files"
        )

    def _check_config(self, path: str) -> None:
        if path != self._first.path:
            found = read_config(Path(path), self._plan.loading.config_overrides)
            if found != self._model:
                raise ConfigError(f"the config.json of {path} does not describe the served model")

    def _check_memory(self) -> None:
        shape = DecoderModel(self._model, dtype=DTYPES[self._plan.dtype], device="meta")
        num_bytes = sum(shard.memory.nbytes for shard in shape.tensors().values())
        needed = int(max(num_bytes, self._plan.weight_bytes) * SLACK)
        free = self._free_bytes()
        if free < needed:
            raise ConfigError(
                f"new weights need {needed / 2**30:.2f} GiB in addition to the current ones, and "
                f"{free / 2**30:.2f} GiB are free: restart the server with them instead"
            )

    def _build(self, source: LiveSource) -> BuiltForward:
        torch.set_num_threads(self._plan.num_threads)  # of this thread
        packed = self._packed if source == self._first else None
        with self.open(source) as (model, fill):
            group = self._holder.group
            if group.layout.num_ranks > 1:
                fill(None)
            kernels = cache_dir() / "kernels"
            return build_forward(model, self._plan, self._table, kernels, group, fill, packed)

    def _forget_pages(self) -> None:
        forward = self._holder.forward_pass
        if isinstance(forward, HoldsPages):
            for memory in forward.page_memory():
                forget(memory)


def give_memory_back() -> None:
    """Return freed memory to the system."""
    gc.collect()  # programs and their buffers refer to each other
    trim()
