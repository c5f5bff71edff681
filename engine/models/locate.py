"""Locates the model, the tokenizer and the draft model that a configuration names.

Remote ones are downloaded on first use. A model that cannot be served is refused before its weights
are: what decides is what decides for a folder of this machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from remora.configs.environment import cache_dir
from remora.configs.planning.loading import Loading
from remora.configs.schema import ServeConfig
from remora.configs.sections.model import ModelSection
from remora.engine.models.checkpoint import read_raw_config
from remora.engine.sources.model_files import Weights
from remora.engine.sources.models import Wanted
from remora.engine.weights.resolve_model import resolve_model


def locate_model(
    model: ModelSection, *, with_weights: bool = True, show_progress: bool = False
) -> Path:
    """Return the folder or GGUF file of a configured model.

    with_weights:  whether the weights of a remote model are downloaded; else a folder may lack them
    Raises ConfigError.
    """
    formats: dict[str, Weights] = {"pt": "pickles", "dummy": "none"}
    weights = formats.get(model.load_format, "safetensors")
    wanted = Wanted(
        weights=weights if with_weights else "none",
        check=partial(check_served, model),
        show_progress=show_progress,
        folder=model.download_folder,
    )
    return resolve_model(model.path, cache_dir(), wanted)


def locate_draft(config: ServeConfig, *, show_progress: bool = False) -> Path | None:
    """Return the folder or GGUF file of the draft model or head; None if none is configured."""
    section = config.speculation
    if section.draft_model is None:
        return None
    weights: Weights = "any" if section.method == "eagle" else "safetensors"
    wanted = Wanted(
        weights=weights, show_progress=show_progress, folder=config.model.download_folder
    )
    return resolve_model(section.draft_model, cache_dir(), wanted)


def locate_tokenizer(model: ModelSection, *, show_progress: bool = False) -> Path | None:
    """Return the place of the tokenizer; None if the model's own is configured."""
    if model.tokenizer_path is None:
        return None
    wanted = Wanted(weights="none", show_progress=show_progress, folder=model.download_folder)
    return resolve_model(model.tokenizer_path, cache_dir(), wanted)


def check_served(model: ModelSection, folder: Path) -> None:
    """Raise ConfigError if a model cannot be served, by its configuration alone."""
    # These import torch, for which a gateway that locates a tokenizer has no use.
    from remora.engine.encoders.architectures import encoder_architecture, parse_encoder
    from remora.engine.models.implementation import implementation_of
    from remora.engine.pooling.facts import pooling_task
    from remora.engine.pooling.load import parse_decoder

    if pooling_task(folder, model.task, model.config_overrides) is None:
        implementation_of(folder, Loading.of(model))
        return
    raw = read_raw_config(folder, model.config_overrides)
    if encoder_architecture(raw):
        parse_encoder(raw)
    else:
        parse_decoder(raw)
