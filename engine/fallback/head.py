"""Splits a causal model of transformers into hidden states and logits.

Its class computes both in one call and applies its own scales and caps to logits. The whole model
is therefore called for the logits, with the hidden states as its decoder's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from remora.configs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ends:
    """The parts of a causal model.

    decoder:  token ids and positions to hidden states
    whole:    hidden states, as `inputs_embeds`, to logits; without its decoder
    head:     the projection within it
    """

    decoder: Any
    whole: Any
    head: nn.Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, vocabulary] from hidden states [R, hidden_size]."""
        made: Tensor = self.whole(inputs_embeds=hidden[None], use_cache=False).logits
        return made[0]


class _Answer:
    """A decoder's output, reduced to the last hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Replaces a decoder that has run already."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Answer:
        """Return the given hidden states."""
        return _Answer(inputs_embeds)


def split_ends(model: Any) -> Ends:
    """Split a causal model. Raises ConfigError."""
    decoder = model.get_decoder()
    if decoder is model or isinstance(decoder, nn.Linear):
        decoder = getattr(model, model.base_model_prefix, None)
    head = model.get_output_embeddings()
    places = [name for name, module in model.named_modules() if module is decoder]
    if decoder is None or not places or not places[0]:
        raise ConfigError("it has no decoder of its own")
    if not isinstance(head, nn.Linear):
        raise ConfigError("its head is no linear layer")
    parent, _, name = places[0].rpartition(".")
    setattr(model.get_submodule(parent), name, _Given())
    return Ends(decoder, model, head)
