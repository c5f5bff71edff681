"""Where adapters come from: which sources the API may name, and a local folder for each.

    Sources.check   may this be loaded by those who call the API?  (below `lora.roots` or the repo)
    Sources.fetch   a folder of this machine with the files, copied there first if they are remote

What a source's text means is in `places.py`; `hub.py` and `remote.py` do the copying. Knows neither
names of adapters, beyond those of the repo's subfolders, nor what is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError, InvalidAdapter, InvalidRequest, Unavailable
from remora.configs.sections.lora import ADAPTER_NAME, MAX_ADAPTER_BYTES, LoraSection
from remora.lora.files import CONFIG, WEIGHTS, check_files
from remora.lora.remote import RemoteAdapter
from remora.lora.retry import PAUSES_S, RETRY_AFTER_S, scrubbed, tried
from remora.lora.source_paths import (
    HubRepo,
    LocalFolder,
    Place,
    RemoteFolder,
    climbs,
    is_below,
    parse_place,
    parse_root,
    shown,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(ADAPTER_NAME)


class Sources:
    """Where adapters may come from, and the copies of those that come from afar.

    roots:      folders and addresses below which the API may load
    repo:       folder or address with a subfolder for each adapter; a root too
    max_bytes:  of an adapter's weights
    timeout_s:  for one adapter, all tries together
    pauses_s:   between tries
    """

    def __init__(
        self,
        *,
        roots: Sequence[str] = (),
        repo: str | None = None,
        max_bytes: int = MAX_ADAPTER_BYTES,
        timeout_s: float = 300.0,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        """Raises ConfigError for a root or repo that means nothing."""
        self._repo = None if repo is None else _configured(repo, "lora.repo")
        self._roots = [_configured(root, "lora.roots") for root in roots]
        if self._repo is not None:
            self._roots.append(self._repo)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._pauses_s = tuple(pauses_s)

    @classmethod
    def configured(cls, section: LoraSection) -> Sources:
        """Return the sources of a configuration. Raises ConfigError."""
        return cls(
            roots=section.roots,
            repo=_repo_of(section),
            max_bytes=section.max_adapter_bytes,
            timeout_s=section.load_timeout_s,
        )

    def check(self, source: str) -> None:
        """Raise InvalidRequest unless the API may load from here. Opens nothing."""
        try:
            place = parse_place(source)
        except ValueError as error:
            raise _refusal(source, str(error)) from error
        if climbs(source):
            raise _refusal(source, "no part of it may be ..")
        if isinstance(place, LocalFolder) and not place.path.is_absolute():
            raise _refusal(source, "expected an absolute folder, or an address such as hf://...")
        if not self._roots:
            raise _refusal(
                source, "nothing may be loaded by the API: neither lora.roots nor lora.repo is set"
            )
        if not any(is_below(place, root) for root in self._roots):
            raise _refusal(source, "it lies below none of lora.roots, nor in lora.repo")

    def fetch(self, source: str) -> Path:
        """Return a folder whose files may be read, copied to this machine first if need be.

        For any thread; takes as long as it takes. Raises InvalidAdapter where the files are at
        fault, Unavailable where the network is.
        """
        try:
            place = parse_place(source)
        except ValueError as error:
            raise InvalidAdapter(f"{shown(source)} is no place of an adapter: {error}") from error
        if isinstance(place, LocalFolder):
            folder = Path(os.path.realpath(place.path))
        else:
            folder = self._fetch(place, time.monotonic() + self._timeout_s)
        check_files(folder, max_bytes=self._max_bytes, is_snapshot=isinstance(place, HubRepo))
        return folder

    def repo_adapters(self) -> dict[str, str]:
        """Return the sources of what the repo holds now, by name. Raises Unavailable."""
        match self._repo:
            case LocalFolder(path):
                return {folder.name: str(folder) for folder in _subfolders(path)}
            case RemoteFolder(url):
                names = tried(
                    lambda: RemoteAdapter(url).subfolders(),
                    f"looking into {url}",
                    deadline=time.monotonic() + self._timeout_s,
                    pauses_s=self._pauses_s,
                )
                return {name: f"{url}/{name}" for name in names if _NAME.fullmatch(name)}
        return {}

    def stamp(self, source: str) -> str:
        """Return what differs when the files have changed; "" where that cannot be told."""
        try:
            match parse_place(source):
                case LocalFolder(path):
                    return _stamp(path)
                case RemoteFolder(url):
                    return RemoteAdapter(url).stamp(self._max_bytes)
                case HubRepo() as repo:
                    from remora.lora import hub

                    return hub.stamp(repo)
        except Exception as error:  # of any library; whoever loads will be told
            logger.debug("no stamp of %s: %s", shown(source), scrubbed(error))
        return ""

    def _fetch(self, place: HubRepo | RemoteFolder, deadline: float) -> Path:
        def fetch() -> Path:
            if isinstance(place, RemoteFolder):
                adapter, cache = RemoteAdapter(place.url), cache_dir() / "adapters"
                return adapter.fetch(cache, max_bytes=self._max_bytes, deadline=deadline)
            # It takes a while to import, and few need it.
            from remora.lora import hub

            return hub.fetch(place, max_bytes=self._max_bytes)

        what = f"fetching {place.url if isinstance(place, RemoteFolder) else place.shown}"
        return tried(fetch, what, deadline=deadline, pauses_s=self._pauses_s)


def local_folders(section: LoraSection) -> list[Path]:
    """Return the folders of this machine that a configuration names adapters in.

    Raises ConfigError.
    """
    places = [_configured(adapter.path, "lora.adapters") for adapter in section.adapters]
    folders = [place.path for place in places if isinstance(place, LocalFolder)]
    repo = _repo_of(section)
    place = None if repo is None else _configured(repo, "lora.repo")
    if isinstance(place, LocalFolder):
        folders += _subfolders(place.path)
    return folders


def _repo_of(section: LoraSection) -> str | None:
    repo = section.repo
    if repo is None or not repo.startswith("env:"):
        return repo
    name = repo.removeprefix("env:")
    value = os.environ.get(name, "")
    if not value.strip():
        raise ConfigError(
            f"lora.repo: the environment variable {name} is not set; set it where the server (or "
            "the Ray cluster) is started to a folder with a subfolder for each adapter"
        )
    return value


def _configured(text: str, key: str) -> Place:
    try:
        place = parse_root(text) if key == "lora.roots" else parse_place(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown(text)} is no place of adapters: {error}") from error
    if key == "lora.repo" and isinstance(place, HubRepo):
        raise ConfigError(
            "lora.repo: a repository of the hub holds one adapter; name it in lora.adapters, or "
            "its owner in lora.roots"
        )
    return place


def _subfolders(repo: Path) -> list[Path]:
    """Return the folders of adapters in a repo; links that lead out of it are passed over."""
    home = LocalFolder(repo)
    try:
        found = sorted(repo.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unavailable(f"lora.repo cannot be listed: {error.strerror}", RETRY_AFTER_S) from error
    return [
        folder.absolute()
        for folder in found
        if _NAME.fullmatch(folder.name)
        and os.path.lexists(folder / CONFIG)
        and is_below(LocalFolder(folder), home)
    ]


def _stamp(folder: Path) -> str:
    facts = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    return " ".join(f"{fact.st_size}-{fact.st_mtime_ns}-{fact.st_ino}" for fact in facts)


def _refusal(source: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"lora_path {shown(source)} is refused: {why}", param="lora_path")
