#!/usr/bin/env bash
# What thunder_step.py and tests/integrations/thunder need on a machine without a network: a tarball of about 5 MB.
# Pure Python but optree, whose wheel is for Linux x86-64 and the Python named here (default 3.12).
#
# usage: pack_thunder.sh OUT.tgz [PYTHON_VERSION]
# there: mkdir -p /tmp/thunder && tar xzf OUT.tgz -C /tmp/thunder && export PYTHONPATH=/tmp/thunder:$PWD:$PYTHONPATH
set -euo pipefail
out=$(realpath -m "$1")
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-deps --no-compile --target "$site" --only-binary=:all: \
    --python-version "${2:-3.12}" --implementation cp --platform manylinux_2_28_x86_64 \
    --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    lightning-thunder==0.2.6 litgpt==0.5.13 looseversion dill optree jsonargparse lightning==2.6.6 \
    lightning-utilities torchmetrics opt_einsum networkx
rm -rf "$site"/bin "$site"/thunder/benchmarks "$site"/thunder/tests
tar czf "$out" -C "$site" .
ls -l "$out"
