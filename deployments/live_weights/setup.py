"""Joins a replica's live weights with those of the other replicas."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from remora.configs.environment import cache_dir
from remora.configs.schema import ServeConfig
from remora.deployments.live_weights.fleet import Fleet, OnlyReplica, Peers
from remora.deployments.live_weights.replica import ReplicaWeights
from remora.deployments.ranks.weights import TeamWeights

if TYPE_CHECKING:  # torch is imported when it is needed
    from remora.deployments.ranks.team import RayTeam
    from remora.engine.launch import LaunchedEngine


@dataclass(frozen=True, slots=True)
class ReplicaFleet:
    """This replica's weights, and those of all replicas."""

    replica: ReplicaWeights
    weights: Fleet

    @classmethod
    def configured(
        cls,
        config: ServeConfig,
        launched: LaunchedEngine,
        others: RayTeam | None,
        replica_id: str | None,
    ) -> Self | None:
        """Return what the configuration allows, None = weights and memory stay as they are.

        Call it on the replica's event loop.
        """
        built = launched.built
        rank = getattr(built, "live", None)
        if rank is None:
            return None
        from remora.engine.live.allowed import AllowedSources
        from remora.engine.live.control import LiveWeights
        from remora.engine.live.uploads import FOLDER, Uploads

        model = config.model
        uploads = Uploads(cache_dir() / FOLDER, model.weight_upload_limit)
        team = None if others is None else TeamWeights(others)
        replica = ReplicaWeights(
            LiveWeights(rank, launched.client, uploads, team),
            AllowedSources(model.weight_roots, model.weight_loaders),
            version=model.weight_version,
            replica=replica_id or uuid.uuid4().hex,
            can_sleep=config.engine.sleep_mode,
            can_share=model.share_weights,
            model=built.plan.model_path,
        )
        is_alone = config.parallel.num_replicas == 1 and not config.autoscaling.is_on
        has_peers = not is_alone and replica_id is not None
        peers = _serve_peers(replica) if has_peers else OnlyReplica(replica)
        fleet = Fleet(replica, peers, model.weight_instances, model.weight_upload_limit or 0)
        return cls(replica, fleet)

    def close(self) -> None:
        """Delete uploads."""
        self.replica.close()


def _serve_peers(replica: ReplicaWeights) -> Peers:
    from remora.deployments.live_weights.serve_peers import ServePeers  # imports Ray

    return ServePeers(replica)
