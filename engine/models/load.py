"""Opens a model path: builds the model, or one rank's shard of it, and loads its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

import torch

from remora.configs.errors import ConfigError
from remora.configs.planning.device_plan import HeldWeights
from remora.configs.planning.loading import PLAIN_LOADING, Loading
from remora.engine.models.checkpoint import QUANTIZATION, is_gguf, read_config, read_raw_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.implementation import Ours, implementation_of
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.protocols import (
    Fill,
    QuantisedSource,
    WeightEdit,
    WeightSource,
    nothing_left,
)
from remora.engine.weights.dummy import DummyWeights
from remora.engine.weights.files import check_hashes, weight_files
from remora.engine.weights.formats.source import QuantisedWeights, dequantised
from remora.engine.weights.gguf.weights import GGUFWeights
from remora.engine.weights.hold_quantised import hold_quantised
from remora.engine.weights.loader import Filling, whole_shapes
from remora.engine.weights.pickled import PickledWeights
from remora.engine.weights.rename_tensors import RenamedWeights, RenamingRules
from remora.engine.weights.rounded import RoundedWeights
from remora.engine.weights.safetensors import SafetensorsWeights

if TYPE_CHECKING:  # it imports transformers
    from remora.engine.fallback.model import FallbackModel

LOAD_FORMATS = ("auto", "safetensors", "gguf", "pt", "dummy")
TIED_HEAD = frozenset({"lm_head.weight"})


class LoadOptions(TypedDict):
    """What to load, and for whom.

    load_format:  one of LOAD_FORMATS; auto depends on the path and never reads pickles; dummy
                  needs no weights
    layout:       of the rank; the whole model by default
    edit:         changes the weights while they are read
    host_layers:  layers whose large weights are loaded into host memory, to be offloaded
    held:         how linear layers hold weights that kernels multiply quantised; an edit
                  changes dequantised ones
    """

    dtype: torch.dtype
    load_format: str
    device: str
    show_progress: bool
    layout: NotRequired[Layout]
    edit: NotRequired[WeightEdit | None]
    loading: NotRequired[Loading]
    held: NotRequired[HeldWeights]
    host_layers: NotRequired[Collection[int]]


def load_model(path: Path, **options: Unpack[LoadOptions]) -> DecoderModel:
    """Build a rank's shard of the model at `path` and load its weights.

    path:  a folder with config.json, or a .gguf file
    Only the shard is read and kept, plus one tensor for each thread.
    Raises ConfigError for an unknown architecture or setting, an unsupported format, or weights
    that do not fit.
    """
    with open_model(path, **options) as (model, _):
        return model


@contextmanager
def open_model(path: Path, **options: Unpack[LoadOptions]) -> Iterator[tuple[DecoderModel, Fill]]:
    """Like `load_model`, but load parts on demand, and the rest at the end.

    Packing a layer and dropping its weights before the next one loads needs memory for the packed
    model only.
    """
    dtype, load_format, device = options["dtype"], options["load_format"], options["device"]
    edit, loading = options.get("edit"), options.get("loading", PLAIN_LOADING)
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}; known are {', '.join(LOAD_FORMATS)}.")
    _check_hashes(path, load_format, loading)
    config = read_config(path, loading.config_overrides)
    model = DecoderModel(config, dtype=dtype, device=device, layout=options.get("layout", WHOLE))
    model.load_on_host(options.get("host_layers", ()))
    # An edit adds to the weights, and only the sum must be rounded.
    read_as = dtype if edit is None else torch.float32
    source = open_weights(path, load_format, device=device, loading=loading, dtype=read_as)
    if edit is not None:
        source = edit(source, RenamingRules(config.rules))
    is_shown, num_threads = options["show_progress"], loading.num_threads
    held = options.get("held", "dequantised")
    if held in ("int8", "fp8"):
        source = RoundedWeights(source, held)
    if held != "dequantised" and isinstance(source, QuantisedSource):
        hold_quantised(model, source, source.label, show_progress=is_shown)
    with filling(model, source, show_progress=is_shown, num_threads=num_threads) as filled:
        if load_format == "pt":  # read a file at a time, not a tensor
            filled()
        yield model, filled


def filling(
    model: DecoderModel, source: WeightSource, *, show_progress: bool, num_threads: int
) -> Filling:
    """Return what fills a rank's shard of a model. Raises ConfigError if names or shapes differ."""
    config = model.config
    return Filling(
        model.tensors(),
        source,
        expected=_expected_shapes(config),
        unused=TIED_HEAD if config.head.tied else frozenset(),
        show_progress=show_progress,
        num_threads=num_threads,
    )


@contextmanager
def open_served_model(
    path: Path, **options: Unpack[LoadOptions]
) -> Iterator[tuple[DecoderModel | FallbackModel, Fill]]:
    """Like `open_model`, also for models that transformers runs, which are loaded at once."""
    loading = options.get("loading", PLAIN_LOADING)
    chosen = implementation_of(path, loading)
    if isinstance(chosen, Ours):
        with open_model(path, **options) as opened:
            yield opened
        return
    from remora.engine.fallback.load import dummy_shapes, load_fallback

    dtype, load_format, device = options["dtype"], options["load_format"], options["device"]
    _check_hashes(path, load_format, loading)
    source: WeightSource
    if load_format == "dummy":
        source = DummyWeights(dummy_shapes(chosen.structure), device=device)
    else:
        source = _open_files(path, load_format, loading, dtype)
    model = load_fallback(
        chosen.structure,
        source,
        dtype=dtype,
        device=device,
        layout=options.get("layout", WHOLE),
        show_progress=options["show_progress"],
        num_threads=loading.num_threads,
    )
    yield model, nothing_left


def _check_hashes(path: Path, load_format: str, loading: Loading) -> None:
    if loading.verify_checksums and load_format != "dummy":
        check_hashes(weight_files(path, load_format))


def _expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the whole model."""
    whole = DecoderModel(config, dtype=torch.bfloat16, device="meta")
    return whole_shapes(whole.tensors())


def open_weights(
    path: Path,
    load_format: str,
    *,
    device: str = "cpu",
    loading: Loading = PLAIN_LOADING,
    dtype: torch.dtype = torch.float32,
) -> WeightSource:
    """Open the tensors of a checkpoint. Raises ConfigError; see `load_model`.

    device:  of random weights; tensors of files are read into CPU memory
    dtype:   of dequantised tensors
    """
    config = read_config(path, loading.config_overrides)
    if load_format == "dummy":
        return DummyWeights(_expected_shapes(config), device=device)
    source = _open_files(path, load_format, loading, dtype)
    if isinstance(source, QuantisedWeights) and any(rule.is_transposed for rule in config.rules):
        raise ConfigError(
            f"{path} is quantised, and {config.architecture} stores transposed weights, of which "
            "quantised ones are not read. Use the original checkpoint."
        )
    return RenamedWeights(source, config.rules) if config.rules else source


def check_files(path: Path, load_format: str, loading: Loading) -> str:
    """Read the headers of weight files; return a description of the number of tensors.

    Raises ConfigError for missing or damaged files.
    """
    if load_format == "dummy":
        return "random weights (model.load_format is dummy)"
    source = _open_files(path, load_format, loading, torch.float32)
    tensors = f"{len(source.shapes())} tensors"
    if isinstance(source, QuantisedWeights):
        return f"{tensors}; quantised: {source.description()}"
    return tensors


def _open_files(path: Path, load_format: str, loading: Loading, dtype: torch.dtype) -> WeightSource:
    """Open weights with the names in the files."""
    if is_gguf(path) != (load_format == "gguf") and load_format != "auto":
        stored = "a GGUF file" if is_gguf(path) else "a folder"
        raise ConfigError(
            f"load_format is {load_format!r}, but {path} is {stored}; set load_format: auto."
        )
    if is_gguf(path):
        return GGUFWeights(path, dtype=dtype, num_threads=loading.num_threads)
    settings = read_raw_config(path, loading.config_overrides).get(QUANTIZATION) or {}
    return dequantised(open_stored(path, load_format, loading), settings, dtype)


def open_stored(path: Path, load_format: str, loading: Loading) -> WeightSource:
    """Open the tensors of a folder as they are stored."""
    if load_format == "pt":
        return PickledWeights(path, mmap=loading.mmap)
    return SafetensorsWeights(path, mmap=loading.mmap)
