"""The part of a model that one rank holds. Pure arithmetic: knows no device and no process.

Rank r of a replica is rank r % tp_size of pipeline stage r // tp_size. Stages divide the layers;
the ranks of a stage divide each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.planning.shares import kv_heads_of, share

NOTHING = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The position of one rank. `Layout()` is a rank that holds everything."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks that run the model together."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """Index among the ranks that share its layers."""
        return self.rank % self.tp_size

    @property
    def stage(self) -> int:
        """Pipeline stage, from 0."""
        return self.rank // self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether it embeds the tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it projects to logits."""
        return self.stage == self.pp_size - 1

    @property
    def last_stage(self) -> range:
        """Ranks that project to logits."""
        return range(self.num_ranks - self.tp_size, self.num_ranks)

    def at(self, rank: int) -> Layout:
        """Return the layout of another rank of the same replica."""
        return Layout(rank=rank, tp_size=self.tp_size, pp_size=self.pp_size)

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage; stages differ by one layer at most."""
        return share(num_layers, self.stage, self.pp_size)

    def share(self, size: int) -> range:
        """Return its range of a dimension that the ranks of a stage divide."""
        return share(size, self.tp_rank, self.tp_size)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return its KV heads: an equal part, or one shared by several ranks if there are fewer.

        One of the two numbers must divide the other.
        """
        return kv_heads_of(num_kv_heads, self.tp_rank, self.tp_size)


WHOLE = Layout()
