"""Adapters of a server that speaks S3, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import InvalidAdapter, Unavailable
from remora.configs.load import parse_args
from remora.lora.adapter import read_adapter
from remora.lora.files import CONFIG, WEIGHTS
from remora.lora.sources import Sources
from tests.lora.peft_files import AS_NAMED, SHAPES, make_tensors, write_adapter

moto = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

MAX_BYTES = 100_000
URL = "s3://bucket/adapters/pirate"
SECRET = "planted-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system as others see it who share no cache with us, with an adapter in a bucket."""
    host, port = server.get_host_and_port()
    set_up(monkeypatch, f"http://{host}:{port}")
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.mkdir("bucket")
    put(files, tmp_path)
    yield files
    files.rm("bucket", recursive=True)


def set_up(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def put(files: Any, tmp_path: Path, **changes: Any) -> None:
    folder = write_adapter(tmp_path / "written", **changes)
    for name in (CONFIG, WEIGHTS):
        files.pipe(f"{URL}/{name}", (folder / name).read_bytes())


def make_sources() -> Sources:
    return Sources(repo="s3://bucket/adapters", max_bytes=MAX_BYTES, pauses_s=())


def test_adapters_are_found_and_fetched_and_again_when_they_change(
    bucket: Any, tmp_path: Path
) -> None:
    sources = make_sources()
    sources.check(URL)
    assert sources.repo_adapters() == {"pirate": URL}

    folder, stamp = sources.fetch(URL), sources.stamp(URL)
    assert read_adapter(folder, SHAPES, AS_NAMED).max_rank == 2
    assert sources.fetch(URL) == folder
    assert sources.stamp(URL) == stamp != ""

    put(bucket, tmp_path, tensors=make_tensors(value=2.0))
    assert sources.stamp(URL) not in ("", stamp)
    assert sources.fetch(URL) != folder

    bucket.pipe("s3://bucket/adapters/french/adapter_config.json", b"{}")
    assert list(sources.repo_adapters()) == ["french", "pirate"]


@pytest.mark.observes("backend:lora_repo.type")
@pytest.mark.parametrize("path", ["bucket/adapters", "/bucket/adapters", "s3://bucket/adapters"])
def test_a_repository_of_the_type_s3_is_listed(path: str, bucket: Any) -> None:
    repo = {"type": "s3", "path": path, "ownership": "private"}
    written = {"load_lora_dynamic": True, "lora_repo": repo}
    config = parse_args({"dialect": "backend", "args": written, "model": {"path": "/model"}})

    assert Sources.configured(config.lora).repo_adapters() == {"pirate": URL}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://bucket/adapters/nobody", "is not there"),
        ("s3://no-such-bucket/adapters", "is not there"),
    ],
)
def test_what_is_not_there_is_told(source: str, reason: str, bucket: Any) -> None:
    with pytest.raises(InvalidAdapter, match=reason):
        make_sources().fetch(source)


def test_a_server_that_is_gone_is_told_without_secrets(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        set_up(elsewhere, f"http://127.0.0.1:9/{SECRET}")
        with pytest.raises(Unavailable, match="fetching s3://") as raised:
            make_sources().fetch(URL)
    s3fs.S3FileSystem.clear_instance_cache()

    assert SECRET not in str(raised.value)
