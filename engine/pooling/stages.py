"""The layers after pooling, as data from checkpoints."""

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

    name:        of its tensors, without `.weight`
    activation:  a key of heads.ACTIVATIONS, or none
    folder:      subfolder with its weights; None = they are in the model's files
    is_norm:     a LayerNorm of size `outputs` instead of a linear layer
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
        """Return the number of its parameters."""
        return self.outputs * ((1 if self.is_norm else self.inputs) + self.bias)


def torch_activation(name: str, where: str) -> str:
    """Return the activation of that torch module. Raises ConfigError if it is not supported."""
    found = _TORCH_ACTIVATIONS.get(name.rsplit(".", 1)[-1].removesuffix("()"))
    if found is None:
        raise ConfigError(
            f"{where} has the activation {name}; supported: {', '.join(_TORCH_ACTIVATIONS)}."
        )
    return found
