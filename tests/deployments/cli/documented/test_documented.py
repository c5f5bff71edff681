"""Every command of README.md and docs/*.md runs as it is written, or is listed in `NOT_RUN`.

The names that pages use stand for files of the working folder: MODEL is a folder named MODEL.
"""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from remora.deployments.cli import serve as serve_module
from remora.deployments.cli.main import app
from remora.deployments.cli.terminal import LazyCommands
from remora.deployments.serve_environment import ENVIRONMENT
from tests.configs.dialects.launch_commands import FILES
from tests.conftest import TinyCheckpoints
from tests.deployments.cli.documented.pages import ROOT, Command, blocks, inline
from tests.deployments.cli.fake_server import STOP, FakeServer, chat_event
from tests.deployments.conftest import SMOL, Cluster

_MACHINE = "changes the machine that it runs on"
# By the beginning of the command. Those of remora are parsed.
NOT_RUN: Mapping[tuple[str, ...], str] = {
    ("make",): "runs for minutes; that the target exists is checked",
    ("remora", "bench"): "measures for minutes; tests/deployments/bench runs it on small loads",
    ("remora", "lora"): "needs a server with adapters; tests/deployments/adapters has one",
    ("remora", "quantize"): "computes for long; a slow test here runs it",
    ("curl", "-H", "content-type: application/octet-stream"): "uploads the parts of a trainer; "
    "tests/deployments/http/weights does",
    ("podman",): "needs a container engine and a registry",
    ("helm",): "needs a cluster; that the chart has the values is checked",
    ("prometheus",): "another program, not a dependency",
    ("grafana",): "another program, not a dependency",
    ("python3", "-m", "venv", "/opt/remora"): _MACHINE,
    ("useradd",): _MACHINE,
    ("cp", "deployments/manifests/remora.service"): _MACHINE,
    ("systemctl",): _MACHINE,
    ("serve", "run"): "Ray's own command; `remora serve` deploys the same file",
}
COMMANDS = blocks()


def page(command: Command) -> str:
    return command.place.partition(":")[0]


def reason(command: Command) -> str | None:
    return next((why for start, why in NOT_RUN.items() if _begins(command, start)), None)


def _begins(command: Command, start: tuple[str, ...]) -> bool:
    return command.words[: len(start)] == start


@pytest.fixture
def folder(
    tmp_path: Path, tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Make the working folder that pages assume, with the files that they name."""
    for name in ("configs", "deployments", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("MODEL", "PATH"):
        (tmp_path / name).symlink_to(tiny_checkpoints("llama"))
    (tmp_path / "serve_config.yaml").write_text(FILES[0].text)
    (tmp_path / "llm_config.yaml").write_text(FILES[1].text)
    (tmp_path / "sglang.yaml").write_text("model-path: MODEL\n")
    (tmp_path / "optimisation.json").write_text("{}")
    (tmp_path / "pipeline.json").write_text("{}")
    (tmp_path / "my.txt").write_text("Sphinx of black quartz, judge my vow. " * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop `remora serve` where Ray would start; returns the addresses that it would serve."""
    addresses: list[str] = []

    def supervised(_drive: Any, address: str) -> int:
        addresses.append(address)
        return 0

    def served(raw: dict[str, Any], *_: object, **_options: object) -> int:
        addresses.append(f"{raw['http_options']['host']}:{raw['http_options']['port']}")
        return 0

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(serve_module, "serve_locally", served)
    monkeypatch.setattr(serve_module, "run_supervised", supervised)
    monkeypatch.setattr(serve_module, "bound", lambda host, port: socket.socket())
    monkeypatch.setattr(serve_module, "remove_remains", list)
    return addresses


@pytest.mark.parametrize("name", sorted({page(command) for command in COMMANDS}))
def test_the_commands_of_a_page_run(
    name: str,
    folder: Path,
    deployed: list[str],
    make_server: Callable[..., FakeServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_served = 0
    for command in COMMANDS:
        if page(command) != name or reason(command) is not None or command.program == "curl":
            continue
        words, typed = list(command.words), None
        if command.program == "mkdir":
            _in_a_shell(command, folder)
            continue
        assert command.program == "remora", f"{command.place}: neither run nor in NOT_RUN"
        if words[1] == "chat":  # with the server that the page has started
            server = make_server((200, chat_event("Paris.") + STOP))
            words[words.index("--url") + 1], typed = server.url, "What is the capital?\n"
        num_served += words[1] == "serve"
        with monkeypatch.context() as patch:
            for variable, value in command.environment.items():
                patch.setenv(variable, value)
            result = CliRunner().invoke(app, words[1:], input=typed)
        assert result.exit_code == 0, f"{command.place}: {command.text}\n{result.output}"
        assert "missing here" not in result.output
    assert len(deployed) == num_served


def _in_a_shell(command: Command, folder: Path) -> None:
    text = command.text.replace("/var/tmp", str(folder))
    assert text != command.text
    subprocess.run(["sh", "-ec", text], check=True)
    assert list((folder / "dashboards").glob("*.json"))


@pytest.mark.slow
def test_checkpoints_are_quantised(folder: Path) -> None:
    commands = [c for c in COMMANDS if _begins(c, ("remora", "quantize"))]
    assert commands
    for command in commands:
        result = CliRunner().invoke(app, list(command.words[1:]))
        assert result.exit_code == 0, f"{command.place}: {result.output}"
        assert (folder / "OUT" / "config.json").is_file()
        shutil.rmtree(folder / "OUT")


@pytest.mark.ray
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_chats_of_curl_are_answered(cluster: Cluster) -> None:
    commands = [c for c in COMMANDS if c.program == "curl" and reason(c) is None]
    assert commands
    for command in commands:
        words = [w.replace("http://127.0.0.1:8000", cluster.url(SMOL)) for w in command.words]
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, check=True)
        events = [line for line in done.stdout.decode().splitlines() if line]
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert "Paris" in text


@pytest.mark.parametrize(
    "command", [*COMMANDS, *inline()], ids=lambda command: f"{command.place} {command.words[-1]}"
)
def test_options_exist(command: Command) -> None:
    """Parse a command of remora without running it; texts may leave arguments out."""
    if command.program == "make":
        subprocess.run(["make", "--dry-run", *command.words[1:]], cwd=ROOT, check=True)
    if command.program == "helm":
        _check_values(command)
    if command.program != "remora":
        return
    rest = [w for w in command.words[1:] if not w.startswith("[") and not w.endswith("]")]
    found: Any = get_command(app)
    while rest and hasattr(found, "list_commands"):
        word = rest.pop(0)
        if word.startswith("-"):  # of all commands; some act as soon as they are parsed
            assert word in {option for each in found.params for option in each.opts}
            return
        is_lazy = isinstance(found, LazyCommands) and word in found.commands_at
        found = found.load(word) if is_lazy else found.get_command(typer.Context(found), word)
        assert found is not None, f"{command.place}: no command {word}"
    try:
        if rest:
            found.make_context("remora", rest)
    except typer.BadParameter as error:
        if type(error).__name__ != "MissingParameter":
            raise


def _check_values(command: Command) -> None:
    values = yaml.safe_load((ROOT / "deployments/manifests/chart/values.yaml").read_text())
    pairs = [after for at, after in itertools.pairwise(command.words) if at == "--set"]
    for pair in itertools.chain.from_iterable(pair.split(",") for pair in pairs):
        found = values
        for key in pair.partition("=")[0].split("."):
            assert key in found or found == {}, f"{command.place}: the chart has no {pair}"
            found = found.get(key, {})


def test_the_list_of_commands_that_do_not_run_is_needed() -> None:
    unused = [s for s in NOT_RUN if not any(_begins(command, s) for command in COMMANDS)]
    assert unused == []
