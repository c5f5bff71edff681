"""Attention by flashinfer's wrappers, which plan each step on the host.

A plan divides the keys of a step's rows among the GPU's multiprocessors. It depends on lengths,
page tables, window and soft cap, so all layers with the same window share one. A wrapper of a
captured step belongs to one number of rows; planning again before a replay writes new values to
the memory that the graph reads. Knows nothing of page ownership or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.attention.paged_kv import PagedKV
from remora.engine.graphs.device_stream import Event, stream_of
from remora.engine.graphs.staging import Shape, Staging, room_for
from remora.engine.kv.pages import DUMP_PAGE, pages_needed
from remora.engine.runner.batch import AttentionSpec, ForwardBatch, QKNormRope
from remora.engine.runner.inputs import StepInputs

FLOAT_WORKSPACE_BYTES = 384 * 2**20  # partial results of split keys, shared by all wrappers
INT_WORKSPACE_BYTES = 8 * 2**20  # a plan; each wrapper allocates its own
INT32 = np.dtype(np.int32)
# Where fewer heads share a KV head, its kernel without tensor cores is faster.
TENSOR_CORE_GROUP = 4

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Kind = tuple[int, float, float]  # window (-1 = none), soft cap (0 = none), scale


def workspace_bytes(num_graphs: int, num_kinds: int) -> int:
    """Return the bytes of the workspaces.

    num_kinds:  how many kinds of layers differ in window, soft cap or scale
    """
    return FLOAT_WORKSPACE_BYTES + INT_WORKSPACE_BYTES * num_kinds * (num_graphs + 2)


@dataclass(frozen=True, slots=True)
class HostPages:
    """Pages of some rows, in the form that flashinfer takes, on the host.

    indptr:     [rows + 1] first page of each row in `indices`, then their number
    indices:    page ids, row by row
    last_lens:  [rows] tokens in each row's last page
    """

    indptr: Int32s
    indices: Int32s
    last_lens: Int32s

    @classmethod
    def of(cls, tables: Int32s, rows: Int64s, lengths: Int64s, page_size: int) -> HostPages:
        """Return those of rows of page tables, with these lengths in tokens."""
        counts = (lengths + (page_size - 1)) // page_size
        indptr = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        widest = int(counts.max(initial=0))
        held = np.arange(widest) < counts[:, None]
        last_lens = (lengths - (counts - 1) * page_size).astype(np.int32)
        return cls(indptr, tables[rows, :widest][held], last_lens)

    def padded(self, num_rows: int) -> HostPages:
        """Return these pages with rows of one token on the dump page at the end."""
        rest = num_rows - len(self.last_lens)
        more = np.arange(1, rest + 1, dtype=np.int32) + self.indptr[-1]
        return HostPages(
            np.concatenate((self.indptr, more)),
            np.concatenate((self.indices, np.full(rest, DUMP_PAGE, np.int32))),
            np.concatenate((self.last_lens, np.ones(rest, np.int32))),
        )


class FlashInferAttention(PagedKV):
    """AttentionBackend and HostPlanned of flashinfer.

    library:    the package, or what has its wrappers
    num_heads:  of queries
    max_rows, max_tokens:  of a step, and of a sequence
    """

    def __init__(
        self, library: Any, *, num_heads: int, max_rows: int, max_tokens: int, **pages: Any
    ) -> None:
        super().__init__(**pages)
        self._library = library
        self._num_heads = num_heads
        self._page_size, self._num_kv_heads, self._head_dim = self.kv_pages.shape[3:]
        device = self.kv_pages.device
        self._stream = stream_of(device)
        self._workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        most = max_rows * pages_needed(max_tokens, self._page_size)
        self._staging = Staging(self._stream, room_for([Shape((most,), INT32)]))
        # Of captured steps, which run one at a time and so share them.
        self._indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(most, dtype=torch.int32, device=device)
        self._last_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._decoders: dict[tuple[int | None, Kind], _Planned] = {}
        self._extenders: dict[Kind, _Planned] = {}
        self._step: StepInputs | None = None
        self._size: int | None = None

    def plan_step(self, inputs: StepInputs, size: int | None) -> None:
        """Plan a step; see `protocols.HostPlanned`.

        Wrappers of other steps than captured ones are planned when a layer first needs them.
        """
        self._step, self._size = inputs, size
        for planned in (*self._decoders.values(), *self._extenders.values()):
            planned.is_current = False
        for (rows, kind), planned in self._decoders.items():
            if rows is not None and rows == size:
                self._plan_decodes(planned, kind)

    def attend(
        self, layer: int, heads: Tensor, rope: QKNormRope, batch: ForwardBatch, spec: AttentionSpec
    ) -> Tensor:
        """Apply QK norm and RoPE, store and attend; see `protocols.AttentionBackend`."""
        query = self.store(layer, heads, rope, batch)
        pages = self.kv_pages[layer, 0], self.kv_pages[layer, 1]
        kind = _kind(spec)
        out = torch.empty_like(query)
        rows = batch.num_decodes
        if rows > 0:
            decoder = self._decoder(kind)
            decoder.wrapper.run(query[:rows], pages, out=out[:rows])
        if rows < len(query):
            extender = self._extender(kind)
            extender.wrapper.run(query[rows:], pages, out=out[rows:])
        return out

    def _decoder(self, kind: Kind) -> _Planned:
        key = self._size, kind
        if key not in self._decoders:
            buffers: Mapping[str, Any] = {}
            if self._size is not None:
                buffers = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": self._indptr[: self._size + 1],
                    "paged_kv_indices_buffer": self._indices,
                    "paged_kv_last_page_len_buffer": self._last_lens[: self._size],
                }
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_tensor_cores=self._num_heads >= TENSOR_CORE_GROUP * self._num_kv_heads,
                **buffers,
            )
            self._decoders[key] = _Planned(wrapper, self._stream.event())
        planned = self._decoders[key]
        if not planned.is_current:
            self._plan_decodes(planned, kind)
        return planned

    def _plan_decodes(self, planned: _Planned, kind: Kind) -> None:
        step = self._step
        assert step is not None, "no step is planned"
        rows = step.num_decodes
        pages = HostPages.of(step.tables, step.rows[:rows], step.lengths[:rows], self._page_size)
        if self._size is not None:
            pages = pages.padded(self._size)
        planned.plan(
            lambda wrapper: wrapper.plan(
                torch.from_numpy(pages.indptr),
                self._upload(pages.indices),
                torch.from_numpy(pages.last_lens),
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                self._page_size,
                **self._options(kind),
            )
        )

    def _extender(self, kind: Kind) -> _Planned:
        if kind not in self._extenders:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._extenders[kind] = _Planned(wrapper, self._stream.event())
        planned, step = self._extenders[kind], self._step
        if planned.is_current:
            return planned
        assert step is not None, "no step is planned"
        rows = slice(step.num_decodes, None)
        pages = HostPages.of(step.tables, step.rows[rows], step.lengths[rows], self._page_size)
        starts = (step.starts[rows] - step.num_decodes).astype(np.int32)
        planned.plan(
            lambda wrapper: wrapper.plan(
                torch.from_numpy(starts),
                torch.from_numpy(pages.indptr),
                self._upload(pages.indices),
                torch.from_numpy(pages.last_lens),
                self._num_heads,
                self._num_kv_heads,
                self._head_dim,
                self._page_size,
                causal=True,
                **self._options(kind),
            )
        )
        return planned

    def _upload(self, indices: Int32s) -> Tensor:
        """Copy page ids to the device; the wrapper would wait for the device to copy them."""
        return self._staging.upload([indices])[0].clone()

    def _options(self, kind: Kind) -> Mapping[str, Any]:
        window, soft_cap, scale = kind
        dtype = self.kv_pages.dtype
        return {
            "window_left": window,
            "logits_soft_cap": soft_cap,
            "sm_scale": scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }


class _Planned:
    """A wrapper, and whether its plan is that of the current step.

    copied:  for the moment at which the latest plan is on the device
    """

    def __init__(self, wrapper: Any, copied: Event) -> None:
        self.wrapper = wrapper
        self.is_current = False
        self._copied = copied

    def plan(self, plan: Callable[[Any], None]) -> None:
        """Plan the wrapper.

        A plan is copied to the device from a buffer on the host, which the next plan overwrites.
        """
        self._copied.synchronize()
        plan(self.wrapper)
        self._copied.record()
        self.is_current = True


def _kind(spec: AttentionSpec) -> Kind:
    window = -1 if spec.window is None else spec.window - 1  # keys before a query's own
    return window, spec.soft_cap or 0.0, spec.scale
