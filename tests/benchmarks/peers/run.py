"""Install, serve and measure other engines and ours: `python tests/benchmarks/peers/run.py -h`.

Only finds the checkout; everything else is in `main.py`, which wants to be imported by its full
name.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
runpy.run_module("tests.benchmarks.peers.main", run_name="__main__")
