"""A model with paged memory and sequences on it: the smallest thing that runs ForwardBatches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from torch import Tensor

from remora.engine.fallback.model import FallbackModel
from remora.engine.models.decoder import DecoderModel
from remora.engine.parallel.group import ALONE, Group
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.device import make_attention
from remora.kernels.lora import RowGroups
from tests.engine.fakes import make_plan


class PagedModel:
    """Runs chunks of named sequences; pages come in random order, as after long use.

    adapters:  slots, counted from 1, of the sequences that have one
    """

    def __init__(
        self,
        model: DecoderModel | FallbackModel,
        *,
        page_size: int = 16,
        num_pages: int = 64,
        group: Group = ALONE,
    ) -> None:
        self.model = model
        self._group = group
        plan = make_plan(page_size=page_size)
        self.attention = make_attention(model, plan, num_pages)
        self._page_size = page_size
        self._free = random.Random(0).sample(range(1, num_pages + 1), num_pages)
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}
        self.adapters: dict[str, int] = {}

    def step(self, **chunks: list[int]) -> dict[str, Tensor]:
        """Run one forward pass over new tokens of each sequence; returns logits of all of them."""
        order = sorted(chunks, key=lambda name: len(chunks[name]) > 1)
        starts = {name: self._lens.get(name, 0) for name in order}
        for name in order:
            self._grow(name, len(chunks[name]))
        batch = self._batch(order, chunks, starts)
        hidden = self.model.forward(batch, self.attention, group=self._group)
        logits = self.model.logits(hidden, batch.adapters)
        ends = itertools.accumulate(len(chunks[name]) for name in order)
        return {
            name: logits[end - len(chunks[name]) : end]
            for name, end in zip(order, ends, strict=True)
        }

    def _grow(self, name: str, num_tokens: int) -> None:
        self._lens[name] = self._lens.get(name, 0) + num_tokens
        table = self._tables.setdefault(name, [])
        while len(table) * self._page_size < self._lens[name]:
            table.append(self._free.pop())

    def _batch(
        self, order: list[str], chunks: dict[str, list[int]], starts: dict[str, int]
    ) -> ForwardBatch:
        decodes = [name for name in order if len(chunks[name]) == 1]
        extends = order[len(decodes) :]
        positions = [starts[name] + i for name in order for i in range(len(chunks[name]))]
        slots = [
            self._tables[name][at // self._page_size] * self._page_size + at % self._page_size
            for name in order
            for at in range(starts[name], self._lens[name])
        ]
        widest = max(len(self._tables[name]) for name in order)
        bounds = [len(decodes)]
        for name in extends:
            bounds.append(bounds[-1] + len(chunks[name]))
        tables = [(self._tables[name] + [0] * widest)[:widest] for name in order]
        adapters = [self.adapters.get(name, 0) for name in order for _ in chunks[name]]
        return ForwardBatch(
            token_ids=torch.tensor([token for name in order for token in chunks[name]]),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            num_decodes=len(decodes),
            tables=torch.tensor(tables, dtype=torch.int32),
            starts=torch.tensor([*range(len(decodes)), *bounds], dtype=torch.int32),
            lengths=torch.tensor([self._lens[name] for name in order], dtype=torch.int32),
            extend_starts=tuple(bounds),
            extend_lens=tuple(self._lens[name] for name in extends),
            logit_index=torch.arange(len(positions)),
            adapters=RowGroups.of(np.array(adapters, np.int32), torch.device("cpu")),
        )
