#!/usr/bin/env bash
# Starts a command once per rank under torchrun, on this machine:
#   bash launch/torchrun.sh -n 2 overlap-gemm bench --op gemm_reduce_scatter
#   bash launch/torchrun.sh -n 4 python train.py
# Without -n: one rank per GPU, or 2 ranks.
set -euo pipefail
source "$(dirname "$0")/env.sh"
parse_ranks "$@"
share_cores "$RANKS"
exec torchrun --standalone --nproc-per-node "$RANKS" --no-python -- "${COMMAND[@]}"
