"""The weights of all replicas of a deployment: all load, then all change; one failing keeps all.

Any replica may carry a change out. It asks the others through a handle of its own deployment. A
replica that starts later becomes like the running ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Collection
from functools import partial
from typing import Any, Protocol, TypeVar

from remora.configs.errors import InvalidRequest, Unavailable
from remora.deployments.http.generation.weight_update import (
    InstanceUpdate,
    Mode,
    Update,
    WeightPart,
)
from remora.deployments.live_weights.replica import ReplicaWeights, WeightsState

log = logging.getLogger(__name__)
T = TypeVar("T")


class Peers(Protocol):
    """All replicas of the deployment, this one among them."""

    async def all(self, operation: str, *args: Any) -> list[WeightsState | BaseException]:
        """Call `ReplicaWeights.call` on each; return the answer or error of each."""


class OnlyReplica:
    """Peers of a deployment with one replica."""

    def __init__(self, replica: ReplicaWeights) -> None:
        self._replica = replica

    async def all(self, operation: str, *args: Any) -> list[WeightsState | BaseException]:
        """Call this replica."""
        return [*await asyncio.gather(self._replica.call(operation, *args), return_exceptions=True)]


class Fleet:
    """Weights of all replicas; see `Weights`. An operation continues when its caller leaves.

    instances:    addresses of servers whose weights may be taken, in the form of `base_url`
    limit_bytes:  of what is taken
    """

    def __init__(
        self,
        replica: ReplicaWeights,
        peers: Peers,
        instances: Collection[str] = (),
        limit_bytes: int = 0,
    ) -> None:
        self._replica, self._peers = replica, peers
        self._instances, self._limit_bytes = instances, limit_bytes
        self._is_copying = False
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def version(self) -> str:
        """The label of this replica's weights."""
        return self._replica.state.version

    @property
    def num_updates(self) -> int:
        """The number of updates of this replica."""
        return self._replica.state.num_updates

    @property
    def released(self) -> Collection[str]:
        """The tags of this replica's released memory."""
        return self._replica.state.released

    async def update(self, update: Update) -> None:
        """Load on all replicas, then serve. Raises the first error, and all keep their weights."""
        await self._whole(self._update(update))

    async def add_part(self, upload: str, offset: int, part: bytes) -> None:
        """Append bytes to an upload on all replicas."""
        _check(await self._peers.all("add_part", upload, offset, part))

    async def update_from_instance(self, order: InstanceUpdate) -> None:
        """Copy another server's weights to all replicas, then serve them as `update` does."""
        if order.url not in self._instances:
            raise InvalidRequest(
                f"{order.url} is not in model.weight_instances, and requests are sent to no other "
                f"address; it lists {', '.join(self._instances) or 'none'}.",
                "url",
                "instance_not_allowed",
            )
        if self._is_copying:
            raise InvalidRequest("Another weight update is running.", code="update_running")
        await self._whole(self._update_from_instance(order))

    async def read_part(self, start: int, num_bytes: int, tag: str | None) -> WeightPart:
        """Return a part of this replica's weights."""
        return await self._replica.read_part(start, num_bytes, tag)

    async def relabel(self, version: str) -> None:
        """Change the label on all replicas."""
        await self._whole(self._everywhere("relabel", version))

    async def sleep(self, tags: frozenset[str], mode: Mode, *, forgets: bool) -> None:
        """Release memory on all replicas; if one refuses, the sleeping ones wake again."""
        await self._whole(self._sleep(tags, mode, forgets))

    async def wake(self, tags: frozenset[str]) -> None:
        """Take memory again on all replicas."""
        await self._whole(self._everywhere("wake", tags))

    async def save(self, path: str) -> int:
        """Write this replica's weights to a new folder."""
        return await self._whole(self._replica.save(path))

    async def catch_up(self) -> None:
        """Become like the replicas that run already, if they have been updated or sleep."""
        states = [each for each in await self._peers.all("tell") if isinstance(each, WeightsState)]
        others = [each for each in states if each.replica != self._replica.state.replica]
        newest = max(others, key=lambda state: state.num_updates, default=None)
        if newest is not None and (newest.num_updates or newest.released):
            log.info("weights: as replica %s: version %s", newest.replica, newest.version)
            await self._replica.adopt(newest)

    async def _update(self, update: Update) -> None:
        name = secrets.token_hex(8)
        asked = await self._peers.all("tell")
        try:
            known = {each.replica for each in _check(asked)}
            staged = {each.replica for each in _check(await self._peers.all("stage", name, update))}
            if known - staged:
                raise Unavailable("A replica was lost; the weights stay. Please try again.")
        except BaseException:
            await self._peers.all("discard", name)
            raise
        _check(await self._peers.all("install", name))

    async def _update_from_instance(self, order: InstanceUpdate) -> None:
        # Imports an HTTP client, for which few replicas have a use.
        from remora.deployments.live_weights.instance import copy_weights

        upload = f"instance-{secrets.token_hex(8)}"
        self._is_copying = True
        try:
            version = await copy_weights(
                order,
                limit_bytes=self._limit_bytes,
                add=partial(self.add_part, upload),
                check_config=self._replica.check_config,
            )
            version = order.version or version
            log.info("weights: version %s has arrived from %s", version, order.url)
            await self._update(
                Update(upload=upload, is_whole=True, version=version, aborts=order.aborts)
            )
        except BaseException:
            await self._peers.all("drop_upload", upload)
            raise
        finally:
            self._is_copying = False

    async def _sleep(self, tags: frozenset[str], mode: Mode, forgets: bool) -> None:
        had = self._replica.state.released
        answers = await self._peers.all("sleep", tags, mode, forgets)
        try:
            _check(answers)
        except InvalidRequest:
            if not forgets and any(isinstance(each, WeightsState) for each in answers):
                await self._peers.all("wake", tags - had)
            raise

    async def _everywhere(self, operation: str, *args: Any) -> None:
        _check(await self._peers.all(operation, *args))

    async def _whole(self, operation: Awaitable[T]) -> T:
        """Run an operation to its end, also if the caller leaves."""
        task = asyncio.ensure_future(operation)
        self._running.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    def _end(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("weights: %s", error)


def _check(answers: list[WeightsState | BaseException]) -> list[WeightsState]:
    """Return the answers. Raises the first error, refusals first."""
    errors = [each for each in answers if isinstance(each, BaseException)]
    if errors:
        raise next((each for each in errors if isinstance(each, InvalidRequest)), errors[0])
    return [each for each in answers if isinstance(each, WeightsState)]
