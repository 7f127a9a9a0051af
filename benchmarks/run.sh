#!/usr/bin/env bash
# Measures the shapes of shapes.json on this machine, one process group for all, and keeps data and picture:
#   bash benchmarks/run.sh NAME OP [BENCH OPTION...]
#   bash benchmarks/run.sh h200x4 gemm_reduce_scatter                # one rank per GPU, eager and in CUDA graphs
#   bash benchmarks/run.sh cpu-2-ranks gemm_reduce_scatter --only Llama-8B --m 512 --rounds 5   # what a CPU can bear
# OP is one of the four ops, or all.
set -euo pipefail
cd "$(dirname "$0")/.."
name="${1:?usage: bash benchmarks/run.sh NAME OP [BENCH OPTION...]}"
op="${2:?name an op, or all}"
shift 2

ops=("$op")
[ "$op" = all ] && ops=(all_gather_gemm gemm_reduce_scatter gemm_all_reduce gemm_all_gather)
options=()
for each in "${ops[@]}"; do options+=(--op "$each"); done
file="benchmarks/results/$name-${op//_/-}"
exec bash launch/torchrun.sh python -m overlap_gemm.cli bench --shapes benchmarks/shapes.json "${options[@]}" \
    --json "$file.json" --plot "$file.png" "$@"
