"""How steps are overlapped, recorded as CUDA graphs and compiled: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Section

GraphRows = Annotated[int, Field(ge=1, le=65_536)]


class RecordingKeys(Section):
    """Overlap, CUDA graphs and torch.compile."""

    overlap: bool | None = None
    """Whether a step is planned while the device computes the one before. Default: on a GPU."""

    graph_max_rows: Annotated[int, Field(ge=0, le=65_536)] | None = None
    """Most sequences of a decode step that is recorded as a CUDA graph; larger steps are launched
    kernel by kernel. 0 = no graphs. Default: max_running_requests."""

    graph_rows: Annotated[list[GraphRows], Field(min_length=1, max_length=1024)] | None = None
    """Numbers of sequences that graphs are recorded for, instead of the keys below; those beyond
    max_running_requests are left out."""

    graph_padding: bool = True
    """Whether a decode step between two recorded sizes runs as the larger one. Off: only steps of
    exactly a recorded size do, others are launched kernel by kernel."""

    graph_max_tokens: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Longest sequence, in tokens, that runs in a graph; steps with longer ones are launched kernel
    by kernel. Default: any."""

    graph_gc: bool = False
    """Whether Python may collect garbage while graphs are recorded, which takes longer then."""

    graph_split: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Graphs are recorded for 1, 2 and 4 sequences and for multiples of graph_fine up to this many;
    beyond it for multiples of graph_step."""

    graph_fine: Annotated[int, Field(ge=1, le=1024)] = 8
    """See graph_split."""

    graph_step: Annotated[int, Field(ge=1, le=1024)] = 16
    """See graph_split."""

    compile: bool = False
    """Whether decode steps of torch's operations run through torch.compile, which takes seconds to
    minutes at each start, and a C++ compiler on a CPU. Prompts and rows with adapters run
    uncompiled. Native CPU kernels come first: they are compiled already, and faster."""

    compile_max_rows: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Most sequences of a decode step that is compiled; larger ones run uncompiled."""
