"""What is run before a replica says that it is ready: the section `warmup`."""

from __future__ import annotations

from remora.configs.fields import Section


class WarmupSection(Section):
    """What is run before a replica is ready."""
