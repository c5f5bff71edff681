"""Plans of a model and its draft model, which share rows, pages and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.draft_plan import (
    DraftFacts,
    HeadFacts,
    plan_with_draft,
    refit_with_draft,
)
from remora.configs.planning.memory_report import report
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from tests.configs.planning.test_plan import FOLDER, GIB, make_machine, make_model

GPU = make_machine(devices=("cpu", "cuda:0"), has_triton=True)
SMALL = {"num_layers": 10, "num_parameters": 50_000_000, "max_position": 4096}


def written(**sections: Any) -> ServeConfig:
    speculation = {"method": "draft", "draft_model": "some/smaller"}
    return parse_args({"model": {"path": "some/tiny"}, "speculation": speculation} | sections)


def plan(config: ServeConfig, machine: MachineFacts, model: ModelFacts | None = None) -> EnginePlan:
    draft = DraftFacts(FOLDER / "smaller", make_model(**SMALL))
    return plan_with_draft(config, model or make_model(), machine, FOLDER, draft=draft)


@pytest.mark.parametrize("machine", [make_machine(2 * GIB), GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "parallel", [{}, {"tp_size": 3}, {"pp_size": 2, "num_replicas": 2}], ids=["1", "tp", "pp"]
)
def test_a_draft_model_runs_on_one_rank_and_has_the_models_pages(
    machine: MachineFacts, parallel: dict[str, int]
) -> None:
    device = "cuda" if machine is GPU else "cpu"
    made = plan(written(parallel=parallel, engine={"device": device}), machine)

    own = made.draft
    assert own is not None
    assert own.num_ranks == 1
    assert own.num_pages == made.num_pages
    assert own.max_running_requests == made.max_running_requests
    assert own.kv_bytes < made.kv_bytes
    assert not made.on_device.overlap
    assert made.speculation is not None
    assert made.speculation.max_tokens == SMALL["max_position"]


def test_on_a_gpu_the_kv_cache_leaves_room_for_a_draft_model() -> None:
    config = written(engine={"mem_fraction": 0.95, "max_running_requests": 512})
    free = GIB

    made = refit_with_draft(
        plan(config, GPU),
        config,
        make_model(),
        free_bytes=free,
        total_bytes=2 * GIB,
        step_bytes=GIB // 16,
    )

    own = made.draft
    assert own is not None
    assert own.num_pages == made.num_pages
    taken = own.weight_bytes + made.kv_bytes + GIB // 8
    assert 0.9 * free < taken <= free
    page = made.page_size * (made.num_pages + 1)
    assert own.kv_bytes // page == 2 * 10 * 3 * 64 * 2
    assert made.kv_bytes // page == 2 * (30 + 10) * 3 * 64 * 2


def test_steps_with_drafts_do_not_overlap() -> None:
    with pytest.raises(ConfigError, match=r"engine.overlap = true: .* leave one of them out"):
        plan(written(engine={"overlap": True, "device": "cuda"}), GPU)


def head_plan(config: ServeConfig, model: ModelFacts, **changes: Any) -> EnginePlan:
    values: dict[str, Any] = {
        "weight_bytes": 2**24,
        "token_bytes": 1000,
        "state_bytes": 9000,
        "captures": (2, 15, 27),
        "max_position": 2048,
    }
    facts = HeadFacts(path=FOLDER / "head", **(values | changes))
    return plan_with_draft(config, model, GPU, FOLDER, draft=facts)


def with_head(**sections: Any) -> ServeConfig:
    return written(speculation={"method": "eagle", "draft_model": "some/head"}, **sections)


def test_on_a_gpu_the_kv_cache_leaves_room_for_a_head() -> None:
    config = with_head(engine={"mem_fraction": 0.95, "device": "cuda"})
    free, step = GIB, GIB // 16
    first = head_plan(config, make_model())

    made = refit_with_draft(
        first, config, make_model(), free_bytes=free, total_bytes=2 * GIB, step_bytes=step
    )

    assert made.speculation is not None
    assert made.speculation.max_tokens == 2048
    states = 9000 * max(made.max_step_tokens, made.max_running_requests)
    taken = 2**24 + states + made.kv_bytes + 2 * step
    assert 0.9 * free < taken <= free
    page = made.page_size * (made.num_pages + 1)
    assert made.kv_bytes // page == 2 * 30 * 3 * 64 * 2 + 1000
    found = [report(made, make_model(), is_native=is_native) for is_native in (True, False)]
    assert [each.draft_bytes for each in found] == [2**24] * 2
    without = replace(made, speculation=None)
    assert found[1].step_bytes - report(without, make_model(), is_native=False).step_bytes == states


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heads_run_on_tensor_parallel_ranks(device: str) -> None:
    config = with_head(parallel={"tp_size": 3}, engine={"device": device})
    assert head_plan(config, make_model()).num_ranks == 3


def test_what_does_not_keep_the_states_of_a_head_is_refused() -> None:
    for sections, changes, says in (
        (
            {"parallel": {"pp_size": 2}, "engine": {"device": "cuda"}},
            {},
            "are on the last of parallel.pp_size = 2 stages",
        ),
        ({"engine": {"compile": True, "device": "cuda"}}, {}, "leave engine.compile out"),
        ({}, {"implementation": "transformers"}, "runs with transformers' code"),
    ):
        with pytest.raises(ConfigError, match=says):
            head_plan(with_head(**sections), make_model(**changes))
    compiled = with_head(engine={"compile": True, "device": "cuda"})
    assert head_plan(compiled, make_model(), captures=()).on_device.compiled_rows
