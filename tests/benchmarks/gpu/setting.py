"""What a worker is given: the device, the device's bounds, and the options of its stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tests.benchmarks.gpu.bounds import Bounds

if TYPE_CHECKING:  # the process that starts workers runs without it
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting of a stage.

    device:   cuda, or cpu: everything is tiny then, kernels are interpreted, and times mean nothing
    work:     the folder of files for the tar
    bounds:   None = not measured
    options:  of the stage
    """

    device: str
    work: str
    bounds: Bounds | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, written: str) -> Setting:
        """Return what `written` has written."""
        fields = json.loads(written)
        bounds = fields.pop("bounds")
        return cls(bounds=None if bounds is None else Bounds(**bounds), **fields)

    def written(self) -> str:
        """Return it as one word, for a command line."""
        return json.dumps(asdict(self))

    @property
    def is_tiny(self) -> bool:
        """Whether a CPU stands in for the GPU."""
        return self.device == "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors."""
        import torch

        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The format of activations; Triton's interpreter does not multiply bfloat16."""
        import torch

        return torch.float16 if self.is_tiny else torch.bfloat16
