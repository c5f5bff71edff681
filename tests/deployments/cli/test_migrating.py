"""docs/migrating.md: its keys, commands and our metrics exist (`documented` runs the commands)."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from remora.configs.schema import ServeConfig
from remora.deployments.cli.main import app
from tests.deployments.fakes import FakeServer, make_client

PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
SPECULATIVE = {"remora_draft_tokens_total", "remora_accepted_drafts_total"}


def test_keys_exist() -> None:
    sections = {name: field.annotation for name, field in ServeConfig.model_fields.items()}
    for section, key in re.findall(r"`(?:--set )?([a-z]+)\.([a-z_]+)(?:=[^`]*|: [^`]*)?`", PAGE):
        if section in sections:
            assert key in getattr(sections[section], "model_fields", {}), f"{section}.{key}"


def test_our_commands_exist() -> None:
    known = getattr(get_command(app), "commands", {})
    for name in re.findall(r"`remora ([a-z]+)", PAGE):
        assert name in known


async def test_our_metrics_exist() -> None:
    async with make_client(FakeServer()) as client:
        text = (await client.get("/metrics")).text
    named = set(re.findall(r"`(remora_[a-z0-9_]+)`", PAGE))
    assert named
    for name in named - SPECULATIVE:
        assert f"# TYPE {name} " in text, name
