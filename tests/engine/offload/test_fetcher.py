"""Layers read their own weights, whatever the order in which a device's two streams are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.engine.offload.fetcher import LayerFetcher
from remora.engine.offload.streams import CopyStreams, CudaCopies, HostCopies, copies_to
from tests.engine.offload.simulated import CPU, SimulatedCopies, SimulatedEvent

SEEDS = st.integers(0, 2**32)
EAGERNESS = st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0])


def make_layers(number: int, sizes: list[int]) -> list[list[Tensor]]:
    """Make layers of two parts, each with a value of its own."""
    return [
        [
            torch.full((part,), layer + 1, dtype=torch.uint8)
            for part in (sizes[layer % len(sizes)], 2)
        ]
        for layer in range(number)
    ]


def run_passes(
    streams: SimulatedCopies, layers: list[list[Tensor]], num_ahead: int, ends: list[int]
) -> None:
    """Launch passes, of which some end early, as after an error; then let the device work."""
    fetcher = LayerFetcher(layers, num_ahead, streams)
    for end in ends:
        fetcher.begin()
        for layer in range(min(end, len(layers))):
            fetcher.acquire(layer)
            streams.use(fetcher.buffer(layer), torch.cat(layers[layer]))
            fetcher.release(layer)
    streams.run()


@given(
    number=st.integers(1, 7),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    num_ahead=st.integers(0, 5),
    ends=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=SEEDS,
    eagerness=EAGERNESS,
)
def test_no_layer_reads_weights_of_another_or_half_of_its_own(
    number: int, sizes: list[int], num_ahead: int, ends: list[int], seed: int, eagerness: float
) -> None:
    run_passes(SimulatedCopies(seed, eagerness), make_layers(number, sizes), num_ahead, ends)


class Hasty(SimulatedCopies):
    """Copies do not wait for the buffer to be unused."""

    def copy(self, target: Tensor, sources: Any, *, after: Any, done: Any) -> None:
        super().copy(target, sources, after=SimulatedEvent(), done=done)


class Careless(SimulatedCopies):
    """Layers do not wait for their copies."""

    def wait(self, event: SimulatedEvent) -> None:
        pass


@pytest.mark.parametrize("kind", [Hasty, Careless])
def test_the_simulation_notices_missing_waits(kind: type[SimulatedCopies]) -> None:
    eagerness = 1.0 if kind is Hasty else 0.0
    with pytest.raises(AssertionError):
        run_passes(kind(0, eagerness), make_layers(5, [4]), 2, [5, 5])


class Noted(HostCopies):
    """Notes what the host launches."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.launched: list[str] = []
        self.events: list[dict[str, str]] = []

    def event(self) -> dict[str, str]:
        return {}

    def record(self, event: dict[str, str]) -> None:
        event["after"] = self.launched[-1] if self.launched else "nothing"

    def copy(self, target: Tensor, sources: Any, *, after: Any, done: Any) -> None:
        layer = int(sources[0][0]) - 1
        self.launched.append(f"copy {layer} after {after['after']}")
        done["copy"] = str(layer)

    def wait(self, event: dict[str, str]) -> None:
        self.launched.append(f"wait for {event['copy']}")


@pytest.mark.parametrize(
    ("num_ahead", "expected"),
    [
        (0, [
            "copy 0 after nothing", "wait for 0", "run 0",
            "copy 1 after run 0", "wait for 1", "run 1",
            "copy 2 after run 1", "wait for 2", "run 2",
        ]),
        (1, [
            "copy 0 after nothing", "wait for 0", "run 0",
            "copy 1 after run 0", "wait for 1", "run 1",
            "copy 2 after run 1", "wait for 2", "run 2",
        ]),
        (2, [
            "copy 0 after nothing", "copy 1 after copy 0 after nothing", "wait for 0", "run 0",
            "copy 2 after run 0", "wait for 1", "run 1", "wait for 2", "run 2",
        ]),
    ],
)  # fmt: skip
def test_copies_begin_as_many_layers_ahead_as_there_are_buffers(
    num_ahead: int, expected: list[str]
) -> None:
    streams = Noted()
    fetcher = LayerFetcher(make_layers(3, [4]), num_ahead, streams)

    fetcher.begin()
    for layer in range(3):
        fetcher.acquire(layer)
        streams.launched.append(f"run {layer}")
        fetcher.release(layer)

    assert streams.launched == expected
    assert len(fetcher.buffers) == max(1, num_ahead)


def test_a_buffer_has_the_size_of_the_largest_of_its_layers() -> None:
    layers = make_layers(5, [7, 3, 5])

    fetcher = LayerFetcher(layers, 2, HostCopies(CPU))

    assert [len(buffer) for buffer in fetcher.buffers] == [9, 9]
    assert [len(buffer) for buffer in LayerFetcher(layers, 3, HostCopies(CPU)).buffers] == [9, 5, 7]


class FakeCuda:
    """torch.cuda's streams and events, of which it notes the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "steps"
        fake = self

        class Event:
            def record(self) -> None:
                fake.calls.append(f"{fake.current}: record")

            def wait(self) -> None:
                fake.calls.append(f"{fake.current}: wait")

        @contextmanager
        def on_stream(stream: str) -> Iterator[None]:
            before, fake.current = fake.current, stream
            yield
            fake.current = before

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.Stream", lambda: "copies")
        monkeypatch.setattr("torch.cuda.stream", on_stream)

    def copying(self, target: Tensor, sources: Any) -> None:
        self.calls.append(f"{self.current}: copy")


def test_a_gpu_copies_on_a_stream_of_its_own_between_two_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr("remora.engine.offload.streams.copy_parts", cuda.copying)
    streams: CopyStreams = copies_to(torch.device("cuda"))
    unused, copied = streams.event(), streams.event()

    streams.record(unused)
    streams.copy(torch.empty(1), [torch.empty(1)], after=unused, done=copied)
    streams.wait(copied)

    assert isinstance(streams, CudaCopies)
    assert cuda.calls == [
        "steps: record",
        "copies: wait",
        "copies: copy",
        "copies: record",
        "steps: wait",
    ]
