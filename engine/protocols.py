"""The seams of the engine: what its parts promise each other.

Implementations live in their own rooms; nothing here runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.types import EngineStats, IntArray, Output, Request, StepPlan, StepResult

if TYPE_CHECKING:  # what only serves requests need not load torch
    from torch import Tensor

    from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
    from remora.engine.runner.inputs import StepInputs
    from remora.kernels.lora import LowRankSlots, RowGroups

PROMPT_LOGPROB_ROWS = 64  # most rows of logits that `ForwardPass.logits` is asked for at a time


class AttentionBackend(Protocol):
    """Attention over paged KV. Owns the KV tensors; knows nothing of who owns which page."""

    def attend(
        self,
        layer: int,
        heads: Tensor,
        turn: QKNormRope,
        batch: ForwardBatch,
        rule: AttentionSpec,
    ) -> Tensor:
        """Turn queries and keys, store K and V of the batch's tokens, and attend.

        Each query attends to its own sequence.
        heads:   [T, num_heads + 2 * num_kv_heads, head_dim], those of q, then of k, then of v, as
                 they were projected; not changed
        rule:    how queries look at keys; a layer hands in the same object at every step
        Returns [T, num_heads, head_dim] in the dtype of `heads`.
        """
        ...


class WeightSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names."""

    label: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading any."""
        ...

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors whole, file after file.

        None takes memory for longer than it is held. Names that are not there are passed over.
        """
        ...


class Renaming(Protocol):
    """How a model's checkpoint calls tensors and lays them out, and what of ours they hold."""

    def names(self, theirs: str) -> tuple[str, ...]:
        """Return the names of our tensors that one of the checkpoint holds; () = none."""
        ...

    def parts(self, theirs: str, whole: Tensor) -> tuple[Tensor, ...]:
        """Take a tensor of the checkpoint apart, into those of `names`.

        Raises RuntimeError or IndexError for shapes that cannot be taken apart.
        """
        ...

    def rows(self, theirs: str, rows: Tensor) -> tuple[Tensor, ...]:
        """Divide what belongs to each output of a weight, [outputs, ...], among `names`.

        There must be as many as the weight has, and nothing may bar it.
        """
        ...

    def bars_updates(self, theirs: str) -> str:
        """Return why what belongs to the outputs of a weight cannot be divided; empty = it can."""
        ...


WeightEdit = Callable[[WeightSource, Renaming], WeightSource]
"""What stands between a checkpoint and the model: it may change tensors, not names or shapes.

The source has our names; the renaming is what it has them by.
"""

Fill = Callable[[Collection[str] | None], None]
"""Loads what a model has under these names, where that was not done; None = everything."""


def nothing_left(names: Collection[str] | None = None) -> None:
    """Be the `Fill` of a model whose weights are there."""


MakePool = Callable[
    [LoRASlotConfig, Mapping[str, "UpdatePlace | None"], WeightSource, Renaming], "AdapterPool"
]


@dataclass(frozen=True, slots=True)
class UpdatePlace:
    """Where low-rank updates of one weight of the checkpoint belong.

    slots:            of the layer that computes with the weight
    part:             which part of the layer the weight is
    outputs, inputs:  the ranges of what the slots give and take that this rank holds: rows and
                      columns of the weight
    is_lookup:        rows of the weight are looked up: they are inputs, and its columns outputs
    """

    slots: LowRankSlots
    part: int
    outputs: slice
    inputs: slice
    is_lookup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What is known of an adapter that was prepared.

    num_bytes:  of this rank's share
    digest:     which differs between adapters
    """

    max_rank: int
    num_bytes: int
    digest: str


class AdapterPool(Protocol):
    """A rank's copies of adapters, in the host's memory, and the slots that they are put into."""

    def prepare(self, lora_id: int, folder: Path) -> AdapterFacts:
        """Read an adapter and check it, in any thread. Raises InvalidAdapter."""
        ...

    def discard(self, lora_id: int) -> None:
        """Forget an adapter that will not be installed any more; also one that is not there."""
        ...

    def install(self, slot: int, lora_id: int) -> None:
        """Put an adapter into a slot, counted from 1, in the place of what is there."""
        ...


@dataclass(frozen=True, slots=True)
class Adapting:
    """What an engine is to do about adapters.

    edit:       changes the weights as they load: one adapter may be merged into them
    room:       slots for adapters beside the weights; None = there are none
    make_pool:  with a room: makes what fills the slots, from the room that rank 0 has planned, the
                places of updates by the names of all weights that have one (None = on a stage
                that is not this rank's), the base model's checkpoint and its renaming
    instances:  of adapters that are there from the start, by name
    """

    edit: WeightEdit | None = None
    room: LoRASlotConfig | None = None
    make_pool: MakePool | None = None
    lora_ids: Mapping[str, int] = field(default_factory=dict)


NO_ADAPTERS = Adapting()


class Model(Protocol):
    """A decoder whose weights are loaded."""

    vocab_size: int

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """Return the final hidden states [T, hidden_size] of the batch, after the last norm."""
        ...

    def logits(self, hidden: Tensor, adapters: RowGroups = ...) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, vocab_size].

        adapters:  which of the R rows belong to which adapter
        """
        ...


class ForwardPass(Protocol):
    """From a step's inputs to logits, by whatever means: torch operations, a step program, a graph.

    Logits live until the next call of either method. Of several ranks all make the same calls, and
    those other than rank 0 get no rows.
    """

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size] of the tokens in `logit_index`."""
        ...

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        ...

    def hidden(self, first: int, last: int) -> Tensor:
        """Return the final hidden states [last - first, hidden_size] of tokens of the latest step.

        After the last norm; any dtype, on any device; void after the next step. Of several ranks
        rank 0 alone is asked; it has them if there is one stage.
        """
        ...

    def close(self) -> None:
        """Stop what was started; further calls do nothing."""
        ...


class TakesNewest(Protocol):
    """A forward pass that may begin with tokens which only the device knows."""

    def set_last_tokens(self, rows: IntArray, token_ids: Tensor) -> None:
        """Keep each row's newest token; inputs that say IN_FLIGHT stand for it.

        rows:  [R];  token_ids: [R] int64, on the device
        """
        ...


class Runner(Protocol):
    """Executes step plans on one rank (or, behind a channel, on a group of them)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample. Raises whatever the device raises."""
        ...

    def close(self) -> None:
        """Stop what the runner has started; its memory goes with the object."""
        ...


class OverlappingRunner(Runner, Protocol):
    """A Runner whose device works on one step while the next is planned.

    Of each step `begin`, then `sample`, then `finish` is called; a step may begin before the one
    before it finishes, and not before it is sampled. The device does everything in this order.
    """

    def begin(self, plan: StepPlan) -> None:
        """Take in what the plan says of rows, and start its forward pass."""
        ...

    def sample(self, ended: Collection[int] = ()) -> None:
        """Start to choose tokens of the step that was begun last.

        ended:  rows that need none any more; what they get means nothing
        """
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest step that was sampled."""
        ...


class EngineClient(Protocol):
    """The engine as request handlers see it; hides in which process or thread it runs."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Submit on first iteration and yield Outputs until every index has finished.

        Several steps' worth is merged into one Output per index when the consumer was busy.
        Closing the generator (client gone) aborts the request. Raises, before anything is
        yielded, PromptTooLong, InvalidRequest, QueueFull, Unavailable; EngineError at any time.
        """
        ...

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all); returns how many were found. They end with `abort`."""
        ...

    async def is_waiting(self, request_id: str) -> bool:
        """Return whether an open request waits for its turn, with all of its sequences."""
        ...

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; False, and nothing done, while requests are running."""
        ...

    async def page_hashes(self, limit: int) -> bytes:
        """Return the hashes (kv/hashes.py) of up to `limit` cached pages, the latest used first.

        Answered between two steps.
        """
        ...

    def limit_queue(self, plan: EnginePlan) -> None:
        """Refuse requests beyond this plan's limits of the queue from now on."""
        ...

    def stats(self) -> EngineStats:
        """Return the newest counters; never blocks."""
        ...

    def check_health(self) -> None:
        """Raise EngineError if the loop is dead or a step is overdue."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones.

        Those still open after `timeout_s` end with Unavailable, and the answer is False.
        """
        ...

    def close(self) -> None:
        """Stop the loop. Requests still open end with EngineError."""
        ...
