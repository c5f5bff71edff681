"""Serve config files as data: make one for a model, and find remora's application in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remora.configs.errors import ConfigError
from remora.configs.load import IMPORT_PATH
from remora.configs.model_names import parse_model_name
from remora.configs.schema import BUILTIN_MODELS

APP_NAME = "remora"


def our_application(raw: dict[str, Any]) -> dict[str, Any]:
    """Return remora's application in a Serve config."""
    found: dict[str, Any] = next(
        app for app in raw["applications"] if app["import_path"] == IMPORT_PATH
    )
    return found


def config_of_model(name: str) -> dict[str, Any]:
    """Return the Serve config of a model directory, .gguf file, built-in or remote model.

    Raises ConfigError if there is no such file.
    """
    if Path(name).exists() and name not in BUILTIN_MODELS:
        # A replica has a different working directory.
        name = str(Path(name).absolute())
    elif name not in BUILTIN_MODELS and parse_model_name(name) is None:
        raise ConfigError(
            f"{name}: no such file or folder; give a .yaml file, a Hugging Face folder, a .gguf "
            "file, a repository of the hub (OWNER/NAME), a URL (s3://BUCKET/PATH), or "
            f"{' or '.join(BUILTIN_MODELS)}"
        )
    return config_of_args({"model": {"path": name}}, {})


def config_of_args(args: dict[str, Any], http: dict[str, Any]) -> dict[str, Any]:
    """Return the Serve config of one application; `http` may have host and port."""
    return {
        "proxy_location": "HeadOnly",
        **({"http_options": http} if http else {}),
        "applications": [
            {"name": APP_NAME, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
        ],
    }
