"""Interfaces between the engine's parts. Implementations have modules of their own."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.types import EngineStats, Output, Request, StepPlan, StepResult

if TYPE_CHECKING:  # HTTP handlers import this module without torch
    from torch import Tensor

    from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
    from remora.engine.runner.inputs import StepInputs
    from remora.kernels.lora import LowRankSlots, RowGroups
    from remora.kernels.quantised.weight_kinds import WeightKind


class AttentionBackend(Protocol):
    """Attention over paged KV. Owns the KV tensors; knows nothing of page ownership."""

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store K and V of the batch's tokens, and attend.

        Each query attends to its own sequence.
        heads:  [T, num_heads + 2 * num_kv_heads, head_dim]: projected q, k and v heads; not changed
        spec:   the same object at every step of a layer
        Returns [T, num_heads, head_dim] in the dtype of `heads`.
        """


@runtime_checkable
class CopiesPages(Protocol):
    """An attention backend with pages."""

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the contents of pages [M] to other pages [M], in all layers.

        Window layers with a page pool of their own are left out.
        """


@runtime_checkable
class HostPlanned(Protocol):
    """An attention backend that plans each step on the host."""

    def plan_step(self, inputs: StepInputs, size: int | None) -> None:
        """Plan a step before its layers attend, or before the graph that holds them replays.

        size:  rows of the captured step, padded with rows of length 1 on the dump page; None = the
               step is not captured
        """


class WeightSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names."""

    label: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor, without reading any."""

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each of these tensors whole, file by file; unknown names are skipped.

        The source keeps no reference: a tensor's memory is free once the caller drops it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """A tensor whose weight a source also has as it is stored.

    label:          the format in a few words
    shape:          of the weight, [*E, outputs, inputs]
    is_transposed:  whether the tensor's last two dimensions are those of the weight exchanged
    """

    label: str
    shape: tuple[int, ...]
    is_transposed: bool = False


@runtime_checkable
class QuantisedSource(Protocol):
    """A WeightSource with quantised weights; `read` dequantises them."""

    def quantised(self) -> Mapping[str, QuantisedTensor]:
        """Return the tensors that `kinds` yields, without reading any."""

    def kinds(self, names: Collection[str]) -> Iterator[tuple[str, WeightKind]]:
        """Yield the weights of these tensors as they are stored; other names are skipped.

        Raises ConfigError for damaged ones.
        """


NOT_QUANTISED: Mapping[str, QuantisedTensor] = MappingProxyType({})


def quantised_tensors(source: WeightSource) -> Mapping[str, QuantisedTensor]:
    """Return the quantised weights of a source, which may have none."""
    return source.quantised() if isinstance(source, QuantisedSource) else NOT_QUANTISED


class Renaming(Protocol):
    """Maps a checkpoint's tensor names and layouts to the model's."""

    def names(self, theirs: str) -> tuple[str, ...]:
        """Return the names of the model's tensors that a checkpoint tensor holds; () = none."""

    def parts(self, theirs: str, whole: Tensor) -> tuple[Tensor, ...]:
        """Split a checkpoint tensor into the tensors of `names`.

        Raises RuntimeError or IndexError for shapes that cannot be split.
        """

    def rows(self, theirs: str, rows: Tensor) -> tuple[Tensor, ...]:
        """Split one value per output of a weight, [outputs, ...], among `names`.

        `rows` has as many outputs as the weight, and `bars_updates` must be empty.
        """

    def bars_updates(self, theirs: str) -> str:
        """Return why values per output of a weight cannot be split; empty = they can."""


WeightEdit = Callable[[WeightSource, Renaming], WeightSource]
"""Changes tensors between checkpoint and model, but no names or shapes.

The source has the model's names; the renaming says how they were made.
"""


class Fill(Protocol):
    """Loads a model's tensors on demand."""

    def __call__(self, names: Collection[str] | None = None) -> None:
        """Load the tensors of these names that are not loaded yet; None = all."""

    def quantised(self) -> Set[str]:
        """Return the names of the tensors that `kinds` may read."""

    def kinds(self, names: Collection[str]) -> dict[str, WeightKind]:
        """Read these tensors as they are stored, where they are quantised and not loaded yet.

        They count as loaded; the caller has them, and the model's memory is not written.
        """

    def skip(self, names: Collection[str]) -> None:
        """Count these tensors as loaded; the caller has them in another form."""


class _NothingLeft:
    def __call__(self, names: Collection[str] | None = None) -> None:
        """Do nothing."""

    def quantised(self) -> Set[str]:
        """Return no names."""
        return frozenset()

    def kinds(self, names: Collection[str]) -> dict[str, WeightKind]:
        """Return no weights."""
        return {}

    def skip(self, names: Collection[str]) -> None:
        """Do nothing."""


nothing_left: Fill = _NothingLeft()
"""`Fill` of a model whose weights are loaded."""


class PackedStore(Protocol):
    """Keeps the packed bytes of products between starts."""

    def has(self, key: str) -> bool:
        """Return whether a product's bytes are kept."""

    def fetch(self, key: str, memories: Sequence[Tensor], make: Callable[[], None]) -> bool:
        """Write a product's bytes to `memories`: kept ones, else what `make` writes there.

        memories:  bytes uint8, contiguous and zero
        make:      called at most once; its bytes are kept
        Returns whether they were kept before.
        """


class _NothingKept:
    def has(self, key: str) -> bool:
        """Return False."""
        return False

    def fetch(self, key: str, memories: Sequence[Tensor], make: Callable[[], None]) -> bool:
        """Call `make`."""
        make()
        return False


nothing_kept: PackedStore = _NothingKept()
"""`PackedStore` that keeps nothing."""


MakePool = Callable[
    [LoRASlotConfig, Mapping[str, "UpdatePlace | None"], WeightSource, Renaming], "AdapterPool"
]


class HoldsWeights(Protocol):
    """A part of a layer with large weights, whose memory may be replaced.

    weight_device:  where they are loaded
    """

    weight_device: str

    def weight_tensors(self) -> list[Tensor]:
        """Return the tensors of the weights, quantised or not."""

    def set_weight_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replace them by others of the same shapes, in the order of `weight_tensors`."""


@dataclass(frozen=True, slots=True)
class UpdatePlace:
    """Where low-rank updates of one checkpoint weight are stored.

    slots:            of the layer that uses the weight
    part:             index of the weight among the layer's fused parts
    outputs, inputs:  ranges of the weight's rows and columns that this rank holds
    is_lookup:        an embedding: the weight's rows are inputs, its columns outputs
    """

    slots: LowRankSlots
    part: int
    outputs: slice
    inputs: slice
    is_lookup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """Facts about a prepared adapter.

    num_bytes:  of this rank's share
    digest:     of the adapter's contents
    """

    max_rank: int
    num_bytes: int
    digest: str


class AdapterPool(Protocol):
    """A rank's adapters in host memory, and the slots that they are copied into."""

    def prepare(self, lora_id: int, folder: Path) -> AdapterFacts:
        """Read and check an adapter, in any thread. Raises InvalidAdapter."""

    def discard(self, lora_id: int) -> None:
        """Forget an adapter that will not be installed again; unknown ids are ignored."""

    def install(self, slot: int, lora_id: int) -> None:
        """Copy an adapter into a slot, counted from 1, replacing its contents."""


@dataclass(frozen=True, slots=True)
class Adapting:
    """How an engine applies adapters.

    edit:       changes the weights as they load, as to merge one adapter into them
    room:       slots for unmerged adapters; None = no slots
    make_pool:  with a room: makes the pool that fills the slots, from rank 0's slot configuration,
                the update places by weight name (None = on another rank's stage), the base model's
                checkpoint and its renaming
    lora_ids:   of adapters known at start, by name
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

    def logits(self, hidden: Tensor, adapters: RowGroups = ...) -> Tensor:
        """Project hidden states [R, hidden_size] to float32 logits [R, vocab_size].

        adapters:  which of the R rows belong to which adapter
        """


class ForwardPass(Protocol):
    """Computes logits from a step's inputs, by torch operations, a step program or a graph.

    Copies the pages of `StepInputs.copies` first.
    Logits are valid until the next call. All ranks make the same calls; ranks other than 0 get no
    rows.
    """

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size] of the tokens in `logit_index`."""

    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""

    def hidden(self, first: int, last: int) -> Tensor:
        """Return the final hidden states [last - first, hidden_size] of tokens of the latest step.

        After the last norm; any dtype, on any device; valid until the next step. Called on rank 0
        only, which has them if there is one stage.
        """

    def close(self) -> None:
        """Stop what was started; further calls do nothing."""


class DeviceTokens(Protocol):
    """A forward pass that may begin with tokens which only the device knows."""

    def set_last_tokens(self, token_ids: Tensor) -> None:
        """Keep the newest tokens of the latest step's rows, which IN_FLIGHT in inputs refers to.

        token_ids:  [R] int64, on the device, of the tokens in `logit_index`
        """


class Runner(Protocol):
    """Executes step plans on one rank (or, behind a channel, on a group of them).

    Each step gets the calls `begin`, `sample`, `finish`, which raise whatever the device raises. A
    step may begin once the one before is sampled, and the device works in this order.
    """

    def begin(self, plan: StepPlan) -> None:
        """Apply the plan's changes of rows, and start its forward pass."""

    def sample(self, ended: Collection[int] = ()) -> None:
        """Start to sample the step that was begun last.

        ended:  rows that have ended since; their tokens are meaningless
        """

    def finish(self) -> StepResult:
        """Wait for the oldest sampled step."""

    def close(self) -> None:
        """Stop threads and ranks; memory is freed with the object."""


class EngineClient(Protocol):
    """The engine as request handlers see it, in whichever process or thread it runs."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Submit on first iteration and yield Outputs until every index has finished.

        When the consumer is slower than the engine, several steps merge into one Output per index.
        Closing the generator (client gone) aborts the request. Raises, before anything is
        yielded, PromptTooLong, InvalidRequest, QueueFull, Unavailable; EngineError at any time.
        """

    async def abort(self, request_id: str | None) -> int:
        """Abort one request (None: all); returns how many were found. They end with `abort`."""

    async def is_waiting(self, request_id: str) -> bool:
        """Return whether all sequences of an open request are waiting."""

    async def flush_cache(self) -> bool:
        """Drop the prefix cache; returns False, and keeps it, while requests are running."""

    async def page_hashes(self, limit: int) -> bytes:
        """Return the hashes of up to `limit` cached pages, latest used first, between two steps."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine takes no steps, since `pause`."""

    async def pause(self, *, retracting: bool = False) -> None:
        """Take no steps until `unpause`. Open requests stay, and new ones wait.

        retracting:  whether running requests give up their pages and wait again, too
        """

    async def unpause(self) -> None:
        """Go on with all requests that are open; does nothing if the engine is not paused."""

    def limit_queue(self, plan: EnginePlan) -> None:
        """Refuse requests beyond this plan's queue limits from now on."""

    def stats(self) -> EngineStats:
        """Return the newest counters; never blocks."""

    def check_health(self) -> None:
        """Raise EngineError if the loop is dead or a step is overdue."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones.

        Returns False if requests were still open after `timeout_s`; they end with Unavailable.
        """

    def close(self) -> None:
        """Stop the loop. Requests still open end with EngineError."""
