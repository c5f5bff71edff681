"""Downloads adapters from the Hugging Face hub into the hub library's own cache.

Checks sizes before the download and fetches only an adapter's two files. Files in the cache are
found without a network. The token is the library's (HF_TOKEN).
"""

from __future__ import annotations

import math
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo

from remora.configs.errors import AdapterNotFound, InvalidAdapter, Unavailable
from remora.lora.files import CONFIG, WEIGHTS, check_size, refuse_missing, size_limits
from remora.lora.retry import RETRY_AFTER_S
from remora.lora.source_paths import HubRepo

_TIMEOUT_S = 10.0


def stamp(repo: HubRepo) -> str:
    """Return the current commit of a repository. Raises the library's errors."""
    return str(_info(repo).sha or "")


def fetch(repo: HubRepo, *, max_bytes: int) -> Path:
    """Return the cache folder with an adapter's files; the weights have at most `max_bytes`.

    Raises InvalidAdapter, Unavailable, and the library's errors while it downloads.
    """
    try:
        _check(repo, _info(repo), max_bytes)
    except RepositoryNotFoundError as error:
        raise AdapterNotFound(
            f"the hub has no {repo.shown}; if it is private or gated, start the server with "
            "HF_TOKEN set to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise AdapterNotFound(f"hf://{repo.repo_id} has no revision {repo.revision}") from error
    except HFValidationError as error:
        raise InvalidAdapter(f"{repo.shown} is not a valid repository name: {error}") from error
    except InvalidAdapter:
        raise
    except Exception as error:
        return _from_cache(repo, error)
    return _download(repo)


def _download(repo: HubRepo, *, local_files_only: bool = False) -> Path:
    found = snapshot_download(
        repo.repo_id,
        revision=repo.revision,
        allow_patterns=[CONFIG, WEIGHTS],
        local_files_only=local_files_only,
    )
    return Path(found)


def _info(repo: HubRepo) -> ModelInfo:
    return HfApi().model_info(
        repo.repo_id, revision=repo.revision, files_metadata=True, timeout=_TIMEOUT_S
    )


def _check(repo: HubRepo, info: ModelInfo, max_bytes: int) -> None:
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    for name, most in size_limits(max_bytes):
        if name not in sizes:
            refuse_missing(repo.shown, name, sizes.__contains__)
        size = sizes[name]
        check_size(repo.shown, name, math.inf if size is None else size, most)


def _from_cache(repo: HubRepo, error: Exception) -> Path:
    """Return the cached files. Raises Unavailable when offline, else `error`, to be retried."""
    try:
        return _download(repo, local_files_only=True)
    except LocalEntryNotFoundError:
        if isinstance(error, OfflineModeIsEnabled):
            raise Unavailable(
                f"{repo.shown} is not in the cache, and HF_HUB_OFFLINE forbids the download",
                RETRY_AFTER_S,
            ) from error
        raise error from None
