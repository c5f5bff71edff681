"""Chat templates in separate files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from remora.configs.errors import ConfigError

FILES = ("chat_template.jinja", "additional_chat_templates")  # these precede SETTINGS
SETTINGS = "tokenizer_config.json"
OLD_FILE = "chat_template.json"  # used before chat_template.jinja existed


def read_template_file(file: Path) -> str:
    """Return the template in a file; of JSON its entry `chat_template`. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return text
        source = json.loads(text)["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as a chat template: {error!r}") from error
    if not isinstance(source, str):
        raise ConfigError(f"{file}: chat_template is a {type(source).__name__}; a text is expected")
    return source


def template_place(path: Path) -> str:
    """Name the source of chat templates in a folder or GGUF file that has some."""
    if path.is_file():
        return f"metadata of {path}"
    found = [name for name in FILES if (path / name).exists()]
    return f"{' and '.join(found) or SETTINGS} in {path}"


def find_template_file(wanted: str, names: Collection[str]) -> Path:
    """Return the file of `model.chat_template`, which is none of the templates `names`."""
    file = Path(wanted).expanduser()
    if file.is_file():
        return file
    own = ", ".join(sorted(names)) or "none"
    raise ConfigError(
        f"model.chat_template is {wanted!r}: there is no such file (looked for {file.absolute()}), "
        f"and the checkpoint's own templates are: {own}"
    )
