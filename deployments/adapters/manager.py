"""The LoRAManager: which adapters all replicas of a model are to serve, and what became of it.

Replicas ask what is wanted, tell what they have, and are answered as soon as that changes, so the
manager knows no replica that does not know it, and needs to find none. A new version is served
only once every replica has loaded it; until then, and if one cannot, the old one stays. Nothing of
a request comes by here: without a manager replicas serve what they have.

What the API has loaded outlives the manager in `lora.store`, or in the replicas, which tell a
manager that has lost everything what they serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from remora.configs.errors import (
    InvalidAdapter,
    InvalidRequest,
    RemoraError,
    Unavailable,
)
from remora.configs.load import parse_args
from remora.configs.planning.plan import served_name
from remora.deployments.serve_context import log_through_serve
from remora.lora.records import AdapterRecord, AdapterReport, Desired, Owner, ReplicaReport
from remora.lora.registry import Registry
from remora.lora.sources import Sources

log = logging.getLogger(__name__)

# A replica asks again after so long at most, and is taken for gone when it has not for GONE_S.
SYNC_S = 3.0
GONE_S = 10.0
# A name that the repository does not have is not looked for again at once.
MISSING_S = 2.0


@dataclass(frozen=True, slots=True)
class _Replica:
    """What a replica has told.

    number:    of its last report
    revision:  of what it serves
    reports:   what became of its adapters, by version
    """

    number: int
    revision: int
    reports: Mapping[int, AdapterReport]
    stats: Mapping[str, float]
    heard_at: float


class LoRAManager:
    """The manager of one model. All methods run on one event loop. Raises ConfigError."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        log_through_serve()
        config = parse_args(args)
        lora = config.lora
        self._lora = lora
        self._sources = Sources.configured(lora)
        self._registry = Registry(
            lora.store,
            base=served_name(config, Path(config.model.path)),
            max_pinned=lora.max_loras_per_batch - 1,
        )
        self._clock: Callable[[], float] = time.monotonic
        self._began_at = self._clock()
        self._replicas: dict[str, _Replica] = {}
        # Each lives as long as somebody holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._missing: dict[str, float] = {}
        self._found: dict[str, tuple[str, str]] = {}  # name -> source and stamp, in the repository
        self._stamps: dict[str, str] = {}  # of what is served
        self._refused: dict[str, str] = {}  # adapters of the repository that cannot be served
        self._retried: set[str] = set()
        self._scanning = asyncio.Lock()
        self._removed: set[int] = set()
        self._beginning = asyncio.Lock()
        self._has_begun = False
        self._woken = asyncio.Event()
        self._watching = asyncio.create_task(self._watch_repo(), name="remora-lora-repo")

    def check_health(self) -> None:
        """Raise if nobody watches the repository any more."""
        if self._watching.done():
            raise RuntimeError(f"the watching of lora.repo has ended: {self._watching}")

    # -- for replicas --------------------------------------------------------------------------

    async def sync(self, replica: str, report: ReplicaReport, *, waits: bool = True) -> Desired:
        """Hear what has changed at a replica, and tell it what it is to have.

        waits:  whether the answer is to come when that is news to the replica, or after SYNC_S
        """
        if report.follows == 0:
            await self._begin(report.records)
        if not self._hear(replica, report):
            return Desired(revision=report.revision, asks=True)
        if waits:
            await self._until(lambda: self._registry.revision != report.revision, SYNC_S)
        return self._registry.desired(report.revision)

    def _hear(self, replica: str, report: ReplicaReport) -> bool:
        """Take in a report; False = it builds on one that is not known."""
        known = self._replicas.get(replica)
        if known is not None and report.number <= known.number:
            return True  # a later one was faster, and told everything
        if report.follows and (known is None or report.follows != known.number):
            return False
        kept = known.reports if known is not None and report.follows else {}
        told = {adapter.version: adapter for adapter in report.adapters}
        reports = {v: each for v, each in (*kept.items(), *told.items()) if v not in report.gone}
        self._replicas[replica] = _Replica(
            report.number, report.revision, reports, report.stats, self._clock()
        )
        for adapter in report.adapters:
            if adapter.digest:
                self._registry.note_digest(adapter.name, adapter.version, adapter.digest)
        self._drop_broken(report.adapters)
        # Whoever has asked for an end may have left.
        for version in filter(self._is_gone, self._registry.ended):
            self._registry.forget_ended(version)
        self._wake()
        return True

    # -- for operators -------------------------------------------------------------------------

    async def load(
        self, name: str, source: str, *, pinned: bool = False, replaces: bool = False
    ) -> dict[str, Any]:
        """Load an adapter at all replicas, and serve it once all have it; return what is known.

        replaces:  whether an adapter of that name may be there already

        Raises InvalidRequest, InvalidAdapter, Unavailable; nothing has changed then.
        """
        self._registry.check_name(name)
        self._sources.check(source)
        async with self._alone(name):
            known = self._registry.find(name)
            if known is not None and not replaces:
                raise InvalidRequest(
                    f"An adapter {name!r} is loaded already, from {known.source}. Unload it first, "
                    "or send load_inplace: true to replace it.",
                    "lora_name",
                    "already_loaded",
                )
            self._check_owner(known, "replaced")
            return self._told(await self._load(name, source, "api", pinned=pinned))

    async def unload(self, name: str, *, ends: bool = False) -> dict[str, Any]:
        """Serve an adapter no longer, and wait until its requests have ended.

        ends:  whether these are ended at once

        Raises UnknownModel, InvalidRequest, Unavailable if requests take too long to end.
        """
        async with self._alone(name):
            self._check_owner(self._registry.find(name), "unloaded")
            record = self._registry.remove(name, ends=ends)
            self._removed.add(record.version)
            self._wake()
            is_gone = await self._until(lambda: self._is_gone(record.version))
            if not is_gone:
                raise Unavailable(
                    f"The adapter {name!r} is served no longer, but requests that use it still run "
                    f"after {self._lora.load_timeout_s:g} s. They may end by themselves.",
                    10.0,
                )
            return {"name": name, "version": record.version}

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Let an adapter stay loaded, or not. Raises UnknownModel, InvalidRequest."""
        record = self._registry.pin(name, pinned=pinned)
        self._wake()
        await self._until(self._all_know)
        return self._told(record)

    async def resolve(self, name: str) -> bool:
        """Look whether the repository has an adapter of a name that nobody serves."""
        if self._registry.find(name) is not None:
            return True
        if self._lora.repo is None or self._missing.get(name, 0.0) > self._clock():
            return False
        await self._scan()
        found = self._registry.find(name) is not None
        if not found:
            now = self._clock()
            self._missing = {n: until for n, until in self._missing.items() if until > now}
            self._missing[name] = now + MISSING_S
        return found

    async def adapters(self) -> dict[str, Any]:
        """Return what is known of each adapter at each replica, and each replica's counters."""
        server = [self._told(record) for record in self._registry.records]
        refused = [
            {"name": name, "owner": "repo", "refused": reason}
            for name, reason in self._refused.items()
        ]
        oldest = self._clock() - GONE_S
        replicas = {
            name: dict(replica.stats)
            for name, replica in self._replicas.items()
            if replica.heard_at > oldest
        }
        return {"adapters": [*server, *refused], "replicas": replicas}

    # -- how -----------------------------------------------------------------------------------

    async def _load(
        self, name: str, source: str, owner: Owner, *, pinned: bool = False
    ) -> AdapterRecord:
        """Let all replicas load an adapter, then serve it; else nothing has changed."""
        staged = self._registry.stage(name, source, owner=owner, pinned=pinned)
        self._wake()
        try:
            digest = await self._loaded_everywhere(staged)
        except BaseException:
            self._registry.drop(staged.version)
            self._wake()
            raise
        record = self._registry.commit(staged.version, digest)
        self._wake()
        await self._until(self._all_know)
        log.info("adapter %s is served as version %d, from %s", name, record.version, source)
        return record

    async def _loaded_everywhere(self, staged: AdapterRecord) -> str:
        """Wait until every replica has loaded a version; return its digest."""
        # A manager that has just begun does not know its replicas yet.
        rest_s = self._began_at + SYNC_S - self._clock()
        if not self._live() and rest_s > 0:
            await self._until(lambda: bool(self._live()), rest_s)

        def found() -> list[AdapterReport | None]:
            return [replica.reports.get(staged.version) for replica in self._live()]

        def is_decided() -> bool:
            reports = found()
            has_failed = any(report is not None and report.state == "failed" for report in reports)
            return has_failed or all(report is not None and report.num_loads for report in reports)

        if not await self._until(is_decided):
            raise Unavailable(
                f"The adapter {staged.name!r} was not loaded by all replicas within "
                f"{self._lora.load_timeout_s:g} s (lora.load_timeout_s).",
                10.0,
            )
        reports = [report for report in found() if report is not None]
        failed = [report for report in reports if report.state == "failed"]
        if failed:
            worst = max(failed, key=lambda report: report.is_fault)
            raise InvalidAdapter(worst.reason) if worst.is_fault else Unavailable(worst.reason)
        digests = {report.digest for report in reports if report.digest}
        if len(digests) > 1:
            raise InvalidAdapter(
                f"{staged.source} holds other files at one replica than at another; each needs "
                "the same"
            )
        return next(iter(digests), "")

    def _live(self) -> list[_Replica]:
        oldest = self._clock() - GONE_S
        return [replica for replica in self._replicas.values() if replica.heard_at > oldest]

    def _all_know(self) -> bool:
        revision = self._registry.revision
        return all(replica.revision >= revision for replica in self._live())

    def _is_gone(self, version: int) -> bool:
        return self._all_know() and all(version not in each.reports for each in self._live())

    def _check_owner(self, record: AdapterRecord | None, what: str) -> None:
        if record is None or record.owner == "api":
            return
        where = {
            "config": "is named in the configuration: change lora.adapters there",
            "repo": f"comes from the folder {self._lora.repo}: change it there",
        }[record.owner]
        raise InvalidRequest(
            f"The adapter {record.name!r} cannot be {what} by a request: it {where}.", "lora_name"
        )

    async def _begin(self, records: tuple[AdapterRecord, ...]) -> None:
        """Want what is to be there from the start, when the first replica asks.

        If the store has been lost, that is what it serves; others may serve more.
        """
        if self._registry.is_new and self._clock() < self._began_at + GONE_S:
            self._registry.restore(r for r in records if r.version not in self._removed)
        async with self._beginning:
            if self._has_begun:
                return
            entries = ((adapter.name, adapter.path) for adapter in self._lora.adapters)
            self._registry.replace_owned("config", entries)
            if self._lora.repo is not None:
                await self._scan()
            self._has_begun = True

    def _drop_broken(self, reports: tuple[AdapterReport, ...]) -> None:
        """Serve nothing of the repository's that cannot be served; it is looked at when changed.

        What could be served once has changed while nobody looked: that gets one more try.
        """
        for report in reports:
            record = self._registry.find(report.name)
            if record is None or record.version != report.version or record.owner != "repo":
                continue
            if report.state == "failed" and report.is_fault:
                if not record.digest or record.name in self._retried:
                    self._refused[report.name] = report.reason
                self._retried.add(record.name)
                self._registry.remove(report.name)

    async def _watch_repo(self) -> None:
        """Look into the repository, for good."""
        while True:
            try:
                if self._has_begun and self._lora.repo is not None:
                    await self._scan()
                    await self._renew()
            except Exception:  # a boundary: the next look may find it in order
                log.exception("lora.repo could not be read; what is served stays")
            await asyncio.sleep(self._lora.repo_period_s)

    async def _scan(self) -> None:
        """Serve what is new in the repository, and no longer what has gone."""
        async with self._scanning:
            found = await asyncio.to_thread(self._stamped_repo)
            for name, (_, stamp) in found.items():
                if self._stamps.setdefault(name, stamp) != stamp:
                    self._refused.pop(name, None)
                    self._retried.discard(name)
            for name in self._stamps.keys() - found.keys():
                del self._stamps[name]
                self._refused.pop(name, None)
            self._found = found
            wanted = ((name, source) for name, (source, _) in found.items())
            self._registry.replace_owned("repo", filter(self._may_serve, wanted))
            self._wake()

    async def _renew(self) -> None:
        """Load anew what has changed in the repository; what cannot be loaded stays as it was."""
        for name, (source, stamp) in self._found.items():
            if self._stamps.get(name) == stamp:
                continue
            self._stamps[name] = stamp
            record = self._registry.find(name)
            if record is None or record.owner != "repo" or not record.digest:
                continue
            try:
                await self._load(name, source, "repo", pinned=record.pinned)
            except RemoraError as error:
                log.warning("adapter %s has changed and stays as it was: %s", name, error)

    def _stamped_repo(self) -> dict[str, tuple[str, str]]:
        found = self._sources.repo_adapters()
        # What cannot be told now is taken for unchanged.
        return {
            name: (source, self._sources.stamp(source) or self._stamps.get(name, ""))
            for name, source in found.items()
        }

    def _may_serve(self, found: tuple[str, str]) -> bool:
        name, _ = found
        try:
            self._registry.check_name(name)
        except InvalidRequest as error:
            self._refused[name] = str(error)
        return name not in self._refused

    def _told(self, record: AdapterRecord) -> dict[str, Any]:
        """Return what is known of an adapter, as the API tells it."""
        oldest = self._clock() - GONE_S
        replicas = {
            name: _shown(replica.reports[record.version])
            for name, replica in self._replicas.items()
            if replica.heard_at > oldest and record.version in replica.reports
        }
        return {
            "name": record.name,
            "version": record.version,
            "source": record.source,
            "pinned": record.pinned,
            "owner": record.owner,
            "num_users": sum(shown["num_users"] for shown in replicas.values()),
            "num_uses": sum(shown["num_uses"] for shown in replicas.values()),
            "replicas": replicas,
        }

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """Change one name by one caller at a time."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition; returns whether it holds."""
        timeout_s = self._lora.load_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    with suppress(TimeoutError):  # replicas that go in silence wake nobody
                        async with asyncio.timeout(GONE_S):
                            await self._woken.wait()
        except TimeoutError:
            return condition()
        return True


def _shown(report: AdapterReport) -> dict[str, Any]:
    fields = ("state", "slot", "num_users", "num_uses", "num_loads", "num_bytes", "max_rank")
    shown = {name: getattr(report, name) for name in fields}
    return shown | ({"reason": report.reason} if report.reason else {})
