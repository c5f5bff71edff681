"""Plans of a model and its draft model, which share rows, pages and memory."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.draft_plan import DraftFacts, plan_with_draft, refit_with_draft
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
