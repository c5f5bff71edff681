"""`remora pull`: download models, so that serving them later needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remora.configs.planning.kv_budget import human_bytes
from remora.deployments.cli.options import Settings, read_overrides
from remora.deployments.cli.target import read_models
from remora.deployments.cli.terminal import answer


def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            help="OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME:Q4_K_M of the Hugging Face hub, a "
            "URL such as s3://BUCKET/PATH, a built-in name, or a Serve config file."
        ),
    ],
    settings: Settings = None,
) -> None:
    """Download models, or a configuration's models, drafts and tokenizers, into the caches.

    Only the files that serving needs. An interrupted download continues.
    """
    from remora.engine.models.locate import locate_draft, locate_model, locate_tokenizer

    for name in names:
        for model in read_models([name], None, read_overrides(settings)).values():
            path = locate_model(model.config.model, show_progress=True)
            answer(f"{model.config.model.path}: {human_bytes(_size(path))} in {path}")
            draft = locate_draft(model.config, show_progress=True)
            if draft is not None:
                written = model.config.speculation.draft_model
                answer(f"{written}: {human_bytes(_size(draft))} in {draft}")
            locate_tokenizer(model.config.model, show_progress=True)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
