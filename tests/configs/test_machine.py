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


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    cpuinfo = "".join(make_processor(number, number % 2) for number in range(4))

    facts = read(tmp_path, {"proc/cpuinfo": cpuinfo}, cpus={0, 1, 2, 3})

    assert facts.num_cores == 2


def test_cores_of_two_sockets_with_the_same_number_are_two(tmp_path: Path) -> None:
    cpuinfo = make_processor(0, 0, package=0) + make_processor(1, 0, package=1)

    assert read(tmp_path, {"proc/cpuinfo": cpuinfo}, cpus={0, 1}).num_cores == 2


def test_only_processors_that_the_process_may_use_count(tmp_path: Path) -> None:
    cpuinfo = "".join(make_processor(number, number) for number in range(8))

    assert read(tmp_path, {"proc/cpuinfo": cpuinfo}, cpus={2, 5}).num_cores == 2


def test_without_core_numbers_each_processor_is_a_core(tmp_path: Path) -> None:
    cpuinfo = make_processor(0, None) + make_processor(1, None)

    assert read(tmp_path, {"proc/cpuinfo": cpuinfo}, cpus={0, 1}).num_cores == 2


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_a_cpu_quota_caps_the_cores(tmp_path: Path, files: dict[str, str], num_cores: int) -> None:
    cpuinfo = "".join(make_processor(number, number) for number in range(4))

    facts = read(tmp_path, files | {"proc/cpuinfo": cpuinfo}, cpus={0, 1, 2, 3})

    assert facts.num_cores == num_cores


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
            "0::/",
            {V2 + "memory.max": 1000, V2 + "memory.current": 2000},
            1000,
            0,
            id="over the limit",
        ),
    ],
)
def test_memory_limits_of_control_groups_apply(
    tmp_path: Path, group: str, files: dict[str, Any], total: int, available: int
) -> None:
    written = {name: str(value) for name, value in files.items()}

    facts = read(tmp_path, written | ({"proc/self/cgroup": f"{group}\n"} if group else {}))

    assert (facts.total_bytes, facts.available_bytes) == (total, available)


def test_cpu_name_and_kernel_features_are_read(tmp_path: Path) -> None:
    facts = read(tmp_path, {})

    assert facts.cpu_name == "Test CPU"
    assert facts.cpu_features == ("avx2", "avx512f")


def test_an_arm_machine_is_read_too(tmp_path: Path) -> None:
    cpuinfo = "processor : 0\nFeatures : fp asimd bf16 sve\nCPU implementer : 0x41\n"

    facts = read(tmp_path, {"proc/cpuinfo": cpuinfo})

    assert facts.num_cores == 1
    assert facts.cpu_features == ("asimd", "bf16", "sve")


def test_devices_are_the_caller_s_to_name(tmp_path: Path) -> None:
    root = make_root(tmp_path, {})

    assert read_machine_facts(root=root, cpus={0}).devices == ("cpu",)
    assert read_machine_facts(root=root, cpus={0}, devices=["cpu", "cuda:0"]).devices == (
        "cpu",
        "cuda:0",
    )


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    facts = read_machine_facts(root=tmp_path, cpus={0, 1})

    assert facts.num_cores == 2
    assert facts.total_bytes > 0


def test_this_machine_has_a_core_and_memory() -> None:
    facts = read_machine_facts()

    assert facts.num_cores >= 1
    assert 0 < facts.available_bytes <= facts.total_bytes
