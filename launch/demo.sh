#!/usr/bin/env bash
# Sets up everything and runs the main job on all GPUs of this machine, or on 2 CPU ranks.
# Arguments go to `overlap-gemm demo`: `bash launch/demo.sh --steps 200`.
set -euo pipefail
exec bash "$(dirname "$0")/torchrun.sh" python -m overlap_gemm.cli demo "$@"
