"""How a step runs on its device: which attention, in graphs of which sizes, overlapping or not.

Pure, like `plan.py`, which it is a part of. What was written and cannot be is refused with the
reason; what was not written becomes what the device does best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remora.configs.errors import ConfigError
from remora.configs.graph_sizes import graph_sizes
from remora.configs.schema import ServeConfig

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """How a step runs.

    attention_backend:  whose kernels attend
    graph_sizes:        rows of recorded decode steps, ascending; none = all steps are launched
    overlap:            whether a step is planned while the one before runs
    """

    attention_backend: Backend = "torch"
    graph_sizes: tuple[int, ...] = ()
    overlap: bool = False


ONE_BY_ONE = DevicePlan()


def plan_device(
    config: ServeConfig, *, device: str, has_triton: bool, max_running: int
) -> DevicePlan:
    """Decide for a device: cpu or cuda. Raises ConfigError."""
    engine = config.engine
    if device == "cpu":
        _refuse(config, "the model runs on a CPU", "engine.device cuda needs a GPU", triton=True)
        return ONE_BY_ONE
    if engine.attention_backend == "triton" and not has_triton:
        raise ConfigError(
            "engine.attention_backend = triton: the package triton is not installed; install it, "
            "or set engine.attention_backend to auto"
        )
    by_triton = has_triton and engine.attention_backend != "torch"
    backend: Backend = "triton" if by_triton else "torch"
    if config.parallel.num_ranks > 1:
        _refuse(
            config,
            "several ranks take their steps in turn, and launch them one by one",
            "leave it out, or set parallel.tp_size and pp_size to 1",
        )
        return DevicePlan(attention_backend=backend)
    if not by_triton:
        _refuse(
            config,
            "attention by torch waits for lengths on the host",
            "leave it out, or set engine.attention_backend to triton",
        )
        return DevicePlan(attention_backend=backend)
    most = max_running if engine.graph_max_rows is None else engine.graph_max_rows
    return DevicePlan(
        attention_backend=backend,
        graph_sizes=graph_sizes(
            most=min(most, max_running),
            split=engine.graph_split,
            fine=engine.graph_fine,
            step=engine.graph_step,
        ),
        overlap=engine.overlap is not False,
    )


def _refuse(config: ServeConfig, reason: str, advice: str, *, triton: bool = False) -> None:
    """Raise ConfigError for a key that asks for what cannot be."""
    engine = config.engine
    asked = {
        "overlap": engine.overlap is True,
        "graph_max_rows": bool(engine.graph_max_rows),
        "attention_backend": triton and engine.attention_backend == "triton",
    }
    asked |= {
        key: key in engine.model_fields_set and engine.graph_max_rows != 0
        for key in ("graph_split", "graph_fine", "graph_step")
    }
    for key, is_asked in asked.items():
        if is_asked:
            value = str(getattr(engine, key)).lower()
            raise ConfigError(f"engine.{key} = {value}: {reason}; {advice}")
