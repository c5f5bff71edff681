"""Chooses an adapter's two files in a repository of the Hugging Face hub, and checks their sizes.

`engine/sources/hub.py` downloads them. Files in the cache are found without a network.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

from remora.engine.sources.addresses import HubRepo
from remora.engine.sources.faults import SourceFault, SourceOffline
from remora.engine.sources.hub import Listing, cached_snapshot, commit_of, fetch_files, list_repo
from remora.engine.sources.retry import scrubbed
from remora.lora.files import CONFIG, WEIGHTS, check_size, refuse_missing, size_limits

logger = logging.getLogger(__name__)


def stamp(repo: HubRepo) -> str:
    """Return the current commit of a repository. Raises SourceFault and network errors."""
    return commit_of(repo)


def fetch(repo: HubRepo, *, max_bytes: int) -> Path:
    """Return the cache folder with an adapter's files; the weights have at most `max_bytes`.

    Raises InvalidAdapter, SourceFault, and the network's errors, to be retried.
    """
    try:
        listing = list_repo(repo)
    except SourceFault:
        raise
    except Exception as error:
        folder = cached_snapshot(repo)
        if folder is None or not all((folder / name).exists() for name in (CONFIG, WEIGHTS)):
            if isinstance(error, SourceOffline):
                raise SourceOffline(f"{repo.shown} is not in the cache, and {error}") from error
            raise
        logger.info("%s: taken from the cache (%s)", repo.shown, scrubbed(error))
        return folder
    _check(repo, listing, max_bytes)
    return fetch_files(repo, listing, (CONFIG, WEIGHTS))


def _check(repo: HubRepo, listing: Listing, max_bytes: int) -> None:
    for name, most in size_limits(max_bytes):
        if name not in listing.sizes:
            refuse_missing(repo.shown, name, listing.sizes.__contains__)
        size = listing.sizes[name]
        check_size(repo.shown, name, math.inf if size is None else size, most)
