"""Ids of calls that bring none, as clients and templates of each family expect them."""

from __future__ import annotations

import secrets
import string

_ALPHANUMERICS = string.ascii_letters + string.digits


def random_id(number: int, name: str) -> str:
    """Return an id such as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id(number: int, name: str) -> str:
    """Return nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


def kimi_id(number: int, name: str) -> str:
    """Return the id that the model would have given."""
    return f"functions.{name}:{number}"
