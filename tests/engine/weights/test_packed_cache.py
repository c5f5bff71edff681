"""Packed weights on disk: when they are read, and what becomes of files that cannot be."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from remora.engine.weights import packed_cache
from remora.engine.weights.packed_cache import CHUNK_BYTES, PackedCache

KEY, RECIPE = "layer", "int4"
SIZES = (CHUNK_BYTES + 1000, 3000)  # bytes of the weights of a product


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def cache(checkpoint: Path, tmp_path: Path) -> PackedCache:
    return cache_of(checkpoint, tmp_path)


def cache_of(checkpoint: Path, tmp_path: Path, limit_bytes: int = 2**40) -> PackedCache:
    root = tmp_path / "packed"
    return PackedCache.of(checkpoint, "auto", "fingerprint", root=root, limit_bytes=limit_bytes)


class Start:
    """What a start does with one product; `was_kept`: it was not packed."""

    def __init__(self, cache: PackedCache, recipe: str = RECIPE, seed: int = 0) -> None:
        self.memories = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
        self.packed = some_bytes(seed)
        with cache.open(recipe, 2) as folder:
            self.was_kept = folder.fetch(KEY, self.memories, self.pack)
        for memory, expected in zip(self.memories, self.packed, strict=True):
            assert torch.equal(memory, expected)

    def pack(self) -> None:
        for memory, packed in zip(self.memories, self.packed, strict=True):
            assert not memory.any()
            memory.copy_(packed)


def some_bytes(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 256, (size,), generator=generator).byte() for size in SIZES]


def file_of(cache: PackedCache) -> Path:
    (file,) = cache.root.glob("*/*")
    return file


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_later_starts_read_what_the_first_one_packed(cache: PackedCache) -> None:
    assert not Start(cache).was_kept
    assert Start(cache).was_kept
    assert file_of(cache).parent.name.startswith("model-")


def rewrite(file: Path) -> None:
    file.write_bytes(b"weights, and more")


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("change", [rewrite, touch])
def test_a_changed_checkpoint_is_packed_again(
    change: Callable[[Path], None], checkpoint: Path, cache: PackedCache, tmp_path: Path
) -> None:
    Start(cache)
    change(checkpoint / "model.safetensors")

    changed = cache_of(checkpoint, tmp_path)

    assert not Start(changed, seed=1).was_kept
    assert Start(changed, seed=1).was_kept


def test_another_checkpoint_or_recipe_is_packed_again(
    checkpoint: Path, cache: PackedCache, tmp_path: Path
) -> None:
    Start(cache)
    shutil.copytree(checkpoint, tmp_path / "other" / "model")

    assert not Start(cache_of(tmp_path / "other" / "model", tmp_path), seed=1).was_kept
    assert not Start(replace(cache, identity="of another fingerprint"), seed=1).was_kept
    assert not Start(cache, recipe="int8", seed=1).was_kept
    assert Start(cache).was_kept


def cut(content: bytearray) -> bytearray:
    return content[:-1]


def empty(content: bytearray) -> bytearray:
    return content[:0]


def flip_first(content: bytearray) -> bytearray:
    content[0] ^= 1  # of the checksums
    return content


def flip_last(content: bytearray) -> bytearray:
    content[-1] ^= 128
    return content


def swap(content: bytearray) -> bytearray:
    content[5000], content[5001] = content[5001] ^ 1, content[5000]
    return content


@pytest.mark.parametrize("damage", [cut, empty, flip_first, flip_last, swap])
def test_a_damaged_file_is_replaced_with_a_warning(
    damage: Callable[[bytearray], bytearray], cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    Start(cache)
    file = file_of(cache)
    file.write_bytes(damage(bytearray(file.read_bytes())))

    assert not Start(cache).was_kept
    (warning,) = warnings(caplog)
    assert str(file) in warning
    assert Start(cache).was_kept
    assert len(warnings(caplog)) == 1


def test_a_file_of_another_product_is_damaged(cache: PackedCache) -> None:
    Start(cache)
    file = file_of(cache)
    memories = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    file.rename(file.with_name("other"))

    with cache.open(RECIPE, 2) as folder:
        assert folder.has("other")
        assert not folder.fetch("other", memories, lambda: None)


def test_many_damaged_files_cost_one_warning(
    cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with cache.open(RECIPE, 1) as folder:
            for number in range(3):
                folder.fetch(f"layer {number}", some_bytes(number), lambda: None)
        for file in cache.root.glob("*/*"):
            file.write_bytes(b"")

    assert len(warnings(caplog)) == 1


def test_starts_at_the_same_time_share_a_folder(cache: PackedCache) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert not all(start.was_kept for start in pool.map(Start, [cache] * 16))

    assert Start(cache).was_kept
    file_of(cache)  # the only one


def test_a_file_that_was_removed_since_is_made_again(cache: PackedCache) -> None:
    Start(cache)
    memories = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    with cache.open(RECIPE, 2) as folder:
        shutil.rmtree(cache.root)
        assert not folder.fetch(KEY, memories, lambda: None)

    assert file_of(cache).name == KEY


def test_a_folder_that_cannot_be_written_costs_a_warning(
    cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.root.write_bytes(b"not a folder")

    with cache.open(RECIPE, 2) as folder:
        for number in range(3):
            assert not folder.fetch(f"layer {number}", some_bytes(number), lambda: None)

    assert len(warnings(caplog)) == 1


def test_a_read_only_folder_is_read(
    cache: PackedCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    Start(cache)
    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(Path, "mkdir", fail)

    assert Start(cache).was_kept
    assert not warnings(caplog)
    assert not Start(cache, recipe="other").was_kept
    assert len(warnings(caplog)) == 1


def test_a_full_disk_costs_a_warning_and_leaves_no_part(
    cache: PackedCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        assert not Start(cache).was_kept

    (warning,) = warnings(caplog)
    assert "No space left" in warning
    assert not list(cache.root.glob("*/*"))
    assert not Start(cache).was_kept


def test_a_share_of_the_disk_stays_free(
    cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_FREE", 1.0)

    assert not Start(cache).was_kept
    assert not cache.root.exists()


@pytest.mark.observes("model.packed_cache")
def test_the_checkpoints_used_longest_ago_are_removed_at_the_limit(
    checkpoint: Path, tmp_path: Path
) -> None:
    cache = cache_of(checkpoint, tmp_path, limit_bytes=int(2.5 * sum(SIZES)))
    for number, recipe in enumerate(("first", "second")):
        Start(cache, recipe)
        (folder,) = (path for path in cache.root.iterdir() if path.stat().st_mtime > 10)
        os.utime(folder, (number, number))

    assert Start(cache, "first").was_kept  # used again, so that it stays
    assert not Start(cache, "third").was_kept

    assert [Start(cache, recipe).was_kept for recipe in ("first", "third")] == [True, True]
    assert sum(file.stat().st_size for file in cache.root.glob("*/*")) <= cache.limit_bytes
    assert not Start(cache, "second").was_kept


def test_what_exceeds_the_limit_is_packed_at_every_start(checkpoint: Path, tmp_path: Path) -> None:
    cache = cache_of(checkpoint, tmp_path, limit_bytes=int(1.5 * sum(SIZES)))

    def start() -> list[bool]:
        with cache.open(RECIPE, 1) as folder:
            return [
                folder.fetch(f"layer {number}", some_bytes(number), lambda: None)
                for number in range(3)
            ]

    assert start() == [False, False, False]
    assert start() == [True, False, False]


def test_unfinished_files_of_processes_that_ended_are_removed(cache: PackedCache) -> None:
    Start(cache)
    folder = file_of(cache).parent
    old, new = folder / "layer-1.part", folder / "layer-2.part"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (1, 1))

    Start(cache, "other")

    assert new.exists()
    assert not old.exists()


def test_small_products_are_not_kept(cache: PackedCache) -> None:
    with cache.open(RECIPE, 1) as folder:
        assert not folder.fetch(KEY, [torch.ones(100, dtype=torch.uint8)], lambda: None)

    assert not cache.root.exists()
