"""The distribution: a wheel built from the sdist, installed and used outside the checkout.

Nothing is downloaded: environments see the packages of the running Python, but not its remora.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import httpx
import pytest

import remora
from remora.deployments.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "kernels", "engine", "lora", "deployments")
FILES = ("pyproject.toml", "README.md", "LICENSE")
# Not read by the product: files for hosts, and what a build or an interpreter leaves.
ELSEWHERE = ("deployments/manifests/", "kernels/cpu/lib/", "__pycache__/")
HOOKS = "import sys, setuptools.build_meta as hooks; getattr(hooks, sys.argv[1])(sys.argv[2])"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a program without the paths of this one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(target: Path) -> Path:
    """Copy what a distribution is made of, as `make wheel-here` does."""
    for folder in FOLDERS:
        unwanted = shutil.ignore_patterns("__pycache__", "lib")
        shutil.copytree(ROOT / folder, target / folder, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def make_environment(folder: Path, wheel: Path) -> Path:
    """Install a wheel into an environment of its own; returns its folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    programs = folder / "bin"
    lines = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    place = run(
        *(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"),
        cwd=folder,
    ).strip()
    Path(place, "packages.pth").write_text("\n".join(lines))
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    options = ("--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    run(*pip, "install", *options, wheel, cwd=folder)
    return programs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without compiled kernels, built from the sdist."""
    folder = tmp_path_factory.mktemp("distribution")
    source = copy_sources(folder / "source")
    run(sys.executable, "-c", HOOKS, "build_sdist", folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", HOOKS, "build_wheel", folder, cwd=unpacked)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", wheel)


def test_the_wheel_has_all_files_of_the_packages(wheel: Path) -> None:
    wanted = {
        f"remora/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not any(part in f"{path.relative_to(ROOT)}" for part in ELSEWHERE)
    }
    root = {f"remora/engine/root/{name}" for name in ("__init__.py", "py.typed")}
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if name.startswith("remora/")}

    assert "remora/kernels/cpu/src/program.h" in wanted
    assert root <= wanted
    assert found == (wanted - root) | {"remora/__init__.py", "remora/py.typed"}


def test_the_wheel_describes_itself(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = f"remora-{remora.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as opened:
        metadata = HeaderParser().parsestr(opened.read(f"{about}/METADATA").decode())
        commands = opened.read(f"{about}/entry_points.txt").decode()
        assert f"{about}/licenses/LICENSE" in opened.namelist()

    assert metadata["Version"] == remora.__version__
    assert set(metadata.get_all("Provides-Extra", [])) == project["optional-dependencies"].keys()
    assert "remora = remora.deployments.cli.entry:main" in commands


def test_the_installed_package_generates_from_an_empty_folder(
    programs: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, remora; from remora import LLM, SamplingParams\n"
        "with LLM('smollm2-135m-instruct', kv_tokens=512, show_progress=False) as llm:\n"
        "    (answer,) = llm.generate('The capital of France is', SamplingParams(max_tokens=2, "
        "temperature=0))\n"
        "print(remora.__file__, *(name for name in ('ray',) if name in sys.modules))\n"
        "print(answer.text)\n"
    )
    where, *texts = run(
        programs / "python", "-c", code, cwd=tmp_path, REMORA_CACHE=str(smollm2_path.parent)
    ).splitlines()

    assert Path(where).is_relative_to(programs.parent)
    assert "Paris" in "".join(texts)
    assert run(programs / "remora", "--version", cwd=tmp_path) == f"remora {remora.__version__}\n"
    assert "[cuda]" in run(programs / "remora", "doctor", cwd=tmp_path)


@pytest.mark.ray
def test_the_installed_command_serves_from_an_empty_folder(
    programs: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = tmp_path / "output.txt"
    with printed.open("w") as out:
        process = subprocess.Popen(
            [programs / "remora", "serve", "smollm2-135m-instruct", "--port", str(port)],
            cwd=tmp_path,
            env=kept | {"REMORA_CACHE": str(smollm2_path.parent)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5).is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        assert process.poll() is None, printed.read_text()
        body = {"prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        page = httpx.get(f"{url}/", headers={"accept": "text/html"}, timeout=30)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)

    assert "Paris" in answer["choices"][0]["text"]
    assert page.headers["content-type"].startswith("text/html")


def test_an_editable_install_finds_the_root_package_and_the_folders(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    run(sys.executable, "-c", HOOKS, "build_editable", tmp_path, cwd=source)
    (editable,) = tmp_path.glob("*.whl")
    programs = make_environment(tmp_path / "venv", editable)
    code = (
        "import remora, remora.configs.load, remora.engine.sampling.params as params\n"
        "print(remora.__file__, remora.SamplingParams.__module__, params.__file__, sep='\\n')"
    )
    found = run(programs / "python", "-c", code, cwd=tmp_path).splitlines()

    module = "remora.engine.sampling.params"
    paths = source / "engine/root/__init__.py", source / "engine/sampling/params.py"
    assert found == [str(paths[0]), module, str(paths[1])]
