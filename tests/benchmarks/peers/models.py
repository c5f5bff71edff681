"""The one model that everybody is measured with, in each peer's format.

The Hugging Face folder is what our engine serves. The GGUF files hold the same weights: bfloat16
and Q8_0 are made from the packaged Q4_1 file by llama.cpp's own tool, as our folder is by ours.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.engine.weights.resolve_model import SMOLLM2, resolve_model
from remora.engine.weights.smollm2 import (
    INSTALL,
    PACKAGE,
    find_packaged_gguf,
)
from tests.benchmarks.peers.peers import HOME, LLAMA, Peer, PeerError, llama_tool

CACHE = Path("~/.cache/remora").expanduser()


def model_for(peer: Peer, quant: str) -> Path:
    """Return a peer's model, made first where it is missing. Raises PeerError."""
    if quant not in peer.quants:
        raise PeerError(f"{peer.name} is measured with {', '.join(peer.quants)}, not {quant}")
    try:
        return _gguf(quant) if peer is LLAMA else resolve_model(SMOLLM2, CACHE)
    except ConfigError as error:
        raise PeerError(str(error)) from None


def _gguf(quant: str) -> Path:
    packaged = find_packaged_gguf(PACKAGE, INSTALL)
    if quant == "q4_1":
        return packaged
    file = HOME / "models" / f"smollm2-135m-instruct-{quant}.gguf"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        command = [str(llama_tool("llama-quantize")), "--allow-requantize", str(packaged)]
        command += [str(unfinished), quant.upper(), "2"]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise PeerError(f"llama-quantize could not write {file}; its reason is above")
        unfinished.rename(file)
    return file
