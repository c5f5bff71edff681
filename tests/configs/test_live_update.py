"""The keys of `user_config`, in `args` and in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.live_update import DEPLOYMENT, GATEWAY, IN_PLACE, ROUTING_SERVICE
from remora.configs.load import IMPORT_PATH, load_serve_file, parse_args
from remora.configs.schema import ServeConfig

ARGS: dict[str, Any] = {"model": {"path": "x"}, "limits": {"max_n": 4, "max_tools": 5}}
FILE = f"""\
applications:
  - import_path: {IMPORT_PATH}
    args:
      model:
        path: x
      limits:
        max_n: 4
    deployments:
      - name: {DEPLOYMENT}
        user_config:
          limits:
            max_tools: 7
"""


def test_user_config_wins_over_args_key_by_key() -> None:
    config = parse_args(ARGS, {"limits": {"max_n": 2}, "sampling": {"temperature": 0.5}})

    assert (config.limits.max_n, config.limits.max_tools) == (2, 5)
    assert config.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"engine": {"page_size": 32}}, "engine.page_size = 32: cannot change"),
        ({"model": {"path": "y"}}, "model.path = 'y': cannot change"),
        ({"limits": {"max_n": 99}}, "limits.max_n = 99: must be at most 16"),
        ({"limits": {"maxn": 9}}, "did you mean limits.max_n?"),
        ({"limit": 3}, "limit = 3: unknown key"),
        ({"limits": 3}, "limits = 3: expected a mapping"),
        ({"api": {"request_timeout_s": 0.0}}, "api.request_timeout_s"),
    ],
)
def test_wrong_keys_and_values_are_refused(user_config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_args(ARGS, user_config)


def test_every_key_that_may_change_is_one_of_the_schema() -> None:
    for section, keys in IN_PLACE.items():
        model: Any = ServeConfig.model_fields[section].annotation
        assert set(keys) <= set(model.model_fields)


def test_user_config_of_a_file_is_validated_and_takes_effect(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILE)

    config = load_serve_file(path).config

    assert (config.limits.max_n, config.limits.max_tools) == (4, 7)


def test_a_fault_in_args_is_reported_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILE.replace("max_n: 4", "max_n: 400"))

    with pytest.raises(ConfigError, match=rf"{path}:7:16: limits.max_n = 400: must be at most 16"):
        load_serve_file(path)


@pytest.mark.parametrize(
    ("deployment", "args"),
    [
        (DEPLOYMENT, "{model: {path: x}}"),
        *((name, "{model: {path: x}}") for name in (GATEWAY, ROUTING_SERVICE)),
        *(
            (name, "{models: [{model: {path: x}}, {model: {path: y}}]}")
            for name in (GATEWAY, ROUTING_SERVICE)
        ),
    ],
)
@pytest.mark.parametrize(
    ("change", "place", "reason"),
    [
        ("limits: {max_tools: -7}", "31", "limits.max_tools = -7: must be at least 1"),
        ("limits: {max_tolls: 7}", "20", "did you mean limits.max_tools?"),
        ("engine: {page_size: 32}", "20", "engine.page_size = 32"),
    ],
)
def test_a_fault_in_a_user_config_is_one_line_with_its_place(
    tmp_path: Path, deployment: str, args: str, change: str, place: str, reason: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"""\
applications:
  - import_path: {IMPORT_PATH}
    args: {args}
    deployments:
      - name: {deployment}
        user_config:
          {change}
""")

    with pytest.raises(ConfigError) as caught:
        load_serve_file(path)

    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}:7:{place}: ")
    assert reason in line
