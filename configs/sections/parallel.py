"""The section `parallel`: replicas, and the ranks of each replica.

Ranks are numbered by pipeline stage: rank = stage * tp_size + tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Bytes, Name, Seconds, Section

Size = Annotated[int, Field(ge=1, le=256)]
NumaNode = Annotated[int, Field(ge=0, le=1023)]
Placement = Literal["auto", "PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class ParallelSection(Section):
    """Replicas and ranks."""

    num_replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Replicas of the model, among which requests are distributed. See also autoscaling."""

    tp_size: Size = 1
    """Tensor parallelism: ranks that share the weights and heads of each layer."""

    pp_size: Size = 1
    """Pipeline parallelism: stages that the layers are divided into, each of tp_size ranks."""

    micro_batches: Size | None = None
    """Parts that a step is split into, so that pipeline stages work concurrently. Default:
    pp_size."""

    symmetric_memory: bool = False
    """Whether sums of decode steps go through memory that the GPUs of a stage map into each other
    (torch's symmetric memory) instead of nccl. Needs GPUs of one node with peer access. Not
    measured yet."""

    num_nodes: Size = 1
    """Ray nodes that the ranks of one replica are spread over evenly."""

    placement: Placement = "auto"
    """Strategy of the placement group for the ranks of one replica. auto = PACK, or with num_nodes
    above 1 STRICT_SPREAD with one bundle per node."""

    cpus_per_rank: Annotated[float, Field(ge=0, le=1024)] = 1.0
    """Ray CPUs that each rank reserves. They affect Ray's scheduling only; engine.num_threads sets
    the compute threads."""

    memory_per_rank: Bytes | None = None
    """Memory that each rank reserves with Ray, in bytes or as 16GiB. Default: none."""

    accelerator_type: Name | None = None
    """Ray accelerator type that each rank requires, such as H100. Default: any."""

    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that each rank requires, such as {"ray.io/market-type": "spot"}."""

    numa_nodes: Annotated[list[NumaNode], Field(max_length=256)] = Field(default_factory=list)
    """NUMA node of each rank of a replica, in the order of ranks: its process runs on that node's
    CPUs only, and its memory comes from there while there is room. See also engine.num_threads,
    which defaults to the machine's cores divided by its ranks. Default: ranks are not bound."""

    rank_timeout_s: Seconds = 5.0
    """Seconds without a heartbeat after which a rank counts as hung and the replica fails. See also
    engine.step_timeout_s."""

    join_timeout_s: Seconds = 1800.0
    """Seconds for all ranks to load and connect; the start fails if one is missing then."""

    rendezvous_port: Annotated[int, Field(ge=1024, le=65_535)] | None = None
    """TCP port of the ranks' rendezvous. Default: any free port."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.pp_size

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        if self.micro_batches is not None and self.pp_size == 1:
            yield "micro_batches", "needs pp_size above 1"
        if self.symmetric_memory and (self.tp_size == 1 or self.num_nodes > 1):
            yield "symmetric_memory", "needs tp_size above 1, and one node"
        if self.rendezvous_port is not None and self.num_replicas > 1:
            yield ("rendezvous_port", "several replicas cannot share one port; leave it out")
        for key in ("placement", "rank_timeout_s", "join_timeout_s", "rendezvous_port"):
            is_default = getattr(self, key) == type(self).model_fields[key].default
            if self.num_ranks == 1 and not is_default:
                yield key, "needs tp_size * pp_size above 1"
        if self.numa_nodes and len(self.numa_nodes) != self.num_ranks:
            yield "numa_nodes", f"must name {self.num_ranks} nodes, one for each rank"
        if self.num_ranks % self.num_nodes:
            yield (
                "num_nodes",
                f"cannot divide {self.num_ranks} ranks (tp_size * pp_size) evenly; set it to a "
                "divisor of their number",
            )
        if self.num_nodes > 1 and self.placement not in ("auto", "STRICT_SPREAD"):
            yield "placement", "with num_nodes above 1, must be auto or STRICT_SPREAD"
