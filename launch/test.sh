#!/usr/bin/env bash
# Sets up everything and runs the test suite. Arguments go to pytest: `bash launch/test.sh tests/emulator -k tma`.
# Without any, the files are dealt to up to four processes (`-n 0` for one), unless they would share a GPU.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cd "$ROOT"
if [ "$#" -eq 0 ] && ! has_gpu; then
    set -- -n "$(($(nproc) < 4 ? $(nproc) : 4))" --dist loadfile
fi
exec python -m pytest "$@"
