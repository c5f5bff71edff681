#!/usr/bin/env bash
# All tests that need a GPU, and all measurements, in less than ten minutes.
#
#     PYTHON=python3 bash tests/benchmarks/gpu/all.sh FOLDER
#
# Needs torch, triton, transformers, pytest, hypothesis and pydantic, and links in .dev (Makefile).
# Whatever fails, the rest still runs. Writes FOLDER/gpu-tests.xml and FOLDER/gpu.json.
set -u
cd "$(dirname "$0")/../../.."
folder=${1:-build} python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONPATH=.dev:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# Most of the time goes to compiling, a second for each of some 500 kernels: side by side where
# pytest-xdist is there. Warnings of other versions than ours are no errors.
spread=()
"$python" -c 'import xdist' 2>/dev/null && spread=(-n 8)
status=0
all_s=${GPU_SECONDS:-580}
TRITON_INTERPRET=0 timeout --signal=INT --kill-after=10 $((all_s * 2 / 5)) \
  "$python" -m pytest -m gpu -W default --timeout=120 ${spread[@]+"${spread[@]}"} \
  --junitxml="$folder/gpu-tests.xml" tests/kernels/gpu tests/engine/graphs || status=$?
"$python" tests/benchmarks/gpu/run.py --json "$folder/gpu.json" \
  --seconds $((all_s - SECONDS)) || status=$?
exit $status
