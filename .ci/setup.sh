#!/bin/bash
# Makes .venv from requirements.lock and installs the project into it, editable.
# Law: touches only .venv and the pip cache; a second run with nothing to do takes milliseconds;
# two runs at once wait for each other; a run cut short is repaired by the next.
# PYTHON names the interpreter to use; the default is the first fit one found.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.weir-stamp
log=$venv/set-up.log

fail() { # what, way out
    printf 'error: %s\n  way out: %s\n' "$1" "$2" >&2
    exit 1
}

fit() { # is this an interpreter of 3.11 or newer? (a shim of pyenv may exist and yet start nothing)
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fit "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 or newer" "name another one, or unset PYTHON"
        echo "$PYTHON"
        return
    fi
    # 3.11 first: requirements.lock was made with it.
    for candidate in python3.11 python3 python3.12 python3.13 python3.14 /usr/bin/python3; do
        if fit "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if command -v python3 >/dev/null 2>&1; then
        fail "$(python3 --version 2>&1 | tail -1) is too old; weir needs Python 3.11 or newer" \
            "install python3.11 (Debian 12: apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python3.11"
    fi
    fail "python3 is not there; weir needs Python 3.11 or newer" "apt-get install python3 python3-venv"
}

step() { # say what is done, keep pip's own talk in the log, and explain a failure from it
    printf '%s\n' "set-up: $1" >&2
    shift
    if ! "$@" >>"$log" 2>&1; then
        grep -v '^WARNING' "$log" | tail -n 8 >&2 || true
        if grep -qiE 'No space left|Disk quota' "$log"; then
            fail "the disk is full" "free 1 GB for $PWD/$venv and run it again"
        elif grep -qiE 'Failed to establish|Temporary failure|NewConnectionError|Could not find a version|No matching distribution|Read timed out|ConnectionError|Max retries' "$log"; then
            fail "packages can't be fetched" "check the network and pip's settings (pip config list), then run it again; all of it: $log"
        fi
        fail "set-up failed: $*" "read $log; 'make clean' starts over"
    fi
}

# The folder itself may be thrown away below, so the lock is held on a file that stays.
exec 9<requirements.lock
if ! flock --nonblock 9; then
    echo "set-up: another one is at work here; waiting for it" >&2
    flock 9
fi

# The path is part of it: a virtual environment doesn't survive a move.
want=$(cat requirements.lock pyproject.toml .ci/setup.sh | cksum; pwd)
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && [ -x $venv/bin/weir ]; then
    exit 0
fi

python=$(find_python)
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module (Debian keeps it in a package of its own)" "apt-get install python3-venv"
rm -f "$stamp" 2>/dev/null || fail "$PWD/$venv belongs to another user" "make a clone of your own, or remove it"
mkdir -p $venv 2>/dev/null || fail "$PWD can't be written" "make a clone in a folder of yours"
: >"$log" || fail "$PWD/$venv can't be written" "remove it, or make a clone of your own"
if ! fit $venv/bin/python || [ "$(cat $venv/.weir-home 2>/dev/null || pwd)" != "$(pwd)" ]; then
    step "making $venv with $("$python" --version)" "$python" -m venv --clear $venv
fi
pwd >$venv/.weir-home
pip=($venv/bin/python -m pip --disable-pip-version-check --no-input --quiet)
step "installing $(grep -c == requirements.lock) packages (a minute or two the first time)" \
    "${pip[@]}" install --requirement requirements.lock
step "installing weir itself" "${pip[@]}" install --no-deps --no-build-isolation --editable .
printf '%s\n' "$want" >"$stamp"
echo "set-up: $venv is ready" >&2
