"""The device part of a plan: attention backend, CUDA graphs, overlap, torch.compile.

A written value that the device does not support is an error; keys that are not written get the
device's best values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from remora.configs.errors import ConfigError
from remora.configs.planning.graph_sizes import graph_sizes, prompt_sizes
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import AttentionName

HeldWeights = Literal["dequantised", "stored", "int8", "fp8"]
MOST_PROMPT_TOKENS = 2048  # of captured steps by default; products hide the launches of larger ones


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """How a step runs.

    attention_backend:  attention kernels, by a name of engine.attention_backend other than auto
    graph_sizes:        rows of captured decode steps, ascending; () = no graphs
    graph_prompt_sizes: tokens of captured steps with prompts, ascending; () = none
    graph_padding:      whether a step is padded to the next captured size
    graph_max_tokens:   longest sequence of a captured step; None = no limit
    graph_gc:           whether the garbage collector runs during capture
    overlap:            whether the next step is planned while one runs
    splits:             most parts that the keys of a decoding sequence are split into
    split_tokens:       length of each part
    deterministic:      whether a row's results are independent of the other rows, bit for bit
    symmetric_memory:   whether sums over ranks go through symmetric memory
    compiled_rows:      most rows of a compiled decode step; 0 = torch.compile is off
    held_weights:       how linear layers hold weights: quantised ones as the checkpoint has them,
                        or rounded to 8 bits, where kernels multiply them so
    """

    attention_backend: AttentionName = "torch"
    graph_sizes: tuple[int, ...] = ()
    graph_prompt_sizes: tuple[int, ...] = ()
    graph_padding: bool = True
    graph_max_tokens: int | None = None
    graph_gc: bool = False
    overlap: bool = False
    splits: int | None = None
    split_tokens: int | None = None
    deterministic: bool = False
    symmetric_memory: bool = False
    compiled_rows: int = 0
    held_weights: HeldWeights = "dequantised"


ONE_BY_ONE = DevicePlan()


def plan_device(
    config: ServeConfig,
    device: str,
    has_triton: bool,
    max_running: int,
    has_adapters: bool,
    *,
    max_step_tokens: int = 0,
    libraries: Collection[str] = (),
    is_ours: bool = True,
) -> DevicePlan:
    """Decide how a step runs on a device, cpu or cuda. Raises ConfigError.

    max_running, max_step_tokens:  most rows and tokens of a step
    has_adapters:  whether there are adapter slots
    libraries:     installed attention libraries
    is_ours:       whether the model does not run with transformers' code, whose steps cannot be
                   captured as graphs
    """
    if config.engine.deterministic:
        _check_deterministic(config, device, has_triton=has_triton, has_adapters=has_adapters)
    plan = _plan_device(config, device, has_triton, max_running, libraries, is_ours)
    if plan.graph_sizes:
        sizes = _prompt_sizes(config, plan.attention_backend, max_step_tokens)
        plan = replace(plan, graph_prompt_sizes=sizes)
    plan = replace(plan, compiled_rows=_compiled_rows(config, max_running))
    return replace(plan, held_weights=_held_weights(config, device, plan, is_ours))


def _plan_device(
    config: ServeConfig,
    device: str,
    has_triton: bool,
    max_running: int,
    libraries: Collection[str],
    is_ours: bool,
) -> DevicePlan:
    engine = config.engine
    on_cuda_kernels = device != "cpu" and has_triton and engine.attention_backend != "torch"
    if config.parallel.symmetric_memory and not (on_cuda_kernels and is_ours):
        raise ConfigError(
            "parallel.symmetric_memory = true: needs GPUs and attention by Triton or a library; "
            "leave it out"
        )
    if device == "cpu":
        _refuse(config, "the model runs on a CPU", "engine.device cuda needs a GPU", kernels=True)
        _refuse_splits(config)
        return DevicePlan(deterministic=engine.deterministic)
    backend = _attention_backend(config, has_triton, libraries, is_ours)
    if backend != "triton":
        _refuse_splits(config)
    launched = DevicePlan(  # without graphs and overlap
        attention_backend=backend,
        splits=engine.attention_splits,
        split_tokens=engine.attention_split_tokens,
    )
    for is_launched, reason, advice in (
        (
            backend == "torch",
            "torch's attention reads lengths on the host",
            ", or set engine.attention_backend to triton",
        ),
        (
            not is_ours,
            "transformers' code runs the model, whose steps launch one by one",
            "",
        ),
    ):
        if is_launched:
            _refuse(config, reason, f"leave it out{advice}")
            return launched
    return replace(
        launched,
        graph_sizes=_graph_sizes(config, max_running),
        graph_padding=engine.graph_padding,
        graph_max_tokens=engine.graph_max_tokens,
        graph_gc=engine.graph_gc,
        overlap=_overlaps(config),
        deterministic=engine.deterministic,
        symmetric_memory=config.parallel.symmetric_memory,
    )


def _overlaps(config: ServeConfig) -> bool:
    """Return whether steps overlap. Raises ConfigError."""
    if config.speculation.method == "none":
        return config.engine.overlap is not False
    if config.engine.overlap:
        raise ConfigError(
            "engine.overlap = true: the next step cannot be planned before it is known how many "
            f"drafts are right, and speculation.method is {config.speculation.method}; leave "
            "one of them out"
        )
    return False


def _attention_backend(
    config: ServeConfig, has_triton: bool, libraries: Collection[str], is_ours: bool
) -> AttentionName:
    """Return the backend on a GPU. Raises ConfigError."""
    name = config.engine.attention_backend
    if name == "auto":
        return "triton" if has_triton else "torch"
    if name == "torch":
        return name
    if not has_triton:  # the kernels around attention are Triton's
        raise ConfigError(
            f"engine.attention_backend = {name}: the package triton is not installed; install it, "
            "or set the key to auto"
        )
    if name == "triton":
        return name
    others = ", ".join(("triton", *libraries))
    for is_fault, reason in (
        (name not in libraries, f"its package is not installed; available: {others}"),
        (not is_ours, "transformers' code runs the model; set it to triton or torch"),
        (
            config.parallel.pp_size > 1 and name == "flashinfer",
            "it plans whole steps, which stages divide; set it to triton, or parallel.pp_size to 1",
        ),
    ):
        if is_fault:
            raise ConfigError(f"engine.attention_backend = {name}: {reason}")
    return name


def _compiled_rows(config: ServeConfig, max_running: int) -> int:
    """Return the most rows of a compiled decode step; 0 = none. Raises ConfigError."""
    engine = config.engine
    if not engine.compile:
        return 0
    is_native, dumps = engine.cpu_kernels == "native", config.debug.tensor_dump_dir is not None
    for is_fault, reason in (
        (config.parallel.num_ranks > 1, "needs one rank; set parallel.tp_size and pp_size to 1"),
        (is_native, "native kernels are compiled already; leave it or engine.cpu_kernels out"),
        (engine.deterministic, "excludes engine.deterministic; leave one of them out"),
        (dumps, "excludes debug.tensor_dump_dir; leave one of them out"),
    ):
        if is_fault:
            raise ConfigError(f"engine.compile = true: {reason}")
    return min(engine.compile_max_rows, max_running)


def _held_weights(config: ServeConfig, device: str, plan: DevicePlan, is_ours: bool) -> HeldWeights:
    """Return how linear layers hold weights. Raises ConfigError."""
    wanted = config.model.quantization
    if device == "cpu":
        if wanted == "fp8":
            raise ConfigError(
                "model.quantization = fp8: CPU kernels round weights to int8 and int4 only; set it "
                "to int8, or run on a GPU"
            )
        return "dequantised"
    for reason, is_fault in (
        ("engine.attention_backend is torch", plan.attention_backend == "torch"),
        ("engine.compile is true", plan.compiled_rows > 0),
        ("engine.deterministic is true", plan.deterministic),
        ("transformers' code runs the model", not is_ours),
    ):
        if is_fault and wanted != "none":
            raise ConfigError(
                f"model.quantization = {wanted}: {reason}, which has no products with quantised "
                "weights; set one of the two otherwise"
            )
        if is_fault:
            return "dequantised"
    if wanted == "int4" or wanted == "int4_pure":
        raise ConfigError(
            f"model.quantization = {wanted}: needs a CPU; on a GPU set it to fp8 or int8, or serve "
            "a checkpoint of 4 bits"
        )
    return "stored" if wanted == "none" else wanted


def _refuse_splits(config: ServeConfig) -> None:
    """Raise ConfigError for split keys where no kernel splits."""
    engine = config.engine
    for key in ("attention_splits", "attention_split_tokens"):
        if getattr(engine, key) is not None:
            raise ConfigError(
                f"engine.{key} = {getattr(engine, key)}: needs a GPU with Triton kernels; leave it "
                "out, or run on a GPU with engine.attention_backend triton"
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


def _prompt_sizes(
    config: ServeConfig, backend: AttentionName, max_step_tokens: int
) -> tuple[int, ...]:
    """Return the tokens of captured steps with prompts. Raises ConfigError."""
    wanted, parallel = config.engine.graph_prompt_tokens, config.parallel
    for is_launched, reason in (
        (backend != "triton", f"engine.attention_backend {backend} reads prompts on the host"),
        (
            parallel.pp_size > 1 and parallel.micro_batches != 1,
            "pipeline stages divide steps by their prompts; set parallel.micro_batches to 1",
        ),
    ):
        if is_launched and wanted:
            raise ConfigError(f"engine.graph_prompt_tokens = {wanted}: {reason}, or leave it out")
        if is_launched:
            return ()
    return prompt_sizes(min(MOST_PROMPT_TOKENS if wanted is None else wanted, max_step_tokens))


def _check_deterministic(
    config: ServeConfig, device: str, *, has_triton: bool, has_adapters: bool
) -> None:
    """Raise ConfigError where a row's results depend on the other rows."""
    engine, is_cpu = config.engine, device == "cpu"
    for reason, is_fault in (
        ("needs one rank; set parallel.tp_size and pp_size to 1", config.parallel.num_ranks > 1),
        (
            "engine.cpu_kernels is torch, which is not deterministic; set it to native",
            is_cpu and engine.cpu_kernels == "torch",
        ),
        (
            "needs Triton kernels on a GPU; install triton, and set attention_backend to auto",
            not is_cpu and (engine.attention_backend not in ("auto", "triton") or not has_triton),
        ),
        (
            "excludes adapter slots on a GPU; use a single adapter in lora.adapters, which is "
            "merged, or none",
            not is_cpu and has_adapters,
        ),
    ):
        if is_fault:
            raise ConfigError(f"engine.deterministic = true: {reason}")


def _refuse(config: ServeConfig, reason: str, advice: str, *, kernels: bool = False) -> None:
    """Raise ConfigError for a written key that the device does not support.

    kernels:  whether it supports no attention backend of GPUs either
    """
    engine = config.engine
    graph_keys = [key for key in type(engine).model_fields if key.startswith("graph_")]
    asked = {
        key: key in engine.model_fields_set and engine.graph_max_rows != 0 for key in graph_keys
    }
    asked |= {
        "overlap": engine.overlap is True,
        "graph_max_rows": bool(engine.graph_max_rows),
        "attention_backend": kernels and engine.attention_backend not in ("auto", "torch"),
    }
    for key, is_asked in asked.items():
        if is_asked:
            value = str(getattr(engine, key)).lower()
            raise ConfigError(f"engine.{key} = {value}: {reason}; {advice}")
