"""The LoRAManager: keeps the adapters of all replicas of a model the same.

Replicas call the manager, never the other way round: each reports its changes and gets an answer
when the set of adapters changes. A new adapter is served once every replica has loaded it; until
then, and if one of them fails, the old one of that name stays. Requests do not pass the manager:
without it, replicas serve what they have.

Adapters that the API loaded outlive the manager in `lora.store`, or in the replicas, which report
them to a manager whose store was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from remora.configs.errors import (
    AdapterNotFound,
    CapacityError,
    InvalidAdapter,
    InvalidRequest,
    RemoraError,
    RequestError,
    Unavailable,
)
from remora.configs.load import parse_args
from remora.configs.planning.plan import served_name
from remora.deployments.adapters.manager_handle import RefusedCall
from remora.deployments.serve_context import log_through_serve
from remora.lora.records import AdapterRecord, AdapterReport, Desired, Owner, ReplicaReport
from remora.lora.registry import Registry
from remora.lora.sources import Sources
from remora.lora.wakeup import Wakeup

log = logging.getLogger(__name__)

# A replica calls at least every SYNC_S, and counts as gone after GONE_S without a call.
SYNC_S = 3.0
GONE_S = 10.0
# A name that is missing in the repository is not looked up again for this long.
MISSING_S = 2.0


@dataclass(frozen=True, slots=True)
class _ReplicaState:
    """The state of a replica after its last report.

    number:    of the report
    revision:  of the records that it serves
    reports:   state of its adapters, by lora_id
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
        self._replicas: dict[str, _ReplicaState] = {}
        # A lock lives as long as a caller holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._missing: dict[str, float] = {}
        self._found: dict[str, tuple[str, str]] = {}  # name -> source and stamp, in the repository
        self._stamps: dict[str, str] = {}  # of the served ones
        self._refused: dict[str, str] = {}  # adapters of the repository that cannot be served
        self._retried: set[str] = set()
        self._scanning = asyncio.Lock()
        self._removed: set[int] = set()
        self._beginning = asyncio.Lock()
        self._has_begun = False
        self._wakeup = Wakeup()
        self._watching = asyncio.create_task(self._watch_repo(), name="remora-lora-repo")

    def check_health(self) -> None:
        """Raise if the task that watches the repository has ended."""
        if self._watching.done():
            raise RuntimeError(f"the task that watches lora.repo has ended: {self._watching}")

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method for a replica, and return a refusal as a value.

        Serve logs a traceback for each error that a method raises through a handle.
        """
        try:
            return await getattr(self, method)(*args, **kwargs)
        except (RequestError, CapacityError) as error:
            return RefusedCall(error)

    # -- for replicas --------------------------------------------------------------------------

    async def sync(self, replica: str, report: ReplicaReport, *, waits: bool = True) -> Desired:
        """Take in a replica's changes and return the registry's.

        waits:  whether to answer only when the registry changes, or after SYNC_S
        """
        if report.follows == 0:
            await self._begin(report.records)
        if not self._take_in(replica, report):
            return Desired(revision=report.revision, asks=True)
        if waits:
            await self._until(lambda: self._registry.revision != report.revision, SYNC_S)
        return self._registry.desired(report.revision)

    def _take_in(self, replica: str, report: ReplicaReport) -> bool:
        """Update a replica's state; return False if the report follows one that is missing."""
        known = self._replicas.get(replica)
        if known is not None and report.number <= known.number:
            return True  # a later, complete report arrived first
        reports: dict[int, AdapterReport] = {}
        if report.follows:
            if known is None or report.follows != known.number:
                return False
            reports.update(known.reports)
        reports.update((adapter.lora_id, adapter) for adapter in report.adapters)
        for lora_id in report.gone:
            reports.pop(lora_id, None)
        self._replicas[replica] = _ReplicaState(
            report.number, report.revision, reports, report.stats, self._clock()
        )
        for adapter in report.adapters:
            if adapter.digest:
                self._registry.note_digest(adapter.name, adapter.lora_id, adapter.digest)
        self._drop_broken(report.adapters)
        # The request that ended them may have been cancelled.
        for lora_id in filter(self._is_gone, self._registry.ended):
            self._registry.forget_ended(lora_id)
        self._wakeup.wake()
        return True

    # -- for operators -------------------------------------------------------------------------

    async def load(
        self, name: str, source: str, *, pinned: bool = False, replaces: bool = False
    ) -> dict[str, Any]:
        """Load an adapter at all replicas, then serve it; return its description.

        replaces:  whether it may replace an adapter of that name

        Raises InvalidRequest, InvalidAdapter, Unavailable; nothing has changed then.
        """
        self._registry.check_name(name)
        self._sources.check(source)
        await self._first_report()
        async with self._locked(name):
            known = self._registry.find(name)
            if known is not None and not replaces:
                raise InvalidRequest(
                    f"An adapter {name!r} is loaded already, from {known.source}. Unload it first, "
                    "or send load_inplace: true to replace it.",
                    "lora_name",
                    "already_loaded",
                )
            self._check_owner(known, "replaced")
            return self._describe(await self._load(name, source, "api", pinned=pinned))

    async def unload(self, name: str, *, ends: bool = False) -> dict[str, Any]:
        """Stop serving an adapter, and wait until its requests have ended.

        ends:  whether to abort them

        Raises UnknownModel, InvalidRequest, Unavailable if requests take too long to end.
        """
        await self._first_report()
        async with self._locked(name):
            self._check_owner(self._registry.find(name), "unloaded")
            record = self._registry.remove(name, ends=ends)
            self._removed.add(record.lora_id)
            self._wakeup.wake()
            is_gone = await self._until(lambda: self._is_gone(record.lora_id))
            if not is_gone:
                raise Unavailable(
                    f"The adapter {name!r} is not served any more, but its requests still run "
                    f"after {self._lora.load_timeout_s:g} s. Wait for them to end.",
                    10.0,
                )
            return {"name": name, "version": record.lora_id}

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """Pin or unpin an adapter. Raises UnknownModel, InvalidRequest."""
        await self._first_report()
        record = self._registry.pin(name, pinned=pinned)
        self._wakeup.wake()
        await self._until(self._all_know)
        return self._describe(record)

    async def resolve(self, name: str) -> bool:
        """Return whether a name is served, after a look into the repository if necessary."""
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
        """Describe each adapter at each replica, with each replica's counters."""
        await self._first_report()
        server = [self._describe(record) for record in self._registry.records]
        refused = [
            {"name": name, "owner": "repo", "refused": reason}
            for name, reason in self._refused.items()
        ]
        replicas = {name: dict(replica.stats) for name, replica in self._live().items()}
        return {"adapters": [*server, *refused], "replicas": replicas}

    # -- loading -------------------------------------------------------------------------------

    async def _load(
        self, name: str, source: str, owner: Owner, *, pinned: bool = False
    ) -> AdapterRecord:
        """Let all replicas load an adapter, then serve it. Changes nothing if it raises."""
        staged = self._registry.stage(name, source, owner=owner, pinned=pinned)
        self._wakeup.wake()
        try:
            digest = await self._loaded_everywhere(staged)
        except BaseException:
            self._registry.drop(staged.lora_id)
            self._wakeup.wake()
            raise
        record = self._registry.commit(staged.lora_id, digest)
        self._wakeup.wake()
        await self._until(self._all_know)
        log.info("adapter %s: served with lora_id %d from %s", name, record.lora_id, source)
        return record

    async def _loaded_everywhere(self, staged: AdapterRecord) -> str:
        """Wait until every replica has loaded an adapter; return its digest."""

        def found() -> list[AdapterReport | None]:
            return [replica.reports.get(staged.lora_id) for replica in self._live().values()]

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
        if not reports and staged.owner == "api":
            raise Unavailable(
                f"No replica has loaded the adapter {staged.name!r}: none runs, or each ended "
                "while it loaded. See the replicas' logs.",
                10.0,
            )
        failed = [report for report in reports if report.state == "failed"]
        if failed:
            raise _failure(max(failed, key=lambda report: report.is_fault))
        digests = {report.digest for report in reports if report.digest}
        if len(digests) > 1:
            raise InvalidAdapter(
                f"the files of {staged.source} differ between replicas; each replica needs the "
                "same files"
            )
        return next(iter(digests), "")

    def _live(self) -> dict[str, _ReplicaState]:
        oldest = self._clock() - GONE_S
        return {name: each for name, each in self._replicas.items() if each.heard_at > oldest}

    def _all_know(self) -> bool:
        revision = self._registry.revision
        return all(replica.revision >= revision for replica in self._live().values())

    def _is_gone(self, lora_id: int) -> bool:
        live = self._live().values()
        return self._all_know() and all(lora_id not in each.reports for each in live)

    def _check_owner(self, record: AdapterRecord | None, what: str) -> None:
        if record is None or record.owner == "api":
            return
        where = {
            "config": "is part of the configuration: change lora.adapters there",
            "repo": f"is part of the folder {self._lora.repo}: change it there",
        }[record.owner]
        raise InvalidRequest(
            f"The adapter {record.name!r} cannot be {what} by a request: it {where}.", "lora_name"
        )

    async def _first_report(self) -> None:
        """Wait until a new manager knows what replicas serve; at most as long as it asks them."""
        rest_s = self._began_at + GONE_S - self._clock()
        if not self._has_begun and rest_s > 0:
            await self._until(lambda: self._has_begun, rest_s)

    async def _begin(self, records: tuple[AdapterRecord, ...]) -> None:
        """Register the adapters to serve from the start, when a replica calls first.

        If the store was lost, these include the ones that replicas serve.
        """
        if self._registry.is_new and self._clock() < self._began_at + GONE_S:
            self._registry.restore(r for r in records if r.lora_id not in self._removed)
        async with self._beginning:
            if self._has_begun:
                return
            entries = ((adapter.name, adapter.path) for adapter in self._lora.adapters)
            self._registry.replace_owned("config", entries)
            if self._lora.repo is not None:
                await self._scan()
            self._has_begun = True
            self._wakeup.wake()

    def _drop_broken(self, reports: tuple[AdapterReport, ...]) -> None:
        """Stop serving the repository's broken adapters until their files change.

        One that was served before gets another attempt: its files changed since.
        """
        for report in reports:
            record = self._registry.find(report.name)
            if record is None or record.lora_id != report.lora_id or record.owner != "repo":
                continue
            if report.state == "failed" and report.is_fault:
                if not record.digest or record.name in self._retried:
                    self._refused[report.name] = report.reason
                self._retried.add(record.name)
                self._registry.remove(report.name)

    # -- repository ----------------------------------------------------------------------------

    async def _watch_repo(self) -> None:
        while True:
            try:
                if self._has_begun and self._lora.repo is not None:
                    await self._scan()
                    await self._renew()
            except Exception:  # a boundary: the next scan may succeed
                log.exception("lora.repo could not be read; the served adapters stay")
            await asyncio.sleep(self._lora.repo_period_s)

    async def _scan(self) -> None:
        """Serve the repository's new adapters, and drop the ones that are gone."""
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
            self._wakeup.wake()

    async def _renew(self) -> None:
        """Reload the repository's changed adapters; if that fails, the old ones stay."""
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
                log.warning("adapter %s: reload failed, the old one stays: %s", name, error)

    def _stamped_repo(self) -> dict[str, tuple[str, str]]:
        found = self._sources.repo_adapters()
        # A stamp that cannot be determined counts as unchanged.
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

    # -- helpers -------------------------------------------------------------------------------

    def _describe(self, record: AdapterRecord) -> dict[str, Any]:
        """Return an adapter as the API shows it."""
        replicas = {
            name: _describe_report(replica.reports[record.lora_id])
            for name, replica in self._live().items()
            if record.lora_id in replica.reports
        }
        return {
            "name": record.name,
            "version": record.lora_id,
            "source": record.source,
            "pinned": record.pinned,
            "owner": record.owner,
            "num_users": sum(shown["num_users"] for shown in replicas.values()),
            "num_uses": sum(shown["num_uses"] for shown in replicas.values()),
            "replicas": replicas,
        }

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition, at most lora.load_timeout_s by default; return whether it holds."""
        timeout_s = self._lora.load_timeout_s if timeout_s is None else timeout_s
        # A replica that is gone sends no report, so conditions are also checked every GONE_S.
        return await self._wakeup.until(condition, timeout_s, recheck_s=GONE_S)


def _failure(report: AdapterReport) -> RemoraError:
    """Return the error of a failed load."""
    if not report.is_fault:
        return Unavailable(report.reason)
    return (AdapterNotFound if report.is_missing else InvalidAdapter)(report.reason)


def _describe_report(report: AdapterReport) -> dict[str, Any]:
    fields = ("state", "slot", "num_users", "num_uses", "num_loads", "num_bytes", "max_rank")
    shown = {name: getattr(report, name) for name in fields}
    return shown | ({"reason": report.reason} if report.reason else {})
