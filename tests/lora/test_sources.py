"""Where adapters come from: who may load what, and broken adapters of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError, InvalidAdapter, InvalidRequest
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.sections.lora import AdapterEntry, LoraSection
from remora.lora import files
from remora.lora.cpu_pool import CpuAdapterPool
from remora.lora.files import CONFIG, WEIGHTS, read_files
from remora.lora.sources import Sources, local_folders
from tests.lora.broken import BROKEN, MAX_BYTES, Breaker
from tests.lora.peft_files import AS_NAMED, SHAPES, Base, make_tensors, write_adapter


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REMORA_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def make_sources(root: Path, **options: Any) -> Sources:
    return Sources(roots=[str(root)], max_bytes=MAX_BYTES, **options)


def load(sources: Sources, source: str) -> CpuAdapterPool:
    """What a replica does about a source that the API names."""
    sources.check(source)
    room = LoRASlotConfig(num_slots=1, max_rank=8, targets=("q_proj",))
    pool = CpuAdapterPool(room, dict.fromkeys(SHAPES), Base(), AS_NAMED)
    pool.prepare(1, sources.fetch(source))
    return pool


def test_an_adapter_below_a_root_is_loaded(root: Path) -> None:
    folder = write_adapter(root / "pirate")

    assert make_sources(root).fetch(str(folder)) == folder
    load(make_sources(root), str(folder))
    load(make_sources(root), f"file://{folder}")


@pytest.mark.timeout(20)  # nothing is waited for
@pytest.mark.parametrize(("spoil", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_refused_with_the_reason(
    spoil: Breaker, reason: str, root: Path, cache: Path
) -> None:
    spoil(write_adapter(root / "broken"))

    with pytest.raises((InvalidAdapter, InvalidRequest), match=reason):
        load(make_sources(root), str(root / "broken"))

    assert not cache.exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("../broken", "no part of it may be"),
        ("{root}/../root/pirate", "no part of it may be"),
        ("file://{root}/%2e%2e/secret", "no part of it may be"),
        ("simplecache::s3://bucket/a", "expected an absolute path"),
        ("pirate", "expected an absolute path"),
        ("~nobody-of-this-name/x", "expected an absolute path"),
        ("{root}/pirate\0", "control character"),
        ("/etc", "below none of lora.roots"),
        ("{root}-of-others", "below none of lora.roots"),
        ("/dev/zero", "below none of lora.roots"),
        ("hf://owner/name", "below none of lora.roots"),
        ("memory://adapters/x", "below none of lora.roots"),
        ("x" * 10**6, "characters"),
    ],
)
def test_a_source_that_the_api_may_not_name_is_refused(
    source: str, reason: str, root: Path
) -> None:
    write_adapter(root / "pirate")

    with pytest.raises(InvalidRequest, match=reason) as raised:
        make_sources(root).check(source.format(root=root))

    assert raised.value.param == "lora_path"
    assert len(raised.value.message) < 400


@given(source=st.text() | st.text("/.~:@%fileh3s0", max_size=30))
def test_whatever_the_api_names_is_refused_or_a_folder_by_its_whole_name(source: str) -> None:
    """No text makes anything else happen."""
    try:
        Sources(roots=["/"]).check(source)
    except InvalidRequest:
        return

    assert source.lower().startswith(("/", "~", "file://", "local://"))
    assert ".." not in source.split("/")


def test_without_roots_the_api_may_load_nothing(root: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"lora\.roots"):
        Sources().check(str(write_adapter(root / "pirate")))


def test_what_the_configuration_names_needs_no_root(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(root / "pirate")
    monkeypatch.chdir(root)

    assert Sources(named=["pirate"]).fetch("pirate") == root / "pirate"
    with pytest.raises(InvalidAdapter, match=r"below none of lora\.roots"):
        Sources(named=["other"]).fetch("pirate")


def swap(folder: Path) -> None:
    """Replace an adapter's folder with a link to another one, which is outside of its root."""
    outside = write_adapter(folder.parents[1] / "outside")
    folder.rename(folder.with_name("was-here"))
    folder.symlink_to(outside)


def test_a_folder_that_is_swapped_after_a_check_is_refused(root: Path) -> None:
    sources, folder = make_sources(root), write_adapter(root / "pirate")

    sources.check(str(folder))
    swap(folder)
    with pytest.raises(InvalidAdapter, match=r"below none of lora\.roots"):
        sources.fetch(str(folder))


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_folder_that_is_swapped_before_it_is_read_is_refused(root: Path, is_parent: bool) -> None:
    sources, folder = make_sources(root), write_adapter(root / "of" / "pirate")

    fetched = sources.fetch(str(folder))
    if is_parent:
        write_adapter(root.parent / "outside" / "pirate")
    swap(folder.parent if is_parent else folder)
    with pytest.raises(InvalidAdapter, match="while it was loaded"):
        read_files(fetched)


def test_what_is_opened_is_read_whatever_happens_to_the_path(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(root / "pirate")
    expected, opened_file = read_files(folder), files._open_file

    def open_file(opened: int, file: Path) -> int:
        if file.name == CONFIG:
            swap(folder)
            (folder / WEIGHTS).unlink()
            (folder / CONFIG).write_text("{}")
        return opened_file(opened, file)

    monkeypatch.setattr(files, "_open_file", open_file)
    assert read_files(folder).digest == expected.digest


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Files that are opened while a test runs, and not only looked at (O_PATH)."""
    seen: list[str] = []
    is_on = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on and event == "open" and isinstance(args[0], str) and not args[2] & os.O_PATH:
            seen.append(os.path.realpath(args[0]))

    sys.addaudithook(hook)  # stays for good, and is silent
    yield seen
    is_on = False


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "SHA256SUMS"])
def test_nothing_outside_the_folder_is_opened(name: str, root: Path, opened: list[str]) -> None:
    write_adapter(root / "pirate")
    secret = root.parent / "secret"
    secret.write_text("{}")
    (root / "pirate" / name).unlink(missing_ok=True)
    (root / "pirate" / name).symlink_to(secret)
    opened.clear()

    with pytest.raises(InvalidAdapter, match="leads out"):
        load(make_sources(root), str(root / "pirate"))

    assert str(secret) not in opened


def test_links_within_the_folder_are_followed(root: Path) -> None:
    """As volumes of Kubernetes are made."""
    write_adapter(root / "pirate" / "..2026")
    for name in (CONFIG, WEIGHTS):
        (root / "pirate" / name).symlink_to(Path("..2026") / name)

    load(make_sources(root), str(root / "pirate"))


def test_sums_that_are_right_pass(root: Path) -> None:
    folder = write_adapter(root / "pirate")
    os.system(f"cd {folder} && sha256sum {CONFIG} ./{WEIGHTS} > SHA256SUMS")

    load(make_sources(root), str(folder))


def test_the_repo_is_a_root_and_tells_what_it_holds(root: Path) -> None:
    write_adapter(root / "pirate")
    write_adapter(root / "french")
    write_adapter(root / ".hidden")
    write_adapter(root / "no name")
    (root / "empty").mkdir()
    (root / "notes.txt").touch()
    (root / "away").symlink_to(write_adapter(root.parent / "elsewhere"))
    sources = Sources(repo=str(root))

    found = sources.repo_adapters()

    assert found == {"french": f"{root}/french", "pirate": f"{root}/pirate"}
    sources.check(found["pirate"])
    load(sources, found["pirate"])


@pytest.mark.parametrize("repo", [None, "/no/such/folder"])
def test_a_repo_that_is_not_there_holds_nothing(repo: str | None) -> None:
    assert Sources(repo=repo).repo_adapters() == {}


def test_the_stamp_differs_when_the_files_do(root: Path) -> None:
    folder = write_adapter(root / "pirate")
    sources = make_sources(root)
    before = sources.stamp(str(folder))
    assert before == sources.stamp(str(folder)) != ""

    write_adapter(folder, tensors=make_tensors(value=2.0))

    assert sources.stamp(str(folder)) not in ("", before)


@pytest.mark.parametrize("source", ["/no/such/folder", "\0", "nosuchscheme://x", "memory://x/y"])
def test_a_stamp_that_cannot_be_told_is_empty(source: str) -> None:
    assert Sources().stamp(source) == ""


@pytest.mark.observes("lora.max_adapter_bytes")
def test_a_section_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_REPO", str(root))
    write_adapter(root / "pirate")
    section = LoraSection(
        dynamic=True,
        repo="env:THE_REPO",
        adapters=[
            AdapterEntry(name="a", path="some/local/folder"),
            AdapterEntry(name="b", path="s3://bucket/b"),
        ],
        max_adapter_bytes=10,
    )
    sources = Sources.configured(section)

    assert local_folders(section) == [Path("some/local/folder"), root / "pirate"]
    with pytest.raises(InvalidAdapter, match="at most 10"):
        sources.fetch(sources.repo_adapters()["pirate"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"repo": "env:NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"repo": "hf://owner/name"}, "holds one adapter"),
        ({"repo": "s3://bucket/../x"}, "lora.repo"),
        ({"roots": ["s3://bucket?x"]}, "lora.roots"),
    ],
)
def test_a_section_that_means_nothing_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Sources.configured(LoraSection(dynamic=True, **settings))
