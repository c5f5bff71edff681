"""The backend server's JSON: versions, kinds, unknown options."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.dialects.resolve import resolve
from remora.configs.dialects.translate import State
from remora.configs.errors import ConfigError
from remora.configs.load import parse_args


def backend(**data: Any) -> dict[str, Any]:
    return {"dialect": "backend", "args": data, "model": {"path": "m"}}


@pytest.mark.observes("backend:backend.name")
def test_a_version_knows_its_own_parameters_and_values_only() -> None:
    extra = {"tool_call_parser": "hermes"}
    assert parse_args(backend(backend={"name": "v3", "extra_params": extra}))
    with pytest.raises(ConfigError, match="tool_call_parser = hermes: v4 has mistral"):
        parse_args(backend(backend={"name": "v4", "extra_params": extra}))
    with pytest.raises(ConfigError, match="max_total_tokens is not a parameter of v3"):
        parse_args(backend(backend={"name": "v3", "extra_params": {"max_total_tokens": 64}}))
    for values, version in (
        ({"tool_call_parser": "hermes"}, "v3"),
        ({"max_total_tokens": 64}, "v4"),
    ):
        resolved = resolve(backend(backend={"name": "auto", "extra_params": values}))
        (line,) = [line for line in resolved.lines if line.name == "backend.name"]
        assert version in line.text


@pytest.mark.observes("backend:backend.version")
def test_the_latest_version_is_the_only_one() -> None:
    assert parse_args(backend(backend={"version": "latest"}))
    with pytest.raises(ConfigError, match="remora has one version"):
        parse_args(backend(backend={"version": "1.2"}))


@pytest.mark.observes(
    "backend:backend.extra_params", "backend:optimisations.attention_caching.extra_params"
)
def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"backend\.extra_params\.contxt_length .*did you mean"):
        parse_args(backend(backend={"extra_params": {"contxt_length": 1}}))
    caching = {"enabled": True, "extra_params": {"size": 1}}
    with pytest.raises(ConfigError, match="unknown options size"):
        parse_args(backend(optimisations={"attention_caching": caching}))


@pytest.mark.observes("backend:optimisations.attention_caching.type")
def test_there_is_one_kind_of_cache() -> None:
    for kind in ("auto", "radix"):
        caching = {"enabled": True, "type": kind}
        resolved = resolve(backend(optimisations={"attention_caching": caching}))
        (line,) = [line for line in resolved.lines if line.name.endswith("caching.type")]
        assert line.state is State.NO_EFFECT
        assert "a radix tree of pages" in line.text
    with pytest.raises(ConfigError, match="the only kind is radix"):
        parse_args(backend(optimisations={"attention_caching": {"type": "lru"}}))


@pytest.mark.observes("backend:type", "backend:model_type", "backend:optimisations.model_type")
def test_language_models_only_and_both_types_agree() -> None:
    assert parse_args(backend(type="llm", model_type="llm", optimisations={"model_type": "llm"}))
    for data in ({"type": "diffusion"}, {"model_type": "stt"}):
        with pytest.raises(ConfigError, match="refused: not yet: "):
            parse_args(backend(**data))
    with pytest.raises(ConfigError, match=r"optimisations\.model_type = 'stt': .* make them agree"):
        parse_args(backend(model_type="llm", optimisations={"model_type": "stt"}))


@pytest.mark.observes("backend:optimisations.speculative_decoding.extra_params.algorithm")
def test_speculation_is_off_unless_it_is_enabled() -> None:
    off = {"speculative_decoding": {"enabled": False, "type": "auto", "extra_params": {}}}
    assert parse_args(backend(optimisations=off)).speculation.method == "none"
