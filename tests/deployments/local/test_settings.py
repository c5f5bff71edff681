"""What a server without Ray refuses, by name."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.serve_file import config_of_args
from remora.deployments.local.settings import LocalSettings

HTTP = {"host": "127.0.0.1", "port": 8000}
MODEL = {"path": "x"}


def raw_of(args: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return config_of_args({"model": MODEL, **args}, dict(HTTP)) | keys


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"parallel": {"num_replicas": 2}}, "parallel.num_replicas = 2"),
        ({"parallel": {"tp_size": 2}}, "parallel.tp_size = 2"),
        ({"parallel": {"pp_size": 2}}, "parallel.pp_size = 2"),
        ({"parallel": {"accelerator_type": "H100"}}, "parallel.accelerator_type = "),
        ({"parallel": {"label_selector": {"a": "b"}}}, "parallel.label_selector = "),
        ({"autoscaling": {"max_replicas": 3}}, "autoscaling.max_replicas = 3"),
        ({"routing": {"gateway": "on"}}, "routing.gateway = on"),
        ({"routing": {"resume_on_failure": True}}, "routing.resume_on_failure = true"),
        ({"lora": {"dynamic": True}}, "lora.dynamic = true"),
    ],
)
def test_a_setting_that_needs_ray_is_refused(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^--local: {key}.*: ") as raised:
        LocalSettings.of(raw_of(args))
    assert len(str(raised.value).splitlines()) == 1


def test_all_faults_are_reported_at_once() -> None:
    raw = raw_of({"parallel": {"num_replicas": 2}, "lora": {"dynamic": True}})
    raw["http_options"] |= {"request_timeout_s": 5}
    raw["applications"][0] |= {
        "route_prefix": "/a",
        "runtime_env": {"pip": ["x"]},
        "deployments": [{"name": "LLMServer", "num_replicas": 2}],
    }
    raw["applications"].append({"import_path": "other:app"})
    raw["grpc_options"] = {"port": 9000}

    with pytest.raises(ConfigError) as raised:
        LocalSettings.of(raw)
    keys = [line.split()[1] for line in str(raised.value).splitlines()]
    assert keys == [
        "applications",
        "route_prefix",
        "grpc_options",
        "applications.deployments",
        "applications.runtime_env",
        "http_options.request_timeout_s",
        "parallel.num_replicas",
        "lora.dynamic",
    ]


def test_several_models_are_refused() -> None:
    raw = config_of_args({"models": [{"model": {"path": name}} for name in "ab"]}, dict(HTTP))

    with pytest.raises(ConfigError, match=r"^--local: models = 2 models: "):
        LocalSettings.of(raw)


def test_what_one_process_can_do_is_kept() -> None:
    adapters = [{"name": "a", "path": "b"}]
    raw = raw_of({"lora": {"adapters": adapters}, "routing": {"policy": "prefix"}})
    raw["http_options"] |= {"root_path": "/v", "keep_alive_timeout_s": 7, "ssl_keyfile": None}

    settings = LocalSettings.of(raw)

    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.root_path, settings.keep_alive_s) == ("/v", 7)
    assert settings.config.lora.adapters[0].name == "a"
