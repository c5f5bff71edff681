"""Finds out how a model of transformers attends, without weights.

The model is built on the meta device and runs once, and the arguments of its attentions are
recorded. Models whose attention the backend does not support are refused: masks that are neither
causal nor a window, position biases, heads of several shapes, layers with other state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.fallback.attention import STEP, Attended

PROBE = "remora_probe"
NUM_TOKENS = 4
MAX_LOOKED_AT = 2**17  # positions of a mask
# Arguments that attentions may have in addition to q, k and v; the mask implies `sliding_window`.
HARMLESS = {"position_ids", "use_cache", "cache_position", "dropout", "sliding_window"}


class _Mask:
    """A mask that a model created: the rule behind it instead of values."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        self._rule = rule

    def window(self, num_positions: int) -> int | None:
        """Return how many positions a query sees; None = all before it. Raises ConfigError."""
        last = num_positions - 1
        at = torch.tensor([0, 1, 2, last // 3, last])[:, None]
        keys, zero = torch.arange(num_positions)[None], torch.zeros((), dtype=torch.int64)
        seen: Any = self._rule(zero, zero, at, keys)
        if not isinstance(seen, Tensor) or seen.is_meta:
            raise ConfigError("a mask depends on more than positions")
        seen = seen.expand(len(at), num_positions)
        size = int(seen[-1].sum())
        if not torch.equal(seen, (keys <= at) & (keys > at - size)):
            raise ConfigError("a mask is neither causal nor a sliding window")
        return None if size == num_positions else size


class Probe:
    """Records the arguments of attentions."""

    def __init__(self, num_positions: int) -> None:
        self.found: list[Attended] = []
        self._num_positions = min(num_positions, MAX_LOOKED_AT)

    def note(self, module: Any, query: Tensor, key: Tensor, value: Tensor, said: Any) -> None:
        """Record one call. Raises ConfigError for what the backend does not support."""
        others = sorted(
            name
            for name, given in said.items()
            if given is not None
            and given is not False
            and name not in HARMLESS | {"scaling", "softcap", "s_aux", "is_causal", "mask"}
        )
        if others:
            raise ConfigError(f"attention is called with {', '.join(others)}")
        if key.shape[2] != query.shape[2]:
            raise ConfigError("queries attend to other tokens than those of the pass")
        head_dim = query.shape[3]
        scale = said.get("scaling")
        self.found.append(
            Attended(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=head_dim,
                value_dim=value.shape[3],
                scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
                window=self._window(module, said),
                soft_cap=said.get("softcap"),
                has_sinks=said.get("s_aux") is not None,
            )
        )

    def _window(self, module: Any, said: Any) -> int | None:
        mask = said.get("mask")
        if isinstance(mask, _Mask):
            return mask.window(self._num_positions)
        is_causal = said.get("is_causal", getattr(module, "is_causal", True))
        if is_causal is False:
            raise ConfigError("attention is not causal")
        if mask is not None and mask.dim() > 2:
            raise ConfigError("masks are made of values that only a run with weights would tell")
        window: int | None = said.get("sliding_window")
        return window


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **said: Any
) -> tuple[Tensor, None]:
    probe = said.pop(STEP, None)
    if probe is None:
        raise ConfigError("keywords of a pass do not reach attention")
    probe.note(module, query, key, value, {**said, "mask": attention_mask})
    batch, num_heads, num_tokens, _ = query.shape
    return query.new_empty((batch, num_tokens, num_heads, value.shape[3])), None


def _mask(*_args: Any, mask_function: Callable[..., Any], **_said: Any) -> _Mask:
    return _Mask(mask_function)


def register() -> str:
    """Register the recording function with transformers; returns its name there."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)
    return PROBE


@torch.inference_mode()
def look(decoder: Any, *, num_layers: int, num_positions: int) -> tuple[Attended, ...]:
    """Run a decoder on the meta device; return its attentions in order.

    num_layers:     the expected number
    num_positions:  longest sequence of the model
    Raises ConfigError with the reason why the backend cannot serve it.
    """
    probe = Probe(num_positions)
    tokens = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
    try:
        decoder(
            input_ids=tokens,
            position_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=False,
            **{STEP: probe},
        )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"a pass without weights fails ({type(error).__name__}: {str(error)[:200]}), so what "
            "it needs of its attention is not known"
        ) from error
    _check(probe.found, num_layers)
    return tuple(probe.found)


def _check(found: list[Attended], num_layers: int) -> None:
    if not found:
        raise ConfigError("nothing in it attends")
    if len(found) < num_layers:
        raise ConfigError(
            f"of its {num_layers} layers only {len(found)} attend; others keep other state"
        )
    shapes = {(each.num_kv_heads, each.head_dim) for each in found}
    if len(shapes) > 1:
        said = " and ".join(f"{heads} of {size}" for heads, size in sorted(shapes))
        raise ConfigError(f"its layers have KV heads of several shapes ({said})")
    if any(each.value_dim > each.head_dim for each in found):
        raise ConfigError("its values are longer than its keys")
