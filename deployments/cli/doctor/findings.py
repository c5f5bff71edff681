"""The checks of `remora doctor`.

Each check returns findings and changes nothing. A check reports what is broken and never raises.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts
from remora.configs.load import DEFAULT_HOST, DEFAULT_PORT, parse_args
from remora.configs.machine import read_machine_facts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan, make_plan
from remora.configs.schema import BUILTIN_MODEL
from remora.configs.version import __version__
from remora.deployments.cli.compile import KERNELS
from remora.deployments.cli.doctor.extras import find_extras
from remora.kernels.cpu.build import COMPILERS, NativeUnavailable, find_compiled
from remora.kernels.cpu.library import Library
from remora.kernels.cpu.prebuilt import find_prebuilt, load_library

_MODULES = ("torch", "ray.serve", "transformers", "tokenizers", "safetensors", "gguf", "fastapi")
_MODEL_BYTES = 300 * 2**20


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FIX = "fix"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. FIX: remora does not work until this is fixed."""

    level: Level
    subject: str
    text: str

    @classmethod
    def of(cls, is_good: bool, subject: str, text: str, warning: str) -> Finding:
        """Return `text`, with `; warning` appended and level WARN unless `is_good`."""
        if is_good:
            return cls(Level.OK, subject, text)
        return cls(Level.WARN, subject, f"{text}; {warning}")


def examine(model: str) -> Iterator[Finding]:
    """Yield every finding, in the order in which to fix them."""
    yield from check_versions()
    machine = read_machine()
    yield from check_machine(machine)
    yield check_cache()
    yield check_kernels()
    yield from check_products()
    yield check_port()
    yield from check_model(model, machine)


def check_versions() -> Iterator[Finding]:
    """Report the versions of Python and of the required packages, after importing each."""
    yield Finding(Level.OK, "Python", f"{platform.python_version()} at {sys.executable}")
    yield Finding(Level.OK, "remora", __version__)
    for module in _MODULES:
        yield _check_module(module)
    for extra, text in find_extras():
        yield Finding(Level.OK, f"[{extra}]", text)


def _check_module(module: str) -> Finding:
    package = module.split(".")[0]
    try:
        importlib.import_module(module)
        return Finding(Level.OK, package, version(package))
    except (ImportError, PackageNotFoundError, OSError) as error:
        return Finding(Level.FIX, package, f"cannot be imported ({error}); run `make setup`")


def read_machine() -> MachineFacts:
    """Return the machine's facts, including the accelerators that torch sees."""
    devices = ["cpu"]
    try:
        import torch
    except (ImportError, OSError):
        return read_machine_facts()
    devices += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return read_machine_facts(devices=devices)


def check_machine(machine: MachineFacts) -> Iterator[Finding]:
    """Report processor, memory and devices."""
    yield Finding(Level.OK, "processor", f"{machine.cpu_name}, {machine.num_cores} physical cores")
    features = ", ".join(machine.cpu_features) or "no SIMD features"
    is_fast = bool({"avx2", "asimd"} & set(machine.cpu_features))
    yield Finding.of(is_fast, "features", features, "the engine is slow without AVX2 or NEON")
    memory = f"{human_bytes(machine.available_bytes)} of {human_bytes(machine.total_bytes)} free"
    enough = machine.available_bytes >= 2 * 2**30
    yield Finding.of(enough, "memory", memory, "Ray and a small model need 2 GiB")
    yield Finding(Level.OK, "devices", ", ".join(machine.devices))


def check_cache() -> Finding:
    """Report whether the cache holds the built-in model, or can hold it."""
    folder = cache_dir()
    if (folder / BUILTIN_MODEL / "config.json").is_file():
        return Finding(Level.OK, "cache", f"{folder} holds {BUILTIN_MODEL}")
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        text = f"{existing} is not a writable folder; set REMORA_CACHE to one"
        return Finding(Level.FIX, "cache", text)
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < _MODEL_BYTES:
        text = f"{folder}: {human_bytes(free_bytes)} free, {human_bytes(_MODEL_BYTES)} needed; "
        return Finding(Level.FIX, "cache", text + "free disk space or set REMORA_CACHE")
    text = f"{folder}; {BUILTIN_MODEL} is written there at its first use"
    return Finding(Level.OK, "cache", text)


def check_kernels() -> Finding:
    """Report which native kernels are used or can be compiled; otherwise torch's are used."""
    if compiled := find_compiled(cache_dir() / KERNELS):
        return Finding(Level.OK, "kernels", f"native, compiled for this machine: {compiled}")
    for variant, path in find_prebuilt():
        return Finding(Level.OK, "kernels", f"native, prebuilt for {variant.name}: {path}")
    chosen = os.environ.get("CXX", "").split()[:1]
    compiler = next(filter(None, map(shutil.which, chosen or COMPILERS)), None)
    if compiler is None:
        text = f"no C++ compiler ({', '.join(chosen or COMPILERS)}), so torch's kernels are used, "
        advice = "which are slower; install g++ 11 or newer and run `remora compile`"
        return Finding(Level.WARN, "kernels", text + advice)
    text = f"native, compiled by {compiler} at the first start or by `remora compile`"
    return Finding(Level.OK, "kernels", text)


def check_products() -> Iterator[Finding]:
    """Report the rates of one core with the native kernels, unless they must be compiled first."""
    folder = cache_dir() / KERNELS
    if not find_compiled(folder) and not any(find_prebuilt()):
        return
    try:
        rates = Library(load_library(folder)).rates()
    except NativeUnavailable as reason:
        yield Finding(Level.WARN, "products", f"the native kernels do not load: {reason}")
        return
    shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    yield Finding(Level.OK, "products", f"billion operations per second of one core: {shown}")


def check_port(host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> Finding:
    """Report whether the default port of `make serve` is free."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex((host, port)) == 0
    if taken:
        return Finding(Level.WARN, "port", f"{host}:{port} is in use; choose another with --port")
    return Finding(Level.OK, "port", f"{host}:{port} is free")


def check_model(model: str, machine: MachineFacts) -> Iterator[Finding]:
    """Report the plan of `model` on this machine."""
    try:
        plan = _plan_for(model, machine)
    except ConfigError as error:
        yield Finding(Level.FIX, "model", str(error))
        return
    yield Finding(Level.OK, "model", f"{model} from {plan.model_path}")
    used = (
        f"{plan.device}, {plan.dtype}, quantization {plan.quantization}, "
        f"{plan.num_threads} threads, {human_bytes(plan.weight_bytes)} for weights"
    )
    yield Finding(Level.OK, "would use", used)
    is_enough = plan.max_sequence_tokens == plan.max_model_len
    room = f"{human_bytes(plan.kv_bytes)} for {plan.kv_tokens:,} tokens"
    yield Finding.of(is_enough, "KV cache", room, f"one context needs {plan.max_model_len:,}")


def _plan_for(model: str, machine: MachineFacts) -> EnginePlan:
    from remora.engine.models.facts import read_model_facts

    path = _locate(model)
    config = parse_args({"model": {"path": model}})
    return make_plan(config, read_model_facts(path, Loading.of(config.model)), machine, path)


def _locate(model: str) -> Path:
    """Return the model's files; for a built-in model not yet in the cache, its packaged GGUF."""
    from remora.engine.sources.models import Wanted
    from remora.engine.weights.resolve_model import resolve_model
    from remora.engine.weights.smollm2 import INSTALL, PACKAGE, find_packaged_gguf

    is_made = (cache_dir() / BUILTIN_MODEL / "config.json").is_file()
    if model == BUILTIN_MODEL and not is_made:
        return find_packaged_gguf(PACKAGE, INSTALL)
    return resolve_model(model, cache_dir(), Wanted(weights="none"))
