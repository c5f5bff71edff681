from pathlib import Path

import pytest

from remora.configs.errors import ConfigError
from remora.configs.schema import BUILTIN_MODELS
from remora.configs.serve_file import config_of_model, our_application
from remora.engine.weights.resolve_model import BUILT_IN, resolve_model


def test_existing_folders_and_gguf_files_are_themselves(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()

    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert resolve_model(str(file), tmp_path / "cache") == file


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()

    with pytest.raises(ConfigError, match=r"model\.bin is neither a folder nor a \.gguf file"):
        resolve_model(str(file), tmp_path / "cache")


def test_an_unknown_name_says_where_it_looked_and_what_is_built_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model 'gpt-9'.*/gpt-9.*smollm2-135m-instruct"):
        resolve_model("gpt-9", tmp_path)


def test_the_built_in_model_is_found_in_the_cache(smollm2_path: Path) -> None:
    again = resolve_model("smollm2-135m-instruct", smollm2_path.parent)

    assert again == smollm2_path


def test_command_lines_take_the_names_of_all_built_in_models() -> None:
    assert tuple(BUILT_IN) == BUILTIN_MODELS
    for name in BUILT_IN:
        assert our_application(config_of_model(name))["args"] == {"model": {"path": name}}
