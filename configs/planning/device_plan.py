"""How a step runs on its device: which attention, in graphs of which sizes, overlapping or not.

Pure, like `plan.py`, which it is a part of. What was written and cannot be is refused with the
reason; what was not written becomes what the device does best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from remora.configs.errors import ConfigError
from remora.configs.planning.graph_sizes import graph_sizes
from remora.configs.schema import ServeConfig

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """How a step runs.

    attention_backend:  whose kernels attend
    graph_sizes:        rows of recorded decode steps, ascending; none = all steps are launched
    graph_padding:      whether a step of fewer rows than were recorded is padded
    graph_max_tokens:   longest sequence of a recorded step; None = any
    graph_gc:           whether garbage may be collected while steps are recorded
    overlap:            whether a step is planned while the one before runs
    splits:             parts that keys of a decoding sequence are divided into, at most
    split_tokens:       length of such a part
    deterministic:      whether a row must be the same bits whichever rows are beside it
    compiled_rows:      most rows of a decode step that torch.compile compiles; 0 = none
    """

    attention_backend: Backend = "torch"
    graph_sizes: tuple[int, ...] = ()
    graph_padding: bool = True
    graph_max_tokens: int | None = None
    graph_gc: bool = False
    overlap: bool = False
    splits: int | None = None
    split_tokens: int | None = None
    deterministic: bool = False
    compiled_rows: int = 0


ONE_BY_ONE = DevicePlan()


def plan_device(
    config: ServeConfig,
    device: str,
    has_triton: bool,
    max_running: int,
    has_adapters: bool,
    *,
    is_recordable: bool = True,
) -> DevicePlan:
    """Decide for a device: cpu or cuda. Raises ConfigError.

    has_adapters:   whether there is room for adapters beside the weights
    is_recordable:  whether graphs of the model's steps may be made
    """
    engine = config.engine
    if engine.deterministic:
        _check_deterministic(config, device, has_triton=has_triton, has_adapters=has_adapters)
    if device == "cpu":
        _refuse(config, "the model runs on a CPU", "engine.device cuda needs a GPU", triton=True)
        _refuse_splits(config)
        return DevicePlan(deterministic=engine.deterministic)
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
        if not by_triton:
            _refuse_splits(config)
        return _launched(config, backend)
    if not by_triton:
        _refuse_splits(config)
        _refuse(
            config,
            "attention by torch waits for lengths on the host",
            "leave it out, or set engine.attention_backend to triton",
        )
        return DevicePlan(attention_backend=backend)
    if not is_recordable:
        _refuse(
            config,
            "the model is run by transformers' code, whose steps are launched one by one",
            "leave it out",
        )
        return _launched(config, backend)
    return DevicePlan(
        attention_backend=backend,
        graph_sizes=_graph_sizes(config, max_running),
        graph_padding=engine.graph_padding,
        graph_max_tokens=engine.graph_max_tokens,
        graph_gc=engine.graph_gc,
        overlap=engine.overlap is not False,
        deterministic=engine.deterministic,
        splits=engine.attention_splits,
        split_tokens=engine.attention_split_tokens,
    )


def compiled_rows(config: ServeConfig, max_running: int) -> int:
    """Return the most rows of a decode step that is compiled; 0 = none. Raises ConfigError."""
    engine = config.engine
    if not engine.compile:
        return 0
    faults = {
        "sums between ranks are not compiled; set parallel.tp_size and pp_size to 1": (
            config.parallel.num_ranks > 1
        ),
        "native kernels are compiled already; leave it or engine.cpu_kernels = native out": (
            engine.cpu_kernels == "native"
        ),
        "compiled sums depend on the number of rows; leave engine.deterministic out": (
            engine.deterministic
        ),
        "compiled layers cannot be listened at; leave debug.tensor_dump_dir out": (
            config.debug.tensor_dump_dir is not None
        ),
    }
    for reason, is_so in faults.items():
        if is_so:
            raise ConfigError(f"engine.compile = true: {reason}")
    return min(engine.compile_max_rows, max_running)


def _launched(config: ServeConfig, backend: Backend) -> DevicePlan:
    """Return the plan of steps that are launched one by one."""
    return DevicePlan(
        attention_backend=backend,
        splits=config.engine.attention_splits,
        split_tokens=config.engine.attention_split_tokens,
    )


def _refuse_splits(config: ServeConfig) -> None:
    """Raise ConfigError for a division of keys where nothing divides them."""
    engine = config.engine
    for key in ("attention_splits", "attention_split_tokens"):
        if getattr(engine, key) is not None:
            raise ConfigError(
                f"engine.{key} = {getattr(engine, key)}: only triton's kernels divide the keys of "
                "a sequence; leave it out, or run on a GPU with engine.attention_backend triton"
            )


def _graph_sizes(config: ServeConfig, max_running: int) -> tuple[int, ...]:
    engine = config.engine
    if engine.graph_rows is not None:
        return tuple(sorted({rows for rows in engine.graph_rows if rows <= max_running}))
    most = max_running if engine.graph_max_rows is None else engine.graph_max_rows
    return graph_sizes(
        most=min(most, max_running),
        split=engine.graph_split,
        fine=engine.graph_fine,
        step=engine.graph_step,
    )


def _check_deterministic(
    config: ServeConfig, device: str, *, has_triton: bool, has_adapters: bool
) -> None:
    """Raise ConfigError where rows cannot be kept from changing each other's bits."""
    engine = config.engine
    faults = {
        "several ranks add up what each has computed; set parallel.tp_size and pp_size to 1": (
            config.parallel.num_ranks > 1
        ),
        "engine.cpu_kernels is torch, whose sums depend on the number of rows; set it to native": (
            device == "cpu" and engine.cpu_kernels == "torch"
        ),
        "on a GPU that takes triton's kernels; install triton, and leave engine.attention_backend "
        "at auto": device != "cpu" and (engine.attention_backend == "torch" or not has_triton),
        "on a GPU the sums of adapters in slots depend on the number of rows; name a single one in "
        "lora.adapters, which is merged, or none": device != "cpu" and has_adapters,
    }
    for reason, is_so in faults.items():
        if is_so:
            raise ConfigError(f"engine.deterministic = true: {reason}")


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
        for key in (
            "graph_rows",
            "graph_padding",
            "graph_max_tokens",
            "graph_gc",
            "graph_split",
            "graph_fine",
            "graph_step",
        )
    }
    for key, is_asked in asked.items():
        if is_asked:
            value = str(getattr(engine, key)).lower()
            raise ConfigError(f"engine.{key} = {value}: {reason}; {advice}")
