"""Threads that run programs together: nothing is lost, early or late, and everything ends."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.configs.environment import cache_dir
from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.build import SOURCE_DIR, InstructionSet, build_library
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.cpu.program import Program
from tests.kernels.cpu.products import make_batch, pack_alone

NUM_ROWS, WIDTH, NUM_STAGES = 48, 64, 30

EXIT_WITH_THREADS = """
import sys
from pathlib import Path
from remora.kernels.cpu.build import load_library
from remora.kernels.cpu.library import Library, Team
library = Library(load_library(Path(sys.argv[1])))
closed, left_open = Team(library, 3), Team(library, 3)
closed.close()
"""


class Chain:
    """Products with permutations, each reading what the one before wrote.

    A chunk that ran before its input was there, twice, or not at all, leaves wrong numbers: the
    input is another one in every run.
    """

    def __init__(self, team: Team, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(WIDTH, generator=generator) for _ in range(NUM_STAGES)]
        self.order = torch.arange(WIDTH)
        self._rows = [
            Rows.allocate(team, Format.F32, NUM_ROWS, WIDTH) for _ in range(NUM_STAGES + 1)
        ]
        self._program = Program(team, make_batch(NUM_ROWS))
        eye = torch.eye(WIDTH)
        for order, (source, target) in zip(orders, pairwise(self._rows), strict=True):
            packed = pack_alone(team, eye[order], None, Format.F32)
            self._program.multiply(source, packed, target.values)
            self.order = self.order[order]

    def run(self, x: Tensor, *, num_stages: int = NUM_STAGES) -> Tensor:
        self._rows[0].values[: len(x)] = x
        self._program.run(len(x), 0, 0, last=num_stages)
        return self._rows[num_stages].values[: len(x)]


def run_often(library: Library, num_threads: int, times: int) -> None:
    team = Team(library, num_threads)
    chain = Chain(team)
    for number in range(times):
        x = torch.arange(NUM_ROWS * WIDTH).view(NUM_ROWS, WIDTH) + float(number)
        x = x[: 1 + number % NUM_ROWS]
        chain.run(x * 2, num_stages=1 + number % NUM_STAGES)
        assert torch.equal(chain.run(x), x[:, chain.order]), f"run {number} went wrong"
    team.close()


class UnevenJobs:
    """Jobs of stages without data, whose chunks take random times (`uneven_jobs.cpp`)."""

    def __init__(self, folder: Path) -> None:
        sources = folder / "src"
        sources.mkdir()
        for path in (*SOURCE_DIR.glob("team.*"), Path(__file__).with_name("uneven_jobs.cpp")):
            shutil.copy(path, sources)
        compiled = build_library(
            folder, source_dir=sources, instruction_set=InstructionSet.PORTABLE
        )
        self._functions = ctypes.CDLL(str(compiled))
        self._functions.team_new.restype = ctypes.c_void_p
        self._functions.run_uneven_job.restype = ctypes.c_char_p
        self._teams: dict[int, ctypes.c_void_p] = {}

    def run(self, num_threads: int, num_chunks: list[int], seed: int) -> None:
        """Run a job with these chunks in its stages; fails if one ran early, twice or never."""
        if num_threads not in self._teams:
            self._teams[num_threads] = ctypes.c_void_p(self._functions.team_new(num_threads))
        stages = (ctypes.c_int * len(num_chunks))(*num_chunks)
        fault = self._functions.run_uneven_job(
            self._teams[num_threads], stages, len(num_chunks), ctypes.c_uint(seed)
        )
        assert fault is None, fault.decode()

    def close(self) -> None:
        for team in self._teams.values():
            self._functions.team_free(team)


@pytest.fixture(scope="module")
def uneven_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnevenJobs]:
    jobs = UnevenJobs(tmp_path_factory.mktemp("uneven_jobs"))
    yield jobs
    jobs.close()


# One group of threads, incomplete ones, and more groups than two.
@given(
    num_threads=st.sampled_from([1, 2, 5, 8, 9, 16, 20]),
    num_chunks=st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 16, 17, 40, 100]), max_size=30),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=300, deadline=None)
def test_every_chunk_runs_once_and_in_its_stage_however_long_others_take(
    uneven_jobs: UnevenJobs, num_threads: int, num_chunks: list[int], seed: int
) -> None:
    uneven_jobs.run(num_threads, num_chunks, seed)


def test_a_job_may_have_as_many_stages_as_a_team_allows(uneven_jobs: UnevenJobs) -> None:
    for seed in range(10):
        uneven_jobs.run(16, [1 + stage % 20 for stage in range(1024)], seed)
        uneven_jobs.run(16, [3], seed)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 16])
def test_stages_follow_each_other_however_many_threads_share_them(
    library: Library, num_threads: int
) -> None:
    run_often(library, num_threads, 1000)


def test_two_teams_run_at_the_same_time(library: Library) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_often, library, 2, 300) for _ in range(2)]

    assert all(job.result() is None for job in jobs)


def test_a_team_can_be_used_from_one_thread_after_another(library: Library) -> None:
    team = Team(library, 3)
    chain = Chain(team)
    x = torch.randn(NUM_ROWS, WIDTH)
    expected = chain.run(x).clone()

    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(chain.run, x).result(), expected)
    team.close()


def test_a_run_of_nothing_returns(team: Team) -> None:
    chain = Chain(team)

    chain.run(torch.zeros(3, WIDTH), num_stages=0)
    chain.run(torch.zeros(0, WIDTH))


def test_closing_twice_is_closing_once(library: Library) -> None:
    for num_threads in (1, 2, 5):
        team = Team(library, num_threads)
        Chain(team).run(torch.zeros(1, WIDTH))

        team.close()
        team.close()


def test_teams_come_and_go_without_having_worked(library: Library) -> None:
    for _ in range(50):
        Team(library, 4).close()


def test_a_process_ends_although_a_team_stands_by(library: Library) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT_WITH_THREADS, str(cache_dir() / "kernels")],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
