"""Options of LLM: own keys, arguments of vLLM, and what is said about the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.engine.offline.options import config_of


def keys(**options: Any) -> dict[str, Any]:
    """The keys of the sections that differ from their defaults."""
    config = config_of("a-model", options)
    return {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section in ("model", "engine", "parallel", "speculation", "grammar")
        for key in getattr(config, section).model_fields_set
        if (section, key) != ("model", "path")
    }


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (
            {"kv_tokens": 512, "served_name": "a"},
            {"engine.kv_tokens": 512, "model.served_name": "a"},
        ),
        ({"max_model_len": 64, "seed": 7}, {"model.context_length": 64, "engine.random_seed": 7}),
        ({"gpu_memory_utilization": 0.5}, {"engine.total_mem_fraction": 0.5}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 1}, {"parallel.tp_size": 2}),
        ({"dtype": "float32"}, {"model.dtype": "float32"}),
        ({"dtype": "half"}, {"model.dtype": "float16"}),
        ({"quantization": "int8"}, {"model.quantization": "int8"}),
        ({"quantization": None, "max_num_seqs": 3}, {"engine.max_running_requests": 3}),
        ({"enforce_eager": True}, {"engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0}),
        ({"trust_remote_code": True}, {"model.trust_remote_code": True}),
        (
            {"tokenizer": "other", "enable_prefix_caching": False},
            {"model.tokenizer_path": "other", "engine.prefix_cache": False},
        ),
        ({"parallel": {"tp_size": 3}}, {"parallel.tp_size": 3}),
        ({"max_num_seqs": 3, "max_running_requests": 5}, {"engine.max_running_requests": 5}),
        (
            {"tensor_parallel_size": 2, "parallel": {"pp_size": 2}},
            {"parallel.tp_size": 2, "parallel.pp_size": 2},
        ),
        ({"swap_space": 0, "disable_log_stats": None}, {}),
    ],
)
def test_an_option_is_a_key_or_an_argument_of_vllm(
    options: dict[str, Any], meant: dict[str, Any]
) -> None:
    found = keys(**options)

    assert {key: value for key, value in found.items() if key in meant} == meant
    assert found.keys() - meant.keys() <= {"parallel.pp_size", "model.quantization"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_lem": 1}, "no option max_model_lem = 1; did you mean max_model_len?"),
        ({"kv_token": 1}, "did you mean kv_tokens?"),
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size?"),
        ({"zzzzz": None}, "options are keys of the sections"),
        ({"host": "0.0.0.0"}, "host = '0.0.0.0': refused: it is an option of a server"),
        ({"reasoning_parser": "qwen3"}, "refused: it is an option of a server"),
        ({"parallel": 2}, "must be a mapping"),
        ({"enable_lora": True}, r"adapting = remora\.lora\.setup"),
        ({"data_parallel_size": 2}, "LLM is one replica"),
        ({"cpu_offload_gb": 4, "offload_group_size": 2}, "keep one of the two"),
        ({"revision": "v2"}, "only OWNER/NAME has revisions"),
        ({"dtype": "int3"}, "dtype"),
        ({"kv_tokens": "many"}, "engine.kv_tokens"),
        ({"seed": "a"}, "seed = 'a'"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of("a-model", options)


def test_an_argument_that_differs_here_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config_of("a-model", {"max_model_len": 64, "enforce_eager": True, "max_logprobs": 5})

    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("LLM: enforce_eager = true: approximate: ")
    assert second == "LLM: max_logprobs = 5: no effect here"
