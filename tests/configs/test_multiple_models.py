"""Several models in one file: what belongs to all, what to one, and where a fault is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import IMPORT_PATH, load_serve_file, parse_models
from remora.configs.multiple_models import deployment_names, split_models

ROOT = Path(__file__).resolve().parents[2]
HEAD = f"applications:\n  - import_path: {IMPORT_PATH}\n    args:\n"

TWO = "      models: [{model: {path: x}}, {model: {path: y}}]\n"


def make_args(*models: dict[str, Any], **common: Any) -> dict[str, Any]:
    return {"models": list(models), **common}


def model(name: str, **sections: Any) -> dict[str, Any]:
    return {"model": {"path": name}, **sections}


def load_error(tmp_path: Path, args: str) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(HEAD + args, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_serve_file(path)
    return str(caught.value).replace(f"{path}:", "@")


def test_the_shipped_file_serves_two_models() -> None:
    served = load_serve_file(ROOT / "configs" / "gateway.yaml")

    assert list(served.models) == ["smollm2-135m-instruct", "smollm2-135m-instruct-int8"]
    second = served.models["smollm2-135m-instruct-int8"]
    assert (second.config.model.quantization, second.config.engine.num_threads) == ("int8", 1)
    assert {"model.quantization", "engine.num_threads"} <= second.written.keys()


def test_sections_beside_models_hold_for_all_and_a_models_own_keys_come_first() -> None:
    configs = parse_models(
        make_args(
            model("a", engine={"page_size": 8}),
            model("b"),
            engine={"page_size": 32, "max_running_requests": 7},
        )
    )

    assert [config.engine.page_size for config in configs.values()] == [8, 32]
    assert [config.engine.max_running_requests for config in configs.values()] == [7, 7]


def test_args_of_one_model_stay_as_they_are() -> None:
    args = model("a", engine={"page_size": 8})

    assert split_models(args) == [args]
    assert list(parse_models(args)) == ["a"]


@pytest.mark.parametrize(
    ("args", "place", "words"),
    [
        ("      models: []\n", "4:15", "models = []"),
        ("      models: {}\n", "4:15", "expected a list"),
        ("      models: [{model: {path: x, dtyp: y}}]\n", "4:34", "did you mean model.dtype?"),
        (
            "      models: [{model: {path: x}}, {engine: {page_size: 8}}]\n",
            "4:36",
            "model: required key is missing",
        ),
        (TWO + "      engine: {page_size: 9}\n", "5:27", "must be a power of two"),
        ("      models: [{model: {path: x}}]\n      routin: {}\n", "5:7", "did you mean routing?"),
        (
            "      models: [{model: {path: x}}, {model: {path: x}}]\n",
            "4:37",
            "the name 'x' is taken",
        ),
        (
            "      models: [{model: {path: x}, api: {api_key: env:K}}]\n",
            "4:41",
            "write it under api",
        ),
        (TWO + "      api: {batch_dir: /b}\n", "5:13", "api.batch_dir: needs a single model"),
        (TWO + "      routing: {gateway: off}\n", "5:26", "must be one of"),
    ],
)
def test_a_fault_is_told_once_and_where_it_is(
    tmp_path: Path, args: str, place: str, words: str
) -> None:
    error = load_error(tmp_path, args)

    assert error.startswith(f"@{place}: ")
    assert words in error
    assert len(error.splitlines()) == 1


def test_without_a_file_the_entry_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^models\[1\]: engine.page_size = 9: must be"):
        parse_models(make_args(model("a"), model("b", engine={"page_size": 9})))


def test_deployments_are_named_after_their_models() -> None:
    assert dict(deployment_names(["a"])) == {"a": "LLMServer"}
    assert dict(deployment_names(["a/b", "c"])) == {"a/b": "LLMServer-a-b", "c": "LLMServer-c"}
    with pytest.raises(ConfigError, match="a/b, a b"):
        deployment_names(["a/b", "a b"])
