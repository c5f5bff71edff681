"""A repository of ModelScope, read like a folder at a URL: modelscope://OWNER/NAME[@REVISION].

Also what OWNER/NAME means if one of the variables of SWITCHES is true, as in other servers.
MODELSCOPE_DOMAIN names another server than www.modelscope.cn. Public repositories only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from remora.configs.model_names import HubModel, UrlModel
from remora.engine.sources.faults import SourceFault, SourceMissing
from remora.engine.sources.url_folder import RemoteFile

SCHEME = "modelscope"
SWITCHES = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
_DOMAIN = "www.modelscope.cn"
_REVISION = "master"
_URL = re.compile(rf"{SCHEME}://([\w.-]+)/([\w.-]+)(?:@([\w./-]+))?")
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 2**20
_MAX_LISTING_BYTES = 64 * 2**20


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether names of repositories mean ModelScope instead of the Hugging Face hub."""
    return any(environment.get(name, "").lower() in ("1", "true", "yes") for name in SWITCHES)


def url_of_name(model: HubModel) -> UrlModel:
    """Return the repository of ModelScope with the same name."""
    revision = f"@{model.revision}" if model.revision else ""
    return UrlModel(f"{SCHEME}://{model.repo_id}{revision}")


class ModelScopeFolder:
    """A repository at a revision; every call asks the server again."""

    def __init__(self, url: str) -> None:
        """Raises SourceFault for another kind of URL."""
        match = _URL.fullmatch(url)
        if match is None:
            raise SourceFault(f"{url}: expected {SCHEME}://OWNER/NAME or with @REVISION")
        self.url = url
        self._revision = match[3] or _REVISION
        domain = os.environ.get("MODELSCOPE_DOMAIN") or _DOMAIN
        server = domain if "://" in domain else f"https://{domain}"
        self._repo = f"{server}/api/v1/models/{quote(match[1])}/{quote(match[2])}/repo"

    def files(self) -> dict[str, RemoteFile]:
        """Return all files by relative name. Raises SourceMissing."""
        query = urlencode({"Revision": self._revision, "Recursive": "true"})
        with self._open(f"{self._repo}/files?{query}") as reply:
            answer = json.loads(reply.read(_MAX_LISTING_BYTES))
        listed = (answer.get("Data") or {}).get("Files") or []
        found = {
            str(file["Path"]): RemoteFile(
                int(file["Size"]), str(file.get("Sha256") or file.get("Revision"))
            )
            for file in listed
            if file.get("Type") != "tree"
        }
        outside = [name for name in found if name.startswith("/") or ".." in name.split("/")]
        if outside:
            raise SourceFault(f"{self.url} names {outside[0]!r}, a file outside of its folder")
        if not found:
            raise SourceMissing(f"{self.url} has no files at revision {self._revision}")
        return dict(sorted(found.items()))

    def stat(self, name: str) -> RemoteFile:
        """Return a file's metadata. Raises SourceMissing."""
        found = self.files().get(name)
        if found is None:
            raise SourceMissing(f"{self.url} has no file {name}")
        return found

    def copy(self, name: str, target: Path, advance: Callable[[int], None]) -> None:
        """Copy a file; what `target` has is kept, and the copy goes on after it.

        advance:  called with the number of bytes of each chunk before it is written
        """
        query = urlencode({"Revision": self._revision, "FilePath": name})
        with target.open("ab") as copy:
            arrived = copy.tell()
            if arrived and arrived == self.stat(name).num_bytes:
                return
            headers = {"Range": f"bytes={arrived}-"} if arrived else {}
            with self._open(f"{self._repo}?{query}", headers) as reply:
                if arrived and reply.status != 206:  # the whole file again
                    copy.truncate(0)
                while chunk := reply.read(_CHUNK_BYTES):
                    advance(len(chunk))
                    copy.write(chunk)

    def _open(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        try:
            request = Request(url, headers={"User-Agent": "remora", **(headers or {})})
            return urlopen(request, timeout=_TIMEOUT_S)
        except HTTPError as error:
            error.close()
            if error.code in (400, 401, 403, 404):
                raise SourceMissing(
                    f"ModelScope has no {self.url} at revision {self._revision} that is public "
                    f"(HTTP {error.code})"
                ) from error
            raise
