#!/usr/bin/env bash
# Sets up everything and runs the test suite. Arguments go to pytest: `bash launch/test.sh tests/emulator -k tma`.
set -euo pipefail
source "$(dirname "$0")/env.sh"
cd "$ROOT"
exec python -m pytest "$@"
