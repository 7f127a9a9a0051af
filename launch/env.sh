# shellcheck shell=bash
# Sourced by every script of this folder: puts the checkout's own .venv in front, made once and reused.
# Sets ROOT. Prints what it installs; a second run only compares a stamp.
#
#   OVERLAP_GEMM_PYTHON=/path/to/python  use the environment of that Python as it is, install nothing (containers, clusters)
#   OVERLAP_GEMM_EXTRAS=mpi,demo,dev     what to install; the default is everything
#   PYTHON=python3.12                    the Python a new .venv is made from
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { echo "overlap_gemm: $*" >&2; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# What the installation depends on; the .venv carries a checksum of it.
stamp() {
    cat "$ROOT"/constraints*.txt "$ROOT/pyproject.toml" "$ROOT/emulator/pyproject.toml" "$ROOT/tools/pyproject.toml"
    echo "$EXTRAS" "$ROOT" "$(has_gpu && echo gpu)"
}

pick_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python >= 3.10 found; name one with PYTHON=/path/to/python3"
    return 1
}

# A machine without a GPU wants torch's CPU build. PyPI has the CUDA build only, whose NVSHMEM pin needs the other set.
pick_constraints() {
    CONSTRAINTS="$ROOT/constraints-cuda.txt"
    has_gpu && return
    if "${PIP[@]}" --quiet --dry-run --no-deps "$(grep '^torch==' "$ROOT/constraints.txt")" >/dev/null 2>&1; then
        CONSTRAINTS="$ROOT/constraints.txt"
    else
        say "this machine's package index has no CPU build of torch: taking the CUDA build (it runs on CPUs, but is about 3 GB)." \
            "To avoid that, put PyTorch's CPU index into PIP_EXTRA_INDEX_URL."
    fi
}

install() {
    local python log
    if [ ! -x "$VENV/bin/pip" ]; then
        python="$(pick_python)" || return 1
        say "making $VENV with $("$python" --version) (once; later runs reuse it)"
        # Without the venv module's own pip (Debian: package python3-venv) a half-made folder would be left behind.
        "$python" -m venv "$VENV" || { rm -rf "$VENV"; return 1; }
    fi
    PIP=("$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
    pick_constraints
    log="$VENV/install.log"
    say "installing overlap_gemm[$EXTRAS] at the pins of $(basename "$CONSTRAINTS"): some minutes; pip's words go to $log"
    if ! "${PIP[@]}" -c "$CONSTRAINTS" -e "$ROOT/emulator" -e "$ROOT/tools" -e "${ROOT}[$EXTRAS]" >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        return 1
    fi
    stamp | cksum > "$VENV/.installed"
    say "installed"
}

if [ -n "${OVERLAP_GEMM_PYTHON:-}" ]; then
    PATH="$(dirname "$OVERLAP_GEMM_PYTHON"):$PATH"
    # Where overlap_gemm, its emulator and its tools are not installed, this checkout's.
    "$OVERLAP_GEMM_PYTHON" -c 'import sys, importlib.util as u
sys.exit(not all(map(u.find_spec, ("overlap_gemm", "cute_emulator", "overlap_gemm_tools"))))' ||
        export PYTHONPATH="$ROOT/src:$ROOT/tools:$ROOT/emulator/src${PYTHONPATH:+:$PYTHONPATH}"
else
    VENV="$ROOT/.venv"
    EXTRAS="${OVERLAP_GEMM_EXTRAS:-nvshmem,mpi,demo,dev}"
    exec 9<"$ROOT" # two launch scripts started together must not install at once
    flock 9
    if [ "$(stamp | cksum)" != "$(cat "$VENV/.installed" 2>/dev/null)" ]; then
        install || { say "installation failed (see above); running the same command again resumes it"; exit 1; }
    fi
    exec 9<&-
    PATH="$VENV/bin:$PATH"
fi
export PATH
# Small matrix products in NumPy are several times slower, and sometimes a hundred times, with a BLAS thread pool.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"

# Ranks of one machine share its cores: more threads than cores make every rank slower.
share_cores() { # share_cores RANKS
    local threads=$(($(nproc) / $1))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
}

# One rank per GPU; without any, two ranks.
default_ranks() {
    local gpus
    gpus="$(has_gpu && nvidia-smi -L | grep -c '^GPU' || true)"
    echo "$((${gpus:-0} > 0 ? gpus : 2))"
}

# shellcheck disable=SC2034 # the caller reads RANKS and COMMAND
# Reads an optional leading `-n RANKS` into RANKS, and the command into COMMAND.
parse_ranks() {
    RANKS="$(default_ranks)"
    if [ "${1:-}" = "-n" ]; then
        RANKS="${2:?-n needs a number of ranks}"
        shift 2
    fi
    COMMAND=("$@")
    if [ "$#" -eq 0 ]; then
        say "usage: $0 [-n RANKS] COMMAND [ARGUMENT...]"
        exit 2
    fi
}
