"""How large workloads are made, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass

from remora.deployments.bench.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the workloads are made; None = as they are."""

    requests: int | None = None
    inputs: int | None = None
    outputs: int | None = None

    def of(self, workload: Workload) -> Workload:
        """Return the workload in this size."""
        return workload.resized(self.requests, self.inputs, self.outputs)

    def options(self) -> list[str]:
        """Return the size as options of our command line."""
        given = {"--requests": self.requests, "--input": self.inputs, "--output": self.outputs}
        return [text for name, value in given.items() if value for text in (name, str(value))]
