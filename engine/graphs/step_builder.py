"""Builds native step programs (`step_program.py`) from decoders.

Layers whose weights are not loaded yet are loaded when they are packed. The residual stream is
float32; inputs of products are rounded to the program's format. `coverage.py` lists unsupported
models; `StepProgramBuilder._layer` shows a layer, part by part.

Legend: T tokens of a step, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from remora.configs.planning.memory_report import logit_rows
from remora.configs.planning.window_plan import WindowRoom
from remora.engine.graphs import step_norms
from remora.engine.graphs.operands import Operand, RowBuffers, allocate_floats
from remora.engine.graphs.step_experts import ExpertSteps
from remora.engine.graphs.step_latents import LatentSteps
from remora.engine.graphs.step_products import Products
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats, Weights
from remora.engine.layers.attention import growth_factors
from remora.engine.layers.experts import Experts
from remora.engine.layers.latent_attention import LatentAttention
from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.layers.norm import Norm
from remora.engine.models.config import DecoderConfig, ExpertsConfig, MLPConfig
from remora.engine.models.decoder import DecoderBlock, DecoderModel
from remora.engine.protocols import Fill, PackedStore, nothing_kept, nothing_left
from remora.engine.runner.inputs import InputBatch
from remora.kernels.cpu.buffers import Batch, PagedCache, Rows
from remora.kernels.cpu.experts import add_weighted
from remora.kernels.cpu.library import PANEL, Activation, Epilogue, Format, KvFormat, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.program import Program
from remora.kernels.memory import Arena

ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Limits of one step.

    num_pages:      of the KV pool, without the dump page 0
    max_positions:  tokens of the longest sequence
    max_drafts:     of a row in one step
    captures:       layers whose inputs the program keeps for drafts
    windows:        page pool of window layers, if they have their own
    kv_dtype:       of quantised K and V; None = the model's
    kv_skip_layers: with K and V in the model's format all the same
    kv_scales:      [num_layers, 2, num_kv_heads], static scales; None = each token has its own
    """

    max_tokens: int
    max_rows: int
    num_pages: int
    page_size: int
    max_positions: int
    windows: WindowRoom | None = None
    kv_dtype: torch.dtype | None = None
    kv_skip_layers: tuple[int, ...] = ()
    kv_scales: Tensor | None = None
    max_drafts: int = 0
    captures: tuple[int, ...] = ()


class StepProgramBuilder:
    """Packs a model's weights and adds its operations.

    Layers with adapter slots keep them: adapters that are loaded later apply at once. The packed
    weights replace the model's: it cannot run by itself after `build`.
    """

    def __init__(
        self,
        model: DecoderModel,
        team: Team,
        shape: StepShape,
        table: InputBatch,
        formats: WeightFormats,
    ) -> None:
        config = model.config
        self._model, self._config, self._team = model, config, team
        self._shape = shape
        self._formats = formats
        self._max_logits = logit_rows(shape.max_rows, shape.max_tokens, shape.max_drafts)
        self._weight_bytes = 0  # without the linear layers that `Weights` packs
        self._arena = Arena()
        batch = Batch(
            max_tokens=shape.max_tokens,
            max_rows=shape.max_rows,
            max_logits=self._max_logits,
            tables=torch.from_numpy(table.tables),
            window_tables=None
            if table.window_tables is None
            else torch.from_numpy(table.window_tables),
        )
        self._program = Program(team, batch)
        self._latent_steps: LatentSteps | None = None
        self._expert_steps: dict[ExpertsConfig, ExpertSteps] = {}
        self._places = self._allocate()
        positions = torch.arange(shape.max_positions)
        self._angles: list[tuple[Tensor, Tensor]] = []
        for rotary in model.rotaries:
            cosines, sines = rotary.angles(positions, torch.float32)
            self._angles.append((cosines.contiguous(), sines.contiguous()))
        growth = config.attention.growth
        self._growth = None if growth is None else growth_factors(growth, positions)

    def _allocate(self) -> list[tuple[PagedCache, int]]:
        """Allocate KV memory; returns each layer's cache and its index in it."""
        config, shape = self._config, self._shape
        windowed = (False,) * config.num_layers if shape.windows is None else shape.windows.layers
        kinds = [
            (is_windowed, layer in shape.kv_skip_layers)
            for layer, is_windowed in enumerate(windowed)
        ]
        members = {
            kind: [layer for layer, other in enumerate(kinds) if other == kind]
            for kind in dict.fromkeys(kinds)
        }
        caches = {kind: self._allocate_cache(layers, *kind) for kind, layers in members.items()}
        self._caches = tuple(caches.values())
        return [(caches[kind], members[kind].index(layer)) for layer, kind in enumerate(kinds)]

    def _allocate_cache(
        self, layers: Sequence[int], is_windowed: bool, is_skipped: bool
    ) -> PagedCache:
        """Allocate the memory of layers; `is_skipped`: with K and V in the model's format."""
        config, shape = self._config, self._shape
        num_pages = shape.num_pages
        if is_windowed:
            assert shape.windows is not None
            num_pages = shape.windows.num_pages
        scales = None if is_skipped else shape.kv_scales
        return PagedCache.allocate(
            self._team,
            num_layers=len(layers),
            num_pages=num_pages + 1,
            page_size=shape.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            format=Format.of(self._model.dtype),
            kv_format=KvFormat.of(None if is_skipped else shape.kv_dtype),
            is_windowed=is_windowed,
            static_scales=None if scales is None else scales[[*layers]],
        )

    def build(self, fill: Fill = nothing_left, store: PackedStore = nothing_kept) -> StepProgram:
        """Pack the model; call it once.

        fill:   loads the model's weights, block by block, unless they are loaded
        store:  keeps packed weights
        """
        model, program, config = self._model, self._program, self._config
        names, head = self._names(), model.head.linear
        weights = Weights(
            self._team, self._arena, names, fill, self._formats, head=head, store=store
        )
        self._weights = weights
        self._products = Products(program, weights, max(self._shape.max_tokens, self._max_logits))
        # `weights` loads these, or need not.
        held = {*self._of_experts(), *weights.unneeded()}
        held |= fill.quantised() & {*chain.from_iterable(names.values())}
        fill(model.outer_tensors().keys() - held)
        if head.bias is not None:
            head.bias *= config.head.scale
        weights.pack(head)  # before blocks fill the memory
        self._allocate_rows()
        program.embed(model.embedding.weight, self._stream)
        if model.embedding.adapters is not None:
            updates = self._products.updates(model.embedding.adapters)
            program.update_embedded(updates, self._stream)
        num_embedding = len(program)
        if model.positions is not None:
            program.embed(model.positions, self._stream, by_position=True)
        starts: list[int] = []
        for layer, block in enumerate(model.blocks):
            fill(model.block_tensors(layer).keys() - held)
            starts.append(len(program))
            self._layer(layer, block)
        head_start = len(program)
        logits = self._head()
        # After the head is packed, possibly from the same weight.
        scale = model.embedding_scale / config.block.residual_scale
        if scale != 1.0:
            model.embedding.weight.mul_(scale)
        return StepProgram(
            program,
            num_embedding=num_embedding,
            head_start=head_start,
            logits=logits[:, : model.vocab_size],
            stream=self._stream[:, : config.hidden_size],
            norm=self._norm_weights(model.norm),
            weight_bytes=weights.weight_bytes + self._weight_bytes,
            head=weights.pack(head),
            embedding=model.embedding.weight,
            pages=[cache.data for cache in self._caches if not cache.is_windowed],
            window_pages=[cache.data for cache in self._caches if cache.is_windowed],
            captures=[starts[layer] for layer in self._shape.captures],
            residual_scale=config.block.residual_scale,
            embedding_scale=scale,
        )

    def _allocate_rows(self) -> None:
        config = self._config
        self._stream = self._floats(config.hidden_size)
        self._normal = self._rows(config.hidden_size)
        heads = config.num_heads + 2 * config.num_kv_heads
        # Used in turn for q, k and v, and for outputs that pass a norm before they are added.
        self._made = self._floats(max(heads * config.head_dim, config.hidden_size) + PANEL)
        self._attended = self._rows(config.num_heads * config.head_dim)
        self._gated = self._rows(_dense_size(config))

    def _names(self) -> dict[Linear, tuple[str, ...]]:
        """Map the layers to the names of their weights, part by part."""
        model = self._model
        linears = [("", model.head.linear)]
        for layer, block in zip(model.layers, model.blocks, strict=True):
            linears += block.linears(f"model.layers.{layer}.")
        return {
            linear: tuple(f"{prefix}{part}.weight" for part in linear.parts)
            for prefix, linear in linears
        }

    def _of_experts(self) -> Iterator[str]:
        """Yield the names of the weights of routed experts."""
        for prefix, experts in self._model.experts():
            yield from chain.from_iterable(experts.weights(prefix))

    def _layer(self, layer: int, block: DecoderBlock) -> None:
        attention, mlp = block.attention, block.mlp
        reading, o_proj = attention.linears()[0], attention.o_proj
        if isinstance(mlp, Experts):
            attended = self._attend(layer, block, self._enter(block.attention_norm, reading))
            self._leave(attended, o_proj, block.attention_out_norm)
            self._through_experts(layer, block.mlp_norm, mlp)
            return
        is_parallel = self._config.block.parallel
        shares_norm = is_parallel and block.mlp_norm is None
        readers = (reading, mlp.gate_up_proj) if shares_norm else (reading,)

        hidden = self._enter(block.attention_norm, *readers)
        attended = self._attend(layer, block, hidden)
        if not is_parallel:
            self._leave(attended, o_proj, block.attention_out_norm)
        if not shares_norm:
            hidden = self._enter(block.mlp_norm, mlp.gate_up_proj)
        gated = self._feed_forward(self._config.layers[layer].mlp, mlp, hidden)
        if is_parallel:  # only now is the block's input no longer read
            self._leave(attended, o_proj, None)
        self._leave(gated, mlp.down_proj, block.mlp_out_norm)

    def _enter(self, norm: Norm | None, *linears: Linear) -> Operand:
        """Add a norm of the stream, if any; returns the input of `linears`."""
        if norm is None:
            stream, size = Rows.of(self._stream), self._config.hidden_size
            return Operand(written=stream, size=size, buffers=self._normal)
        normal = self._normal.operand(
            self._products.formats(*linears), in_floats=_have_adapters(linears)
        )
        self._program.norm(self._stream, self._norm_weights(norm), normal.written)
        return normal

    def _attend(self, layer: int, block: DecoderBlock, hidden: Operand) -> Operand:
        """Add attention up to its last product; returns the input of that product."""
        program, num_heads, attention = self._program, self._config.num_heads, block.attention
        cache, place = self._places[layer]
        cosines, sines = self._angles[block.rotary]
        if isinstance(attention, LatentAttention):
            steps = self._latent_steps = self._latent_steps or self._make_latent_steps()
            attended, num_bytes = steps.add(attention, hidden, cache, place, (cosines, sines))
            self._weight_bytes += num_bytes
            return attended
        self._products.add(hidden, attention.qkv_proj, self._made)
        attended = self._attended.operand(self._products.formats(attention.o_proj))
        program.rotate_and_store(
            self._made,
            cache,
            place,
            num_heads=num_heads,
            cosines=cosines,
            sines=sines,
            interleaved=attention.interleaved,
            query_factors=None if attention.growth is None else self._growth,
            norms=step_norms.of_heads(attention),
        )
        program.attend(
            self._made,
            cache,
            place,
            attended.written.values,
            num_heads=num_heads,
            scale=attention.spec.scale,
            window=attention.spec.window,
            chunked=attention.spec.chunked,
            soft_cap=attention.spec.soft_cap,
            sinks=attention.spec.sinks,
            slopes=attention.spec.slopes,
        )
        return attended

    def _make_latent_steps(self) -> LatentSteps:
        return LatentSteps(
            self._program,
            self._config,
            max_tokens=self._shape.max_tokens,
            plain=Format.of(self._model.dtype),
            arena=self._arena,
            products=self._products,
        )

    def _feed_forward(
        self, config: MLPConfig | ExpertsConfig, mlp: MLP, hidden: Operand
    ) -> Operand:
        """Add a feed-forward layer up to its last product; returns the input of that product."""
        assert isinstance(config, MLPConfig)
        formats = self._products.formats(mlp.down_proj)
        gated = self._gated.operand(formats, size=config.size)  # the buffer fits the widest layer
        self._products.add(
            hidden,
            mlp.gate_up_proj,
            gated.written.values,
            Epilogue.GATED if config.gated else Epilogue.STORE,
            activation=ACTIVATIONS[config.activation],
        )
        return gated

    def _through_experts(self, layer: int, norm: Norm | None, experts: Experts) -> None:
        """Add a layer of experts and shared experts, with its norm, to the stream."""
        assert norm is not None
        program, config, size = self._program, experts.config, self._config.hidden_size
        steps = self._steps_of(config)
        program.norm(self._stream, self._norm_weights(norm), steps.exact)
        hidden = Operand(written=steps.exact, size=size, buffers=self._normal)
        prefix = _mlp_prefix(self._model.layers[layer])
        self._weight_bytes += steps.add(experts, prefix, hidden, Rows.of(self._stream))
        shared = experts.shared
        if shared is None or config.shared is None:
            return
        gated = self._feed_forward(config.shared, shared, hidden)
        if experts.shared_gate is None:
            self._leave(gated, shared.down_proj, None)
            return
        gate = steps.pack(*experts.shared_gate.release(), Format.F32)
        self._weight_bytes += gate.num_bytes
        program.multiply(steps.exact, gate, steps.share, activation=Activation.SIGMOID)
        self._products.add(gated, shared.down_proj, self._made)
        add_weighted(program, self._made, size, steps.share, self._stream)

    def _steps_of(self, config: ExpertsConfig) -> ExpertSteps:
        if config not in self._expert_steps:
            self._expert_steps[config] = ExpertSteps(
                self._program,
                config,
                self._config.hidden_size,
                max_tokens=self._shape.max_tokens,
                arena=self._arena,
                products=self._products,
                weights=self._weights,
            )
        return self._expert_steps[config]

    def _leave(self, x: Operand, linear: Linear, norm: Norm | None) -> None:
        """Add a part's last product, normalised if it has a norm, to the stream."""
        if norm is None:
            self._products.add(x, linear, self._stream, Epilogue.ADD)
            return
        self._products.add(x, linear, self._made)
        weights = step_norms.of_rows(norm, residual_scale=1.0)
        self._program.norm(self._made, weights, Rows.of(self._stream), adds=True)

    def _head(self) -> Tensor:
        """Add the last norm and the head; returns the buffer of logits."""
        head, config = self._model.head.linear, self._config
        rows = self._rows(config.hidden_size, on_logits=True)
        normal = rows.operand(self._products.formats(head), in_floats=_have_adapters([head]))
        logits = self._floats(self._model.vocab_size, on_logits=True)
        weights = self._norm_weights(self._model.norm, factor=config.head.scale)
        self._program.norm(self._stream, weights, normal.written, on_logits=True)
        limit = config.head.soft_cap
        activation = Activation.LINEAR if limit is None else Activation.CAP
        self._products.add(normal, head, logits, activation=activation, limit=limit or 0.0)
        return logits

    def _norm_weights(self, norm: Norm, *, factor: float = 1.0) -> NormWeights:
        """Return a norm of the stored stream, which is divided by the residual scale.

        So the outputs of blocks need no factor.
        """
        scale = self._config.block.residual_scale
        return step_norms.of_rows(norm, residual_scale=scale, factor=factor)

    def _floats(self, size: int, *, on_logits: bool = False) -> Tensor:
        """Allocate [T or R, size] with room for the panels that products write."""
        return allocate_floats(self._num_rows(on_logits), size)

    def _rows(self, size: int, *, on_logits: bool = False) -> RowBuffers:
        return RowBuffers(self._team, self._num_rows(on_logits), size, on_logits=on_logits)

    def _num_rows(self, on_logits: bool) -> int:
        return self._max_logits if on_logits else self._shape.max_tokens


def _mlp_prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp."


def _have_adapters(linears: Iterable[Linear]) -> bool:
    return any(linear.adapters is not None for linear in linears)


def _dense_size(config: DecoderConfig) -> int:
    """Return the largest inner size of dense MLPs and shared experts; 1 if there are none."""
    mlps = (layer.mlp for layer in config.layers)
    dense = (mlp.shared if isinstance(mlp, ExpertsConfig) else mlp for mlp in mlps)
    return max((mlp.size for mlp in dense if mlp is not None), default=1)
