"""Adapters of remote file systems: copied once, whole or not at all, and what is said if not."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import InvalidAdapter, Unavailable
from remora.engine.sources.retry import scrubbed
from remora.lora.adapter import read_adapter
from remora.lora.checksums import parse_manifest
from remora.lora.files import CONFIG, PICKLES, WEIGHTS
from remora.lora.remote import RemoteAdapter
from remora.lora.sources import Sources
from tests.lora.peft_files import AS_NAMED, SHAPES, make_tensors, write_adapter

MAX_BYTES = 1_000_000
URL = "faulty://adapters/pirate"


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system that does, whenever a file is opened, the next of `faults`."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[list[str]] = []
    faults: ClassVar[list[Callable[[str], Any]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        self.opened.append(path)
        instead = self.faults.pop(0)(path) if self.faults else None
        return super()._open(path, mode, **options) if instead is None else instead


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adapters"


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> Iterator[FaultyFileSystem]:
    """A file system with one adapter, at URL."""
    register_implementation("faulty", FaultyFileSystem, clobber=True)
    system = FaultyFileSystem()
    system.written = tmp_path / "written"
    put(system)
    yield system
    for held in (system.store, system.opened, system.faults):
        held.clear()


def put(files: Any, *, at: str = "/adapters/pirate", **changes: Any) -> None:
    folder = write_adapter(files.written, **changes)
    files.pipe({f"{at}/{name}": (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)})


def make_sources(**options: Any) -> Sources:
    return Sources(roots=["faulty://adapters"], max_bytes=MAX_BYTES, pauses_s=(0, 0), **options)


def versions(cache: Path) -> list[Path]:
    """What the cache holds, half-made folders included."""
    return [found for found in cache.glob("*/*") if found.parent.name != "locks"]


def test_files_are_copied_once(files: Any) -> None:
    sources = make_sources()

    folder = sources.fetch(URL)

    assert folder.name == "pirate"
    assert sorted(file.name for file in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert read_adapter(folder, SHAPES, AS_NAMED).max_rank == 2
    assert sources.fetch(URL) == folder
    assert make_sources().fetch(URL) == folder
    assert len(files.opened) == 2


def test_the_local_file_system_of_fsspec_does(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pirate")

    copied = RemoteAdapter(f"file://{folder}").fetch(
        tmp_path / "copies", max_bytes=MAX_BYTES, deadline=float("inf")
    )

    assert (copied / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_files_that_changed_are_copied_anew(files: Any, cache: Path) -> None:
    sources = make_sources()
    found = []
    for value in (1.0, 2.0, 3.0, 4.0):
        put(files, tensors=make_tensors(value=value))
        found.append(sources.fetch(URL))

    values = {float(next(iter(read_adapter(found[-1], SHAPES, AS_NAMED).updates.values())).a[0, 0])}
    assert values == {4.0}
    assert len(set(found)) == 4
    assert sorted(versions(cache)) == sorted(folder.parent for folder in found[-2:])


def test_the_stamp_differs_when_the_files_do(files: Any) -> None:
    put(files)
    sources = make_sources()
    before = sources.stamp(URL)
    assert before == sources.stamp(URL) != ""

    put(files)

    assert sources.stamp(URL) not in ("", before)


def test_many_threads_copy_once(files: Any) -> None:
    num_threads = 8
    ready, found = threading.Barrier(num_threads), []

    def fetch() -> None:
        ready.wait()
        found.append(make_sources().fetch(URL))

    threads = [threading.Thread(target=fetch) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == num_threads
    assert len(set(found)) == 1
    assert len(files.opened) == 2


def refuse(error: BaseException) -> Callable[[str], Any]:
    def fault(path: str) -> Any:
        raise error

    return fault


LOST = ConnectionResetError("reset by peer")
TRANSIENT: dict[str, Callable[[str], Any]] = {
    "connection lost": refuse(LOST),
    "foreign error": refuse(RuntimeError("of some library")),
    "half a file": lambda path: io.BytesIO(b"{"),
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
def test_a_download_is_tried_three_times(
    fault: Callable[[str], Any], files: Any, cache: Path
) -> None:
    files.faults += [fault] * 5

    with pytest.raises(Unavailable, match="fetching faulty://adapters/pirate: "):
        make_sources().fetch(URL)
    assert versions(cache) == []
    assert len(files.opened) == 3

    folder = make_sources().fetch(URL)  # after two more faults
    assert read_adapter(folder, SHAPES, AS_NAMED).max_rank == 2
    assert versions(cache) == [folder.parent]


def test_files_that_change_while_they_are_read_are_read_again(files: Any) -> None:
    put(files, tensors=make_tensors(value=1.0))

    def exchange(path: str) -> None:
        put(files, tensors=make_tensors(value=2.0), lora_alpha=5)

    files.faults += [lambda path: None, exchange]  # the weights, after the configuration

    folder = make_sources().fetch(URL)

    (update,) = read_adapter(folder, SHAPES, AS_NAMED).updates.values()
    assert (float(update.a[0, 0]), update.scale) == (2.0, 2.5)


def test_after_the_deadline_nothing_is_tried_again(files: Any) -> None:
    files.faults += [refuse(LOST)] * 3
    sources = Sources(timeout_s=5.0, pauses_s=(100.0, 100.0))

    with pytest.raises(Unavailable, match="reset by peer"):
        sources.fetch(URL)

    assert len(files.opened) == 1


def test_what_takes_too_long_is_given_up(files: Any, cache: Path) -> None:
    with pytest.raises(Unavailable, match="load_timeout_s"):
        make_sources(timeout_s=1e-9).fetch(URL)

    assert versions(cache) == []


def test_what_a_killed_process_left_is_removed(files: Any, cache: Path) -> None:
    folder = make_sources().fetch(URL)
    left = folder.parent.parent / ".left"
    left.mkdir()
    (left / WEIGHTS).write_text("half")
    put(files)

    make_sources().fetch(URL)

    assert not left.exists()


def remove(name: str) -> Callable[[Any], None]:
    return lambda files: files.rm(f"/adapters/pirate/{name}")


def grow(files: Any) -> None:
    files.pipe(f"/adapters/pirate/{WEIGHTS}", bytes(MAX_BYTES + 1))


def pickled(files: Any) -> None:
    files.mv(f"/adapters/pirate/{WEIGHTS}", f"/adapters/pirate/{PICKLES[0]}")


def folder_instead(files: Any) -> None:
    remove(WEIGHTS)(files)
    files.pipe(f"/adapters/pirate/{WEIGHTS}/x", b"")


def wrong_sums(manifest: str, text: str) -> Callable[[Any], None]:
    return lambda files: files.pipe(f"/adapters/pirate/{manifest}", text.encode())


def refused(files: Any) -> None:
    files.faults += [refuse(PermissionError("403"))]


BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (lambda files: files.store.clear(), f"{CONFIG} is not there"),
    "no config": (remove(CONFIG), f"{CONFIG} is not there"),
    "no weights": (remove(WEIGHTS), f"{WEIGHTS} is not there"),
    "pickle": (pickled, "a pickle"),
    "huge": (grow, f"at most {MAX_BYTES}"),
    "folder": (folder_instead, "is not a file"),
    "other sum": (wrong_sums("SHA256SUMS", f"{'0' * 64}  {WEIGHTS}"), "has the SHA-256"),
    "other sum (JSON)": (wrong_sums("checksums.json", f'{{"{CONFIG}": "{"0" * 64}"}}'), "has the"),
    "sums that are none": (wrong_sums("SHA256SUMS", "yes"), "cannot be read"),
    "no permission": (refused, "permission denied"),
}


@pytest.mark.parametrize(("break_it", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_refused_and_leaves_nothing(
    break_it: Callable[[Any], object], reason: str, files: Any, cache: Path
) -> None:
    break_it(files)

    with pytest.raises(InvalidAdapter, match=reason):
        make_sources().fetch(URL)

    assert versions(cache) == []


def test_a_file_of_unknown_size_is_bounded(
    files: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(files)
    info = files.info
    monkeypatch.setattr(FaultyFileSystem, "info", lambda _, path: info(path) | {"size": None})

    with pytest.raises(InvalidAdapter, match=f"more than {MAX_BYTES} bytes"):
        make_sources().fetch(URL)

    assert versions(cache) == []


def test_sums_that_are_right_pass(files: Any) -> None:
    content = files.cat(f"/adapters/pirate/{WEIGHTS}")
    wrong_sums("SHA256SUMS", f"{hashlib.sha256(content).hexdigest()} *./{WEIGHTS}\n")(files)

    assert make_sources().fetch(URL).is_dir()


def test_a_web_server_that_is_gone_is_not_an_adapter_that_is_missing() -> None:
    with pytest.raises(Unavailable, match=r"fetching http://.*: .*Connect"):
        Sources(pauses_s=()).fetch("http://127.0.0.1:9/pirate")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nosuchscheme://x/y", "nosuchscheme:// cannot be read here"),
        ("adl://x/y", "adl:// cannot be read here: .*[Ii]nstall adlfs"),
        ("gs://bucket/pirate", r"install gcsfs .*pip install 'remora\[gcs\]'"),
    ],
)
def test_an_error_names_the_package_that_is_missing(
    url: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)

    with pytest.raises(InvalidAdapter, match=reason):
        Sources().fetch(url)


def test_a_cache_that_cannot_be_written_is_told(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REMORA_CACHE", str(tmp_path / "file"))

    with pytest.raises(Unavailable, match="set REMORA_CACHE"):
        make_sources().fetch(URL)


def test_a_repo_tells_what_it_holds(files: Any) -> None:
    for name in ("pirate", "french", "no name"):
        put(files, at=f"/adapters/{name}")
    put(files, at="/adapters/deep/er")
    files.pipe("/adapters/unfinished/notes.txt", b"")
    sources = Sources(repo="faulty://adapters")

    found = sources.repo_adapters()

    assert found == {"french": "faulty://adapters/french", "pirate": URL}
    sources.check(found["french"])


def test_a_repo_that_cannot_be_looked_into_is_not_empty(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all its adapters would be unloaded."""
    monkeypatch.setattr(FaultyFileSystem, "find", lambda *_: refuse(LOST)(""))

    with pytest.raises(Unavailable, match="listing faulty://adapters"):
        Sources(repo="faulty://adapters", pauses_s=(0, 0)).repo_adapters()


def test_a_repo_that_is_not_there_holds_nothing() -> None:
    assert Sources(repo="faulty://none").repo_adapters() == {}


@given(
    sums=st.dictionaries(
        st.text("abz09._-", min_size=1),
        st.binary(max_size=8).map(lambda content: hashlib.sha256(content).hexdigest()),
    ),
    mark=st.sampled_from(" *"),
)
def test_what_sha256sum_writes_is_read(sums: dict[str, str], mark: str) -> None:
    text = "".join(f"{told} {mark}{name}\n" for name, told in sums.items())
    assert parse_manifest("SHA256SUMS", text.encode()) == sums


@given(content=st.binary(max_size=200), manifest=st.sampled_from(["SHA256SUMS", "checksums.json"]))
def test_a_manifest_is_read_or_refused(content: bytes, manifest: str) -> None:
    try:
        told = parse_manifest(manifest, content)
    except InvalidAdapter:
        return

    assert all(len(value) == 64 for value in told.values())


@pytest.mark.parametrize(
    "text",
    ["key {secret} is wrong", "GET https://me:{secret}@host/x", "https://host/x?sig={secret}"],
)
def test_no_secret_is_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-value")

    shown = scrubbed(OSError(text.format(secret="planted-value")))

    assert "planted" not in shown
    assert "***" in shown
