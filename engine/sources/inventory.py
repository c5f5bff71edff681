"""Lists the models in the caches of this machine, and removes them. Opens no network.

The hub library's cache has models of other programs, too; they are listed alike, as all of them
can be served from there.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from remora.configs.model_names import HubModel, UrlModel
from remora.engine.sources.model_files import gguf_choices
from remora.engine.sources.models import ADAPTER_FILES, find_complete, url_of

_SHOWN_COMMIT = 12
_PARTS = (".part", ".incomplete")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model, or an adapter, in a cache.

    name:         that serves it
    path:         its folder or GGUF file
    num_bytes:    on the disk; files that several revisions share count for each
    is_complete:  whether it can be served without a network
    is_adapter:   whether it is an adapter
    """

    name: str
    path: Path
    num_bytes: int
    is_complete: bool
    is_adapter: bool = False


def cached_models(cache: Path) -> list[CachedModel]:
    """Return the models in the hub library's cache and below `cache`, by name."""
    return sorted([*_of_hub(), *_of_urls(cache), *_built_in(cache)], key=lambda each: each.name)


def remove(model: HubModel | UrlModel, cache: Path) -> int:
    """Remove a model from its cache: of a repository all revisions, or one if it is named.

    Returns the bytes that this frees; 0 = it is not there.
    """
    if isinstance(model, UrlModel):
        homes = [home for home in _url_homes(cache) if url_of(home) == model.url]
        return sum(_remove_folder(home) for home in homes)
    from remora.engine.sources import hub

    folder = hub.cache_folder() / f"models--{model.owner}--{model.name}"
    if not folder.is_dir():
        return 0
    if model.revision is None and model.file is None:
        locks = hub.cache_folder() / ".locks" / folder.name
        shutil.rmtree(locks, ignore_errors=True)
        return _remove_folder(folder)
    return _remove_some(folder, model)


def _remove_some(folder: Path, model: HubModel) -> int:
    """Remove files of a revision, or of all; contents that no other revision has are freed."""
    before = _size(folder / "blobs")
    for snapshot, labels in _snapshots(folder).items():
        if model.revision in (None, snapshot.name, *labels):
            _remove_files(snapshot, model.file)
            if not any(path.is_file() for path in snapshot.rglob("*")):
                shutil.rmtree(snapshot)
                for label in labels:
                    (folder / "refs" / label).unlink(missing_ok=True)
    used = {path.resolve() for path in (folder / "snapshots").rglob("*")}
    for blob in (folder / "blobs").glob("*"):
        if blob.resolve() not in used:
            blob.unlink()
    return before - _size(folder / "blobs")


def _remove_files(snapshot: Path, file: str | None) -> None:
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    chosen = names
    if file is not None:
        chosen = [name for name in names if name.endswith(".gguf") and file.lower() in name.lower()]
    for name in chosen:
        (snapshot / name).unlink()


def _of_hub() -> Iterator[CachedModel]:
    from remora.engine.sources import hub

    for folder in sorted(hub.cache_folder().glob("models--*--*")):
        owner, _, name = folder.name.removeprefix("models--").partition("--")
        snapshots = _snapshots(folder)
        parts = sum(_size(part) for part in (folder / "blobs").glob("*") if part.suffix in _PARTS)
        if not snapshots and parts:
            yield CachedModel(
                name=f"{owner}/{name}", path=folder, num_bytes=parts, is_complete=False
            )
        for snapshot, labels in snapshots.items():
            label = "" if "main" in labels else f"@{(*labels, snapshot.name[:_SHOWN_COMMIT])[0]}"
            yield from _of_snapshot(f"{owner}/{name}{label}", snapshot, parts)


def _snapshots(folder: Path) -> dict[Path, list[str]]:
    """Return the snapshots of a repository with the branches and tags that mean them."""
    labels: defaultdict[str, list[str]] = defaultdict(list)
    for reference in sorted((folder / "refs").rglob("*")):
        if reference.is_file():
            with suppress(OSError):
                commit = reference.read_text(encoding="utf-8").strip()
                labels[commit].append(str(reference.relative_to(folder / "refs")))
    found = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
    return {snapshot: labels[snapshot.name] for snapshot in found}


def _of_snapshot(name: str, snapshot: Path, parts: int) -> Iterator[CachedModel]:
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    is_adapter = all(file in names for file in ADAPTER_FILES)
    for file in [] if "config.json" in names else gguf_choices(names):
        path = find_complete(snapshot, file, "any")
        yield CachedModel(
            name=f"{name}:{file}",
            path=path or snapshot,
            num_bytes=_size(path) if path else 0,
            is_complete=path is not None,
        )
    if "config.json" in names or is_adapter:
        is_complete = is_adapter or find_complete(snapshot, None, "any") is not None
        yield CachedModel(
            name=name,
            path=snapshot,
            num_bytes=_size(snapshot) + (0 if is_complete else parts),
            is_complete=is_complete,
            is_adapter=is_adapter and "config.json" not in names,
        )


def _url_homes(cache: Path) -> list[Path]:
    return sorted(home for home in (cache / "models").glob("*") if url_of(home))


def _of_urls(cache: Path) -> Iterator[CachedModel]:
    for home in _url_homes(cache):
        versions = sorted(path for path in home.glob("[!.]*/*") if path.is_dir())
        path = max(versions, key=lambda each: each.stat().st_mtime, default=home)
        url = url_of(home)
        file = path / url.rpartition("/")[2]
        yield CachedModel(
            name=url,
            path=file if url.endswith(".gguf") and versions else path,
            num_bytes=_size(home),
            is_complete=bool(versions),
        )


def _built_in(cache: Path) -> Iterator[CachedModel]:
    for folder in sorted(cache.glob("*/config.json")):
        home = folder.parent
        yield CachedModel(name=home.name, path=home, num_bytes=_size(home), is_complete=True)


def _remove_folder(folder: Path) -> int:
    num_bytes = _size(folder)
    shutil.rmtree(folder)
    return num_bytes


def _size(path: Path) -> int:
    """Return the bytes of a file or folder; contents that several links have count once."""
    files = path.rglob("*") if path.is_dir() else [path]
    real = {file.resolve() for file in files if file.is_file()}
    return sum(file.stat().st_size for file in real)
