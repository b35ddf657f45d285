#!/usr/bin/env bash
# README's table in one run: Unsloth and fastft in turn, a process a figure, about ten minutes on an H200.
# Needs unsloth beside fastft; the checkpoints are made where they are missing. Appends one JSON line a figure to OUT.
#
# usage: bash benchmarks/goals.sh OUT.jsonl [FOLDER_FOR_CHECKPOINTS]
set -euo pipefail
here=$(dirname "$0")
out=$(realpath -m "$1")
models=${2:-/tmp}
for name in llama-1b llama-8b; do
  [ -d "$models/$name" ] || python3 "$here/make_model.py" "$name" "$models/$name"
done
small=$models/llama-1b
large=$models/llama-8b
step() { python3 "$here/train_step.py" "$@" --out "$out"; }
sft() { python3 "$here/sft_step.py" "$@" --steps 20 --out "$out"; }

# Unsloth, fastft with its memory + 5 %, fastft with all memory free
compare() { # MODEL BATCH LENGTH BUDGET
  step unsloth "$1" --bs "$2" --seq "$3" --gc
  step fastft "$1" --bs "$2" --seq "$3" --gc --memory-budget "$4"
  step fastft "$1" --bs "$2" --seq "$3" --gc
}
compare "$small" 8 2048 3.62GiB
compare "$large" 4 2048 8.45GiB
compare "$small" 1 32768 6.0GiB
compare "$small" 2 2048 1.84GiB
step unsloth "$small" --bs 2 --seq 2048 # its fastest: no checkpointing
sft unsloth "$small" --bs 2 --seq 2048 --no-gc
sft fastft "$small" --bs 2 --seq 2048
