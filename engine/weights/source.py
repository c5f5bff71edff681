"""From what an operator calls a model to a path on this machine.

A name is an existing folder, an existing .gguf file, or a built-in model. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from remora.configs.errors import ConfigError

SMOLLM2 = "smollm2-135m-instruct"


def _smollm2(cache: Path) -> Path:
    folder = cache / SMOLLM2
    if (folder / "config.json").is_file():
        return folder
    # It loads torch, which those who only look for the folder can do without.
    from remora.engine.weights.materialise import materialise_smollm2

    return materialise_smollm2(cache)


BUILT_IN: dict[str, Callable[[Path], Path]] = {SMOLLM2: _smollm2}


def resolve_model(name_or_path: str, cache: Path) -> Path:
    """Return the folder or GGUF file that a model's name means.

    cache:  folder for built-in models, which are written there on first use
    Raises ConfigError, which says what was looked for and what to do.
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
        f"no model {name_or_path!r}: there is no folder or .gguf file of that name (looked for "
        f"{path.absolute()}), and the built-in models are {', '.join(BUILT_IN)}. Nothing is "
        "downloaded; put a Hugging Face model folder on this machine and give its path."
    )
