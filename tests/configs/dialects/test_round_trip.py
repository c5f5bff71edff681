"""Settings of ours, said in a dialect and read back: what it can say is kept."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.catalogue import SYSTEMS, System
from remora.configs.dialects.command_line import read_command_line
from remora.configs.dialects.convert import convert, written
from remora.configs.dialects.translate import translate
from remora.configs.load import parse_args

KEYS: dict[str, st.SearchStrategy[Any]] = {
    "model.path": st.sampled_from(["m", "/models/a b", "x.gguf"]),
    "model.context_length": st.integers(1, 10_000),
    "model.dtype": st.sampled_from(["auto", "float16", "bfloat16", "float32"]),
    "model.quantization": st.sampled_from(["none", "int8", "int4", "int4_pure"]),
    "engine.page_size": st.sampled_from([1, 16, 64]),
    "engine.kv_tokens": st.integers(1, 10**6),
    "engine.prefix_cache": st.booleans(),
    "engine.overlap": st.booleans(),
    "engine.max_running_requests": st.integers(1, 512),
    "engine.max_prefill_tokens": st.integers(512, 4096),
    "engine.prefill_chunk_tokens": st.integers(1, 512),
    "engine.schedule_policy": st.sampled_from(["fcfs", "lpm", "lof", "random", "dfs-weight"]),
    "engine.free_kv_fraction": st.integers(0, 95).map(lambda percent: percent / 100),
    "engine.graph_max_rows": st.integers(0, 64),
    "engine.full_reserve_usage": st.sampled_from([0.25, 0.5]),
    "parallel.tp_size": st.integers(1, 8),
    "parallel.num_replicas": st.integers(1, 8),
    "routing.policy": st.sampled_from(["power_of_two", "round_robin", "shortest_queue"]),
    "api.tool_parser": st.sampled_from(["mistral", "llama3", "auto"]),
    "api.generate_dialect": st.sampled_from(["auto", "sglang", "tgi", "lightllm"]),
    "metrics.log_level": st.sampled_from(["DEBUG", "ERROR"]),
    "metrics.log_requests": st.sampled_from(["none", "metadata", "full"]),
    "metrics.log_stats_period_s": st.sampled_from([1.0, 30.0]),
    "metrics.prompt_token_buckets": st.just([1.0, 10.0]),
    "grammar.backend": st.sampled_from(["xgrammar", "outlines", "none"]),
    "lora.dynamic": st.just(True),
    "lora.adapters": st.just([{"name": "a", "path": "/a"}, {"name": "b", "path": "/b"}]),
    "http.port": st.integers(1, 65_535),
    "http.host": st.sampled_from(["0.0.0.0", "127.0.0.1"]),
}
SETTINGS = st.fixed_dictionaries({}, optional=KEYS)
ENGINE = ["kv_tokens", "prefix_cache", "max_running_requests", "max_prefill_tokens"]
# What a dialect can say of a key alone, so that it must come back, by section.
KEPT: dict[System, dict[str, list[str]]] = {
    "sglang": {
        "model": ["path", "context_length", "dtype"],
        "engine": [*ENGINE, "page_size", "overlap", "schedule_policy"],
        "parallel": ["tp_size", "num_replicas"],
        "api": ["tool_parser"],
        "metrics": ["log_level", "log_requests", "prompt_token_buckets"],
        "grammar": ["backend"],
        "http": ["port", "host"],
    },
    "lightllm": {
        "model": ["path", "context_length"],
        "engine": [*ENGINE, "prefill_chunk_tokens"],
        "parallel": ["tp_size"],
        "grammar": ["backend"],
        "http": ["port"],
    },
    "rtp_llm": {
        "model": ["path", "context_length"],
        "engine": ["prefix_cache", "max_running_requests", "free_kv_fraction"],
        "parallel": ["tp_size", "num_replicas"],
        "metrics": ["log_level"],
        "http": ["port"],
    },
    "backend": {
        "model": ["context_length"],
        "engine": [*ENGINE, "prefill_chunk_tokens", "graph_max_rows"],
        "parallel": ["tp_size"],
    },
    "vllm": {
        "model": ["path", "context_length", "dtype"],
        "engine": ["prefix_cache", "overlap", "max_running_requests", "page_size"],
        "parallel": ["tp_size", "num_replicas"],
        "metrics": ["log_level"],
        "http": ["port", "host"],
    },
    "ray_serve_llm": {
        "model": ["context_length", "dtype"],
        "engine": ["prefix_cache", "overlap", "max_running_requests", "page_size"],
        "parallel": ["tp_size", "num_replicas"],
        "metrics": ["log_level"],
    },
}


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=60)
@given(data=st.data())
def test_what_a_dialect_can_say_comes_back(system: System, data: st.DataObject) -> None:
    ours = data.draw(SETTINGS)
    converted = convert(DIALECTS[system], ours)
    for key, (value, instead) in converted.lost.items():
        section, _, name = key.partition(".")
        is_kept = name in KEPT[system].get(section, [])
        assert not is_kept, f"{key} = {value} came back as {instead}"
    said = translate(DIALECTS[system], converted.values)
    for line in said.lines:
        assert (
            ours.items()
            >= {key: value for key, value in line.settings.items() if key in ours}.items()
            or line.settings.keys() <= converted.lost.keys()
        )


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=30)
@given(data=st.data())
def test_what_is_written_is_read_as_the_same(system: System, data: st.DataObject) -> None:
    values = {
        name: value
        for name, value in convert(DIALECTS[system], data.draw(SETTINGS)).values.items()
        if value is not False or system not in ("sglang", "lightllm")  # only turn things on
    }
    text = written(DIALECTS[system], values)
    if system == "backend":
        read: dict[str, Any] = json.loads(text)
    elif system == "ray_serve_llm":
        read = yaml.safe_load(text)["applications"][0]["args"]
    else:
        read = read_command_line(system, shlex.split(text), {})
    again = DIALECTS[system].flatten(read)
    back = translate(DIALECTS[system], {name: value for name, (_, value) in again.items()})
    assert back.args == translate(DIALECTS[system], values).args


def test_what_cannot_be_said_is_told() -> None:
    lost = convert(DIALECTS["lightllm"], {"engine.page_size": 32, "model.path": "m"}).lost
    assert lost == {"engine.page_size": (32, None)}


def test_from_one_server_to_another_by_way_of_ours() -> None:
    args = {"model-path": "m", "tp": 2, "max-total-tokens": 4096, "disable-radix-cache": True}
    ours = translate(DIALECTS["sglang"], args).args
    dotted = {f"{section}.{key}": v for section, keys in ours.items() for key, v in keys.items()}
    values = convert(DIALECTS["lightllm"], dotted).values
    again = parse_args({"dialect": "lightllm", "args": dict(values)})
    first = parse_args({"dialect": "sglang", "args": args})
    for section in ("model", "parallel", "engine"):
        assert getattr(again, section) == getattr(first, section)
