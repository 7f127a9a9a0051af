#!/usr/bin/env bash
# Sets up everything and runs the test suite. Arguments go to pytest: `bash launch/test.sh emulator/tests -k tma`.
# Without any, up to four processes share the files, as tests/conftest.py says (`-n 0` for one), unless they would share a GPU.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cd "$ROOT"
if [ "$#" -eq 0 ] && ! has_gpu; then
    processes="$(($(nproc) < 4 ? $(nproc) : 4))"
    share_cores "$processes" # with two threads of torch in each, tests/emulated/test_faults.py took 12 % more processor time
    set -- -n "$processes" --dist loadfile --max-worker-restart 2
fi
exec python -m pytest "$@"
