"""The bytes of one vocabulary entry.

Decoding an id alone is not enough: it loses the leading space of sentencepiece vocabularies, and
returns U+FFFD for part of a character. The vocabulary's own spelling is complete: byte-level BPE
writes each byte as one printable character, sentencepiece writes a space as U+2581 and other bytes
as <0xAB>.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

from tokenizers import Tokenizer as Backend

SPACE_MARK = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(StrEnum):
    """How a vocabulary spells the bytes of its entries."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "sentencepiece with byte tokens"
    SPACE_MARKED = "sentencepiece"
    PLAIN = "plain"


def spelling_of(backend: Backend) -> Spelling:
    """Detect the spelling from the tokenizer's decoder."""
    if backend.decoder is None:
        return Spelling.PLAIN
    steps = _steps(json.loads(backend.decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    if "ByteFallback" in kinds:
        return Spelling.BYTE_FALLBACK
    is_marked = any(step.get("pattern") == {"String": SPACE_MARK} for step in steps)
    return Spelling.SPACE_MARKED if is_marked or "Metaspace" in kinds else Spelling.PLAIN


def entry_bytes(entry: str, spelling: Spelling) -> bytes:
    """Return the bytes of a vocabulary entry (not an added token)."""
    if spelling is Spelling.BYTE_LEVEL:
        try:
            return bytes(_BYTE_OF[char] for char in entry)
        except KeyError:  # not written by a byte-level trainer; the decoder uses it literally too
            return entry.encode()
    if spelling is Spelling.BYTE_FALLBACK:
        match = BYTE_TOKEN.fullmatch(entry)
        if match:
            return bytes([int(match[1], 16)])
    if spelling is Spelling.PLAIN:
        return entry.encode()
    return entry.replace(SPACE_MARK, " ").encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Flatten a decoder's description into its steps."""
    parts = decoder.get("decoders")
    return [step for part in parts for step in _steps(part)] if parts else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Map each character of the byte-level alphabet (GPT-2's) to its byte.

    Bytes that Latin-1 prints map to themselves, the others, in order, to U+0100 and up.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    own = {chr(byte): byte for byte in printed}
    return own | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
