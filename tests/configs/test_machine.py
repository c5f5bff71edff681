"""Cores and memory, read from a made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path

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


def test_without_a_limit_the_machine_s_memory_counts(tmp_path: Path) -> None:
    facts = read(tmp_path, {})

    assert (facts.total_bytes, facts.available_bytes) == (8192 * MIB, 4096 * MIB)


def test_a_v2_limit_counts_with_file_pages_given_back(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": str(1000 * MIB),
            "sys/fs/cgroup/box/memory.current": str(700 * MIB),
            "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {200 * MIB}\n",
        },
    )

    assert (facts.total_bytes, facts.available_bytes) == (1000 * MIB, 500 * MIB)


def test_the_tightest_of_all_parents_counts(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": str(300 * MIB),
            "sys/fs/cgroup/a/memory.current": str(100 * MIB),
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": "7",
        },
    )

    assert facts.available_bytes == 200 * MIB


def test_a_v1_limit_counts(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/box\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(1000 * MIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(700 * MIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {100 * MIB}\n",
        },
    )

    assert facts.available_bytes == 400 * MIB


def test_in_a_container_whose_group_path_is_the_host_s_the_top_is_read(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "proc/self/cgroup": "0::/host/only/path\n",
            "sys/fs/cgroup/memory.max": str(100 * MIB),
            "sys/fs/cgroup/memory.current": str(40 * MIB),
        },
    )

    assert facts.available_bytes == 60 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    facts = read(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "2000",
        },
    )

    assert facts.available_bytes == 0


def test_cpu_name_and_telling_features_are_read(tmp_path: Path) -> None:
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
