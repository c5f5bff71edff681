"""An engine in its own thread, which decodes on a simulated device."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from remora.configs.errors import EngineError
from remora.configs.planning.graph_sizes import graph_sizes, prompt_sizes
from remora.configs.planning.plan import EnginePlan
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.graphs.device_forward import DeviceForward, StepLimits
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.kv.pages import pages_needed
from remora.engine.loop import EngineLoop
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.types import Request, SamplingParams, SequenceOutput
from tests.engine.fakes import make_plan
from tests.engine.simulated.device import VOCAB, HostClock, Mark, SimulatedDevice, SimulatedModel
from tests.engine.simulated.roofline import Roofline

TIMEOUT_S = 60.0
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
GREEDY: dict[str, Any] = {"temperature": 0.0}


def simulated_plan(num_rows: int, chunk_tokens: int = 2048) -> EnginePlan:
    """Return the plan of a GPU's engine, with room for all rows."""
    return make_plan(
        page_size=16,
        num_pages=num_rows * 160 + 16,
        max_model_len=2048,
        max_running_requests=num_rows,
        max_step_tokens=chunk_tokens + num_rows,
        prefill_chunk_tokens=chunk_tokens,
        max_queued_requests=num_rows,
    )


@dataclass(slots=True)
class Simulation:
    """An engine on a simulated device.

    device:  of its runner
    engine:  not yet stepped, without requests
    """

    device: SimulatedDevice
    engine: Engine
    outputs: list[SequenceOutput] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        shape: dict[str, Any],
        num_rows: int,
        clock: HostClock | None = None,
        *,
        chunk_tokens: int = 2048,
        captures_prompts: bool = False,
    ) -> Simulation:
        """Build one as `engine/launch.py` builds it for a GPU.

        chunk_tokens:  most tokens of prompts in a step
        """
        plan = simulated_plan(num_rows, chunk_tokens)
        device = SimulatedDevice(Roofline.of(shape), clock)
        limits = StepLimits(
            max_rows=num_rows,
            max_tokens=plan.max_step_tokens,
            max_pages=pages_needed(plan.max_sequence_tokens, plan.page_size),
        )
        forward = DeviceForward(SimulatedModel(device), _no_attention(), limits, device)
        sizes = prompt_sizes(plan.max_step_tokens) if captures_prompts else ()
        with device.choosing():
            forward.capture(device, graph_sizes(most=num_rows), prompt_sizes=sizes)
        sampler = Sampler(
            max_rows=num_rows,
            vocab_size=VOCAB,
            eos_token_ids=(0,),
            token_sampler=DeviceTokenSampler(device, num_rows, forward.sampling),
        )
        table = InputBatch(
            max_rows=num_rows, max_tokens=plan.max_sequence_tokens, page_size=plan.page_size
        )
        runner = LocalRunner(forward, sampler, table, device_tokens=forward)
        engine = Engine(plan, runner, overlap=True, eos_token_ids=(0,), vocab_size=VOCAB)
        return cls(device, engine)

    def add_requests(self, count: int, num_outputs: int, **sampling: Any) -> None:
        """Add requests to the engine."""
        for request in self.requests(count, num_outputs, **sampling):
            self.engine.add(request)

    def requests(self, count: int, num_outputs: int, **sampling: Any) -> Iterator[Request]:
        """Make requests whose contexts are about the simulated one in the middle of decoding."""
        numbers = random.Random(0)
        longest = int(self.device.roofline.figures["device"]["context"])
        params = SamplingParams(max_tokens=num_outputs, ignore_eos=True, **sampling)
        for number in range(count):
            length = numbers.randrange(longest - 256, longest)
            prompt = [numbers.randrange(1, VOCAB) for _ in range(length)]
            yield Request(request_id=str(number), prompt_ids=prompt, sampling=params)

    def decode(self, num_rows: int, num_steps: int, **sampling: Any) -> list[Mark]:
        """Run the engine's loop in its thread; returns a mark for each step with all rows."""
        self.add_requests(num_rows, num_steps + num_rows + 8, **sampling)
        failures: list[EngineError] = []
        enough = threading.Event()

        def deliver(outputs: list[SequenceOutput]) -> None:
            if len(self.device.marks) > num_steps:
                enough.set()

        def on_failure(error: EngineError) -> None:
            failures.append(error)
            enough.set()

        loop = EngineLoop(
            self.engine, deliver=deliver, on_failure=on_failure, step_timeout_s=TIMEOUT_S
        )
        with self.device.choosing():
            loop.start()
            is_done = enough.wait(TIMEOUT_S)
            loop.close()
        assert is_done, failures
        assert str(failures[0]) == "The engine was closed."
        return self.device.marks[1 : num_steps + 1]

    def extend(self, num_rows: int, num_steps: int, **sampling: Any) -> PromptWindow:
        """Step the engine while prompts are computed in chunks, beside the rows that decode."""
        self.add_requests(num_rows, 500, **sampling)
        device = self.device
        with device.choosing():
            for _ in range(4):
                self.engine.step()
            started_s, idle_s, num_launches = device.free_at, device.idle_s, device.num_launches
            for _ in range(num_steps):
                self.engine.step()
        seconds = device.free_at - started_s
        return PromptWindow(
            gap=(device.idle_s - idle_s) / seconds,
            step_s=seconds / num_steps,
            num_launches=(device.num_launches - num_launches) / num_steps,
        )

    async def serve(self, num_rows: int, num_steps: int, **sampling: Any) -> list[Mark]:
        """Do what `decode` does with a client, whose event loop runs in this thread."""
        client = LocalEngineClient(self.engine, None)

        async def read(request: Request) -> None:
            async for _ in client.generate(request):
                pass

        with self.device.choosing():
            requests = self.requests(num_rows, num_steps + num_rows + 8, **sampling)
            readers = [asyncio.create_task(read(request)) for request in requests]
            while len(self.device.marks) <= num_steps:
                await asyncio.sleep(0.05)
            client.close()
            await asyncio.gather(*readers, return_exceptions=True)
        return self.device.marks[1 : num_steps + 1]


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """Some steps with prompts: share of time, and seconds or counts per step."""

    gap: float
    step_s: float
    num_launches: float


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps in a row: shares of time, and seconds or counts per step."""

    gap: float
    host_s: float
    step_s: float
    num_uploads: float

    @classmethod
    def between(cls, first: Mark, last: Mark, num_steps: int) -> Window:
        seconds = last.start_s - first.start_s
        return cls(
            gap=(last.idle_s - first.idle_s) / seconds,
            host_s=(last.host_s - first.host_s) / num_steps,
            step_s=seconds / num_steps,
            num_uploads=(last.num_uploads - first.num_uploads) / num_steps,
        )


def windows(marks: list[Mark], size: int) -> list[Window]:
    """Cut the steps into windows."""
    return [Window.between(first, last, size) for first, last in pairwise(marks[::size])]


def median(found: list[Window], value: Callable[[Window], float]) -> float:
    """Return the median over windows."""
    return statistics.median(map(value, found))


def _no_attention() -> Any:
    return None
