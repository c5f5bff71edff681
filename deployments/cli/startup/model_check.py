"""Check models as `remora doctor model` does before Ray starts, in a process of its own.

A model that cannot be served is found within seconds, and the server's own process stays without
torch. The process reads the args of an application from its input and writes its faults as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any, TypedDict

from remora.configs.errors import RemoraError
from remora.configs.load import parse_models
from remora.configs.schema import ServeConfig
from remora.deployments.cli.terminal import Failure

# `-P`: modules of the working directory do not replace packages.
_COMMAND = (sys.executable, "-P", "-m", "remora.deployments.cli.startup.model_check")


class Fault(TypedDict):
    """Why a model cannot be served. details: a traceback of an unexpected error, or empty."""

    text: str
    details: str


def check_models(args: Mapping[str, Any]) -> None:
    """Check every model of an application. Raises Failure with the faults, a line each or more.

    args:  of the application, in remora's keys
    """
    done = subprocess.run(_COMMAND, input=json.dumps(args), stdout=subprocess.PIPE, text=True)
    try:
        faults: list[Fault] = json.loads(done.stdout)
    except ValueError:
        raise Failure(
            f"checking the model failed: its process ended with code {done.returncode}"
        ) from None
    if faults:
        details = "\n".join(fault["details"] for fault in faults if fault["details"])
        raise Failure("\n".join(fault["text"] for fault in faults), details=details)


def faults_of(args: dict[str, Any]) -> list[Fault]:
    """Return why models of an application cannot be served; empty if all can."""
    found = []
    models = parse_models(args)
    for name, config in models.items():
        of_model = f"{name}: " if len(models) > 1 else ""
        try:
            texts = [(text, "") for text in _examine(config)]
        except RemoraError as error:
            texts = [(str(error), "")]
        except Exception as error:  # a boundary: files of a model can break any library
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            texts = [(f"model.path = {config.model.path}: {reason}", traceback.format_exc())]
        found += [Fault(text=f"{of_model}{text}", details=details) for text, details in texts]
    return found


def _examine(config: ServeConfig) -> list[str]:
    """Return the findings that must be fixed before a model can be served."""
    from remora.deployments.cli.doctor.findings import Level
    from remora.deployments.cli.doctor.model import NOT_SERVED, examine_model
    from remora.engine.launch import read_machine
    from remora.engine.models.locate import locate_model

    path = locate_model(config.model, with_weights=False)
    return [
        finding.text if finding.subject == NOT_SERVED else f"{finding.subject}: {finding.text}"
        for finding in examine_model(config, path, read_machine(config))
        if finding.level is Level.FIX
    ]


def main() -> None:
    """Read args of an application from the input, and write the faults of its models."""
    given = sys.stdin.read()
    output, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    json.dump(faults_of(json.loads(given)), output)


if __name__ == "__main__":
    main()
