# Sourced by every script of this folder: puts the checkout's own .venv in front, made once and reused.
# Sets ROOT. Prints what it installs; a second run only compares a stamp.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
CONSTRAINTS="$ROOT/constraints.txt"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    CONSTRAINTS="$ROOT/constraints-cuda.txt"
fi
EXTRAS="${OVERLAP_GEMM_EXTRAS:-nvshmem,mpi,demo,dev}"

stamp() { cat "$CONSTRAINTS" "$ROOT/pyproject.toml" && echo "$EXTRAS" "$ROOT"; }

if [ ! -x "$VENV/bin/python" ] || [ "$(stamp | cksum)" != "$(cat "$VENV/.installed" 2>/dev/null)" ]; then
    echo "overlap_gemm: installing into $VENV at the pins of $(basename "$CONSTRAINTS") (once; later runs reuse it)"
    [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV" || exit 1
    "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar on \
        -c "$CONSTRAINTS" -e "$ROOT[$EXTRAS]" || exit 1
    stamp | cksum > "$VENV/.installed"
fi
export PATH="$VENV/bin:$PATH"
# Small matrix products in NumPy are several times slower, and sometimes a hundred times, with a BLAS thread pool.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
