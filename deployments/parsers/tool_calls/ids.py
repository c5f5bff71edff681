"""Makes ids for calls without one, in the form that each family expects."""

from __future__ import annotations

import secrets
import string

_ALPHANUMERICS = string.ascii_letters + string.digits


def random_id(number: int, name: str) -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id(number: int, name: str) -> str:
    """Return nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


def kimi_id(number: int, name: str) -> str:
    """Return the id that the model itself would write."""
    return f"functions.{name}:{number}"
