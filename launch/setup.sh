#!/usr/bin/env bash
# Make .venv, install the project into it and find an OpenGL backend that draws. As root on Debian
# or Ubuntu what is missing is installed; elsewhere the one line to type is printed.
set -euo pipefail
python=${1:-python3}

apt_install() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
    else
        echo "Something is missing. Type:  sudo apt-get install -y $*" >&2
        exit 1
    fi
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.10 | 3.11 | 3.12) ;;
    *)
        echo "$python is Python $version; 3.10, 3.11 or 3.12 is needed: make PYTHON=python3.12" >&2
        exit 1
        ;;
esac

"$python" -c 'import venv, ensurepip' 2>/dev/null || apt_install "python$version-venv"
# Asked of pip, not of the folder: an interrupted start leaves a .venv without it.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv

# The pip that comes with Python 3.10 searches for many minutes where a newer one needs seconds.
.venv/bin/python -m pip install -q -U pip
# On a machine without a GPU: the version that the numbers of launch/LOG.md are of.
if ! .venv/bin/python -c 'import torch' 2>/dev/null && ! command -v nvidia-smi >/dev/null; then
    .venv/bin/pip install -q torch==2.13.0
fi
.venv/bin/pip install -q -e '.[all,dev]'

if ! .venv/bin/python -m envs.rendering; then
    apt_install libegl1 libegl-mesa0 libgl1-mesa-dri
    if ! .venv/bin/python -m envs.rendering; then
        apt_install libosmesa6
        .venv/bin/python -m envs.rendering
    fi
fi
