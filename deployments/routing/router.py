"""A policy as Serve runs it: in every process that holds a handle to the replicas.

Serve carries this class to the proxies by value and everything that it imports by name. What it
passes on to the policy comes from the call's `route` argument (a gateway or a chooser has made it);
in Serve's proxy there is none, and all that is known is the session that Serve has found in a
header. The order that the policy gives is tried one replica after another; when none has room Serve
asks again, after its usual pauses.

Knows Serve and nothing of HTTP bodies, tokens or the engine.
"""

from __future__ import annotations

from asyncio import Future
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.ledger import Ledger
from remora.deployments.routing.policies import make_policy

ROUTE = "route"


class RemoraRouter(RequestRouter):  # type: ignore[misc]
    """Serve's RequestRouter over a policy and a ledger."""

    # A preferred replica that is slow to say that it has room is still the preferred one.
    queue_len_response_deadline_s = 1.0

    def initialize_state(
        self,
        *,
        policy: str,
        max_imbalance: float,
        page_size: int,
        max_pages: int,
        hears_ends: bool,
    ) -> None:
        """Take what `routing_options` has written; Serve calls this once."""
        self._policy = make_policy(policy, max_imbalance=max_imbalance, page_size=page_size)
        self._ledger = Ledger(max_pages=max_pages, hears_ends=hears_ends)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are, and their reports."""
        super().update_replicas(replicas)
        self._ledger.keep(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            self._ledger.take_report(replica.replica_id.unique_id, replica.routing_stats)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, each a rank of its own."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = RouteKey() if pending_request is None else self._key(pending_request)
        ranked = self._policy.rank(self._ledger.views(by_id), key)
        if pending_request is not None:
            # Otherwise Serve would ask again at once, and again, while all are full.
            pending_request.routing_context.should_backoff = True
            if ranked:
                self._count(pending_request, ranked[0], key)
        return [[by_id[id_]] for id_ in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Correct where a request is counted: the first choice may have been full."""
        request_id = pending_request.metadata.internal_request_id
        self._ledger.sent(request_id, replica_id.unique_id, self._key(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no more."""
        self._ledger.ended(internal_request_id, replica_id.unique_id)

    def _count(self, pending: PendingRequest, replica_id: str, key: RouteKey) -> None:
        """Count a request from its choice on: others are chosen for before it has been sent."""
        request_id = pending.metadata.internal_request_id

        def forget_if_given_up(chosen: Future[Any]) -> None:
            if chosen.cancelled():
                self._ledger.ended(request_id)

        if not self._ledger.has(request_id):
            pending.future.add_done_callback(forget_if_given_up)
        self._ledger.sent(request_id, replica_id, key)

    @staticmethod
    def _key(pending: PendingRequest) -> RouteKey:
        key = pending.kwargs.get(ROUTE)
        if isinstance(key, RouteKey):
            return key
        return RouteKey(session=pending.metadata.session_id or None)
