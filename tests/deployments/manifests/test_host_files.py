"""The Containerfile and the systemd unit: what they name agrees with the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from ray.dashboard.modules.metrics import metrics_head
from typer.testing import CliRunner

from remora.configs.environment import cache_dir
from remora.deployments.cli.main import app
from remora.deployments.serve_environment import ENVIRONMENT
from tests.deployments.manifests.tools import MANIFESTS, served_paths
from tests.programs import ROOT, needs

CONTAINERFILE = (MANIFESTS / "Containerfile").read_text(encoding="utf-8")
UNIT = (MANIFESTS / "remora.service").read_text(encoding="utf-8")


def steps() -> list[tuple[str, str]]:
    """Return the steps of the Containerfile: (instruction, arguments)."""
    lines = [line for line in CONTAINERFILE.splitlines() if line and line[0] != "#"]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, " ".join(rest.split())) for word, _, rest in map(_split, joined.splitlines())]


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def environment() -> dict[str, str]:
    return {
        name: value
        for word, rest in steps()
        if word == "ENV"
        for name, _, value in (pair.partition("=") for pair in rest.split())
    }


def test_the_image_has_the_stages_that_its_variants_name() -> None:
    stages = [rest.split(" AS ") for word, rest in steps() if word == "FROM"]

    assert [name for _, name in stages] == ["build", "cpu", "cuda", "run"]
    assert stages[-1][0] == "${VARIANT}"
    assert all(":" in image for image, _ in stages[:-1])  # a version, not the newest
    assert ("ARG", "VARIANT=cpu") in steps()


def test_the_image_runs_as_a_user_who_owns_the_cache() -> None:
    found = steps()
    names = [word for word, _ in found]
    user = dict(found)["USER"]
    setup = next(rest for word, rest in found if word == "RUN" and "useradd" in rest)

    assert user == "1000:1000"
    assert "useradd --uid 1000" in setup
    assert "install -d -o 1000 -g 1000 /cache /dashboards" in setup
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :]
    assert ("VOLUME", "/cache") in found
    caches = {name: path for name, path in environment().items() if path.startswith("/cache")}
    assert caches.keys() == {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"}


def test_remoras_cache_is_in_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMORA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", environment()["XDG_CACHE_HOME"])

    assert cache_dir() == Path("/cache/remora")


def test_the_image_starts_ray_as_remora_does() -> None:
    found = environment()

    # The token is KubeRay's or remora serve's to make.
    assert {name: found[name] for name in ENVIRONMENT if name != "RAY_AUTH_MODE"} == {
        name: value for name, value in ENVIRONMENT.items() if name != "RAY_AUTH_MODE"
    }


def test_ray_puts_its_dashboards_next_to_ours() -> None:
    copied = [rest for word, rest in steps() if word == "COPY" and "dashboards" in rest]

    assert environment()[metrics_head.GRAFANA_DASHBOARD_OUTPUT_DIR_ENV_VAR] == "/dashboards"
    assert copied == ["--chown=1000:1000 deployments/manifests/chart/dashboards /dashboards"]


def test_the_health_check_asks_a_route_of_the_server() -> None:
    check = dict(steps())["HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    found = re.search(r"http://127\.0\.0\.1:8000(/\w+)", command[-1])

    assert found is not None
    assert found[1] in served_paths()
    compile(command[-1], "HEALTHCHECK", "exec")
    assert ("EXPOSE", "8000") in steps()


def test_the_image_starts_with_a_command_that_exists() -> None:
    whole = dict(steps())
    command = [*json.loads(whole["ENTRYPOINT"])[1:], *json.loads(whole["CMD"])]
    options = [word for word in command if word.startswith("--")]
    help_text = CliRunner().invoke(app, [command[0], "--help"]).output

    assert all(option in help_text for option in options)


def test_the_build_stage_installs_what_the_command_line_imports() -> None:
    install = next(rest for word, rest in steps() if word == "RUN" and "wheel-here" in rest)
    code = "import sys, remora.deployments.cli.main, remora.deployments.cli.compile as command"
    code += "; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {re.split(r"[\[<>=~ ]", line)[0] for line in project["dependencies"]}
    modules = {name.partition(".")[0] for name in done.stdout.split()}
    named = {"pyyaml": "yaml", "jinja2": "jinja2", "google-re2": "re2"}
    imported = {name for name in packages if named.get(name, name.replace("-", "_")) in modules}

    assert imported | {"uvicorn"} <= set(install.split("&&")[0].split())


def test_the_build_stage_copies_what_the_wheel_is_made_of() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile[makefile.index("wheel-here:") :]
    files = re.search(r"cp -R (.*) \$\(FOLDERS\)", recipe)
    folders = re.search(r"^FOLDERS := (.*)$", makefile, re.MULTILINE)
    assert files is not None
    assert folders is not None

    copied = {name for word, rest in steps() if word == "COPY" for name in rest.split()[:-1]}
    wanted = {*files[1].split(), *folders[1].split(), "Makefile", "constraints.txt"}
    assert wanted <= copied


def unit(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)


def test_the_unit_gives_a_drain_the_time_that_it_takes() -> None:
    (timeout,) = unit("TimeoutStopSec")

    assert int(timeout) >= 120 + 15  # the default drain, and its cut-off
    assert unit("KillMode") == ["mixed"]  # the supervisor stops the other processes
    assert int(unit("LimitNOFILE")[0]) >= 8_400


def test_the_units_folders_are_writable() -> None:
    variables = dict(pair.split("=") for pair in unit("Environment")[0].split())

    assert variables == {"HOME": "/var/lib/remora", "XDG_CACHE_HOME": "/var/cache/remora"}
    assert unit("StateDirectory") == unit("CacheDirectory") == ["remora"]
    assert unit("ProtectSystem") == ["strict"]


@needs("systemd-analyze")
def test_systemd_understands_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    program = shutil.which("true")
    path = tmp_path / "remora.service"
    path.write_text(UNIT.replace("/opt/remora/bin/remora", str(program)), encoding="utf-8")
    tool = shutil.which("systemd-analyze")
    assert tool is not None

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
        return subprocess.run(
            [tool, *arguments, str(path)], capture_output=True, text=True, env=environment
        )

    verified = run("verify", "--man=no")
    assert "remora.service" not in verified.stderr, verified.stderr
    rated = run("security", "--offline=true", "--threshold=40")  # of 100; unhardened: 96
    assert rated.returncode == 0, rated.stdout[-600:]
