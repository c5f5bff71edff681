"""Replicas and the ranks that each of them is made of: the section `parallel` of a configuration.

Ranks count through the tensor-parallel ones of a pipeline stage first: rank = stage * tp_size + i.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from remora.configs.fields import Bytes, Name, Seconds, Section, conflict

Size = Annotated[int, Field(ge=1, le=256)]
Placement = Literal["auto", "PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


class ParallelSection(Section):
    """Replicas and ranks."""

    num_replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Copies of the model; requests are spread over them. See also the section autoscaling."""

    tp_size: Size = 1
    """Tensor parallelism: ranks that share each layer's weights and heads."""

    pp_size: Size = 1
    """Pipeline parallelism: stages that the layers are divided into; tp_size ranks each."""

    micro_batches: Size | None = None
    """Parts that a step is cut into, so that stages work at the same time. Default: pp_size."""

    num_nodes: Size = 1
    """Ray nodes that the ranks of one replica are spread over, as many on each."""

    placement: Placement = "auto"
    """How Ray places the ranks of one replica (a placement group's strategy). auto = PACK, or
    STRICT_SPREAD of one bundle a node when num_nodes is more than 1."""

    cpus_per_rank: Annotated[float, Field(ge=0, le=1024)] = 1.0
    """Ray CPUs that a rank reserves. Ray's book-keeping only: threads are engine.num_threads."""

    memory_per_rank: Bytes | None = None
    """Memory that a rank reserves with Ray, in bytes or as 16GiB. Default: none."""

    accelerator_type: Name | None = None
    """Ray's name of the GPU that each rank needs, such as H100. Default: any."""

    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray node labels that each rank's node must have, such as {"ray.io/market-type": "spot"}."""

    rank_timeout_s: Seconds = 5.0
    """Seconds without a sign of life after which a rank counts as hung and the replica as failed;
    see also engine.step_timeout_s."""

    join_timeout_s: Seconds = 1800.0
    """Seconds until all ranks have loaded and met; without one of them the start fails then."""

    rendezvous_port: Annotated[int, Field(ge=1024, le=65_535)] | None = None
    """TCP port at which ranks meet to exchange tensors. Default: any free one."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.pp_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batches is not None and self.pp_size == 1:
            raise conflict("micro_batches", "needs pp_size above 1")
        if self.rendezvous_port is not None and self.num_replicas > 1:
            raise conflict("rendezvous_port", "several replicas cannot meet at one port")
        for key in ("placement", "rank_timeout_s", "join_timeout_s", "rendezvous_port"):
            is_default = getattr(self, key) == type(self).model_fields[key].default
            if self.num_ranks == 1 and not is_default:
                raise conflict(key, "needs tp_size * pp_size above 1")
        if self.num_ranks % self.num_nodes:
            raise conflict(
                "num_nodes",
                f"{self.num_ranks} ranks (tp_size * pp_size) cannot be divided evenly by it",
            )
        if self.num_nodes > 1 and self.placement not in ("auto", "STRICT_SPREAD"):
            raise conflict(
                "placement", "with num_nodes above 1 only auto and STRICT_SPREAD mean it"
            )
        return self
