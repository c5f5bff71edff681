"""`remora serve` up to the point where Ray would start."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from remora.configs.errors import ConfigError
from remora.configs.load import IMPORT_PATH
from remora.configs.schema import BUILTIN_MODEL, ServeConfig
from remora.configs.value_sources import of_options
from remora.deployments.cli import serve as serve_module
from remora.deployments.cli.haproxy.choice import Proxy
from remora.deployments.cli.main import app
from remora.deployments.cli.serve import (
    _drive,
    _start_ray,
    _wait_until_running,
    check_routing_hook,
    serve_config,
)
from remora.deployments.cli.startup.address import bound
from remora.deployments.cli.startup.progress import Progress
from remora.deployments.cli.supervision.driver_link import DriverLink
from remora.deployments.cli.supervision.run_folder import RunFolder
from remora.deployments.cli.terminal import Failure
from remora.deployments.routing.haproxy_hook import HOOK_SWITCH
from remora.deployments.serve_environment import WITHOUT_TRACEBACKS


def make_file(folder: Path, **changes: Any) -> Path:
    application = {"name": "a", "import_path": IMPORT_PATH, "args": {"model": {"path": "x"}}}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application], **changes}))
    return path


def make_config(target: Any, **given: Any) -> dict[str, Any]:
    options = [f"{key}={given.pop(key)}" for key in tuple(given) if "." in key]
    return serve_config([str(target)], overrides=of_options(options), **given)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = make_file(tmp_path, http_options={"host": "0.0.0.0", "port": 9000})
    kept = make_config(path)
    config = make_config(path, port=9001, **{"model.served_name": "m", "model.dtype": "float32"})

    assert kept["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert kept["applications"][0]["args"] == {"model": {"path": "x"}}
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9001}
    model = config["applications"][0]["args"]["model"]
    assert model == {"path": "x", "served_name": "m", "dtype": "float32"}


def test_a_folder_becomes_a_config_with_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (application,) = make_config("model")["applications"]
    assert application["args"]["model"]["path"] == str(tmp_path / "model")
    assert application["import_path"] == IMPORT_PATH
    (built_in,) = make_config("smollm2-135m-instruct")["applications"]
    assert built_in["args"] == {"model": {"path": "smollm2-135m-instruct"}}
    with pytest.raises(ConfigError, match=r"no/such/folder: no such file or folder"):
        make_config("no/such/folder")


def test_a_key_that_is_not_there_warns_before_ray_starts(tmp_path: Path) -> None:
    path = make_file(tmp_path)
    text = path.read_text().replace("args:", "args:\n    api: {api_key: 'env:NO_SUCH_KEY'}")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"api\.api_key: .* NO_SUCH_KEY is not set"):
        make_config(path)


@pytest.mark.parametrize("options", [[], ["--set", "model.path=no/such/folder"]])
def test_without_a_target_the_built_in_model_is_served(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    served = []

    def serve_locally(raw: dict[str, Any], *_: object, **_options: object) -> int:
        served.append(raw)
        return 0

    monkeypatch.setattr(serve_module, "serve_locally", serve_locally)
    monkeypatch.setattr(serve_module, "check_files", lambda *_: None)

    result = CliRunner().invoke(app, ["serve", "--local", *options])

    (raw,) = served
    model = raw["applications"][0]["args"]["model"]
    assert result.exit_code == 0
    assert model["path"] == ("no/such/folder" if options else BUILTIN_MODEL)
    assert (BUILTIN_MODEL in result.stdout) is not bool(options)


def test_a_taken_port_warns_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Failure, match=f"127.0.0.1:{port}.*--port"):
            bound("127.0.0.1", port)


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        (["--dtype", "int3"], {}),
        (["--port", "0"], {}),
        (["--host"], {}),
        ([], {"applications": []}),
    ],
)
def test_errors_end_with_code_two_before_ray_starts(
    tmp_path: Path, option: list[str], changes: dict[str, Any]
) -> None:
    result = CliRunner().invoke(app, ["serve", str(make_file(tmp_path, **changes)), *option])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("policy", "lacks", "warns"),
    [("prefix", "Application.hook", True), ("prefix", None, False), ("power_of_two", "x", False)],
)
def test_a_missing_hook_is_reported_where_a_gateway_replaces_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    lacks: str | None,
    warns: bool,
) -> None:
    monkeypatch.setenv(HOOK_SWITCH, "1")
    monkeypatch.setattr(serve_module, "missing_routing_hook", lambda: lacks)
    config = ServeConfig.model_validate({"model": {"path": "x"}, "routing": {"policy": policy}})

    check_routing_hook([config])

    shown = capsys.readouterr().out
    assert (f"no {lacks}" in shown and "gateway" in shown) is warns


class FakeLink(DriverLink):
    """A link without a supervisor."""

    def __init__(self) -> None:
        """Install no signal handlers."""

    def watch(self, pids: Mapping[str, int]) -> None:
        """Do nothing."""

    def starting(self) -> None:
        """Do nothing."""


NESTED = (
    "The actor died because of an error raised in its creation task, ray::ServeController()\n"
    '  File "/x/controller.py", line 1, in __init__\n    self.run()\nValueError: no such module'
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The node timed out.\nFurther lines", r"The node timed out\."),
        (NESTED, "ValueError: no such module"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    import ray

    def init(**_options: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(ray, "init", init)

    with pytest.raises(Failure, match=rf"^Ray did not start: {reason}($|; its logs)") as raised:
        _start_ray(make_config(make_file(tmp_path)), FakeLink(), Progress(io.StringIO()))
    assert raised.value.details.startswith("Traceback (most recent call last)")


def test_a_serve_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve as ray_serve
    from ray.exceptions import GetTimeoutError

    def status() -> None:
        raise GetTimeoutError("Get timed out: some object(s) not ready.\nFurther lines")

    monkeypatch.setattr(ray_serve, "status", status)

    with pytest.raises(Failure, match=r"^Serve did not start: Get timed out: .* not ready\.$"):
        _wait_until_running(["remora"])


@pytest.mark.parametrize("is_verbose", [False, True])
def test_tracebacks_are_shown_on_request_only(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_verbose: bool,
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise Failure("remora did not start: x", details="Traceback of an actor\n")

    monkeypatch.setattr(serve_module, "_start", start)
    monkeypatch.setattr(serve_module, "check_models", lambda _: None)
    monkeypatch.setattr(serve_module, "protect_ray_token", lambda _: None)
    (skips,) = WITHOUT_TRACEBACKS
    environ = {name: value for name, value in os.environ.items() if name != skips}
    monkeypatch.setattr(os, "environ", environ)  # which it changes
    raw = make_config(make_file(tmp_path))
    with pytest.raises(Failure, match=r"^remora did not start: x$"):
        _drive(raw, Proxy.PYTHON, RunFolder(tmp_path, -1), FakeLink(), is_verbose=is_verbose)

    assert ("Traceback of an actor" in capsys.readouterr().err) is is_verbose
    assert (skips in environ) is not is_verbose


def test_the_operator_chooses_the_lines_that_terminals_get(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (skips,) = WITHOUT_TRACEBACKS
    monkeypatch.setattr(serve_module, "_start", lambda *_, **__: None)
    monkeypatch.setattr(serve_module, "_watch_controller", lambda _: None)
    monkeypatch.setattr(serve_module, "check_models", lambda _: None)
    monkeypatch.setattr(serve_module, "protect_ray_token", lambda _: None)
    monkeypatch.setattr(os, "environ", {**os.environ, skips: "x"})
    raw = make_config(make_file(tmp_path))
    _drive(raw, Proxy.PYTHON, RunFolder(tmp_path, -1), FakeLink(), is_verbose=False)

    assert os.environ[skips] == "x"
