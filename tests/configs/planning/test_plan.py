"""The plan fits the memory, and a refusal's advice works when followed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts, StoredFormat
from remora.configs.load import parse_args
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.kv_format import kv_bytes_per_token
from remora.configs.planning.plan import EnginePlan, make_plan, served_name
from remora.configs.planning.scheduling_plan import running_requests

GIB = 2**30
FOLDER = Path("/models/tiny")


def make_model(**changes: Any) -> ModelFacts:
    facts: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position": 8192,
        "dtype": "bfloat16",
        "num_parameters": 134_515_008,
    }
    return ModelFacts(**(facts | changes))


def make_machine(available_bytes: int = 16 * GIB, **changes: Any) -> MachineFacts:
    facts: dict[str, Any] = {
        "num_cores": 4,
        "total_bytes": 2 * available_bytes,
        "available_bytes": available_bytes,
        "cpu_name": "test",
        "cpu_features": (),
        "devices": ("cpu",),
    }
    return MachineFacts(**(facts | changes))


def plan(
    *,
    facts: ModelFacts | None = None,
    machine: MachineFacts | None = None,
    **sections: dict[str, Any],
) -> EnginePlan:
    sections["model"] = {"path": "/some/tiny"} | sections.get("model", {})
    return make_plan(parse_args(sections), facts or make_model(), machine or make_machine(), FOLDER)


def refusal(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(**arguments)
    return str(caught.value)


def test_a_bare_config_takes_everything_from_model_and_machine() -> None:
    made = plan()

    assert (made.dtype, made.device, made.num_threads) == ("bfloat16", "cpu", 4)
    assert (made.max_model_len, made.weight_bytes) == (8192, 2 * 134_515_008)
    assert (made.served_model_name, made.model_path) == ("tiny", FOLDER)


def test_kv_memory_also_holds_the_dump_page_and_kv_tokens_are_whole_pages() -> None:
    assert kv_bytes_per_token(make_model(), "bfloat16") == 23040  # of smollm2
    assert kv_bytes_per_token(make_model(), "float32") == 46080
    page_bytes = 16 * 23040

    made = plan(engine={"kv_memory": 10 * page_bytes})

    assert (made.num_pages, made.kv_bytes) == (9, 10 * page_bytes)
    assert plan(engine={"kv_tokens": 1000}).kv_tokens == 992


def test_the_default_kv_memory_never_exceeds_what_the_running_requests_can_hold() -> None:
    made = plan(
        machine=make_machine(10_000 * GIB),
        model={"context_length": 100},
        engine={"max_running_requests": 3},
    )

    assert made.num_pages == 3 * 7


def test_replicas_share_memory_and_cores() -> None:
    one, four = plan(), plan(parallel={"num_replicas": 4})

    assert four.num_threads == 1
    assert 4 * (four.kv_bytes + four.weight_bytes) < 16 * GIB
    assert four.num_pages < one.num_pages


def test_a_pool_below_the_models_own_context_caps_a_sequence() -> None:
    made = plan(engine={"kv_tokens": 512})

    assert made.max_model_len == 8192
    assert made.max_sequence_tokens == 512


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, (64, 512, 512)),
        ({"max_step_tokens": 16}, (16, 16, 16)),
        ({"max_running_requests": 5000}, (5000, 5000, 512)),
        ({"prefill_chunk_tokens": 4096}, (64, 4096, 4096)),
    ],
)
def test_default_limits_give_way_to_written_ones(
    engine: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    made = plan(engine=engine)

    found = (made.max_running_requests, made.max_step_tokens, made.prefill_chunk_tokens)
    assert found == expected


@pytest.mark.parametrize(
    ("engine", "expected"),
    [({}, (2048, 2048)), ({"max_step_tokens": 512}, (512, 512))],
)
def test_models_with_experts_take_larger_steps(
    engine: dict[str, Any], expected: tuple[int, int]
) -> None:
    made = plan(facts=make_model(experts_per_token=2), engine=engine)

    assert (made.max_step_tokens, made.prefill_chunk_tokens) == expected


@pytest.mark.parametrize(
    ("gib", "expected"),
    [
        (14.6, (256, 2048)),
        (22, (256, 4096)),
        (79.1, (512, 8192)),
        (140, (512, 8192)),
        (191, (512, 16_384)),
    ],
)
@pytest.mark.parametrize("experts", [0, 8])
def test_the_memory_of_a_gpu_sets_the_default_limits(
    gib: float, expected: tuple[int, int], experts: int
) -> None:
    size = int(gib * GIB)
    machine = make_machine(size // 2, total_bytes=size, devices=("cuda:0", "cpu"))
    model = make_model(experts_per_token=experts)

    made = plan(facts=model, machine=machine)
    written = plan(machine=machine, engine={"max_running_requests": 7, "max_step_tokens": 70})
    chunk = plan(machine=machine, engine={"prefill_chunk_tokens": 100})

    assert (made.max_running_requests, made.max_step_tokens) == expected
    assert made.prefill_chunk_tokens == made.max_step_tokens
    assert (written.max_running_requests, written.max_step_tokens) == (7, 70)
    assert (chunk.prefill_chunk_tokens, chunk.max_step_tokens) == (100, expected[1])


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"max_running_requests": 9}, (9, 9)),
        ({"device": "cpu"}, (64, 64)),
        ({"device": "cuda"}, (256, 512)),
        ({}, (64, 512)),
    ],
)
def test_the_running_requests_of_an_unknown_machine_are_a_range(
    engine: dict[str, Any], expected: tuple[int, int]
) -> None:
    config = parse_args({"model": {"path": "m"}, "engine": engine})

    assert running_requests(config.engine) == expected


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"path": "./a/b/"}, "b"),
        ({"path": "b.gguf"}, "b"),
        ({"path": "."}, "tiny"),
        ({"served_name": "mine"}, "mine"),
    ],
)
def test_the_served_name_is_written_or_the_last_part_of_the_path(
    model: dict[str, Any], name: str
) -> None:
    assert plan(model=model).served_model_name == name


def test_cuda_is_taken_where_there_is_one() -> None:
    machine = make_machine(devices=("cpu", "cuda:0"))

    assert plan(machine=machine).device == "cuda"
    assert plan(machine=machine, engine={"device": "cpu"}).device == "cpu"


def test_a_gpu_holds_quantised_layers_in_their_bits() -> None:
    machine = make_machine(devices=("cpu", "cuda:0"), has_triton=True)
    parameters = make_model().num_parameters - 2 * 49152 * 576
    sizes = {"layers": parameters // 2, "head": 0, "device_layers": parameters // 2}
    awq = StoredFormat(label="awq", number=9, bits=4.0, is_native=True, **sizes)
    stored = make_model(stored=(awq,), layer_parameters=(parameters // 30,) * 30)

    plain, quantised, dequantised, fp8 = (
        plan(machine=machine, facts=facts, model=model, engine=engine).weight_bytes
        for facts, model, engine in (
            (make_model(), {}, {}),
            (stored, {}, {}),
            (stored, {}, {"deterministic": True}),
            (make_model(), {"quantization": "fp8"}, {}),
        )
    )

    layers = plain - 2 * 2 * 49152 * 576
    assert dequantised == pytest.approx(plain, rel=1e-3)
    assert quantised == pytest.approx(plain - layers * (0.5 * 0.75), rel=1e-3)
    assert fp8 == pytest.approx(plain - layers / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"engine": {"device": "cuda"}}, ("engine.device = cuda: ", "set engine.device to auto")),
        ({"model": {"context_length": 8193}}, ("= 8193: ", "set it to 8192 or less")),
        ({"facts": make_model(dtype="float8")}, ("number format is float8", "set model.dtype")),
        (
            {"machine": make_machine(GIB), "engine": {"kv_memory": "2GiB"}},
            (
                "weights (256.57 MiB) and KV cache (2 GiB) need 2.25 GiB",
                "1 GiB are available, 1.25 GiB too few",
                "engine.kv_memory up to 767MiB",
            ),
        ),
        (
            {"engine": {"kv_memory": "64MiB"}, "model": {"context_length": 8192}},
            (
                "engine.kv_memory = 64 MiB holds 2896 tokens in pages of 16; one sequence of 8192 "
                "needs 180.35 MiB: set engine.kv_memory to at least 181MiB, or "
                "model.context_length to at most 2896",
            ),
        ),
    ],
)
def test_a_refusal_names_what_was_found_and_what_would_work(
    arguments: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(**arguments)

    assert all(part in message for part in parts)


def test_weights_beyond_the_memory_are_refused_without_kv_advice() -> None:
    message = refusal(
        machine=make_machine(2**20), model={"dtype": "float32"}, parallel={"num_replicas": 2}
    )

    assert "engine.kv_memory up to" not in message
    assert "model.dtype bfloat16" in message
    assert "parallel.num_replicas below 2" in message


sizes = st.integers(1, 2**36)
engines = st.fixed_dictionaries(
    {"page_size": st.sampled_from([1, 2, 16, 64, 256])},
    optional={"max_running_requests": st.integers(1, 512)},
)
kv_choices = st.one_of(
    st.just({}),
    st.builds(lambda size: {"kv_memory": size}, sizes),
    st.builds(lambda num: {"kv_tokens": num}, st.integers(1, 10**6)),
    st.builds(lambda share: {"mem_fraction": share}, st.floats(0.01, 0.95)),
)
contexts = st.one_of(st.none(), st.integers(1, 8192))
ranks = st.sampled_from([{}, {"tp_size": 3}, {"pp_size": 4}, {"tp_size": 3, "pp_size": 2}])


@given(engines, kv_choices, contexts, sizes, st.integers(1, 4), ranks)
def test_a_plan_fits_the_memory_and_a_refusal_names_numbers_that_work(
    engine: dict[str, Any],
    kv: dict[str, Any],
    context: int | None,
    available: int,
    num_replicas: int,
    parallel: dict[str, int],
) -> None:
    sections: dict[str, Any] = {
        "model": {"context_length": context},
        "engine": engine | kv,
        "parallel": {"num_replicas": num_replicas, **parallel},
    }
    machine = make_machine(available)

    try:
        made = plan(machine=machine, **sections)
    except ConfigError as error:
        check_refusal(str(error), machine, sections)
    else:
        check_fits(made, available // num_replicas, kv, context)


def check_fits(made: EnginePlan, available: int, kv: dict[str, Any], context: int | None) -> None:
    assert made.num_pages >= 1
    assert made.num_ranks * (made.weight_bytes + made.kv_bytes) <= available
    assert made.num_ranks * made.kv_bytes <= kv.get("kv_memory", available)
    assert made.kv_tokens <= kv.get("kv_tokens", made.kv_tokens)
    assert context is None or made.kv_tokens >= context
    if not kv:
        most = made.max_running_requests * (made.max_model_len + made.page_size - 1)
        assert made.kv_tokens <= most


def check_refusal(message: str, machine: MachineFacts, sections: dict[str, Any]) -> None:
    """Follow the advice; `at least` needs a machine with enough memory."""
    assert re.search(r"\d", message)
    for limit, on in (("to at least", make_machine(2**50)), ("up to", machine)):
        if (found := re.search(rf"engine\.kv_memory {limit} (\w+)", message)) is not None:
            engine = {"page_size": sections["engine"]["page_size"], "kv_memory": found[1]}
            model = sections["model"] if limit == "to at least" else {}
            plan(machine=on, **(sections | {"engine": engine, "model": model}))
    if (found := re.search(r"model\.context_length to at most (\d+)", message)) is not None:
        plan(machine=machine, **(sections | {"model": {"context_length": int(found[1])}}))
    if "num_replicas" not in message and "too few" in message:
        assert sections["parallel"]["num_replicas"] == 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (10 * GIB, "10 GiB")],
)
def test_sizes_are_shown_in_the_largest_unit_that_leaves_one(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_configs_import_neither_torch_nor_ray() -> None:
    root = Path(__file__).resolve().parents[3]
    names = ", ".join(
        "remora." + ".".join(path.relative_to(root).with_suffix("").parts)
        for path in (root / "configs").rglob("*.py")
    )
    code = f"import sys, {names}; print({{'torch', 'ray', 'numpy', 'fastapi'}} & set(sys.modules))"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("me/tiny", "me/tiny"),
        ("hf://me/tiny@v1:Q4_K_M", "me/tiny"),
        ("s3://bucket/models/tiny", "tiny"),
        ("/models/tiny.gguf", "tiny"),
    ],
)
def test_clients_name_a_model_by_its_repository(path: str, name: str) -> None:
    config = parse_args({"model": {"path": path}})

    assert served_name(config, FOLDER) == name
