"""The forward pass on an asynchronous device: nothing here waits for it.

Page tables and each row's newest token live on the device; a step uploads changes in one copy.
Decode steps replay a captured graph of their number of rows, and steps with prompts one of their
number of tokens, padded with what reads and writes the dump page; the other steps launch their
kernels one by one. Logits of steps with prompts are launched after the graph: few of their tokens
need some.

Legend: T tokens of the step, S rows, R rows of logits, D rows of a decode step, B rows of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.configs.planning.graph_sizes import size_for
from remora.engine.attention.page_copies import copy_step_pages
from remora.engine.graphs.cuda_graphs import GraphRunner
from remora.engine.graphs.decode_steps import decode_arrays, decode_shapes, split_decode
from remora.engine.graphs.device_stream import DeviceStream
from remora.engine.graphs.prompt_steps import PromptShape, prompt_shapes
from remora.engine.graphs.staging import Arrays, Shape, Staging, room_for
from remora.engine.graphs.step_sampling import StepSampling, choose_in_graph
from remora.engine.kv.pages import DUMP_PAGE
from remora.engine.protocols import AttentionBackend, HostPlanned, Model
from remora.engine.runner.batch import ForwardBatch, GivenRows
from remora.engine.runner.inputs import NOTHING_GROWN, Int32Array, StepInputs, dummy_step
from remora.kernels.dispatch import by_triton
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.row_tiles import RowTiles, tile_size

MAX_GROWN = 2**14  # entries of page tables per upload
INT64, INT32, DOUBLE = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Most rows and tokens of a step, and most pages and drafts of a row.

    windowed:  whether window layers have a page pool of their own
    """

    max_rows: int
    max_tokens: int
    max_pages: int
    windowed: bool = False
    max_drafts: int = 0

    @property
    def max_logits(self) -> int:
        """Most tokens of a step that have logits."""
        return min(self.max_rows * (1 + self.max_drafts), max(self.max_tokens, self.max_rows))


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Final hidden states [T, hidden_size] and logits [R, vocab_size].

    chosen:  tokens, as by `choose_on_device`; None = there is no graph, or another rank has logits
    """

    hidden: Tensor
    logits: Tensor
    chosen: Tensor | None = None


class DeviceForward:
    """ForwardPass and DeviceTokens over a model on one device.

    The last line of its tables belongs to padding rows of graphs; the others are rows.

    sampling:  of its steps; a graph chooses the tokens of rows that need nothing after the logits
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, limits: StepLimits, stream: DeviceStream
    ) -> None:
        self._model = model
        self._attention = attention
        self._planned = attention if isinstance(attention, HostPlanned) else None
        self._limits = limits
        self._device = device = stream.device
        num_lines = limits.max_rows + 1
        self._tables = torch.full(
            (num_lines, limits.max_pages), DUMP_PAGE, dtype=torch.int32, device=device
        )
        self._window_tables = torch.full_like(self._tables, DUMP_PAGE) if limits.windowed else None
        self._newest = torch.zeros(num_lines, dtype=torch.int64, device=device)
        self._starts = torch.arange(num_lines + 1, dtype=torch.int32, device=device)
        self._staging = Staging(stream, room_for(_largest_arrays(limits)))
        self.sampling = StepSampling(self._staging)
        self._alone = Staging(stream, room_for([Shape((4, MAX_GROWN), INT32)]))
        self._sampled_lines: Tensor | None = None
        self._graphs: dict[tuple[int, bool], Callable[[], PassOutput]] = {}
        self._sizes: tuple[int, ...] = ()
        self._prompt_graphs: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        self._prompt_shapes: dict[int, PromptShape] = {}
        self._is_padded = True
        self._max_tokens: int | None = None
        self._graph_runner: GraphRunner | None = None
        self._hidden: Tensor | None = None
        self._adapters: Int32Array = np.empty(0, dtype=np.int32)

    @torch.inference_mode()
    def capture(
        self,
        graph_runner: GraphRunner,
        sizes: Sequence[int],
        *,
        prompt_sizes: Sequence[int] = (),
        num_slots: int = 0,
        padded: bool = True,
        max_tokens: int | None = None,
        on_each: Callable[[], object] = lambda: None,
    ) -> None:
        """Capture steps of these sizes, ascending; with adapter slots a second one of each.

        sizes:         rows of decode steps
        prompt_sizes:  tokens of steps with prompts
        num_slots:     adapter slots
        padded:        whether smaller steps are padded to a captured size
        max_tokens:    longest sequence for which graphs replay; None = any
        """
        kinds = (False, True) if num_slots > 0 and by_triton(self._device) else (False,)
        self._capture_prompts(graph_runner, prompt_sizes, num_slots, kinds, on_each)
        self._capture_decodes(graph_runner, sizes, kinds, on_each)
        self._sizes, self._graph_runner = tuple(sizes), graph_runner
        self._is_padded, self._max_tokens = padded, max_tokens

    def _capture_decodes(
        self,
        graph_runner: GraphRunner,
        sizes: Sequence[int],
        kinds: Sequence[bool],
        on_each: Callable[[], object],
    ) -> None:
        results: PassOutput | None = None
        for size in reversed(sizes):
            step = dummy_step(size, size, self._limits.max_pages, windowed=self._limits.windowed)
            for adapted in kinds:
                self._upload_decode(step, size, adapted)
                self._plan_attention(step, size)
                if results is None:
                    results = self._run_decode(size, adapted)
                run = partial(self._decode_into, results, size, adapted)
                self._graphs[size, adapted] = graph_runner.capture(run)
            on_each()

    def _capture_prompts(
        self,
        graph_runner: GraphRunner,
        sizes: Sequence[int],
        num_slots: int,
        kinds: Sequence[bool],
        on_each: Callable[[], object],
    ) -> None:
        limits = self._limits
        shapes = prompt_shapes(
            sizes,
            max_rows=limits.max_rows,
            max_pages=limits.max_pages,
            num_slots=num_slots,
            windowed=limits.windowed,
            max_drafts=limits.max_drafts,
        )
        self._prompt_shapes = {shape.num_tokens: shape for shape in shapes}
        result: Tensor | None = None
        for shape in reversed(shapes):
            num_rows = shape.max_prompts
            step = dummy_step(
                shape.num_tokens, num_rows, limits.max_pages, windowed=limits.windowed
            )
            for adapted in kinds:
                self._upload_prompts(step, shape, adapted)
                if result is None:
                    result = self._run_prompts(shape, adapted)
                run = partial(self._prompts_into, result, shape, adapted)
                self._prompt_graphs[shape.num_tokens, adapted] = graph_runner.capture(run)
            on_each()

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size]."""
        self._adapters = inputs.adapters
        copy_step_pages(self._attention, inputs.copies, self._device)
        made = self._replay(inputs) or self._launch(inputs)
        self._hidden = made.hidden
        self.sampling.end(made.logits, made.chosen)
        return made.logits

    @torch.inference_mode()
    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        groups = RowGroups.of(self._adapters[first:last], self._device)
        return self._model.logits(self._hidden[first:last], groups)

    @torch.inference_mode()
    def set_last_tokens(self, token_ids: Tensor) -> None:
        """Keep the newest token of each row of the latest step that had logits."""
        assert self._sampled_lines is not None, "no step has run"
        if token_ids is self.sampling.tokens:
            return  # the graph has kept them
        self._newest.index_copy_(0, self._sampled_lines, token_ids.to(self._device))

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        return self._hidden[first:last]

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._prompt_graphs.clear()
        if self._graph_runner is not None:
            self._graph_runner.close()

    def _write_grown(
        self, lines: Tensor, columns: Tensor, pages: Tensor, window_pages: Tensor
    ) -> None:
        """Write new entries [N] of the page tables; see `StepInputs.grown`."""
        at = lines.long(), columns.long()
        self._tables.index_put_(at, pages)
        if self._window_tables is not None:
            self._window_tables.index_put_(at, window_pages)

    def _grow_ahead(self, grown: Int32Array, most: int) -> Int32Array:
        """Upload entries of page tables by themselves if a step's upload has no room for them."""
        if grown.shape[1] <= most:
            return grown
        for first in range(0, grown.shape[1], MAX_GROWN):
            (entries,) = self._alone.upload([grown[:, first : first + MAX_GROWN]])
            self._write_grown(*entries)
        return NOTHING_GROWN

    def _plan_attention(self, inputs: StepInputs, size: int | None) -> None:
        if self._planned is not None:
            self._planned.plan_step(inputs, size)

    # -- one by one --------------------------------------------------------------------------

    def _launch(self, inputs: StepInputs) -> PassOutput:
        self._plan_attention(inputs, None)
        num_decodes = inputs.num_decodes
        grown = self._grow_ahead(inputs.grown, MAX_GROWN)
        arrays: Arrays = [
            grown,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.rows,
            inputs.logit_index,
            _sampled_lines(inputs),
            inputs.starts.astype(np.int32),
            inputs.lengths.astype(np.int32),
        ]
        if inputs.windows is not None:
            arrays.append(inputs.windows.slots)
        uploaded, window_slots = _split(self._staging.upload(arrays), 9)
        entries, token_ids, positions, slots, lines, logit_index, sampled, starts, lengths = (
            uploaded
        )
        self._sampled_lines = sampled
        if grown.size:
            self._write_grown(*entries)
        firsts = self._known(token_ids[:num_decodes], lines[:num_decodes])
        batch = ForwardBatch(
            token_ids=torch.cat((firsts, token_ids[num_decodes:])),
            positions=positions,
            slots=slots,
            num_decodes=num_decodes,
            tables=self._tables.index_select(0, lines),  # full width: kernels compile per width
            starts=starts,
            lengths=lengths,
            extend_starts=tuple(inputs.starts[num_decodes:].tolist()),
            extend_lens=tuple(inputs.lengths[num_decodes:].tolist()),
            logit_index=logit_index,
            adapters=RowGroups.of(inputs.adapters, self._device),
            embedded=GivenRows.of(inputs.embedded, self._device),
        )
        batch = self._with_windows(batch, lines, window_slots)
        hidden = self._model.forward(batch, self._attention)
        wanted = RowGroups.of(inputs.adapters[inputs.logit_index], self._device)
        return PassOutput(hidden, self._model.logits(hidden[logit_index], wanted))

    def _with_windows(
        self, batch: ForwardBatch, lines: Tensor, window_slots: Sequence[Tensor]
    ) -> ForwardBatch:
        """Return the batch with tables and slots of window layers that have their own pool.

        window_slots:  one tensor; empty if there are no such layers
        """
        if self._window_tables is None:
            return batch
        tables = self._window_tables.index_select(0, lines)
        return replace(batch, windowed=replace(batch, slots=window_slots[0], tables=tables))

    def _known(self, token_ids: Tensor, lines: Tensor) -> Tensor:
        """Replace IN_FLIGHT by the rows' newest tokens."""
        return torch.where(token_ids < 0, self._newest[lines], token_ids)

    # -- captured ----------------------------------------------------------------------------

    def _replay(self, inputs: StepInputs) -> PassOutput | None:
        """Run a step as a captured graph; None when no graph fits."""
        if self._max_tokens is not None and inputs.lengths.max() > self._max_tokens:
            return None
        if inputs.embedded is not None:
            return None
        if inputs.num_decodes == len(inputs.rows):
            return self._replay_decode(inputs)
        return self._replay_prompts(inputs)

    def _size_for(self, count: int, sizes: Sequence[int]) -> int | None:
        """Return the captured size for a number of rows or tokens; None = none."""
        size = size_for(count, sizes)
        return size if size == count or self._is_padded else None

    def _replay_decode(self, inputs: StepInputs) -> PassOutput | None:
        num_rows, adapted = len(inputs.rows), bool(inputs.adapters.any())
        size = self._size_for(num_rows, self._sizes)
        replay = None if size is None else self._graphs.get((size, adapted))
        if size is None or replay is None:
            return None
        lines, logit_index = self._upload_decode(inputs, size, adapted)
        self._plan_attention(inputs, size)
        made = replay()
        if logit_index is None:
            self._sampled_lines = lines[:num_rows]
            return PassOutput(made.hidden, made.logits[:num_rows], made.chosen)
        self._sampled_lines = lines.index_select(0, logit_index)
        return PassOutput(made.hidden, made.logits.index_select(0, logit_index))

    def _upload_decode(
        self, inputs: StepInputs, size: int, adapted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Upload a decode step's arrays padded to `size` rows, as graphs read them.

        Returns the lines [size], and `logit_index` unless every row has logits.
        """
        num_rows = len(inputs.rows)
        all_sampled = len(inputs.logit_index) == num_rows
        arrays = decode_arrays(
            inputs,
            self._grow_ahead(inputs.grown, size),
            self.sampling.begin(num_rows if all_sampled else None),
            size=size,
            line=self._limits.max_rows,
            adapted=adapted,
        )
        shapes = decode_shapes(size, adapted, self._limits.windowed)
        if not all_sampled:
            arrays.append((inputs.logit_index, 0))
            shapes = [*shapes, Shape(inputs.logit_index.shape, INT64)]
        uploaded = self._staging.upload_padded(shapes, arrays)
        return uploaded[3], None if all_sampled else uploaded[-1]

    def _decode_into(self, results: PassOutput, size: int, adapted: bool) -> PassOutput:
        """Write a step's output to buffers that all graphs share; one each would take gigabytes."""
        made = self._run_decode(size, adapted)
        hidden, logits = results.hidden[:size], results.logits[:size]
        hidden.copy_(made.hidden)
        logits.copy_(made.logits)
        return PassOutput(hidden, logits, made.chosen)

    def _run_decode(self, size: int, adapted: bool) -> PassOutput:
        """Run a step of padded rows whose arrays are uploaded, and choose its tokens."""
        windowed = self._limits.windowed
        views = self._staging.views(decode_shapes(size, adapted, windowed))
        own, grown, params, window_slots, tiles = split_decode(views, windowed)
        token_ids, positions, slots, lines, lengths = own
        self._write_grown(*grown)
        groups = NO_GROUPS
        if tiles:
            rows, ranges = tiles
            groups = RowGroups(tiles=RowTiles(rows, ranges, tile_size(size)))
        batch = ForwardBatch(
            token_ids=self._known(token_ids, lines),
            positions=positions,
            slots=slots,
            num_decodes=size,
            tables=self._tables.index_select(0, lines),
            starts=self._starts[: size + 1],
            lengths=lengths,
            extend_starts=(size,),
            extend_lens=(),
            logit_index=lines,  # unused: every row has logits
            adapters=groups,
            is_padded=True,
        )
        batch = self._with_windows(batch, lines, window_slots)
        hidden = self._model.forward(batch, self._attention)
        logits = self._model.logits(hidden, groups)
        if len(logits) == 0:  # rank 0 has them
            return PassOutput(hidden, logits)
        chosen = choose_in_graph(logits, params)
        self._newest.index_copy_(0, lines, chosen[0])
        return PassOutput(hidden, logits, chosen)

    def _replay_prompts(self, inputs: StepInputs) -> PassOutput | None:
        num_tokens, adapted = inputs.num_tokens, bool(inputs.adapters.any())
        size = self._size_for(num_tokens, tuple(self._prompt_shapes))
        replay = None if size is None else self._prompt_graphs.get((size, adapted))
        if size is None or replay is None or not self._prompt_shapes[size].holds(inputs):
            return None
        logit_index, self._sampled_lines = self._upload_prompts(
            inputs, self._prompt_shapes[size], adapted
        )
        hidden = replay()
        wanted = RowGroups.of(inputs.adapters[inputs.logit_index], self._device)
        logits = self._model.logits(hidden.index_select(0, logit_index), wanted)
        return PassOutput(hidden[:num_tokens], logits)

    def _upload_prompts(
        self, inputs: StepInputs, shape: PromptShape, adapted: bool
    ) -> tuple[Tensor, Tensor]:
        """Upload a step's arrays as graphs read them; returns `logit_index` and its rows' lines."""
        arrays = shape.arrays(
            inputs,
            self._grow_ahead(inputs.grown, shape.max_grown),
            _sampled_lines(inputs),
            line=self._limits.max_rows,
            adapted=adapted,
        )
        uploaded = self._staging.upload_padded(shape.shapes(adapted), arrays)
        count, first = len(inputs.logit_index), 6 + self._limits.windowed
        return uploaded[first][:count], uploaded[first + 1][:count]

    def _prompts_into(self, result: Tensor, shape: PromptShape, adapted: bool) -> Tensor:
        """Write a step's hidden states to a buffer that all graphs share."""
        return result[: shape.num_tokens].copy_(self._run_prompts(shape, adapted))

    def _run_prompts(self, shape: PromptShape, adapted: bool) -> Tensor:
        """Run a step with prompts whose arrays are uploaded; returns hidden states."""
        views = self._staging.views(shape.shapes(adapted))
        (token_ids, positions, slots), others = views[:3], views[3:]
        window_slots, others = _split(others, self._limits.windowed)
        lines, lengths, starts, _, _, *others = others
        grown, tiles = _split(others, 4)
        self._write_grown(*grown)
        groups, num_decodes = NO_GROUPS, shape.max_decodes
        if tiles:
            groups = RowGroups(tiles=RowTiles(tiles[0], tiles[1], tile_size(shape.num_tokens)))
        firsts = self._known(token_ids[:num_decodes], lines[:num_decodes])
        batch = ForwardBatch(
            token_ids=torch.cat((firsts, token_ids[num_decodes:])),
            positions=positions,
            slots=slots,
            num_decodes=num_decodes,
            tables=self._tables.index_select(0, lines),
            starts=starts,
            lengths=lengths,
            extend_starts=(shape.num_tokens,),  # the host knows no prompts
            extend_lens=(),
            logit_index=lines[:0],
            adapters=groups,
            is_padded=True,
        )
        return self._model.forward(self._with_windows(batch, lines, window_slots), self._attention)


def _sampled_lines(inputs: StepInputs) -> npt.NDArray[np.int64]:
    """Return the lines of the rows whose tokens have logits."""
    return inputs.rows[np.searchsorted(inputs.starts, inputs.logit_index, side="right") - 1]


def _split(tensors: list[Tensor], at: int) -> tuple[list[Tensor], list[Tensor]]:
    return tensors[:at], tensors[at:]


def _largest_arrays(limits: StepLimits) -> list[Shape]:
    """Return shapes that the arrays of any step fit into, riders included."""
    rows, tokens = limits.max_logits + 1, limits.max_tokens
    (largest,) = prompt_shapes(
        [tokens],
        max_rows=limits.max_rows,
        max_pages=limits.max_pages,
        num_slots=tokens,
        windowed=limits.windowed,
        max_drafts=limits.max_drafts,
    )
    return [
        *largest.shapes(True),
        Shape((4, MAX_GROWN), INT32),
        *(Shape((tokens,), INT64) for _ in range(4)),
        *(Shape((rows,), INT64) for _ in range(9)),
        *(Shape((rows,), INT32) for _ in range(8)),
        *(Shape((rows,), DOUBLE) for _ in range(5)),
    ]
