"""The tokenizer selected by a configuration."""

from __future__ import annotations

from pathlib import Path

from remora.configs.errors import ConfigError
from remora.configs.sections.model import ModelSection
from remora.engine.models.locate import locate_tokenizer
from remora.engine.tokens.absent import AbsentTokenizer
from remora.engine.tokens.generation_config import read_eos_token_ids
from remora.engine.tokens.tokenizer import Tokenizer


def configured_tokenizer(model: ModelSection, path: Path, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a model.

    path:        of the model
    vocab_size:  of the model
    Raises ConfigError.
    """
    wrong = [token_id for token_id in model.eos_token_ids or () if token_id >= vocab_size]
    if wrong:
        raise ConfigError(
            f"model.eos_token_ids holds {wrong[0]}; the model's ids are below {vocab_size}"
        )
    if model.skip_tokenizer:
        eos = model.eos_token_ids or read_eos_token_ids(path)
        return AbsentTokenizer(vocab_size, eos_token_ids=tuple(eos))
    place = locate_tokenizer(model) or path
    tokenizer = Tokenizer.load(
        place, loader=model.tokenizer_loader, trust_code=model.trust_remote_code
    )
    if place != path:
        tokenizer.add_eos_token_ids(read_eos_token_ids(path))
    if model.chat_template is not None:
        tokenizer.choose_template(model.chat_template)
    if model.eos_token_ids is not None:
        tokenizer.eos_token_ids = tuple(dict.fromkeys(model.eos_token_ids))
    return tokenizer
