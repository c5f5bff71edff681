"""Cores and memory, read from a made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora.configs.facts import MachineFacts
from remora.configs.machine import read_machine_facts

MIB = 2**20
MEMINFO = "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\n"


def make_processor(number: int, core: int | None, package: int = 0) -> str:
    lines = [f"processor\t: {number}", "model name\t: Test CPU", "flags\t\t: fpu avx2 avx512f sse"]
    if core is not None:
        lines += [f"physical id\t: {package}", f"core id\t: {core}"]
    return "\n".join(lines) + "\n\n"


def make_root(tmp_path: Path, files: dict[str, str]) -> Path:
    defaults = {"proc/meminfo": MEMINFO, "proc/cpuinfo": make_processor(0, 0)}
    for name, text in (defaults | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def read(tmp_path: Path, files: dict[str, str], cpus: set[int] | None = None) -> MachineFacts:
    return read_machine_facts(root=make_root(tmp_path, files), cpus=cpus or {0})


ONE = make_processor(0, 0)


@pytest.mark.parametrize(
    ("cpuinfo", "cpus", "num_cores"),
    [
        pytest.param(
            "".join(make_processor(n, n % 2) for n in range(4)), {0, 1, 2, 3}, 2, id="hyper-threads"
        ),
        pytest.param(ONE + make_processor(1, 0, package=1), {0, 1}, 2, id="two sockets"),
        pytest.param(
            "".join(make_processor(n, n) for n in range(8)), {2, 5}, 2, id="only allowed ones"
        ),
        pytest.param(
            make_processor(0, None) + make_processor(1, None), {0, 1}, 2, id="no core numbers"
        ),
    ],
)
def test_physical_cores_that_the_process_may_use_count(
    tmp_path: Path, cpuinfo: str, cpus: set[int], num_cores: int
) -> None:
    assert read(tmp_path, {"proc/cpuinfo": cpuinfo}, cpus=cpus).num_cores == num_cores


CFS = "sys/fs/cgroup/cpu/x/cpu.cfs_"


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/x\n", CFS + "quota_us": "300000"}, 3),
        ({"proc/self/cgroup": "4:cpu:/x\n", CFS + "quota_us": "-1"}, 4),
    ],
)
def test_a_cpu_quota_caps_the_cores(tmp_path: Path, files: dict[str, str], num_cores: int) -> None:
    cpuinfo = "".join(make_processor(number, number) for number in range(4))
    common = {"proc/cpuinfo": cpuinfo, CFS + "period_us": "100000"}

    assert read(tmp_path, files | common, cpus={0, 1, 2, 3}).num_cores == num_cores


V1, V2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("group", "files", "total", "available"),
    [
        pytest.param("", {}, 8192 * MIB, 4096 * MIB, id="no limit"),
        pytest.param(
            "0::/box",
            {
                V2 + "box/memory.max": 1000 * MIB,
                V2 + "box/memory.current": 700 * MIB,
                V2 + "box/memory.stat": f"anon 5\ninactive_file {200 * MIB}\n",
            },
            1000 * MIB,
            500 * MIB,
            id="version 2, file pages are reclaimable",
        ),
        pytest.param(
            "0::/a/b",
            {
                V2 + "a/memory.max": 300 * MIB,
                V2 + "a/memory.current": 100 * MIB,
                V2 + "a/b/memory.max": "max",
                V2 + "a/b/memory.current": 7,
            },
            300 * MIB,
            200 * MIB,
            id="the tightest parent",
        ),
        pytest.param(
            "9:memory:/box\n1:name=systemd:/",
            {
                V1 + "box/memory.limit_in_bytes": 1000 * MIB,
                V1 + "box/memory.usage_in_bytes": 700 * MIB,
                V1 + "box/memory.stat": f"total_inactive_file {100 * MIB}\n",
            },
            1000 * MIB,
            400 * MIB,
            id="version 1",
        ),
        pytest.param(
            "0::/host/only/path",
            {V2 + "memory.max": 100 * MIB, V2 + "memory.current": 40 * MIB},
            100 * MIB,
            60 * MIB,
            id="a container with the host's path",
        ),
        pytest.param(
            "0::/", {V2 + "memory.max": 9, V2 + "memory.current": 19}, 9, 0, id="over the limit"
        ),
    ],
)
def test_memory_limits_of_control_groups_apply(
    tmp_path: Path, group: str, files: dict[str, Any], total: int, available: int
) -> None:
    written = {name: str(value) for name, value in files.items()}

    facts = read(tmp_path, written | ({"proc/self/cgroup": f"{group}\n"} if group else {}))

    assert (facts.total_bytes, facts.available_bytes) == (total, available)


@pytest.mark.parametrize(
    ("cpuinfo", "name", "features"),
    [
        (ONE, "Test CPU", ("avx2", "avx512f")),
        (
            "processor : 0\nFeatures : fp asimd bf16 sve\nCPU implementer : 0x41\n",
            "0x41",
            ("asimd", "bf16", "sve"),
        ),
    ],
    ids=["x86", "arm"],
)
def test_name_and_kernel_features_of_the_processor(
    tmp_path: Path, cpuinfo: str, name: str, features: tuple[str, ...]
) -> None:
    facts = read(tmp_path, {"proc/cpuinfo": cpuinfo})

    assert (facts.num_cores, facts.cpu_name, facts.cpu_features) == (1, name, features)
    assert facts.devices == ("cpu",)
    named = read_machine_facts(root=tmp_path, cpus={0}, devices=["cpu", "cuda:0"])
    assert named.devices == ("cpu", "cuda:0")


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    facts = read_machine_facts(root=tmp_path, cpus={0, 1})

    assert facts.num_cores == 2
    assert facts.total_bytes > 0


def test_this_machine_has_a_core_and_memory() -> None:
    facts = read_machine_facts()

    assert facts.num_cores >= 1
    assert 0 < facts.available_bytes <= facts.total_bytes
