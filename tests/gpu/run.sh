#!/usr/bin/env bash
# Checks the torch engine on a CUDA device: builds csrc/, runs the GPU tests, then the benchmark, which prints one table.
# Under 8 minutes on one H200; downloads and installs nothing. Needs only a checkout and a Python with torch,
# transformers, triton, numpy, safetensors and PyYAML:
#
#     tests/gpu/run.sh                    everything
#     tests/gpu/run.sh --dry-run          the same on the CPU with tiny sizes, to check the scripts themselves
#
# PYTHON names the Python (default: python3), OUT a folder for bench.json and the log of the tests (default: none).
set -uo pipefail
script=$(realpath "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
begin=$SECONDS
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
total_s=465
tests_s=240

case "${1:-}" in
"" | --dry-run) ;;
*)
    sed -n '2,10s/^# \{0,1\}//p' "$script"
    [ "$1" = "--help" ] || [ "$1" = "-h" ]
    exit $(($? * 2))
    ;;
esac

device=cuda
build_options=(--cuda)
bench_options=()
if [ "${1:-}" = "--dry-run" ]; then
    device=cpu
    build_options=()
    bench_options=(--tiny)
    total_s=1500
    tests_s=1000
fi
if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    bench_options+=(--json "$OUT/bench.json")
fi

echo "== what is here"
"$PYTHON" - "$device" <<'PYTHON' || exit 2
import importlib.metadata
import importlib.util
import os
import shutil
import sys

# Module -> (distribution, why it is needed).
needed = {
    "torch": ("torch", "everything"),
    "transformers": ("transformers", "the models"),
    "numpy": ("numpy", "everything"),
    "safetensors": ("safetensors", "model folders"),
    "yaml": ("PyYAML", "kitelib's configuration"),
    "anyio": ("anyio", "the asynchronous engine, which is not tested here"),
    "zstandard": ("zstandard", "compressed blocks; nothing here makes any"),
    "triton": ("triton", "attention on CUDA"),
}
print("python", sys.version.split()[0], "on", os.cpu_count(), "cores")
fatal = []
for module, (name, use) in needed.items():
    if importlib.util.find_spec(module) is None:
        print(f"MISSING {name}, needed for {use}")
        if module not in ("anyio", "zstandard") and (module != "triton" or sys.argv[1] != "cpu"):
            fatal.append(name)
    else:
        print(name, importlib.metadata.version(name))
for tool in ("cc", "nvcc"):
    print(tool, shutil.which(tool) or "is not on the PATH")
if fatal:
    sys.exit(f"Nothing can be checked without {', '.join(fatal)}; install them, or add their folder to PYTHONPATH.")
import torch

print("CUDA of torch", torch.version.cuda, "available:", torch.cuda.is_available())
if sys.argv[1] != "cpu" and not torch.cuda.is_available():
    sys.exit("There is no CUDA device. tests/gpu/run.sh --dry-run checks the scripts on the CPU.")
PYTHON
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader

echo "== csrc"
"$PYTHON" -m kitelib.native.build "${build_options[@]}" || echo "PyTorch's own operations will stand in for it."

echo "== tests"
log=${OUT:+$OUT/}
if [ -n "$log" ]; then
    timeout "$tests_s" "$PYTHON" tests/gpu/runner.py --device "$device" 2>&1 | tee "${log}tests.log"
    tests=${PIPESTATUS[0]}
else
    timeout "$tests_s" "$PYTHON" tests/gpu/runner.py --device "$device"
    tests=$?
fi
[ "$tests" = 124 ] && echo "The tests were stopped after $tests_s s."

echo "== benchmark"
left=$((total_s - (SECONDS - begin)))
timeout "$left" "$PYTHON" tests/gpu/bench.py --device "$device" --limit "$((left - 15))" "${bench_options[@]}"
bench=$?
[ "$bench" = 124 ] && echo "The benchmark was stopped: the whole script may take $total_s s."

echo "== $((SECONDS - begin)) s in all; tests: status $tests, benchmark: status $bench"
[ "$tests" = 0 ] && [ "$bench" = 0 ]
