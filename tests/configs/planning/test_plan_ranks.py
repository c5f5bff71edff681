"""Plans of several ranks: shares of weights, KV memory and cores, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.planning.kv_format import kv_bytes_per_token
from tests.configs.planning.test_plan import make_machine, make_model, plan, refusal

WIDE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 4096}
WIDE |= {"num_layers": 32, "vocab_size": 128_256, "num_parameters": 8_030_261_248}


@pytest.mark.parametrize(
    ("sections", "num_threads"),
    [
        ({"parallel": {"tp_size": 3, "num_replicas": 2}}, 2),
        ({"parallel": {"tp_size": 3, "pp_size": 2, "num_nodes": 2}}, 12 // 3),
        ({"parallel": {"tp_size": 3, "num_nodes": 3}}, 12),
        ({"autoscaling": {"max_replicas": 4}}, 12 // 4),
    ],
)
def test_ranks_share_cores_and_memory_with_the_others_on_their_node(
    sections: dict[str, Any], num_threads: int
) -> None:
    machine = make_machine(num_cores=12)

    made = plan(machine=machine, **sections)

    sharers = 12 // num_threads
    assert made.num_threads == num_threads
    assert sharers * (made.weight_bytes + made.kv_bytes) <= machine.available_bytes


def test_with_autoscaling_the_advice_names_its_key() -> None:
    assert "autoscaling.max_replicas below 4" in refusal(
        machine=make_machine(2**20), autoscaling={"max_replicas": 4}
    )


def test_a_gpu_that_was_asked_for_is_a_ranks_own() -> None:
    machine = make_machine(devices=("cpu", "cuda:0"))
    sections = {"engine": {"device": "cuda", "kv_tokens": 100_000}}

    made = plan(machine=machine, facts=make_model(**WIDE), parallel={"tp_size": 2}, **sections)

    assert made.weight_bytes + made.kv_bytes > machine.available_bytes // 2


@pytest.mark.parametrize("written", [{"placement": "PACK"}, {"rank_timeout_s": 9.0}])
def test_what_only_several_ranks_have_is_refused_with_one(written: dict[str, Any]) -> None:
    (key,) = written

    with pytest.raises(ConfigError, match=rf"parallel\.{key}.*needs tp_size \* pp_size above 1"):
        plan(parallel=written)
    assert plan(parallel={**written, "tp_size": 3}).tp_size == 3


@pytest.mark.parametrize(
    "several",
    [
        {"parallel": {"tp_size": 3}},
        {"parallel": {"num_replicas": 2}},
        {"autoscaling": {"max_replicas": 2}},
    ],
)
def test_a_gpu_found_by_auto_is_not_shared(several: dict[str, Any]) -> None:
    machine = make_machine(devices=("cpu", "cuda:0"))

    assert "set engine.device to cuda, so that Ray" in refusal(machine=machine, **several)
    assert plan(machine=machine, engine={"device": "cpu"}, **several).device == "cpu"


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "part"), [(8, 1, 8), (2, 1, 2), (1, 4, 4), (4, 2, 8), (16, 1, 8)]
)
def test_a_rank_holds_its_share_of_the_kv_cache(tp_size: int, pp_size: int, part: int) -> None:
    model = make_model(**WIDE)  # of 8 KV heads 16 ranks hold one each, and each is held twice

    each = kv_bytes_per_token(model, "bfloat16", tp_size=tp_size, pp_size=pp_size)

    assert part * each == kv_bytes_per_token(model, "bfloat16")


def test_kv_memory_is_that_of_the_whole_replica() -> None:
    page_bytes = 16 * 23040

    made = plan(engine={"kv_memory": 10 * page_bytes}, parallel={"tp_size": 3})

    assert made.num_pages == 9
    assert 3 * made.kv_bytes == 10 * page_bytes


@pytest.mark.parametrize("tp_size", [2, 4, 6, 18])
def test_heads_that_cannot_be_divided_are_refused_with_the_sizes_that_work(tp_size: int) -> None:
    message = refusal(parallel={"tp_size": tp_size})

    assert message.startswith(f"parallel.tp_size = {tp_size}: ")
    assert message.endswith("set it to one of 1, 3, 9")


@pytest.mark.parametrize(
    ("sections", "begins", "part"),
    [
        ({"parallel": {"pp_size": 31}}, "parallel.pp_size = 31", "set it to 30 or less"),
        (
            {"parallel": {"pp_size": 2}, "engine": {"cpu_kernels": "native"}},
            "engine.cpu_kernels = native",
            "parallel.tp_size * pp_size is 2",
        ),
        (
            {"parallel": {"pp_size": 2}, "model": {"quantization": "int8"}},
            "model.quantization = int8",
            "parallel.tp_size * pp_size is 2",
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_anything_is_loaded(
    sections: dict[str, Any], begins: str, part: str
) -> None:
    found = refusal(**sections)

    assert found.startswith(begins)
    assert part in found


def test_a_refusal_says_by_how_many_the_memory_was_divided() -> None:
    kv = {"engine": {"kv_memory": "200GiB"}}

    assert "for each of 3 ranks, " in refusal(parallel={"tp_size": 3}, **kv)
    assert "for each of 3 ranks of 2 replicas, " in refusal(
        parallel={"tp_size": 3, "num_replicas": 2}, **kv
    )
    assert "of a rank need" in refusal(parallel={"tp_size": 3}, **kv)
