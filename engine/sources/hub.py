"""Reads repositories of the Hugging Face hub into the hub library's own cache.

    HF_HOME/hub/models--OWNER--NAME/refs/REVISION          the commit of a branch or tag
                                    snapshots/COMMIT/...   links to the files of a commit
                                    blobs/ETAG             their contents

Large files continue after an interruption: what has arrived stays in blobs/ETAG.part. Address,
token, cache and offline mode are the library's: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
Which files are wanted is the caller's choice.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import disable_progress_bars

from remora.engine.sources.addresses import HubRepo
from remora.engine.sources.faults import (
    SourceFault,
    SourceMissing,
    SourceOffline,
    SourceUnreachable,
)
from remora.engine.sources.retry import scrubbed

_TIMEOUT_S = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_THREADS = 4
# Smaller files are left to the library, which starts them anew after an interruption.
_RESUMED_BYTES = 2**20

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a commit: size in bytes by name; None = the hub does not report it."""

    commit: str
    sizes: Mapping[str, int | None]


def cache_folder(repo: HubRepo | None = None) -> Path:
    """Return the cache folder, of a repository or the hub library's; it may not exist yet."""
    if repo is not None and repo.cache is not None:
        return repo.cache
    return Path(constants.HF_HUB_CACHE)


def _folder_setting(repo: HubRepo) -> str:
    """Return the name of the setting that says where a repository's cache folder is."""
    return "HF_HOME" if repo.cache is None else "model.download_dir"


def endpoint() -> str:
    """Return the address of the hub."""
    return str(constants.ENDPOINT)


def repo_folder(repo: HubRepo) -> Path:
    """Return the folder of a repository in the cache, which may not exist."""
    return cache_folder(repo) / f"models--{repo.owner}--{repo.name}"


def cached_snapshot(repo: HubRepo) -> Path | None:
    """Return the snapshot of a revision in the cache, maybe without some files; else None."""
    folder, revision = repo_folder(repo), repo.revision or constants.DEFAULT_REVISION
    commit = revision
    if _COMMIT.fullmatch(revision) is None:
        reference = folder / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def list_repo(repo: HubRepo) -> Listing:
    """Return the files of a revision. Raises SourceFault, SourceUnreachable."""
    with _explained(repo):
        info = HfApi().model_info(
            repo.repo_id, revision=repo.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    return Listing(str(info.sha or ""), sizes)


def commit_of(repo: HubRepo) -> str:
    """Return the commit of a revision. Raises SourceFault, SourceUnreachable."""
    if repo.revision is not None and _COMMIT.fullmatch(repo.revision):
        return repo.revision
    with _explained(repo):
        info = HfApi().model_info(repo.repo_id, revision=repo.revision, timeout=_TIMEOUT_S)
    return str(info.sha or "")


def missing_bytes(repo: HubRepo, listing: Listing, names: Iterable[str]) -> int:
    """Return the bytes of files that are not in the cache. Parts of files do not count."""
    snapshot = repo_folder(repo) / "snapshots" / listing.commit
    return sum(listing.sizes.get(name) or 0 for name in names if not (snapshot / name).exists())


def fetch_files(
    repo: HubRepo, listing: Listing, names: Iterable[str], advance: Advance = lambda count: None
) -> Path:
    """Return the snapshot of a commit, with these files of it.

    advance:  called with numbers of bytes that have arrived, by several threads
    Raises SourceFault, SourceUnreachable.
    """
    snapshot = repo_folder(repo) / "snapshots" / listing.commit
    missing = [name for name in names if not (snapshot / name).exists()]
    is_over = threading.Event()

    def counted(count: int) -> None:
        if is_over.is_set():
            raise InterruptedError("another file failed, or the program ends")
        advance(count)

    def fetch(name: str) -> None:
        _fetch_file(repo, listing.commit, name, counted)

    disable_progress_bars()  # of the library, a bar for each file
    with _explained(repo), ThreadPoolExecutor(_NUM_THREADS) as threads:
        try:
            for _ in threads.map(fetch, missing):
                pass
        except BaseException:
            is_over.set()
            threads.shutdown(cancel_futures=True)
            raise
        _note_revision(repo, listing.commit)
    return snapshot


def _fetch_file(repo: HubRepo, commit: str, name: str, advance: Advance) -> None:
    url = hf_hub_url(repo.repo_id, name, revision=commit)
    facts = get_hf_file_metadata(url, timeout=_TIMEOUT_S)
    size = facts.size or 0
    is_ours = _RESUMED_BYTES <= size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if is_ours and facts.etag is not None and re.fullmatch(r"[\w-]+", facts.etag):
        _fetch_blob(repo, facts.etag, size, url, advance)
        size = 0
    # Finds the content in blobs, or fetches it, and makes the link in the snapshot.
    hf_hub_download(
        repo.repo_id,
        name,
        revision=commit,
        cache_dir=cache_folder(repo),
        etag_timeout=_TIMEOUT_S,
    )
    advance(size)


def _fetch_blob(repo: HubRepo, etag: str, size: int, url: str, advance: Advance) -> None:
    """Write a file's content to blobs, continuing what has arrived earlier."""
    blob = repo_folder(repo) / "blobs" / etag
    # The library's own lock of the file, so that neither it nor another process writes it, too.
    lock = cache_folder(repo) / ".locks" / repo_folder(repo).name / f"{etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if blob.exists():
            advance(size)
            return
        part = blob.with_name(f"{etag}.part")
        arrived = part.stat().st_size if part.exists() else 0
        if arrived > size:
            part.unlink()
            arrived = 0
        advance(arrived)
        with _Counted(part, advance) as opened:
            http_get(
                url,
                opened,
                resume_size=arrived,
                headers=build_hf_headers(),
                expected_size=size,
                displayed_filename=blob.name,
            )
        if _SHA256.fullmatch(etag) and _hash_of(part) != etag:
            part.unlink()
            raise SourceUnreachable(f"the content of {url} has another SHA-256 than the hub says")
        part.rename(blob)


class _Counted(io.BufferedWriter):
    """A file that is appended to, and reports the bytes that it gets."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._advance = advance

    def write(self, data: object, /) -> int:
        self._advance(len(data))  # type: ignore[arg-type]
        return super().write(data)  # type: ignore[arg-type]


def _hash_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _note_revision(repo: HubRepo, commit: str) -> None:
    """Write the commit of a branch or tag where the library looks for it without a network."""
    revision = repo.revision or constants.DEFAULT_REVISION
    if _COMMIT.fullmatch(revision):
        return
    reference = repo_folder(repo) / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    draft = reference.with_name(f".{reference.name}.{threading.get_native_id()}")
    draft.write_text(commit, encoding="utf-8")
    draft.replace(reference)


@contextmanager
def _explained(repo: HubRepo) -> Iterator[None]:
    """Turn the library's errors into faults that say what to do."""
    try:
        yield
    except GatedRepoError as error:
        state = "the account of the token in use has no access" if get_token() else "none is set"
        raise SourceFault(
            f"{repo.shown} is gated: accept its conditions at {endpoint()}/{repo.repo_id}, and "
            f"set HF_TOKEN to a token of that account ({state})"
        ) from error
    except RepositoryNotFoundError as error:
        access = (
            "the token in use may not read it"
            if get_token()
            else "it is private and needs HF_TOKEN"
        )
        raise SourceMissing(
            f"the hub at {endpoint()} has no {repo.shown}, or {access}: check the name, or set "
            "HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceMissing(
            f"hf://{repo.repo_id} has no revision {repo.revision}: name a branch, a tag or a "
            f"commit of {endpoint()}/{repo.repo_id}/commits"
        ) from error
    except HFValidationError as error:
        raise SourceFault(f"{repo.shown} is not a valid repository name: {error}") from error
    except OfflineModeIsEnabled as error:
        raise SourceOffline("HF_HUB_OFFLINE forbids the download") from error
    except HfHubHTTPError as error:
        raise _http_fault(repo, error) from error
    except PermissionError as error:
        raise SourceFault(
            f"the cache folder {cache_folder(repo)} cannot be written ({error.strerror}); set "
            f"{_folder_setting(repo)} to a writable folder"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(cache_folder(repo)).free
            raise SourceFault(
                f"the disk of {cache_folder(repo)} is full ({free:,} bytes free): free space, or "
                f"set {_folder_setting(repo)} to a folder on a larger disk"
            ) from error
        raise


def _http_fault(repo: HubRepo, error: HfHubHTTPError) -> Exception:
    status = error.response.status_code
    if status == 401:
        return SourceFault(
            f"the hub at {endpoint()} refuses the token in use: set HF_TOKEN to a valid one, or "
            "unset it for public models"
        )
    if status == 403:
        return SourceFault(f"the token in use may not read {repo.shown} (HTTP 403)")
    return SourceUnreachable(f"the hub at {endpoint()} answers HTTP {status}: {scrubbed(error)}")
