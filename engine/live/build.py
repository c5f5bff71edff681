"""Makes a rank's live weights from a configuration."""

from __future__ import annotations

from remora.configs.machine import read_machine_facts
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.engine.live.rank import RankWeights, import_loaders
from remora.engine.models.checkpoint import read_config
from remora.engine.parallel.follower import Follower
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.weights.packed_cache import PackedCache


def live_weights(
    config: ServeConfig,
    plan: EnginePlan,
    table: InputBatch,
    holder: LocalRunner | Follower,
    packed: PackedCache | None = None,
) -> RankWeights | None:
    """Return what changes a rank's weights and memory; None = the configuration allows nothing.

    plan:    with the path of the model on this node
    packed:  packed weights of the plan's checkpoint
    Raises ConfigError if a weight loader cannot be imported.
    """
    if not config.live_weights_keys:
        return None
    return RankWeights(
        plan,
        read_config(plan.model_path, plan.loading.config_overrides),
        table,
        holder,
        layout=holder.group.layout,
        loaders=import_loaders(config.model.weight_loaders),
        free_bytes=_free_bytes,
        packed=packed,
    )


def _free_bytes() -> int:
    return read_machine_facts(devices=("cpu",)).available_bytes
