"""The forward pass on an asynchronous device: nothing here waits for it.

Page tables and each row's newest token live on the device; a step uploads changes in one copy.
Decode steps replay a captured graph of their size, padded with rows that read and write the dump
page; all other steps launch their kernels one by one.

Legend: T tokens of the step, S rows, R rows of logits, D rows of a decode step, B rows of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.configs.planning.graph_sizes import size_for
from remora.engine.graphs.cuda_graphs import GraphRunner
from remora.engine.graphs.device_stream import DeviceStream
from remora.engine.graphs.staging import Shape, Staging, room_for
from remora.engine.kv.pages import DUMP_PAGE
from remora.engine.protocols import AttentionBackend, HostPlanned, Model
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.inputs import Int32Array, StepInputs, dummy_step
from remora.engine.types import IntArray
from remora.kernels.dispatch import by_triton
from remora.kernels.lora import NO_GROUPS, RowGroups
from remora.kernels.memory import to_device
from remora.kernels.row_tiles import RowTiles, cut_tiles, tile_size

Arrays = list[npt.NDArray[Any]]
DUMP_SLOT = 0  # of the dump page
MAX_GROWN = 2**14  # entries of page tables per upload
INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Most rows and tokens of a step, and most pages of a row.

    windowed:  whether window layers have a page pool of their own
    """

    max_rows: int
    max_tokens: int
    max_pages: int
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Final hidden states [T, hidden_size] and logits [R, vocab_size]."""

    hidden: Tensor
    logits: Tensor


class DeviceForward:
    """ForwardPass and DeviceTokens over a model on one device.

    The last line of its tables belongs to padding rows of graphs; the others are rows.
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
        self._staging = Staging(stream, room_for(_largest_arrays(limits)))
        self._grown = Staging(stream, room_for([Shape((4, MAX_GROWN), INT32)]))
        self._noted = Staging(stream, room_for([Shape((num_lines,), INT32)]))
        self._graphs: dict[tuple[int, bool], Callable[[], PassOutput]] = {}
        self._sizes: tuple[int, ...] = ()
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
        adapters: bool,
        padded: bool = True,
        max_tokens: int | None = None,
        on_each: Callable[[], object] = lambda: None,
    ) -> None:
        """Capture decode steps of these sizes, ascending; with `adapters` a second one of each.

        padded:      whether steps of fewer rows are padded to a captured size
        max_tokens:  longest sequence for which graphs replay; None = any
        """
        kinds = (False, True) if adapters and by_triton(self._device) else (False,)
        results: PassOutput | None = None
        for size in reversed(sizes):
            step = dummy_step(size, size, self._limits.max_pages, windowed=self._limits.windowed)
            for adapted in kinds:
                self._staging.upload(_padded(step, size, adapted, line=self._limits.max_rows))
                self._plan_attention(step, size)
                if results is None:
                    results = self._run_decode(size, adapted)
                run = partial(self._decode_into, results, size, adapted)
                self._graphs[size, adapted] = graph_runner.capture(run)
            on_each()
        self._sizes, self._graph_runner = tuple(sizes), graph_runner
        self._is_padded, self._max_tokens = padded, max_tokens

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the step; returns float32 logits [R, vocab_size]."""
        self._grow(inputs.grown)
        self._adapters = inputs.adapters
        made = self._replay(inputs) or self._launch(inputs)
        self._hidden = made.hidden
        return made.logits

    @torch.inference_mode()
    def logits(self, first: int, last: int) -> Tensor:
        """Return float32 logits [last - first, vocab_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        groups = RowGroups.of(self._adapters[first:last], self._device)
        return self._model.logits(self._hidden[first:last], groups)

    @torch.inference_mode()
    def set_last_tokens(self, rows: IntArray, token_ids: Tensor) -> None:
        """Keep each row's newest token."""
        (lines,) = self._noted.upload([rows.astype(np.int32)])
        self._newest.index_copy_(0, lines.long(), token_ids.to(self._device))

    def hidden(self, first: int, last: int) -> Tensor:
        """Return final hidden states [last - first, hidden_size] of tokens of the latest step."""
        assert self._hidden is not None, "no step has run"
        return self._hidden[first:last]

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        if self._graph_runner is not None:
            self._graph_runner.close()

    def _grow(self, grown: Int32Array) -> None:
        for first in range(0, grown.shape[1], MAX_GROWN):
            (entries,) = self._grown.upload([grown[:, first : first + MAX_GROWN]])
            lines, columns, pages, window_pages = entries
            at = lines.long(), columns.long()
            self._tables.index_put_(at, pages)
            if self._window_tables is not None:
                self._window_tables.index_put_(at, window_pages)

    def _plan_attention(self, inputs: StepInputs, size: int | None) -> None:
        if self._planned is not None:
            self._planned.plan_step(inputs, size)

    # -- one by one --------------------------------------------------------------------------

    def _launch(self, inputs: StepInputs) -> PassOutput:
        self._plan_attention(inputs, None)
        num_decodes = inputs.num_decodes
        arrays: Arrays = [
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.rows,
            inputs.logit_index,
            inputs.starts.astype(np.int32),
            inputs.lengths.astype(np.int32),
        ]
        if inputs.windows is not None:
            arrays.append(inputs.windows.slots)
        uploaded = self._staging.upload(arrays)
        token_ids, positions, slots, lines, logit_index, starts, lengths, *window_slots = uploaded
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
        """Run a decode step as a captured graph; None when no graph fits."""
        num_rows = len(inputs.rows)
        size = size_for(num_rows, self._sizes) if inputs.num_decodes == num_rows else None
        if size is None or (size > num_rows and not self._is_padded):
            return None
        if self._max_tokens is not None and inputs.lengths.max() > self._max_tokens:
            return None
        adapted = bool(inputs.adapters.any())
        replay = self._graphs.get((size, adapted))
        if replay is None:
            return None
        self._staging.upload(_padded(inputs, size, adapted, line=self._limits.max_rows))
        self._plan_attention(inputs, size)
        made = replay()
        if len(inputs.logit_index) == num_rows:
            return PassOutput(made.hidden, made.logits[:num_rows])
        index = to_device(inputs.logit_index, self._device)
        return PassOutput(made.hidden, made.logits[index])

    def _decode_into(self, results: PassOutput, size: int, adapted: bool) -> PassOutput:
        """Write a step's output to buffers that all graphs share; one each would take gigabytes."""
        made = self._run_decode(size, adapted)
        hidden, logits = results.hidden[:size], results.logits[:size]
        hidden.copy_(made.hidden)
        logits.copy_(made.logits)
        return PassOutput(hidden, logits)

    def _run_decode(self, size: int, adapted: bool) -> PassOutput:
        """Run a step of padded rows whose arrays are uploaded."""
        windowed = self._limits.windowed
        views = self._staging.views(_shapes_of(size, adapted, windowed))
        token_ids, positions, slots, lines, starts, lengths, *others = views
        window_slots, tiles = others[:windowed], others[windowed:]
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
            starts=starts,
            lengths=lengths,
            extend_starts=(size,),
            extend_lens=(),
            logit_index=lines,  # unused: every row has logits
            adapters=groups,
        )
        batch = self._with_windows(batch, lines, window_slots)
        hidden = self._model.forward(batch, self._attention)
        return PassOutput(hidden, self._model.logits(hidden, groups))


def _padded(inputs: StepInputs, size: int, adapted: bool, *, line: int) -> Arrays:
    """Return a decode step's arrays padded to `size` rows.

    line:  of the tables, holding the dump page only, which padding rows read
    """
    rest = size - len(inputs.rows)

    def pad(values: npt.NDArray[Any], with_: int) -> npt.NDArray[Any]:
        return np.concatenate((values, np.full(rest, with_, values.dtype)))

    arrays = [
        pad(inputs.token_ids, 0),
        pad(inputs.positions, 0),
        pad(inputs.slots, DUMP_SLOT),
        pad(inputs.rows, line),
        np.arange(size + 1, dtype=np.int32),
        pad(inputs.lengths, 1).astype(np.int32),
    ]
    if inputs.windows is not None:
        arrays.append(pad(inputs.windows.slots, DUMP_SLOT))
    if adapted:
        rows, tiles = cut_tiles(inputs.adapters, tile_size(size))
        arrays.append(np.concatenate((rows, np.zeros(size - len(rows), np.int32))))
        arrays.append(np.concatenate((tiles, np.zeros((size - len(tiles), 3), np.int32))))
    return arrays


def _shapes_of(size: int, adapted: bool, windowed: bool) -> list[Shape]:
    """Return the shapes of `_padded`'s arrays."""
    shapes = [
        *(Shape((size,), INT64) for _ in range(4)),
        Shape((size + 1,), INT32),
        Shape((size,), INT32),
        *(Shape((size,), INT64) for _ in range(windowed)),
    ]
    if adapted:
        shapes += [Shape((size,), INT32), Shape((size, 3), INT32)]
    return shapes


def _largest_arrays(limits: StepLimits) -> list[Shape]:
    """Return shapes that the arrays of any step fit into."""
    rows, tokens = limits.max_rows + 1, limits.max_tokens
    return [
        *(Shape((tokens,), INT64) for _ in range(4)),
        *(Shape((rows,), INT64) for _ in range(5)),
        *(Shape((rows,), INT32) for _ in range(8)),
    ]
