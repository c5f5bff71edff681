"""Attention backends by name: what each supports, and how it is made.

A backend that does not support a model, its pages or the GPU is refused by name, and the error
lists backends that do. Knows the packages' names; imports one only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch

from remora.configs.errors import ConfigError
from remora.configs.machine import attention_libraries
from remora.configs.planning.plan import EnginePlan
from remora.engine.attention.flash_attention import (
    FlashAttention,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    PagedCall,
    TorchVarlen,
)
from remora.engine.attention.flashinfer_backend import FlashInferAttention, workspace_bytes
from remora.engine.models.config import DecoderConfig
from remora.engine.protocols import AttentionBackend

ALIBI, CHUNKS, SINKS, CAPS, WINDOWS, LATENTS = (
    "ALiBi",
    "attention chunks",
    "attention sinks",
    "soft caps",
    "sliding windows",
    "latent attention",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model, its pages and the GPU demand of a backend.

    features:    of the above
    capability:  major compute capability of the GPU; None = unknown
    """

    features: frozenset[str]
    head_dim: int
    dtype: torch.dtype
    page_size: int
    capability: int | None

    @classmethod
    def of(
        cls, config: DecoderConfig, dtype: torch.dtype, page_size: int, capability: int | None
    ) -> Needs:
        """Return those of a model."""
        attention, layers = config.attention, config.layers
        features = {
            ALIBI: attention.alibi is not None,
            CHUNKS: any(layer.chunked for layer in layers),
            SINKS: attention.sinks,
            CAPS: attention.soft_cap is not None,
            WINDOWS: any(layer.window is not None for layer in layers),
            LATENTS: attention.latent is not None,
        }
        return cls(
            features=frozenset(name for name, is_used in features.items() if is_used),
            head_dim=config.head_dim,
            dtype=dtype,
            page_size=page_size,
            capability=capability,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a backend supports.

    head_dims:     that it has kernels for
    half_only:     whether it has none for float32
    page_tokens:   of which a page's tokens must be a multiple
    capabilities:  major compute capabilities of GPUs that it has kernels for
    distribution:  installed package that the start banner takes its version from
    """

    features: frozenset[str]
    head_dims: range | tuple[int, ...] = range(1, 1025)
    half_only: bool = True
    page_tokens: int = 1
    capabilities: range = range(7, 100)
    distribution: str = ""


_MULTIPLES_OF_8 = range(8, 257, 8)
SUPPORT: Mapping[str, Support] = MappingProxyType(
    {
        "triton": Support(
            features=frozenset({SINKS, CAPS, WINDOWS, LATENTS}),
            half_only=False,
            distribution="triton",
        ),
        "flashinfer": Support(
            features=frozenset({CAPS, WINDOWS}),
            head_dims=(64, 128, 256),
            capabilities=range(8, 100),
            distribution="flashinfer-python",
        ),
        "fa4": Support(
            features=frozenset({SINKS, CAPS, WINDOWS}),
            head_dims=_MULTIPLES_OF_8,
            capabilities=range(9, 12),
            distribution="flash-attn-4",
        ),
        "fa3": Support(
            features=frozenset({CAPS, WINDOWS}),
            head_dims=_MULTIPLES_OF_8,
            capabilities=range(8, 10),
            distribution="flash_attn_3",
        ),
        "fa2": Support(
            features=frozenset({ALIBI, CAPS, WINDOWS}),
            head_dims=_MULTIPLES_OF_8,
            page_tokens=256,
            capabilities=range(8, 100),
            distribution="flash-attn",
        ),
        "torch_varlen": Support(
            features=frozenset({WINDOWS}),
            head_dims=_MULTIPLES_OF_8,
            page_tokens=256,
            capabilities=range(8, 100),
            distribution="torch",
        ),
        "torch": Support(
            features=frozenset({ALIBI, CHUNKS, SINKS, CAPS, WINDOWS, LATENTS}),
            half_only=False,
            distribution="torch",
        ),
    }
)


def unsupported(name: str, needs: Needs) -> list[str]:
    """Return what a backend lacks; [] = it can be used."""
    return list(_lacks(SUPPORT[name], needs))


def _lacks(support: Support, needs: Needs) -> Iterator[str]:
    yield from sorted(needs.features - support.features)
    if needs.head_dim not in support.head_dims:
        yield f"heads of {needs.head_dim} values"
    if support.half_only and needs.dtype not in (torch.float16, torch.bfloat16):
        yield str(needs.dtype).removeprefix("torch.")
    if needs.page_size % support.page_tokens:
        yield (
            f"pages of {needs.page_size} tokens (engine.page_size; it needs multiples of "
            f"{support.page_tokens})"
        )
    if needs.capability is not None and needs.capability not in support.capabilities:
        yield f"GPUs of compute capability {needs.capability}"


def check_supported(name: str, needs: Needs) -> None:
    """Raise ConfigError if a backend lacks something, naming installed ones that lack nothing."""
    lacking = unsupported(name, needs)
    if not lacking:
        return
    installed = ("triton", *attention_libraries(), "torch")
    others = [other for other in SUPPORT if other in installed and not unsupported(other, needs)]
    raise ConfigError(
        f"engine.attention_backend = {name}: it does not support {', '.join(lacking)}; set it to "
        + " or ".join(others)
    )


def describe(name: str) -> str:
    """Return a backend's name, and its package's version if that is installed."""
    try:
        return f"{name} {metadata.version(SUPPORT[name].distribution)}"
    except metadata.PackageNotFoundError:
        return name


def extra_bytes(plan: EnginePlan, config: DecoderConfig) -> int:
    """Return the device memory that a backend holds besides KV and activations."""
    if plan.on_device.attention_backend != "flashinfer":
        return 0
    num_kinds = len({layer.window for layer in config.layers})
    return workspace_bytes(len(plan.on_device.graph_sizes), num_kinds)


def capability(device: str) -> int | None:
    """Return the major compute capability of a device, if it is a GPU of this machine."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()[0]


def make_backend(name: str, plan: EnginePlan, num_heads: int) -> Callable[..., AttentionBackend]:
    """Return what makes a library's backend of some KV pages. Raises ConfigError.

    num_heads:  of this rank's queries
    """
    try:
        if name == "flashinfer":
            return partial(
                FlashInferAttention,
                import_module("flashinfer"),
                num_heads=num_heads,
                max_rows=plan.max_running_requests,
                max_tokens=plan.max_sequence_tokens,
            )
        return partial(FlashAttention, _CALLS[name](plan))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"engine.attention_backend = {name}: its package cannot be used ({error}); set the key "
            "to auto"
        ) from error


def _flash_attention_2(plan: EnginePlan) -> PagedCall:
    package = import_module("flash_attn")
    return FlashAttention2(package.flash_attn_with_kvcache, package.flash_attn_varlen_func)


def _flash_attention_3(plan: EnginePlan) -> PagedCall:
    return FlashAttention3(import_module("flash_attn_interface").flash_attn_with_kvcache)


def _flash_attention_4(plan: EnginePlan) -> PagedCall:
    varlen = import_module("flash_attn.cute").flash_attn_varlen_func
    return FlashAttention4(varlen, splits=capability(plan.device) in (10, 11))


def _torch_varlen(plan: EnginePlan) -> PagedCall:
    varlen: Any = import_module("torch.nn.attention.varlen").varlen_attn
    if not {"block_table", "seqused_k"} <= signature(varlen).parameters.keys():
        raise ImportError(f"torch {torch.__version__} has no pages in varlen_attn")
    return TorchVarlen(varlen)


_CALLS: Mapping[str, Callable[[EnginePlan], PagedCall]] = {
    "fa2": _flash_attention_2,
    "fa3": _flash_attention_3,
    "fa4": _flash_attention_4,
    "torch_varlen": _torch_varlen,
}
