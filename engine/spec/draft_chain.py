"""The drafts of rows while a draft model makes them, one after another.

A draft is what the model computes next, so a chain of k drafts is k passes. Where the device keeps
each draft, the passes are launched one after another, and the host waits once, for all drafts;
otherwise it waits for each. Knows rows and tokens; neither models nor pages.

Legend: S rows of the chain, P of them in a pass, D most drafts of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from remora.engine.graphs.device_stream import DeviceStream, Readback
from remora.engine.protocols import DeviceTokens
from remora.engine.runner.inputs import IN_FLIGHT, Int64Array
from remora.engine.spec.stop_tokens import StopTokens
from remora.engine.types import IntArray, TokenArray
from remora.kernels.memory import to_device


class DraftChain(Protocol):
    """Collects the drafts of a step, pass by pass.

    stops:  tokens that end rows, which are replaced
    """

    stops: StopTokens

    def begin(self, rows: IntArray) -> None:
        """Begin with rows [S] without drafts."""

    def add(self, at: Int64Array, token_ids: Tensor) -> TokenArray:
        """Append what the latest pass drew for its rows, and return how its inputs name it [P].

        at:         [P] places among the rows: those of the pass before, or some of them
        token_ids:  [P] int64, which the next pass may overwrite
        """

    def take(self) -> TokenArray:
        """Return the drafts [S, D], with 0 behind the last of a row."""


class HostChain:
    """DraftChain whose drafts the host knows at once."""

    def __init__(self, stops: StopTokens) -> None:
        self.stops = stops
        self._rows: IntArray = np.empty(0, np.int32)
        self._at: list[Int64Array] = []
        self._drafts: list[TokenArray] = []

    def begin(self, rows: IntArray) -> None:
        """Forget the chain before; see `DraftChain`."""
        self._rows, self._at, self._drafts = rows, [], []

    def add(self, at: Int64Array, token_ids: Tensor) -> TokenArray:
        """Wait for the drafts; see `DraftChain`."""
        known = self.stops.avoid(self._rows[at], token_ids.cpu().numpy().copy())
        self._at.append(at)
        self._drafts.append(known)
        return known

    def take(self) -> TokenArray:
        """Return what is known; see `DraftChain`."""
        return _by_row(len(self._rows), self._at, np.concatenate(self._drafts))


class DeviceChain:
    """DraftChain whose drafts stay on the device, where the next pass reads them."""

    def __init__(
        self, stops: StopTokens, tokens: DeviceTokens, stream: DeviceStream, *, most_id: int
    ) -> None:
        """Begin without drafts.

        tokens:   the forward pass of the draft model
        stream:   its device's
        most_id:  greatest id that the draft model knows
        """
        self.stops = stops
        self._tokens = tokens
        self._device = stream.device
        self._readback = Readback(stream)
        self._most_id = most_id
        self._rows: IntArray = np.empty(0, np.int32)
        self._at: list[Int64Array] = []
        self._drafts: list[Tensor] = []
        self._pairs: Tensor | None = None

    def begin(self, rows: IntArray) -> None:
        """Forget the chain before; see `DraftChain`."""
        self._rows, self._at, self._drafts, self._pairs = rows, [], [], None

    def add(self, at: Int64Array, token_ids: Tensor) -> TokenArray:
        """Hand the drafts to the next pass without waiting for them; see `DraftChain`."""
        if self._pairs is None or len(at) < len(self._at[-1]):
            self._pairs = to_device(self.stops.pairs(self._rows[at]), self._device)
        drafts = _replaced(token_ids, self._pairs)
        self._at.append(at)
        self._drafts.append(drafts)
        self._tokens.set_last_tokens(drafts.clamp(max=self._most_id))
        return np.full(len(at), IN_FLIGHT)

    def take(self) -> TokenArray:
        """Wait for all drafts, which are copied together; see `DraftChain`."""
        (drafts,) = self._readback.start([torch.cat(self._drafts)])()
        return _by_row(len(self._rows), self._at, drafts)


def _replaced(token_ids: Tensor, pairs: Tensor) -> Tensor:
    """Replace the tokens [P] that end their rows; pairs: as of `StopTokens`."""
    places, stops, others = pairs
    is_stop = token_ids.index_select(0, places) == stops
    return token_ids.index_add(0, places, (others - stops) * is_stop)


def _by_row(num_rows: int, at: Sequence[Int64Array], joined: TokenArray) -> TokenArray:
    """Return drafts [S, D] from those of all passes, one pass after another."""
    drafts = np.zeros((num_rows, len(at)), np.int64)
    ends = np.cumsum([len(each) for each in at])
    for ahead, (places, ids) in enumerate(zip(at, np.split(joined, ends[:-1]), strict=True)):
        drafts[places, ahead] = ids
    return drafts
