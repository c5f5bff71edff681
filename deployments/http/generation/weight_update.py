"""The served weights as request handlers see them, and what an operator may do with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from remora.configs.errors import InvalidRequest

Mode = Literal["idle", "abort", "wait"]
TAGS = ("weights", "kv_cache", "cuda_graph")
PART_BYTES = 16 * 2**20  # of shared weights in one answer, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An order to serve other weights.

    path:         what they are loaded from, below a root or by a loader; None = an upload
    load_format:  of `path`, or the name of a loader
    upload:       name of a complete upload of tensors
    is_whole:     whether the upload has all tensors of the model; the current ones do not count
    version:      new label of the weights; None = it stays
    aborts:       whether open requests are aborted instead of waited for
    """

    path: str | None = None
    load_format: str | None = None
    upload: str | None = None
    is_whole: bool = False
    version: str | None = None
    aborts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUpdate:
    """An order to take the weights of another server.

    url:      its address, in the form of `base_url`
    api_key:  its admin key; None = it needs none
    model:    the name by which a gateway finds the model there; None = there is one model
    version:  new label of the weights; None = the other server's
    aborts:   whether open requests are aborted instead of waited for
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    version: str | None = None
    aborts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """A part of the safetensors file of the served weights.

    content:      bytes from `start` on; empty if `start` is not in the file, or the tag differs
    total_bytes:  of the file
    tag:          is the same for parts of the same weights under the same label
    """

    content: bytes
    start: int
    total_bytes: int
    tag: str


class Weights(Protocol):
    """The weights of all replicas."""

    @property
    def version(self) -> str:
        """Return the label of the weights."""

    @property
    def num_updates(self) -> int:
        """Return the number of updates since the start."""

    @property
    def released(self) -> Collection[str]:
        """Return the tags of memory that is released."""

    async def update(self, update: Update) -> None:
        """Load weights on all replicas, then serve them. InvalidRequest: the old ones stay."""

    async def add_part(self, upload: str, offset: int, part: bytes) -> None:
        """Append bytes of a safetensors file to an upload."""

    async def update_from_instance(self, order: InstanceUpdate) -> None:
        """Take another server's weights, then serve them. InvalidRequest: the old ones stay."""

    async def read_part(self, start: int, num_bytes: int, tag: str | None) -> WeightPart:
        """Return at most these bytes of the served weights, if they still have the tag."""

    async def relabel(self, version: str) -> None:
        """Change the label of the weights only."""

    async def sleep(self, tags: frozenset[str], mode: Mode, *, forgets: bool) -> None:
        """Release memory; requests are refused until it is taken again."""

    async def wake(self, tags: frozenset[str]) -> None:
        """Take released memory again."""

    async def save(self, path: str) -> int:
        """Write the weights to a new folder; return their bytes."""


class FixedWeights:
    """Weights that stay as they were loaded."""

    num_updates = 0
    released: Collection[str] = ()

    def __init__(self, version: str) -> None:
        self.version = version

    async def update(self, update: Update) -> None:
        """Raise InvalidRequest."""
        self._refuse("model.weight_roots, model.weight_loaders or model.weight_upload_limit")

    async def add_part(self, upload: str, offset: int, part: bytes) -> None:
        """Raise InvalidRequest."""
        self._refuse("model.weight_upload_limit")

    async def update_from_instance(self, order: InstanceUpdate) -> None:
        """Raise InvalidRequest."""
        self._refuse("model.weight_instances")

    async def read_part(self, start: int, num_bytes: int, tag: str | None) -> WeightPart:
        """Raise InvalidRequest."""
        self._refuse("model.share_weights")

    async def relabel(self, version: str) -> None:
        """Raise InvalidRequest."""
        self._refuse("model.weight_roots, model.weight_loaders or model.weight_upload_limit")

    async def sleep(self, tags: frozenset[str], mode: Mode, *, forgets: bool) -> None:
        """Raise InvalidRequest."""
        self._refuse("engine.sleep_mode")

    async def wake(self, tags: frozenset[str]) -> None:
        """Raise InvalidRequest."""
        self._refuse("engine.sleep_mode")

    async def save(self, path: str) -> int:
        """Raise InvalidRequest."""
        self._refuse("model.weight_roots")

    @staticmethod
    def _refuse(keys: str) -> NoReturn:
        raise InvalidRequest(
            f"This server's weights and memory stay as they are; set {keys}.", code="not_enabled"
        )


def described(weights: Weights) -> dict[str, Any]:
    """Return the entries of /server_info about weights."""
    return {
        "weight_version": weights.version,
        "weight_updates": weights.num_updates,
        "released_memory": sorted(weights.released),
    }
