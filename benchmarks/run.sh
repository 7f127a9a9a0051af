#!/usr/bin/env bash
# Measures the shapes of shapes.json on this machine and keeps the results as data and as pictures:
#   bash benchmarks/run.sh NAME MODEL [BENCH OPTION...]
# Options that a CPU can bear: `bash benchmarks/run.sh cpu Llama-8B --m 512 --rounds 5`.
set -euo pipefail
cd "$(dirname "$0")/.."
name="${1:?usage: bash benchmarks/run.sh NAME MODEL [BENCH OPTION...]}"
model="${2:?name a model of shapes.json, such as Llama-8B}"
shift 2

bench() { # bench PHASE [BENCH OPTION...]
    local file="benchmarks/results/$name-$1"
    bash launch/torchrun.sh overlap-gemm bench --shapes benchmarks/shapes.json --only "$model" \
        --json "$file.json" --plot "$file.png" "${@:2}"
}

bench prefill --op all_gather_gemm --op gemm_reduce_scatter "$@"
bench decode --op gemm_all_reduce --op gemm_all_gather # of few rows whatever the options say
