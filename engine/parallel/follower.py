"""A rank that follows rank 0: the same rows and forward passes, without sampling.

Knows nothing of scheduling, sampling or placement.
"""

from __future__ import annotations

import threading
import time

import torch

from remora.configs.errors import EngineError
from remora.engine.parallel.channel import Channel
from remora.engine.parallel.group import Group
from remora.engine.parallel.shared_tokens import SharedTokens
from remora.engine.parallel.wire import Failed, JoinGroup, Logits, Message, Step
from remora.engine.protocols import AdapterPool, ForwardPass
from remora.engine.runner.inputs import InputBatch
from remora.engine.sampling.token_sampler import TokenSampler


class Follower:
    """Rows and forward pass of a rank other than 0.

    adapters:                its adapter pool; None = no slots
    shared_tokens:           receives rank 0's tokens before the host knows them; None = steps do
                             not need them
    num_steps, step_time_s:  totals so far
    """

    def __init__(
        self,
        forward: ForwardPass,
        table: InputBatch,
        channel: Channel,
        group: Group,
        adapters: AdapterPool | None = None,
        *,
        shared_tokens: SharedTokens | None = None,
    ) -> None:
        self.adapters = adapters
        self.num_steps = 0
        self.step_time_s = 0.0
        self._forward = forward
        self.table = table
        self._channel = channel
        self._group = group
        self._shared_tokens = shared_tokens
        self._between_steps = threading.Lock()

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass in use."""
        return self._forward

    @property
    def group(self) -> Group:
        """The group of this rank."""
        return self._group

    def exchange(self, forward: ForwardPass, token_sampler: TokenSampler) -> None:
        """Replace the forward pass after the message in progress, from any thread.

        token_sampler:  not used, because rank 0 samples
        """
        with self._between_steps:
            self._forward.close()
            self._forward = forward

    def run(self) -> None:
        """Handle rank 0's messages until it is gone. Reports an error to rank 0 and raises it."""
        try:
            while (message := self._channel.receive()) is not None:
                with self._between_steps:
                    self._handle(message)
        except Exception as error:
            reason = str(error) or type(error).__name__
            self._channel.fail(Failed(reason, second_hand=isinstance(error, EngineError)))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection and leave the group, which ends `run`."""
        self._channel.close()
        self._group.close()
        self._forward.close()

    @torch.inference_mode()
    def _handle(self, message: Message) -> None:
        match message:
            case Step():
                started = time.perf_counter()
                self._step(message)
                self.num_steps += 1
                self.step_time_s += time.perf_counter() - started
            case Logits():
                self._forward.logits(message.first, message.last)
            case Failed() | JoinGroup():
                raise ValueError(f"unexpected message from rank 0: {message}")

    def _step(self, step: Step) -> None:
        self.table.add_runs(step.rows, step.token_ids)  # several of a row, if steps overlap
        if self.adapters is not None:
            for load in step.plan.loads:
                self.adapters.install(load.slot, load.lora_id)
        for init in step.plan.added:
            self.table.start(init)
        if step.plan.moves is not None:
            self.table.move(step.plan.moves)
        if len(step.plan.page_rows):
            plan = step.plan
            self.table.add_pages(plan.page_rows, plan.page_ids, plan.window_ids)
        self._forward.forward(self.table.inputs(step.plan))
        sampled = step.plan.rows[step.plan.samples]
        if self._shared_tokens is not None and len(sampled):
            self._shared_tokens.receive(len(sampled))
