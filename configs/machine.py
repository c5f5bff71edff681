"""Read the machine's cores, memory and CPU features.

Reads /proc, /sys and the control groups of this process, so a container's limits apply. Does not
use torch: the caller names the accelerators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from remora.configs.facts import MachineFacts

# The CPU features that matter for kernels.
_KERNEL_FEATURES = (
    *("avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve"),  # Arm
)


def read_machine_facts(
    *, devices: Sequence[str] = ("cpu",), root: Path = Path("/"), cpus: set[int] | None = None
) -> MachineFacts:
    """Read the facts.

    root:  directory that contains /proc and /sys; tests pass another one
    cpus:  processor numbers that this process may use; None = its CPU affinity
    """
    allowed = _allowed_cpus() if cpus is None else cpus
    processors = _read_processors(root)
    total, available = _read_memory(root)
    for group_limit, group_available in _read_group_limits(root):
        total, available = min(total, group_limit), min(available, group_available)
    name, features = _describe_cpu(processors)
    return MachineFacts(
        num_cores=_count_cores(processors, allowed, _read_cpu_quota(root)),
        total_bytes=total,
        available_bytes=max(available, 0),
        cpu_name=name,
        cpu_features=features,
        devices=tuple(devices),
        has_triton=find_spec("triton") is not None,
        attention_libraries=attention_libraries(),
    )


def attention_libraries() -> tuple[str, ...]:
    """Return the installed attention libraries, without importing them."""
    # FlashAttention 4 is a folder of flash_attn, with version 2 or alone.
    flash_attn = find_spec("flash_attn")
    folders = () if flash_attn is None else flash_attn.submodule_search_locations or ()
    found = {
        "flashinfer": find_spec("flashinfer") is not None,
        "fa4": any(Path(folder, "cute", "interface.py").is_file() for folder in folders),
        "fa3": find_spec("flash_attn_interface") is not None,
        "fa2": find_spec("flash_attn_2_cuda") is not None,
        "torch_varlen": True,
    }
    return tuple(name for name, is_installed in found.items() if is_installed)


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    """Return the text of a kernel file, or "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_processors(root: Path) -> dict[int, dict[str, str]]:
    """Return number -> fields of each logical processor in /proc/cpuinfo."""
    processors: dict[int, dict[str, str]] = {}
    for block in _read(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in pairs}
        if fields.get("processor", "").isdigit():
            processors[int(fields["processor"])] = fields
    return processors


def _count_cores(
    processors: dict[int, dict[str, str]], allowed: set[int], quota: float | None
) -> int:
    """Count physical cores, at most the CPU quota; hyper-threads of one core count once."""
    cores = {_core_of(number, processors.get(number, {})) for number in allowed}
    count = max(1, len(cores))
    return count if quota is None else max(1, min(count, int(quota)))


def _core_of(number: int, fields: dict[str, str]) -> tuple[str, str]:
    if "core id" not in fields:
        return "processor", str(number)
    return fields.get("physical id", "0"), fields["core id"]


def _describe_cpu(processors: dict[int, dict[str, str]]) -> tuple[str, tuple[str, ...]]:
    first = next(iter(processors.values()), {})
    name = first.get("model name") or first.get("CPU implementer") or os.uname().machine
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return name, tuple(feature for feature in _KERNEL_FEATURES if feature in flags)


def _read_memory(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes of the whole machine."""
    fields = _read_pairs(root / "proc/meminfo")
    if "MemTotal" in fields:
        total = fields["MemTotal"] * 1024
        return total, fields.get("MemAvailable", fields.get("MemFree", 0)) * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _read_pairs(path: Path) -> dict[str, int]:
    """Return the `name number` lines of a kernel file."""
    pairs: dict[str, int] = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            pairs[words[0]] = int(words[1])
    return pairs


def _group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is version 2) of this process's control group and each of its parents."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        is_v2 = names == ""
        if not is_v2 and controller not in names.split(","):
            continue
        top = base if is_v2 else base / controller
        folder = top / path.lstrip("/")
        # In a container the path may be the host's, and only the top exists.
        yield from (
            (parent, is_v2) for parent in (folder, *folder.parents) if top in parent.parents
        )
        yield top, is_v2


def _read_number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read_group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, available) bytes of each control group that has a memory limit."""
    for folder, is_v2 in _group_folders(root, "memory"):
        limit = _read_number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _read_number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            continue
        # File pages count as used, but the kernel reclaims them when memory is short.
        cached = _read_pairs(folder / "memory.stat")
        reclaimable = cached.get("inactive_file" if is_v2 else "total_inactive_file", 0)
        yield limit, limit - used + min(reclaimable, used)


def _read_cpu_quota(root: Path) -> float | None:
    """Return the control groups' CPU quota in processors; None = no limit."""
    quotas = []
    for folder, is_v2 in _group_folders(root, "cpu"):
        if is_v2:
            quota, period = (*_read(folder / "cpu.max").split(), "", "")[:2]
        else:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
