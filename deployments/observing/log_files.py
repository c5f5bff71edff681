"""Applies an operator's logging configuration: handlers, levels and formats."""

from __future__ import annotations

import logging.config
from pathlib import Path
from typing import Any

import yaml

from remora.configs.errors import ConfigError

_KEY = "metrics.log_config"


def apply_log_config(path: str | None) -> None:
    """Apply a logging configuration file; None changes nothing. Raises ConfigError.

    An .ini, .conf or .cfg file is a logging fileConfig, any other a dictConfig in JSON or YAML.
    Existing loggers stay enabled unless the file disables them.
    """
    if path is None:
        return
    try:
        if Path(path).suffix in (".ini", ".conf", ".cfg"):
            with Path(path).open(encoding="utf-8") as file:
                logging.config.fileConfig(file, disable_existing_loggers=False)
        else:
            text = Path(path).read_text(encoding="utf-8")
            logging.config.dictConfig(_as_dict(yaml.safe_load(text), path))
    except OSError as error:
        raise ConfigError(f"{_KEY}: {path} cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{_KEY}: {path} is neither JSON nor YAML: {error}") from None
    except ConfigError:
        raise
    except Exception as error:  # a boundary: the file's handlers may raise anything
        raise ConfigError(
            f"{_KEY}: {path} is not a logging configuration: {error.__cause__ or error}"
        ) from error


def _as_dict(found: Any, path: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{_KEY}: {path} must contain a mapping, as logging's dictConfig takes")
    return {"version": 1, "disable_existing_loggers": False} | found
