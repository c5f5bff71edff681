"""Run the tests of every client, each in its own environment: texts first, then embeddings.

    python tests/deployments/clients/run.py [CLIENT ...]

Environments are kept in `~/.cache/remora/clients`. If REMORA_URL and REMORA_TOKENIZER are set, that
server is used, without the tests of embeddings.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console

from remora.configs.environment import cache_dir
from remora.configs.schema import BUILTIN_MODEL
from remora.deployments.free_ports import free_port
from remora.engine.weights.resolve_model import resolve_model

HERE = Path(__file__).parent
PYTEST = ("pytest==9.2.0", "pytest-timeout==2.4.0")
START_TIMEOUT_S = 180.0

# Name of a test file -> (module under test, requirements of its environment)
CLIENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "anthropic": ("anthropic", ("anthropic>=2.12,<3",)),
    "ollama": ("ollama", ("ollama>=0.6.3,<0.7",)),
    "cohere": ("cohere", ("cohere>=7.3,<8",)),
    "text_generation": ("text_generation", ("text-generation==0.7.0",)),
    "huggingface_hub": ("huggingface_hub", ("huggingface_hub>=2.4,<3", "numpy")),
    "langchain": ("langchain_openai", ("langchain-openai>=1.1,<2",)),
    "instructor": ("instructor", ("instructor==1.17.0",)),
    "pydantic_ai": ("pydantic_ai", ("pydantic-ai-slim[openai]==2.68.0",)),
    "litellm": ("litellm", ("litellm>=1.100,<2", "mcp")),
    "lm_eval": ("lm_eval", ("lm-eval[api]==0.4.13", "torch==2.13.0", "transformers==5.23.0")),
}

# Clients that have tests of embeddings, too: test_CLIENT_embeddings.py.
EMBEDDING_CLIENTS = ("ollama", "cohere", "huggingface_hub")

console = Console()


def make_environment(name: str) -> Path:
    """Return the interpreter of a client's environment, which is created on first use."""
    folder = cache_dir() / "clients" / name.replace("_", "-")
    python = folder / "bin" / "python"
    _, requirements = CLIENTS[name]
    wanted = "\n".join((*PYTEST, *requirements))
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    console.print(f"installing {name} ...")
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *PYTEST, *requirements], check=True)
    stamp.write_text(wanted)
    return python


@contextmanager
def serving(config_name: str) -> Iterator[str]:
    """Start a server of a configuration of this folder on a free port, and yield its address."""
    port = free_port()
    remora = shutil.which("remora", path=str(Path(sys.executable).parent))
    if remora is None:
        raise SystemExit("remora is not installed in this environment; run `make setup`.")
    with TemporaryDirectory() as folder:
        config = Path(folder) / "server.yaml"
        # `api` is the last section of the file.
        given = (HERE / config_name).read_text("utf-8").rstrip().removesuffix(" {}")
        config.write_text(f"{given}\n        batch_dir: {folder}/batches\n", "utf-8")
        server = subprocess.Popen([remora, "serve", str(config), "--port", str(port)])
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_ready(url, server)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"The server was not ready after {START_TIMEOUT_S:g} s.")


def run_tests(name: str, url: str, tokenizer: str, *, suffix: str = "") -> bool:
    """Run one client's tests in its environment; return whether all passed.

    suffix:  of the tests' file name
    """
    module, _ = CLIENTS[name]
    console.rule(name + suffix)
    command = [str(make_environment(name)), "-m", "pytest", "-c", str(HERE / "standalone.ini")]
    command += [f"--confcutdir={HERE}", str(HERE / f"test_{name}{suffix}.py")]
    environment = {
        "REMORA_CLIENT": module,
        "REMORA_URL": url,
        "REMORA_TOKENIZER": tokenizer,
        # Its client refuses to send anything while offline.
        "HF_HUB_OFFLINE": "0" if name == "huggingface_hub" else "1",
        "ANONYMIZED_TELEMETRY": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return subprocess.run(command, env=os.environ | environment, check=False).returncode == 0


def main(names: list[str]) -> int:
    """Run the named clients, or all; return the exit status."""
    unknown = set(names) - set(CLIENTS)
    if unknown:
        raise SystemExit(
            f"unknown client: {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}"
        )
    chosen = names or list(CLIENTS)
    tokenizer = os.environ.get("REMORA_TOKENIZER") or str(resolve_model(BUILTIN_MODEL, cache_dir()))
    for name in chosen:
        make_environment(name)
    given = os.environ.get("REMORA_URL")
    with nullcontext(given) if given else serving("server.yaml") as url:
        passed = {name: run_tests(name, url, tokenizer) for name in chosen}
    embedding = [name for name in chosen if name in EMBEDDING_CLIENTS]
    if embedding and not given:
        with serving("embedder.yaml") as url:
            for name in embedding:
                is_good = run_tests(name, url, tokenizer, suffix="_embeddings")
                passed[f"{name}, embeddings"] = is_good
    console.rule("clients")
    for name, ok in passed.items():
        console.print(f"{name:28} {'passed' if ok else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
