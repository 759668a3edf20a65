#!/bin/bash
# Renews requirements.lock: the newest versions that pyproject.toml allows, installed into an empty
# virtual environment and written down. Law: no address of a package index ends up in the file.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3.11}" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet)
"${pip[@]}" install --editable '.[dev]'
{
    head -n 1 requirements.lock
    "${pip[@]}" freeze --exclude-editable | grep -v '://'
} >"$scratch/lock"
cp "$scratch/lock" requirements.lock
git --no-pager diff --stat -- requirements.lock
