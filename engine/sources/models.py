"""Fetches a model by name into a cache of this machine, and finds it there without a network.

A repository's small files come first, so that a model that cannot be served is refused before its
weights are fetched; the weights are compared with the free space of the disk before they are.
Weights that are complete mean that everything else is. Several processes may ask at once: one of
them downloads, the others wait.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from remora.configs.model_names import HubModel, UrlModel
from remora.configs.planning.kv_budget import human_bytes
from remora.engine.observe.progress import progress_bar
from remora.engine.sources import modelscope
from remora.engine.sources.addresses import HubRepo, RemoteFolder, parse_source
from remora.engine.sources.faults import (
    SourceFault,
    SourceMissing,
    SourceUnreachable,
)
from remora.engine.sources.model_files import (
    Weights,
    gguf_files,
    only_gguf,
    small_files,
    weight_files,
)
from remora.engine.sources.retry import retry, scrubbed
from remora.engine.sources.url_folder import RemoteFile, UrlFolder
from remora.engine.sources.versions import digest_of, install, locked
from remora.engine.weights.files import GGUF_PART

logger = logging.getLogger(__name__)

Folder = UrlFolder | modelscope.ModelScopeFolder

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_URL_NOTE = "url.txt"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt")


def no_check(folder: Path) -> None:
    """Accept any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is fetched of a model.

    weights:        their format; none = only what is read before them
    check:          called with a folder that has all but the weights; raises ConfigError
    show_progress:  whether a terminal shows the progress
    folder:         where downloads are kept; None = the caches of this machine
    """

    weights: Weights = "safetensors"
    check: Callable[[Path], None] = no_check
    show_progress: bool = False
    folder: Path | None = None


def fetch_model(model: HubModel | UrlModel, cache: Path, wanted: Wanted) -> Path:
    """Return the folder, or the first GGUF file, of a model.

    cache:  folder for models of URLs, unless `wanted` names another; those of the hub are in the
            hub library's own
    Raises ConfigError of `wanted.check`, SourceFault, SourceUnreachable.
    """
    cache = wanted.folder or cache
    if isinstance(model, HubModel):
        if modelscope.is_chosen(os.environ):
            url = modelscope.url_of_name(model)
            return _fetch_from_url(url, cache / "models", wanted, model.file)
        return _fetch_from_hub(model, wanted)
    return _fetch_from_url(model, cache / "models", wanted)


def url_of(home: Path) -> str:
    """Return the URL whose copies are in a folder of the cache; "" if the folder is another one."""
    note = home / _URL_NOTE
    return note.read_text(encoding="utf-8") if note.is_file() else ""


def pinned(model: HubModel, folder: Path | None = None) -> HubModel:
    """Return the model at the commit that its revision means now, or meant in the cache.

    folder:  where downloads are kept; None = the cache of this machine

    Without either, return it as it is: fetching it explains why.
    """
    if modelscope.is_chosen(os.environ):  # its branches have no commit that names all files
        return model
    from remora.engine.sources import hub

    repo = _repo(model, folder)
    try:
        return model.at(hub.commit_of(repo))
    except Exception as error:  # a boundary of several libraries: fetching reports it
        logger.info("%s: the hub does not name its commit (%s)", model.text, scrubbed(error))
        snapshot = hub.cached_snapshot(repo)
        return model if snapshot is None else model.at(snapshot.name)


def _repo(model: HubModel, folder: Path | None) -> HubRepo:
    return HubRepo(model.owner, model.name, model.revision, folder)


# -- the hub ---------------------------------------------------------------------------------


def _fetch_from_hub(model: HubModel, wanted: Wanted) -> Path:
    # Slow to import and rarely needed.
    from remora.engine.sources import hub

    repo = _repo(model, wanted.folder)
    snapshot = hub.cached_snapshot(repo)
    cached = None if snapshot is None else find_complete(snapshot, model.file, wanted.weights)
    if cached is not None and snapshot is not None and snapshot.name == model.revision:
        return cached
    try:
        listing = hub.list_repo(repo)
    except Exception as error:
        if cached is None:
            if isinstance(error, SourceFault | SourceUnreachable):
                raise
            address = hub.endpoint()
            raise SourceUnreachable(f"{address} cannot be reached ({scrubbed(error)})") from error
        logger.warning("%s: taken from the cache: %s", model.text, scrubbed(error))
        return cached

    def fetch(names: Iterable[str]) -> Path:
        chosen = list(names)
        num_bytes = hub.missing_bytes(repo, listing, chosen)
        _check_disk(model.text, num_bytes - _arrived(hub.repo_folder(repo)), hub.cache_folder(repo))

        def attempt() -> Path:
            left = hub.missing_bytes(repo, listing, chosen)
            with progress_bar(
                f"Downloading {model.text}", left, wanted.show_progress and left > 0, in_bytes=True
            ) as advance:
                return hub.fetch_files(repo, listing, chosen, advance)

        return retry(attempt, f"downloading {model.text}", deadline=math.inf)

    names = list(listing.sizes)
    file = model.file or only_gguf(names)
    if file is not None:
        chosen = gguf_files(names, file, model.repo_id)
        return fetch(chosen) / chosen[0]
    if ADAPTER_FILES[0] in names and "config.json" not in names:
        return fetch(name for name in ADAPTER_FILES if name in names)
    folder = fetch(small_files(names))
    wanted.check(folder)
    return fetch(
        weight_files(
            names, lambda name: (folder / name).read_bytes(), wanted.weights, model.repo_id
        )
    )


def _arrived(repo_folder: Path) -> int:
    """Return the bytes of files that an earlier download did not finish."""
    return sum(part.stat().st_size for part in repo_folder.glob("blobs/*.part"))


def find_complete(folder: Path, file: str | None, weights: Weights) -> Path | None:
    """Return the folder or GGUF file of a model in the cache; None if files are missing."""
    names = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(".part")
    ]
    file = file or only_gguf(names)
    try:
        if file is not None:
            return folder / gguf_files(names, file, str(folder))[0]
        weight_files(names, lambda name: (folder / name).read_bytes(), weights, str(folder))
    except SourceFault:
        return None
    needed = _TOKENIZERS if weights == "none" else ("config.json",)
    return folder if any(name in names for name in needed) else None


# -- URLs ------------------------------------------------------------------------------------


def _fetch_from_url(model: UrlModel, cache: Path, wanted: Wanted, gguf: str | None = None) -> Path:
    """Fetch a folder, or a GGUF file: the one at the URL, or `gguf` in the folder."""
    url, file = model.url, gguf
    if url.endswith(".gguf"):
        url, _, file = url.rpartition("/")
    remote = _folder_at(url)
    home = cache / digest_of(model.url)
    try:
        files = _files_at(remote, file)
    except SourceFault:
        raise
    except Exception as error:
        found = _newest(home, file, wanted)
        if found is None:
            raise SourceUnreachable(f"{model.url}: {error}") from error
        logger.warning("%s: taken from the cache: %s", model.url, scrubbed(error))
        return found
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.rpartition("/")[2])[:64]
    version = digest_of(repr((list(files.items()), wanted.weights)))
    folder = home / version / (name or "model")
    what = f"downloading {model.url}"
    with locked(cache, home.name, deadline=math.inf, what=what):
        home.mkdir(parents=True, exist_ok=True)
        (home / _URL_NOTE).write_text(model.url, encoding="utf-8")
        if not folder.is_dir():
            # Every attempt continues where the one before it ended.
            retry(
                lambda: install(
                    folder, lambda draft: _fill(model, remote, files, draft, wanted), resumes=True
                ),
                what,
                deadline=math.inf,
            )
    found = find_complete(folder, file, wanted.weights)
    if found is None:
        raise SourceMissing(f"{folder}, the copy of {model.url}, lacks files: remove it")
    return found


def _folder_at(url: str) -> Folder:
    if url.startswith(f"{modelscope.SCHEME}://"):
        return modelscope.ModelScopeFolder(url)
    try:
        address = parse_source(url)
    except ValueError as error:
        raise SourceFault(f"{url!r} is not a valid address: {error}") from error
    assert isinstance(address, RemoteFolder), "names of other kinds are parsed before"
    return UrlFolder(address.url)


def _newest(home: Path, file: str | None, wanted: Wanted) -> Path | None:
    """Return the newest complete copy of a URL in the cache."""
    folders = sorted(home.glob("[!.]*/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    complete = (find_complete(folder, file, wanted.weights) for folder in folders)
    return next((path for path in complete if path is not None), None)


def _files_at(remote: Folder, file: str | None) -> Mapping[str, RemoteFile]:
    def read() -> Mapping[str, RemoteFile]:
        if file is not None and file.endswith(".gguf") and GGUF_PART.fullmatch(file) is None:
            return {file: remote.stat(file)}
        files = remote.files()
        names = files if file is None else gguf_files(files, file, remote.url)
        return {name: files[name] for name in names}

    return retry(read, f"listing {remote.url}", deadline=time.monotonic() + 60)


def _fill(
    model: UrlModel,
    remote: Folder,
    files: Mapping[str, RemoteFile],
    draft: Path,
    wanted: Wanted,
) -> None:
    def copy(names: list[str]) -> None:
        num_bytes = sum(files[name].num_bytes or 0 for name in names)
        there = sum((draft / name).stat().st_size for name in names if (draft / name).exists())
        _check_disk(model.url, num_bytes - there, draft)
        with progress_bar(
            f"Downloading {model.url}", num_bytes, wanted.show_progress, in_bytes=True
        ) as advance:
            advance(there)
            for name in names:
                target = draft / name
                target.parent.mkdir(parents=True, exist_ok=True)
                remote.copy(name, target, advance)
                found, expected = target.stat().st_size, files[name].num_bytes
                if expected is not None and found != expected:
                    if found > expected:
                        target.unlink()
                    raise ConnectionError(f"received {found} of {expected} bytes of {name}")

    names = list(files)
    if all(name.endswith(".gguf") for name in names):
        copy(names)
        return
    copy(small_files(names))
    wanted.check(draft)
    copy(weight_files(names, lambda name: (draft / name).read_bytes(), wanted.weights, model.url))


# -- the disk --------------------------------------------------------------------------------


def _check_disk(name: str, num_bytes: int, folder: Path) -> None:
    """Raise SourceFault if the folder's disk has no room for `num_bytes`."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise SourceFault(
            f"downloading {name} needs {human_bytes(num_bytes)}, and the disk of {folder} has "
            f"{human_bytes(free)} free: free space (`remora models`, `remora rm NAME`), or set "
            "model.download_dir or HF_HOME (models of URLs: REMORA_CACHE) to a folder on a larger "
            "disk"
        )
