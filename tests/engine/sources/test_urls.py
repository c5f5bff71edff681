"""Models at URLs: copied once, continued after an interruption, found without their network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from remora.configs.errors import ConfigError
from remora.configs.model_names import UrlModel
from remora.engine.sources.inventory import cached_models, remove
from remora.engine.weights import resolve_model as resolver
from remora.engine.weights.resolve_model import resolve_model

URL = "lossy://bucket/tiny"
WEIGHTS = bytes(range(256)) * 64


class LossyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system that loses the connection `breaks` times, each after `most` bytes."""

    protocol = "lossy"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    offsets: ClassVar[list[int]] = []
    breaks: ClassVar[list[int]] = []
    is_gone: ClassVar[list[bool]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("lossy://", "memory://"))

    def find(self, path: str, **options: Any) -> Any:
        if self.is_gone:
            raise ConnectionError("no route")
        return super().find(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        opened = super()._open(path, mode, **options)
        return _Lossy(opened, self) if path.endswith("model.safetensors") else opened


class _Lossy:
    def __init__(self, opened: Any, system: type[LossyFileSystem] | LossyFileSystem) -> None:
        self._opened, self._system = opened, system
        self._most = system.breaks.pop(0) if system.breaks else None
        opened.seek(0)

    def __enter__(self) -> _Lossy:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, offset: int) -> None:
        self._opened.seek(offset)

    def read(self, _: int) -> bytes:
        self._system.offsets.append(self._opened.tell())
        if self._most is None:
            return bytes(self._opened.read())
        if self._most == 0:
            raise ConnectionResetError("reset by peer")
        most, self._most = self._most, 0
        return bytes(self._opened.read(most))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyFileSystem]:
    register_implementation("lossy", LossyFileSystem, clobber=True)
    monkeypatch.setattr("remora.engine.sources.retry.time.sleep", lambda pause_s: None)
    monkeypatch.setattr(resolver, "_resolved", {})
    system = LossyFileSystem()
    system.pipe(
        {
            "/bucket/tiny/config.json": b"{}",
            "/bucket/tiny/tokenizer.json": b"{ }",
            "/bucket/tiny/model.safetensors": WEIGHTS,
            "/bucket/tiny/original/model.safetensors": b"again",
            "/bucket/tiny-Q8_0.gguf": b"eight",
        }
    )
    yield system
    for held in (system.store, system.offsets, system.breaks, system.is_gone):
        held.clear()


def resolve(cache: Path, url: str = URL) -> Path:
    resolver._resolved.clear()
    return resolve_model(url, cache)


def test_a_folder_is_copied_once(files: Any, tmp_path: Path) -> None:
    folder = resolve(tmp_path)

    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert folder.name == "tiny"
    num_reads = len(files.offsets)
    assert resolve(tmp_path) == folder
    assert len(files.offsets) == num_reads


def test_a_copy_that_was_interrupted_continues(files: Any, tmp_path: Path) -> None:
    files.breaks += [1000, 500, 100]  # all attempts of the first call
    with pytest.raises(ConfigError, match="reset by peer"):
        resolve(tmp_path)

    folder = resolve(tmp_path)

    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert files.offsets[-2:] == [1600, len(WEIGHTS)]


def test_a_file_that_changed_is_copied_anew(files: Any, tmp_path: Path) -> None:
    first = resolve(tmp_path)
    files.pipe("/bucket/tiny/config.json", b'{"new": 1}')

    assert (resolve(tmp_path) / "config.json").read_bytes() == b'{"new": 1}'
    assert (first / "config.json").read_bytes() == b"{}"


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    assert resolve(tmp_path, "lossy://bucket/tiny-Q8_0.gguf").read_bytes() == b"eight"


def test_without_the_network_the_cache_serves_and_is_named(files: Any, tmp_path: Path) -> None:
    folder = resolve(tmp_path)
    files.is_gone.append(True)

    assert resolve(tmp_path) == folder
    with pytest.raises(ConfigError, match=rf"{tmp_path}/models.*no route.*smollm2"):
        resolve(tmp_path, "lossy://bucket/other")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("lossy://bucket/none", "there are no files at"),
        ("lossy://bucket/../a", "is not a valid address"),
        ("nosuchscheme://a/b", "cannot be read here"),
    ],
)
def test_a_url_that_means_nothing_gets_one_line(url: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        resolve(tmp_path, url)
    assert "\n" not in str(refused.value)


def test_copies_are_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = resolve(tmp_path)

    (found,) = cached_models(tmp_path)

    assert (found.name, found.path, found.is_complete) == (URL, folder, True)
    assert remove(UrlModel(URL), tmp_path) == found.num_bytes > len(WEIGHTS)
    assert cached_models(tmp_path) == []
