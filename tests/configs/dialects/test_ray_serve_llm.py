"""Ray Serve LLM's files: models, fields that depend on others, positions of faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from remora.configs.dialects.all import DIALECTS
from remora.configs.dialects.convert import convert, settings_of, written
from remora.configs.dialects.resolve import resolve
from remora.configs.errors import ConfigError
from remora.configs.load import load_serve_file, parse_args, parse_models

MODEL = {"model_loading_config": {"model_id": "m", "model_source": "/m"}}


def settings(**fields: Any) -> dict[str, Any]:
    """Return the settings of one model, by dotted key."""
    args = {"dialect": "ray_serve_llm", "args": {"llm_configs": [{**MODEL, **fields}]}}
    found = settings_of(resolve(args).args)
    return {key: value for key, value in found.items() if not key.startswith("model.")}


def deployment(**fields: Any) -> dict[str, Any]:
    return settings(deployment_config=fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"accelerator_type": "A10"}, {"parallel.accelerator_type": "A10G"}),
        ({"accelerator_config": {"kind": "cpu"}}, {"engine.device": "cpu"}),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 2, "GPU": 0}}}, {
            "parallel.cpus_per_rank": 2.0, "engine.device": "cpu",
        }),
        ({
            "placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}] * 4, "strategy": "SPREAD"},
            "engine_kwargs": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        }, {
            "parallel.cpus_per_rank": 1.0, "parallel.placement": "SPREAD",
            "parallel.tp_size": 2, "parallel.pp_size": 2,
        }),
        ({"lora_config": {"dynamic_lora_loading_path": "s3://b/a"}}, {
            "lora.repo": "s3://b/a", "lora.dynamic": True,
        }),
        ({"engine_kwargs": {"max_model_len": 8192, "enforce_eager": True}}, {
            "engine.graph_max_rows": 0, "engine.graph_prompt_tokens": 0,
        }),
        ({"engine_kwargs": {"max_num_seqs": 8, "max_num_active_seqs": 4}}, {
            "engine.max_running_requests": 4,
        }),
        ({"runtime_env": {"env_vars": {"VLLM_USE_V1": "1", "HF_TOKEN": "x"}}}, {}),
        ({"experimental_configs": {"num_ingress_replicas": 3}}, {"routing.num_gateways": 3}),
        ({"log_engine_metrics": False}, {"metrics.enabled": False}),
    ],
)  # fmt: skip
def test_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_replicas": 2}, {"parallel.num_replicas": 2}),
        ({"num_replicas": "auto"}, {"autoscaling.max_replicas": 100}),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 3}}, {
            "autoscaling.max_replicas": 3,
        }),
        ({"autoscaling_config": {"upscaling_factor": 1.0, "min_replicas": 0, "max_replicas": 2}}, {
            "autoscaling.min_replicas": 0, "autoscaling.max_replicas": 2,
        }),
        ({"request_router_config": {"request_router_class": "a.b:PrefixCacheAffinityRouter"}}, {
            "routing.policy": "prefix",
        }),
        ({"max_queued_requests": -1, "health_check_period_s": 5}, {}),
        ({"ray_actor_options": {"num_cpus": 4, "num_gpus": 1}}, {"parallel.cpus_per_rank": 4.0}),
        ({"logging_config": {"log_level": "debug", "enable_access_log": False}}, {
            "metrics.log_level": "DEBUG", "metrics.access_log_level": "WARNING",
        }),
    ],
)  # fmt: skip
def test_deployment_options(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert deployment(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"accelerator_type": "TPU-V6E"}, "TPUs are not supported"),
        ({"server_cls": "a.B"}, "Python code from outside"),
        ({"engine_kwargs": {"model": "x"}}, "use model_loading_config"),
        ({"engine_kwargs": {"enable_lorra": True}}, "did you mean engine_kwargs.enable_lora?"),
        ({"engine_kwargs": {"hf_token": "hf_1"}}, "set the variable HF_TOKEN"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"CPU": 1}]}}, "all bundles equal"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}] * 2}}, "2 bundles for 1 ranks"),
        ({"placement_group_config": {"bundle_per_worker": {"GPU": 0.5}}}, "a rank has one GPU"),
        ({"runtime_env": {"pip": ["x"]}}, "the runtime_env of the application"),
        ({"deployment_config": {"autoscaling_config": {"policy": {"a": 1}}}}, "Python code"),
        ({"deployment_config": {"num_replicas": 2, "autoscaling_config": {"max_replicas": 2}}},
         "remove one of the two"),
        ({"no_such": 1}, "Ray Serve LLM 2.60.0 has no such parameter"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**fields)
    assert says in str(caught.value)


def test_a_model_without_a_source_is_its_id() -> None:
    args = {"model_loading_config": {"model_id": "org/name"}}
    config = parse_args({"dialect": "ray_serve_llm", "args": args})
    assert (config.model.path, config.model.served_name) == ("org/name", "org/name")


def both(**second: Any) -> dict[str, Any]:
    entries = [
        {**MODEL, "deployment_config": {"graceful_shutdown_timeout_s": 9.0}},
        {"model_loading_config": {"model_id": "n", "model_source": "/n"}, **second},
    ]
    return {"dialect": "ray_serve_llm", "args": {"llm_configs": entries}}


def test_several_models_share_what_applies_to_all() -> None:
    second = {"deployment_config": {"graceful_shutdown_timeout_s": 9.0, "num_replicas": 2}}
    models = parse_models(both(**second))
    assert {name: config.parallel.num_replicas for name, config in models.items()} == {
        "m": 1,
        "n": 2,
    }
    assert {config.api.drain_timeout_s for config in models.values()} == {9.0}


def test_several_models_must_agree_on_what_applies_to_all() -> None:
    with pytest.raises(ConfigError, match=r"api\.drain_timeout_s: models have 9\.0 and 8\.0"):
        parse_models(both(deployment_config={"graceful_shutdown_timeout_s": 8.0}))


FILE = """\
http_options: {port: 8123}
applications:
- import_path: ray.serve.llm:build_openai_app
  route_prefix: /llm
  args:
    llm_configs:
    - model_loading_config: {model_id: m, model_source: /m}
      engine_kwargs:
        max_model_len: 64
"""


def test_a_file_of_theirs_is_served_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    file = load_serve_file(path)
    assert (file.port, file.route_prefix) == (8123, "/llm")
    assert file.import_path == "remora.deployments.app:build"
    assert file.config.model.context_length == 64
    assert file.written["model.context_length"] == "line 9"


def test_faults_have_their_place(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE.replace("max_model_len: 64", "worker_cls: a.B"))
    with pytest.raises(ConfigError) as caught:
        load_serve_file(path)
    assert str(caught.value).startswith(f"{path}:9:9: engine_kwargs.worker_cls = 'a.B': refused")


def test_entries_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(MODEL))
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"llm_configs": [str(tmp_path / "m.yaml")]}))
    file = load_serve_file(path, is_ray_serve_llm=True)
    assert file.config.model.path == "/m"


def test_what_is_written_is_a_file_for_serve_run() -> None:
    ours = {"model.path": "/m", "model.served_name": "m", "parallel.tp_size": 2}
    text = written(DIALECTS["ray_serve_llm"], convert(DIALECTS["ray_serve_llm"], ours).values)
    (application,) = yaml.safe_load(text)["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    assert application["args"]["llm_configs"] == [
        {
            "model_loading_config": {"model_id": "m", "model_source": "/m"},
            "engine_kwargs": {"tensor_parallel_size": 2},
        }
    ]
