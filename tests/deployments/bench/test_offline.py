"""The engine driven in this process, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from remora.configs.errors import ConfigError
from remora.deployments.bench.offline import (
    OfflineEngine,
    StepTime,
    measure,
    step_figures,
    with_bound,
    work_of_plan,
)
from remora.deployments.bench.roofline import Bounds
from remora.deployments.bench.stats import Slo
from remora.deployments.bench.sweep import as_plots, as_table, measure_rows, row_workload
from remora.deployments.bench.targets import read_target
from remora.deployments.bench.workloads import OFFLINE
from remora.deployments.cli.terminal import Failure
from tests.conftest import TinyCheckpoints


@pytest.fixture(scope="module")
def engine(tiny_checkpoints: TinyCheckpoints) -> Iterator[OfflineEngine]:
    settings = [
        "engine.num_threads=1",
        "engine.kv_tokens=2048",
        "engine.page_size=8",
        "engine.max_running_requests=8",
    ]
    target = read_target(str(tiny_checkpoints("llama")), settings)
    engine = OfflineEngine(target.config, show_progress=False)
    yield engine
    engine.close()


def test_the_arithmetic_agrees_with_the_engine_on_the_bytes_of_a_step(
    engine: OfflineEngine,
) -> None:
    worked_out = work_of_plan(engine.built.plan).step_bytes

    # Norms are read too, and packed matrices are padded.
    assert worked_out <= engine.work.step_bytes < 1.3 * worked_out


def test_models_that_transformers_code_runs_are_refused(tiny_checkpoints: TinyCheckpoints) -> None:
    target = read_target(str(tiny_checkpoints("llama")), ["model.impl=transformers"])

    with pytest.raises(ConfigError, match="remora doctor model"):
        OfflineEngine(target.config, show_progress=False)


def test_every_request_gets_exactly_its_tokens(engine: OfflineEngine) -> None:
    workload = OFFLINE["batch"].resized(requests=5, inputs=20, outputs=7)
    ended: list[bool] = []

    run = engine.run(workload, on_finish=lambda: ended.append(True))

    assert [trace.num_output_tokens for trace in run.traces] == [7] * 5
    assert [len(trace.stamps_s) for trace in run.traces] == [7] * 5
    assert len(ended) == 5
    assert all(0 < trace.stamps_s[0] - trace.started_s <= run.seconds for trace in run.traces)
    assert sum(step.num_tokens for step in run.steps) == 5 * (20 + 7 - 1)
    assert all(step.total_s >= step.forward_s + step.sample_s for step in run.steps)


def test_drafts_are_measured_where_there_are_some(
    engine: OfflineEngine, tiny_checkpoints: TinyCheckpoints
) -> None:
    settings = [
        "engine.num_threads=1",
        "engine.kv_tokens=2048",
        "speculation.method=ngram",
        "speculation.max_drafts=3",
        "speculation.shortest_suffix=1",
        "speculation.adaptive=false",
    ]
    target = read_target(str(tiny_checkpoints("llama")), settings)
    drafting = OfflineEngine(target.config, show_progress=False)
    workload = OFFLINE["batch"].resized(requests=3, inputs=20, outputs=60)

    run = drafting.run(workload)
    figures, plain = (measure(each, workload, repeats=1).figures for each in (drafting, engine))
    drafting.close()

    drafts = run.drafts
    verifying = [step for step in run.steps if step.num_drafts]
    assert drafts["draft_tokens"] == sum(step.num_drafts for step in verifying) > 0
    assert drafts["verify_steps"] == len(verifying)
    measured_s = sum(step.forward_s + step.sample_s for step in verifying)
    assert drafts["verifying_s"] == pytest.approx(measured_s)
    accepted = (drafts["tokens_per_verified_row"] - 1) * drafts["draft_rows"]
    assert drafts["accepted_share"] == pytest.approx(accepted / drafts["draft_tokens"])
    num_tokens = sum(step.num_tokens for step in run.steps)
    assert num_tokens == 3 * (20 + 60 - 1) + drafts["draft_tokens"] - round(accepted)
    assert 0 <= drafts["accepted_1_share"] <= 1
    assert drafts.keys() <= figures.keys()
    assert not drafts.keys() & plain.keys()


def test_a_common_prefix_is_found_again_but_not_by_the_next_run(engine: OfflineEngine) -> None:
    workload = OFFLINE["shared-prefix"].resized(requests=12, inputs=129, outputs=3)

    runs = [engine.run(workload) for _ in range(2)]

    cached = [sum(trace.num_cached_tokens for trace in run.traces) for run in runs]
    assert cached[0] > 0
    assert cached[0] == cached[1]
    assert runs[0].traces[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("name", "figure"),
    [("decode", "decode_tok_s"), ("prefill", "prefill_tok_s"), ("batch", "output_tok_s")],
)
def test_each_workload_has_its_figure_and_its_bound(
    engine: OfflineEngine, name: str, figure: str
) -> None:
    workload = OFFLINE[name].resized(requests=4, inputs=24, outputs=8)
    bounds = Bounds(num_threads=1, read_gb_s_1=1, read_gb_s=1, bf16_gflop_s=1, int8_gop_s=None)

    result = measure(engine, workload, repeats=2, slo=Slo(ttft_ms=1e6, tpot_ms=1e6))
    result = with_bound(result, workload, engine.work, bounds)

    assert result.figures[figure] > 0
    assert result.figures["goodput_share"] == 1
    assert result.figures["bound_share"] > 0
    low, high = result.spread[figure]
    assert low <= result.figures[figure] <= high


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("embedding", "not served yet: the engine makes no embeddings"),
        ("json-schema", "not served yet: the engine knows no JSON schemas"),
        ("prefill", "needs 1501 tokens per sequence; the engine has 512"),
    ],
)
def test_what_the_engine_cannot_run_is_skipped(
    engine: OfflineEngine, name: str, reason: str
) -> None:
    assert measure(engine, OFFLINE[name], repeats=1).skipped == reason


def test_an_interrupted_run_leaves_the_engine_usable(engine: OfflineEngine) -> None:
    workload = OFFLINE["batch"].resized(requests=4, inputs=16, outputs=4)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(workload, on_finish=interrupt)

    assert len(engine.run(workload).traces) == 4


def test_a_decode_step_is_what_is_shown_where_there_is_one() -> None:
    prefill = StepTime(num_rows=1, num_tokens=64, total_s=9.0, forward_s=8.0, sample_s=0.5)
    decode = StepTime(num_rows=2, num_tokens=2, total_s=0.010, forward_s=0.007, sample_s=0.001)

    figures = step_figures([prefill, decode])

    assert figures["step_ms"] == pytest.approx(10)
    assert figures["schedule_ms"] == pytest.approx(2)
    assert figures["overhead_share"] == pytest.approx(0.3)
    assert step_figures([prefill])["step_ms"] == 9000
    assert step_figures([]) == {}


def test_a_sweep_times_steps_of_exactly_so_many_rows(engine: OfflineEngine) -> None:
    workloads = {rows: row_workload(rows, inputs=8, outputs=6) for rows in (1, 4, 8)}

    costs = {
        rows: measure_rows(engine, workload, on_finish=lambda: None).figures
        for rows, workload in workloads.items()
    }

    assert all(0 < figures["overhead_share"] < 1 for figures in costs.values())
    assert [row[0] for row in as_table(costs).rows] == ["1", "4", "8"]
    assert [[x for x, _ in line] for line in as_plots(costs)[0].lines.values()] == [[1, 4, 8]] * 4
    with pytest.raises(Failure, match="9 rows never decoded together"):
        measure_rows(engine, row_workload(9, inputs=8, outputs=4), on_finish=lambda: None)


def test_the_offline_benchmark_needs_neither_ray_nor_a_web_framework() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['ray', 'fastapi', 'starlette', 'httptools'], None))\n"
        "import remora.deployments.bench.suites, remora.deployments.bench.offline\n"
        "import remora.deployments.bench.session, remora.deployments.cli.bench\n"
        "import remora.deployments.bench.workloads"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
