"""Which layers' weights are in host memory, and the memory of the device that this frees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.configs.facts import StoredFormat
from remora.configs.load import parse_args
from remora.configs.planning.draft_plan import DraftFacts, plan_with_draft
from remora.configs.planning.memory_report import lines, report
from remora.configs.planning.offload_plan import OffloadPlan
from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.pooling_plan import make_pooling_plan
from remora.configs.planning.shares import rank_layers
from tests.configs.planning.test_plan import GIB, make_machine, make_model, plan

MIB = 2**20
GPU = make_machine(80 * GIB, devices=("cuda:0", "cpu"), has_triton=True)
LAYER = make_model(num_layers=8, num_parameters=8 * 100 * MIB + 49152 * 576 * 2 + 576)
LAYER_BYTES = 2 * 100 * MIB


def planned(**sections: Any) -> EnginePlan:
    sections["engine"] = {"device": "cuda"} | sections.get("engine", {})
    return plan(facts=sections.pop("facts", LAYER), machine=GPU, **sections)


def offloaded(**sections: Any) -> OffloadPlan:
    found = planned(**sections).offload
    assert found is not None
    return found


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(**sections)
    return str(caught.value)


@pytest.mark.observes("offload.group_size")
@pytest.mark.parametrize(
    ("section", "layers"),
    [
        ({"group_size": 2}, (1, 3, 5, 7)),
        ({"group_size": 3}, (2, 5)),
        ({"group_size": 1}, tuple(range(8))),
    ],
)
def test_the_last_layer_of_each_group_is_in_host_memory(
    section: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert offloaded(offload=section).layers == layers
    assert planned().offload is None


@pytest.mark.observes("offload.num_in_group")
def test_several_layers_of_each_group() -> None:
    section = {"group_size": 4, "num_in_group": 3}

    assert offloaded(offload=section).layers == (1, 2, 3, 5, 6, 7)


@pytest.mark.observes("offload.host_memory")
def test_as_many_layers_as_fit_host_memory_are_spread_evenly() -> None:
    found = [
        offloaded(offload={"host_memory": number * LAYER_BYTES}).layers for number in (2, 4, 8)
    ]

    assert found == [(3, 7), (1, 3, 5, 7), tuple(range(8))]
    almost = offloaded(offload={"host_memory": 4 * LAYER_BYTES - 1})
    assert (len(almost.layers), almost.host_bytes) == (3, 3 * LAYER_BYTES)


@pytest.mark.observes("offload.prefetch_layers")
@pytest.mark.parametrize(("prefetch", "buffers"), [(0, 1), (1, 1), (3, 3)])
def test_weights_on_the_device_are_the_others_and_the_buffers(prefetch: int, buffers: int) -> None:
    made = planned(offload={"group_size": 2, "prefetch_layers": prefetch})

    assert made.offload is not None
    assert made.offload.prefetch == prefetch
    assert made.offload.buffer_bytes == buffers * LAYER_BYTES
    assert made.offload.host_bytes == 4 * LAYER_BYTES
    assert made.weight_bytes == planned().weight_bytes - (4 - buffers) * LAYER_BYTES


def test_the_kv_cache_gets_what_weights_leave() -> None:
    tight = make_machine(2 * GIB, devices=("cuda:0", "cpu"), has_triton=True)
    engine = {"device": "cuda"}
    few = plan(facts=LAYER, machine=tight, engine=engine)

    many = plan(facts=LAYER, machine=tight, engine=engine, offload={"group_size": 2})

    assert many.kv_bytes - few.kv_bytes == pytest.approx(0.9 * 3 * LAYER_BYTES, rel=0.01)


def test_weights_that_do_not_fit_the_device_fit_in_part() -> None:
    small = make_machine(GIB, devices=("cuda:0", "cpu"), has_triton=True)
    engine = {"device": "cuda"}
    with pytest.raises(ConfigError, match=r"offload\.host_memory"):
        plan(facts=LAYER, machine=small, engine=engine)

    made = plan(facts=LAYER, machine=small, engine=engine, offload={"group_size": 1})

    assert made.weight_bytes + made.kv_bytes < GIB


def test_stages_and_ranks_offload_their_own_layers() -> None:
    sections: dict[str, Any] = {"offload": {"group_size": 2}, "facts": LAYER}
    two = offloaded(parallel={"pp_size": 2}, **sections)
    three = offloaded(parallel={"tp_size": 3}, **sections)

    assert two.layers == (1, 3, 5, 7)  # groups are counted within a stage
    assert two.saved_bytes == (LAYER_BYTES, LAYER_BYTES)
    assert offloaded(
        parallel={"pp_size": 2}, offload={"group_size": 3, "num_in_group": 2}
    ).layers == (
        *(1, 2),
        *(5, 6),
    )
    own = rank_layers(LAYER, tp_size=3)[0] * 2
    assert (three.host_bytes, three.buffer_bytes) == (4 * own, own)
    assert own < 0.36 * LAYER_BYTES


def test_quantised_layers_count_as_they_are_stored() -> None:
    stored = StoredFormat(
        label="int4",
        number=8,
        bits=4.5,
        is_native=False,
        layers=8 * 100 * MIB,
        head=0,
        device_layers=8 * 100 * MIB,
    )
    facts = make_model(
        num_layers=8,
        num_parameters=LAYER.num_parameters,
        layer_parameters=(100 * MIB,) * 8,
        stored=(stored,),
    )

    found = offloaded(facts=facts, offload={"group_size": 4})

    assert found.host_bytes == pytest.approx(2 * 100 * MIB * 4.5 / 8, rel=1e-6)


@given(
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=12),
    pp_size=st.integers(1, 3),
    share=st.floats(0, 1.2),
    prefetch=st.integers(0, 3),
)
def test_layers_of_any_sizes_stay_within_the_limit_and_save_memory(
    sizes: list[int], pp_size: int, share: float, prefetch: int
) -> None:
    facts = make_model(
        num_layers=len(sizes),
        layer_parameters=tuple(sizes),
        num_parameters=sum(sizes) + 49152 * 576 * 2 + 576,
    )
    limit = max(1, int(2 * sum(sizes) * share))
    sections: dict[str, Any] = {
        "facts": facts,
        "engine": {"device": "cuda", "kv_tokens": 16},
        "model": {"context_length": 16},
        "parallel": {"pp_size": min(pp_size, len(sizes))},
    }
    machine = make_machine(10**6 * GIB, devices=("cuda:0", "cpu"))
    sections["offload"] = {"host_memory": limit, "prefetch_layers": prefetch}
    try:
        made = plan(machine=machine, **sections)
    except ConfigError as error:
        event("refused")
        message = str(error)
    else:
        event("planned")
        message = check_limits(made, limit, plan(machine=machine, **sections | {"offload": {}}))

    assert message == "" or "no memory is saved" in message


def check_limits(made: EnginePlan, limit: int, without: EnginePlan) -> str:
    assert made.offload is not None
    assert made.offload.host_bytes <= limit
    assert list(made.offload.layers) == sorted(set(made.offload.layers))
    assert min(made.offload.saved_bytes) >= 0
    assert made.weight_bytes <= without.weight_bytes
    return ""


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"group_size": 8}, r"offload\.group_size = 8 keeps 1 of a rank's 8 layers .* smaller"),
        ({"host_memory": 10}, r"offload\.host_memory = 10 B keeps 0 .* host_memory of 400MiB"),
        ({"group_size": 2, "prefetch_layers": 4}, r"buffers for 4 .* a smaller prefetch_layers"),
    ],
)
def test_what_saves_nothing_is_refused(section: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(offload=section))


def test_the_advice_of_a_refusal_works() -> None:
    assert "host_memory of 400MiB" in refused(offload={"host_memory": 10})

    assert len(offloaded(offload={"host_memory": "400MiB"}).layers) == 2


@pytest.mark.parametrize("section", [{"group_size": 2}, {"host_memory": "1GiB"}])
def test_on_a_cpu_weights_are_in_host_memory_already(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"offload\.\w+: .* in host memory already; leave it out"):
        plan(offload=section)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"sleep_mode": True}}, r"sleep_mode excludes offload\.group_size"),
        ({"model": {"weight_roots": ["/w"]}}, r"weight_roots excludes offload\.group_size"),
        ({"engine": {"compile": True}}, r"compile excludes offload\.group_size"),
        ({"offload": {"group_size": 2, "host_memory": 1}}, "remove one of the two"),
        ({"offload": {"num_in_group": 2}}, "needs group_size"),
        ({"offload": {"prefetch_layers": 2}}, "needs host_memory or group_size"),
        ({"offload": {"group_size": 2, "num_in_group": 3}}, r"must not exceed group_size \(2\)"),
    ],
)
def test_keys_that_exclude_each_other_are_named(sections: dict[str, Any], message: str) -> None:
    sections = {"model": {}, "offload": {"group_size": 2}} | sections
    sections["model"] = {"path": "m"} | sections["model"]

    with pytest.raises(ConfigError, match=message):
        parse_args(sections)


def test_models_of_transformers_and_of_embeddings_keep_their_weights() -> None:
    facts = make_model(implementation="transformers")
    assert "offload.group_size: the model is run by transformers' code" in refused(
        facts=facts, offload={"group_size": 2}
    )
    config = parse_args({"model": {"path": "m"}, "offload": {"group_size": 2}})

    with pytest.raises(ConfigError, match=r"offload\.group_size is not available for embeddings"):
        make_pooling_plan(
            config, LAYER, GPU, Path("m"), task="embed", max_tokens=None, head_parameters=0
        )


def test_a_draft_model_stays_on_the_device() -> None:
    config = parse_args(
        {
            "model": {"path": "m"},
            "engine": {"device": "cuda"},
            "offload": {"group_size": 2},
            "speculation": {"method": "draft", "draft_model": "d"},
        }
    )

    made = plan_with_draft(config, LAYER, GPU, Path("m"), draft=DraftFacts(Path("d"), make_model()))

    assert made.offload is not None
    assert made.draft is not None
    assert made.draft.offload is None


def test_the_plan_is_reported() -> None:
    made = planned(offload={"group_size": 2})

    text = lines(report(made, LAYER, is_native=False), made)

    assert (
        "offload    weights of 4 layers in host memory (800 MiB of a rank), through buffers of "
        "200 MiB"
    ) in text
