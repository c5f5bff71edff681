"""Opening a checkpoint's tokenizer.json with its related files.

transformers needs a second and 100 MB for the same result: importing it alone costs more than
reading the file. But it supports many kinds of checkpoints, and builds some tokenizers differently
from the file. So a folder is read here only if every setting in it is known; otherwise, and for
folders without that file, transformers loads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer as Backend

from remora.configs.errors import ConfigError

ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes that use the file unchanged, for kinds of models without a preferred class of their own.
PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
PLAIN_MODEL_TYPES = frozenset({"llama", "qwen3"})
# Ignored settings: padding, truncation and bookkeeping, which are not used; cleaning of decoded
# text, which applies to BERT tokenizers; and values that always come from tokenizer.json.
WITHOUT_EFFECT = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "backend",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "max_length",
        "model_input_names",
        "model_max_length",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "padding_side",
        "response_schema",  # the form before response_template, which transformers ignores too
        "stride",
        "tokenizer_class",
        "truncation_side",
        "truncation_strategy",
    }
)
UNDERSTOOD = WITHOUT_EFFECT | {
    *ROLES,
    "added_tokens_decoder",
    "chat_template",
    "response_template",
}
TOKEN_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")
# Other files with tokens or templates.
LEGACY_TOKEN_FILES = ("added_tokens.json", "special_tokens_map.json")
OTHER_TEMPLATES = ("additional_chat_templates", "chat_template.json")


class TokenizerParts(Protocol):
    """The required interface of a tokenizer; transformers' fast tokenizers have it too."""

    @property
    def backend_tokenizer(self) -> Backend:
        """Return the underlying tokenizer."""

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Return the text of the token in each role (`bos_token`, ...)."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """Return the chat template, or several by name."""

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of the token that ends a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FastTokenizer:
    """A tokenizer of the `tokenizers` library with its special tokens and templates."""

    backend_tokenizer: Backend
    special_tokens_map: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None
    response_template: Mapping[str, Any] | None = None

    @property
    def eos_token_id(self) -> int | None:
        """Return the id of `eos_token`."""
        token = self.special_tokens_map.get("eos_token")
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found

    def save(self, folder: Path) -> None:
        """Write the files that this module and transformers load it from."""
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "TokenizersBackend",
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens_map,
        }
        if self.response_template is not None:
            settings["response_template"] = self.response_template
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
        given = self.chat_template or {}
        for name, source in ({"default": given} if isinstance(given, str) else given).items():
            file = folder / "chat_template.jinja"
            if name != "default":
                file = folder / OTHER_TEMPLATES[0] / f"{name}.jinja"
                file.parent.mkdir(exist_ok=True)
            file.write_text(source, encoding="utf-8")


def load_tokenizer(
    folder: Path,
    loader: Literal["auto", "transformers"] = "auto",
    *,
    trust_code: bool = False,
) -> TokenizerParts:
    """Load the tokenizer of a checkpoint folder. Raises ConfigError; never downloads.

    trust_code:  whether code in the folder may run
    """
    try:
        own = read_fast_tokenizer(folder) if loader == "auto" else None
        return own or _load_by_transformers(folder, trust_code=trust_code)
    except ConfigError:
        raise
    except Exception as error:  # malformed files raise arbitrary exceptions
        raise ConfigError(
            f"{folder} has no tokenizer that can be loaded: {type(error).__name__}: {error}"
        ) from error


def read_fast_tokenizer(folder: Path) -> FastTokenizer | None:
    """Read tokenizer.json, or return None if other files or settings matter too."""
    file = folder / "tokenizer.json"
    settings = _read_object(folder / "tokenizer_config.json")
    if not file.is_file() or not _is_plain(folder, settings):
        return None
    backend = Backend.from_file(str(file))
    special = {role: settings[role] for role in ROLES if settings.get(role) is not None}
    if not _agrees(backend, special, settings.get("added_tokens_decoder") or {}):
        return None
    template = folder / "chat_template.jinja"
    return FastTokenizer(
        backend_tokenizer=backend,
        special_tokens_map=special,
        chat_template=template.read_text(encoding="utf-8")
        if template.is_file()
        else settings.get("chat_template"),
        response_template=settings.get("response_template"),
    )


def _is_plain(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether all settings in the folder are known."""
    # With `added_tokens_decoder`, the older files are not used.
    others: tuple[str, ...] = OTHER_TEMPLATES
    if "added_tokens_decoder" not in settings:
        others += LEGACY_TOKEN_FILES
    said = {name for name, value in settings.items() if value not in (None, [], {})}
    return (
        settings.get("tokenizer_class") in PLAIN_CLASSES
        and _read_object(folder / "config.json").get("model_type") in PLAIN_MODEL_TYPES
        and said <= UNDERSTOOD
        and isinstance(settings.get("chat_template"), str | None)
        and not any((folder / name).exists() for name in others)
    )


def _agrees(backend: Backend, special: Mapping[str, Any], named: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json has all tokens that the settings name, under the same names."""
    added = backend.get_added_tokens_decoder()
    controls = [token.content for token in added.values() if token.special]
    return all(token in controls for token in special.values()) and all(
        int(token_id) in added
        and all(getattr(added[int(token_id)], flag) == token.get(flag) for flag in TOKEN_FLAGS)
        for token_id, token in named.items()
    )


def _load_by_transformers(folder: Path, *, trust_code: bool) -> TokenizerParts:
    from transformers import AutoTokenizer

    code = _read_object(folder / "tokenizer_config.json").get("auto_map") or {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_code, local_files_only=True
        )
    except ValueError as error:
        if trust_code or "trust_remote_code" not in str(error):
            raise
        named = code.get("AutoTokenizer") if isinstance(code, Mapping) else code
        raise ConfigError(
            f"{folder}: its tokenizer needs code that comes with it "
            f"({named or 'named in config.json'}), which is not run unless "
            "model.trust_remote_code is true. Read it first: it runs with all that the server may "
            "do. Or name another tokenizer by model.tokenizer_path."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{folder} has a {type(tokenizer).__name__}, which runs in Python; one with a "
            "tokenizer.json is needed (save_pretrained of a fast tokenizer writes it)."
        )
    loaded: TokenizerParts = tokenizer
    return loaded


def _read_object(file: Path) -> Mapping[str, Any]:
    """Return a JSON object, empty for invalid files, which other code reports."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
