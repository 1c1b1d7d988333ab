#!/usr/bin/env bash
# setup_venv.sh PYTHON VENV: a virtual environment with expertile (editable) and its test tools.
# A torch that already drives this machine's GPU is used as it is; a machine without a GPU gets the pinned CPU build.
set -euo pipefail
python=${1:?usage: setup_venv.sh PYTHON VENV}
venv=${2:?usage: setup_venv.sh PYTHON VENV}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "expertile needs Python 3.11 or later; '$python' is $("$python" --version 2>&1 || echo missing)." >&2
  echo "Name another one with: make PYTHON=/path/to/python3.12 …" >&2
  exit 1
fi
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "Using the installed torch, which drives this machine's GPU."
  "$python" -m venv --system-site-packages "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[lab,test]' ||
    # A machine without a network: everything but the package itself must be there already.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "Installing torch with CUDA (several GB) and expertile into $venv …"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet -e '.[lab,test]'
else
  echo "No GPU here: installing the CPU build of torch and expertile into $venv …"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[lab,test]'
fi
