"""Layers that stand behind pooling, as checkpoints describe them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError

_TORCH_ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A layer after pooling.

    name:      of its tensors, without `.weight`
    folder:    under the checkpoint's, where its own file is; None = they are with the model's
    is_norm:   a norm, and no product; `outputs` are its size then
    activation: of heads.ACTIVATIONS, or none
    """

    name: str
    outputs: int
    inputs: int
    bias: bool = True
    activation: str = "none"
    folder: str | None = None
    is_norm: bool = False
    eps: float = 1e-5

    @property
    def num_parameters(self) -> int:
        """Return how many numbers its weights have."""
        return self.outputs * ((1 if self.is_norm else self.inputs) + self.bias)


def torch_activation(name: str, where: str) -> str:
    """Return the function that a module of torch computes. Raises ConfigError."""
    found = _TORCH_ACTIVATIONS.get(name.rsplit(".", 1)[-1].removesuffix("()"))
    if found is None:
        raise ConfigError(
            f"{where} has the activation {name}; known are {', '.join(_TORCH_ACTIVATIONS)}."
        )
    return found
