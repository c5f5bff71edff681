"""The embedding and output head of a target that torch runs, for a draft head, which has neither.

A rank holds its share of both. A draft head runs on rank 0 alone, so with several ranks it gets its
own copy of what it uses.
"""

from __future__ import annotations

import torch

from remora.configs.planning.plan import EnginePlan
from remora.engine.layers.embedding import Embedding, Head
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import EMBEDDING, HEAD, DecoderModel
from remora.engine.models.load import TIED_HEAD, open_weights
from remora.engine.parallel.shard import Axis
from remora.engine.spec.heads.torch_pass import Ends
from remora.engine.weights.loader import Filling, whole_shapes


def target_ends(model: DecoderModel, plan: EnginePlan) -> Ends:
    """Return the ends of a loaded model; with several ranks, read again from its files.

    model:  rank 0's share
    Raises ConfigError.
    """
    embedding, head = model.embedding, model.head
    if plan.num_ranks > 1:
        embedding, head = _loaded(model.config, plan, model.dtype)
    return Ends(embedding=embedding, scale=model.embedding_scale, head=head)


def _loaded(config: DecoderConfig, plan: EnginePlan, dtype: torch.dtype) -> tuple[Embedding, Head]:
    vocabulary, size = Axis.whole(config.vocab_size), config.hidden_size
    embedding = Embedding(vocabulary, size, dtype=dtype, device=plan.device)
    is_tied = config.head.tied
    head = Head(
        EMBEDDING if is_tied else HEAD,
        vocabulary,
        size,
        tied=embedding if is_tied else None,
        bias=config.head.bias,
        scale=config.head.scale,
        soft_cap=config.head.soft_cap,
        dtype=dtype,
        device=plan.device,
    )
    whole = DecoderModel(config, dtype=dtype, device="meta")
    source = open_weights(
        plan.model_path, plan.load_format, device=plan.device, loading=plan.loading
    )
    with Filling(
        dict(embedding.tensors(EMBEDDING)) | dict(head.tensors()),
        source,
        expected=whole_shapes(whole.tensors()),
        unused=TIED_HEAD if is_tied else frozenset(),
        show_progress=False,
        num_threads=plan.loading.num_threads,
    ):
        pass
    return embedding, head
