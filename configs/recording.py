"""How steps are overlapped and recorded as CUDA graphs: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Section


class RecordingKeys(Section):
    """Overlap and CUDA graphs."""

    overlap: bool | None = None
    """Whether a step is planned while the device computes the one before. Default: on a GPU."""

    graph_max_rows: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Most sequences of a decode step that is recorded as a CUDA graph; larger steps are launched
    kernel by kernel. 0 = no graphs. Default: max_running_requests."""

    graph_split: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Graphs are recorded for 1, 2 and 4 sequences and for multiples of graph_fine up to this many;
    beyond it for multiples of graph_step."""

    graph_fine: Annotated[int, Field(ge=1, le=1024)] = 8
    """See graph_split."""

    graph_step: Annotated[int, Field(ge=1, le=1024)] = 16
    """See graph_split."""
