"""Go through the cases of one stage, and write what they find to the standard output.

    python tests/benchmarks/gpu/worker.py STAGE SETTING FIRST

STAGE names a module of `stages/`, whose `cases(setting)` returns the cases; SETTING is written by
`Setting.written`; FIRST is the number of the case to begin with. `workers.py` reads the output.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.gpu import workers
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.compiles import COMPILES
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting


def main(stage: str, written: str, first: int) -> None:
    setting = Setting.parse(written)
    # Triton reads it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1" if setting.is_tiny else "0"
    if setting.is_tiny:
        torch.set_num_threads(1)  # of matrices that small, more only wait for each other
    workers.begin(first, asdict(Row(model="", what=f"start of {stage}")))
    module = importlib.import_module(f"tests.benchmarks.gpu.stages.{stage}")
    if not setting.is_tiny:
        COMPILES.listen()
    cases: list[Case] = list(module.cases(setting))
    workers.announce(len(cases))
    for place, case in enumerate(cases[first:], first):
        workers.begin(place, asdict(case.about), case.seconds)
        measure(case)
        if not setting.is_tiny:
            gc.collect()
            torch.cuda.synchronize()  # raises where the GPU is lost: another worker goes on
            torch.cuda.empty_cache()
    about = Row(model="", what=f"kernels compiled by {stage}", details=asdict(COMPILES))
    workers.tell(asdict(about.found(COMPILES.seconds, "s")))


def measure(case: Case) -> None:
    """Write a case's rows, or why it has not come to an end."""
    try:
        for row in case.measure():
            workers.tell(asdict(row))
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        workers.tell(asdict(replace(case.about, failure=said)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
