"""The version of remora, which the distribution takes from here."""

from __future__ import annotations

__version__ = "0.1.0"
