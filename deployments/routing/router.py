"""The routing policy as a Serve RequestRouter, in every process that holds a handle to replicas.

Serve copies this class to its proxies by value, and imports everything that the class refers to.
The route key comes from the call's `route` argument, made by a gateway or a routing service; in
Serve's own proxy there is none, and only the session is known. Replicas are tried in the order that
the policy returns; when none has room, Serve asks again after its usual pause.

Knows Serve. Does not know HTTP bodies, tokens or the engine.
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

from remora.deployments.ray_private import back_off, request_id_of, session_of
from remora.deployments.routing.key import RouteKey
from remora.deployments.routing.ledger import Ledger
from remora.deployments.routing.policies import make_policy

ROUTE = "route"


class RemoraRouter(RequestRouter):  # type: ignore[misc]
    """Serve's RequestRouter over a policy and a ledger."""

    # Serve's default gives up on a preferred replica that is slow to report that it has room.
    queue_len_response_deadline_s = 1.0

    def initialize_state(
        self,
        *,
        policy: str,
        max_imbalance: float,
        page_size: int,
        max_pages: int,
        sees_completions: bool,
    ) -> None:
        """Take the arguments from `routing_options`; Serve calls this once."""
        self._policy = make_policy(policy, max_imbalance=max_imbalance, page_size=page_size)
        self._ledger = Ledger(max_pages=max_pages, sees_completions=sees_completions)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the current replicas and their reports."""
        super().update_replicas(replicas)
        self._ledger.keep(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            self._ledger.take_report(replica.replica_id.unique_id, replica.routing_stats)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in order, each in a group of one."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = RouteKey() if pending_request is None else self._key(pending_request)
        ranked = self._policy.rank(self._ledger.views(by_id), key)
        if pending_request is not None:
            back_off(pending_request)
            if ranked:
                self._count(pending_request, ranked[0], key)
        return [[by_id[id_]] for id_ in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a request at its actual replica: the first choice may have been full."""
        request_id = request_id_of(pending_request)
        self._ledger.sent(request_id, replica_id.unique_id, self._key(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request."""
        self._ledger.ended(internal_request_id, replica_id.unique_id)

    def _count(self, pending: PendingRequest, replica_id: str, key: RouteKey) -> None:
        """Count a request as soon as it is routed: others are routed before it has been sent."""
        request_id = request_id_of(pending)

        def forget_if_given_up(routed: Future[Any]) -> None:
            if routed.cancelled():
                self._ledger.ended(request_id)

        if not self._ledger.has(request_id):
            pending.future.add_done_callback(forget_if_given_up)
        self._ledger.sent(request_id, replica_id, key)

    @staticmethod
    def _key(pending: PendingRequest) -> RouteKey:
        key = pending.kwargs.get(ROUTE)
        return key if isinstance(key, RouteKey) else RouteKey(session=session_of(pending))
