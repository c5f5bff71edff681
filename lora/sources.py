"""Checks which adapter sources the API may load, and fetches them to local folders.

    Sources.check   is the source below `lora.roots` or `lora.repo`?
    Sources.fetch   a local folder with the files, downloaded if they are remote

`engine/sources/` parses sources and downloads; `hub.py` and `remote.py` choose an adapter's
files. Knows no names of adapters, except those of the repo's subfolders, and not which adapters
are loaded.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from remora.configs.environment import cache_dir
from remora.configs.errors import (
    AdapterNotFound,
    ConfigError,
    InvalidAdapter,
    InvalidRequest,
    Unavailable,
)
from remora.configs.model_names import HubModel, parse_model_name
from remora.configs.sections.lora import ADAPTER_NAME, MAX_ADAPTER_BYTES, LoraSection
from remora.engine.sources.addresses import (
    HubRepo,
    LocalFolder,
    RemoteFolder,
    SourcePath,
    climbs,
    is_below,
    parse_root,
    parse_source,
    shown,
)
from remora.engine.sources.faults import SourceFault, SourceMissing, SourceUnreachable
from remora.engine.sources.retry import PAUSES_S, retry, scrubbed
from remora.lora.files import CONFIG, WEIGHTS, check_files, resolved
from remora.lora.remote import RemoteAdapter

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
_NAME = re.compile(ADAPTER_NAME)


class Sources:
    """The allowed sources of adapters.

    roots:      folders and URLs below which the API may load
    named:      sources that the operator names, which need no root
    repo:       folder or URL with a subfolder for each adapter; also a root
    max_bytes:  limit for an adapter's weights
    timeout_s:  for one adapter, all attempts together
    pauses_s:   between attempts
    """

    def __init__(
        self,
        *,
        roots: Sequence[str] = (),
        named: Sequence[str] = (),
        repo: str | None = None,
        max_bytes: int = MAX_ADAPTER_BYTES,
        timeout_s: float = 300.0,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        """Raises ConfigError for an invalid root or repo."""
        self._repo = None if repo is None else _configured(repo, "lora.repo")
        self._roots = [_configured(root, "lora.roots") for root in roots]
        if self._repo is not None:
            self._roots.append(self._repo)
        self._named = frozenset(named)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._pauses_s = tuple(pauses_s)

    @classmethod
    def configured(cls, section: LoraSection) -> Sources:
        """Create from a configuration. Raises ConfigError."""
        return cls(
            roots=section.roots,
            named=[adapter.path for adapter in section.adapters],
            repo=_repo_of(section),
            max_bytes=section.max_adapter_bytes,
            timeout_s=section.load_timeout_s,
        )

    def check(self, source: str) -> None:
        """Raise InvalidRequest unless the API may load from this source. Opens nothing."""
        try:
            path = parse_source(source)
        except ValueError as error:
            raise _refusal(source, str(error)) from error
        if climbs(source):
            raise _refusal(source, "no part of it may be ..")
        if isinstance(path, LocalFolder) and not path.path.is_absolute():
            raise _refusal(source, "expected an absolute path, or a URL such as hf://...")
        if not self._roots:
            raise _refusal(
                source, "the API may load nothing: set lora.roots or lora.repo to allow sources"
            )
        if not self._is_below_roots(path):
            raise _refusal(source, "it is below none of lora.roots, nor in lora.repo")

    def _is_below_roots(self, path: SourcePath) -> bool:
        return any(is_below(path, root) for root in self._roots)

    def fetch(self, source: str) -> Path:
        """Return a local folder with the checked files, downloaded if they are remote.

        Its path has no links, so that `read_files` notices if another folder takes its place. A
        folder of this machine is below a root, or named by the operator. Blocks; for any thread.
        Raises InvalidAdapter for faulty files, Unavailable for network
        errors.
        """
        try:
            path = _parse(source)
        except ValueError as error:
            raise InvalidAdapter(f"{shown(source)} is not a valid source: {error}") from error
        if isinstance(path, LocalFolder):
            folder = resolved(path.path)
            if source not in self._named and not self._is_below_roots(LocalFolder(folder)):
                raise InvalidAdapter(f"{shown(source)} is below none of lora.roots")
        else:
            folder = resolved(self._fetch(path, time.monotonic() + self._timeout_s))
        check_files(folder, max_bytes=self._max_bytes, is_snapshot=isinstance(path, HubRepo))
        return folder

    def repo_adapters(self) -> dict[str, str]:
        """Return the sources of the repo's current adapters, by name. Raises Unavailable."""
        match self._repo:
            case LocalFolder(path):
                return {folder.name: str(folder) for folder in _subfolders(path)}
            case RemoteFolder(url):
                with _faults_of_adapters():
                    names = retry(
                        lambda: RemoteAdapter(url).subfolders(),
                        f"listing {url}",
                        deadline=time.monotonic() + self._timeout_s,
                        pauses_s=self._pauses_s,
                    )
                return {name: f"{url}/{name}" for name in names if _NAME.fullmatch(name)}
        return {}

    def stamp(self, source: str) -> str:
        """Return a text that changes with the files; "" if it cannot be determined."""
        try:
            match _parse(source):
                case LocalFolder(path):
                    return _stamp(path)
                case RemoteFolder(url):
                    return RemoteAdapter(url).stamp(self._max_bytes)
                case HubRepo() as repo:
                    from remora.lora import hub

                    return hub.stamp(repo)
        except Exception as error:  # a boundary of several libraries: a load reports it
            logger.debug("no stamp of %s: %s", shown(source), scrubbed(error))
        return ""

    def _fetch(self, path: HubRepo | RemoteFolder, deadline: float) -> Path:
        def fetch() -> Path:
            if isinstance(path, RemoteFolder):
                adapter, cache = RemoteAdapter(path.url), cache_dir() / "adapters"
                return adapter.fetch(cache, max_bytes=self._max_bytes, deadline=deadline)
            # Slow to import and rarely needed.
            from remora.lora import hub

            return hub.fetch(path, max_bytes=self._max_bytes)

        what = f"fetching {path.url if isinstance(path, RemoteFolder) else path.shown}"
        with _faults_of_adapters():
            return retry(fetch, what, deadline=deadline, pauses_s=self._pauses_s)


@contextmanager
def _faults_of_adapters() -> Iterator[None]:
    """Turn the faults of sources into errors of adapters."""
    try:
        yield
    except SourceMissing as error:
        raise AdapterNotFound(str(error)) from error
    except SourceFault as error:
        raise InvalidAdapter(str(error)) from error
    except SourceUnreachable as error:
        raise Unavailable(str(error), RETRY_AFTER_S) from error


def local_folders(section: LoraSection) -> list[Path]:
    """Return the local adapter folders that a configuration names. Raises ConfigError."""
    paths = [_configured(adapter.path, "lora.adapters") for adapter in section.adapters]
    folders = [path.path for path in paths if isinstance(path, LocalFolder)]
    repo = _repo_of(section)
    root = None if repo is None else _configured(repo, "lora.repo")
    if isinstance(root, LocalFolder):
        folders += _subfolders(root.path)
    return folders


def is_remote_source(source: str) -> bool:
    """Return whether an adapter that a configuration names is not on this machine."""
    return not isinstance(_configured(source, "lora.adapters"), LocalFolder)


def _parse(source: str) -> SourcePath:
    """Parse a source; OWNER/NAME means the hub unless there is such a folder."""
    path = parse_source(source)
    hub = parse_model_name(source)
    if isinstance(path, LocalFolder) and isinstance(hub, HubModel) and not path.path.exists():
        return parse_source(f"hf://{source}")
    return path


def _repo_of(section: LoraSection) -> str | None:
    repo = section.repo
    if repo is None or not repo.startswith("env:"):
        return repo
    name = repo.removeprefix("env:")
    value = os.environ.get(name, "")
    if not value.strip():
        raise ConfigError(
            f"lora.repo: the environment variable {name} is not set; start the server (or the Ray "
            "cluster) with it set to a folder with a subfolder for each adapter"
        )
    return value


def _configured(text: str, key: str) -> SourcePath:
    try:
        path = parse_root(text) if key == "lora.roots" else _parse(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown(text)} is not a valid source: {error}") from error
    if key == "lora.repo" and isinstance(path, HubRepo):
        raise ConfigError(
            "lora.repo: a repository of the hub holds one adapter; name it in lora.adapters, or "
            "its owner in lora.roots"
        )
    return path


def _subfolders(repo: Path) -> list[Path]:
    """Return the folders of adapters in a repo; links that lead out of it are ignored."""
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
