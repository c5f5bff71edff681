"""Check that the files named in a configuration exist, before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.load import FileModel
from remora.configs.model_names import parse_model_name
from remora.configs.schema import ServeConfig
from remora.configs.validation_messages import shown
from remora.engine.weights.resolve_model import BUILT_IN

_MODEL = "set it to a Hugging Face folder, a .gguf file, or OWNER/NAME of the hub"
_ADAPTER = "set it to the adapter's folder, which holds adapter_config.json"
_FILE = "create the file, or remove the key"


def check_files(models: Mapping[str, FileModel], target: str) -> None:
    """Raise ConfigError with one line for each missing file or folder.

    target:  path of the configuration file, named in front of line numbers
    """
    faults = missing_files(models, target)
    if faults:
        raise ConfigError("\n".join(faults))


def missing_files(models: Mapping[str, FileModel], target: str) -> list[str]:
    """Return one line for each missing file or folder, with what to do about it."""
    return [
        f"{_place(model.written.get(key), target)}{key} = {shown(path)}: {reason}; {advice}"
        for model in models.values()
        for key, path, reason, advice in _missing(model.config)
    ]


def _place(written: str | None, target: str) -> str:
    if written is None:
        return ""
    kind, _, number = written.partition(" ")
    return f"{target}:{number}: " if kind == "line" else f"{written}: "


def _missing(config: ServeConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield the key, path, reason and advice for each missing file."""
    for key, name in (
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
    ):
        if name is None or name.lower() in BUILT_IN:
            continue
        path = Path(name).expanduser()
        if not path.exists():
            if parse_model_name(name) is None:
                reason = f"no such folder or file (looked for {path.absolute()})"
                yield key, name, reason, _MODEL
        elif not path.is_dir() and path.suffix != ".gguf":
            yield key, name, "neither a folder nor a .gguf file", _MODEL
    for adapter in config.lora.adapters:
        is_remote = "://" in adapter.path or parse_model_name(adapter.path) is not None
        if not is_remote and not Path(adapter.path).is_dir():
            reason = f"no such folder (looked for {Path(adapter.path).absolute()})"
            yield "lora.adapters", adapter.path, reason, _ADAPTER
    for key, file in (
        ("metrics.log_config", config.metrics.log_config),
        ("api.task_prompts_file", config.api.task_prompts_file),
    ):
        if file is not None and not Path(file).is_file():
            yield key, file, f"no such file (looked for {Path(file).absolute()})", _FILE
