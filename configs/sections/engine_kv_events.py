"""What is told of the prefix cache to others: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Name, Section


class KVEventKeys(Section):
    """Events of the prefix cache."""

    kv_events_endpoint: Name | None = None
    """ZeroMQ address at which a replica publishes which pages its prefix cache stores, removes and
    clears, as vLLM does. One with * is bound (tcp://*:5557), any other is connected to; of several
    replicas on a machine only one can bind. Default: nothing is published. Needs
    remora[kv-events]."""

    kv_events_topic: Annotated[str, Field(max_length=256)] = ""
    """Topic of these messages."""
