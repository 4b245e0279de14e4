#!/bin/sh
# Create .venv beside this project and install the course into it: setup.sh REQUIREMENT
# Needs Python 3.11 or newer; PYTHON chooses one, otherwise the newest found is taken.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$@"; exit 1; }

is_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# The newest suitable Python; one that can make an environment already comes first.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_suitable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    suitable=
    for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
        is_suitable "$name" || continue
        if can_make_venv "$name"; then printf '%s\n' "$name"; return; fi
        suitable=${suitable:-$name}
    done
    [ -n "$suitable" ] || die "no Python 3.11 or newer found; install one, or set PYTHON to its path"
    printf '%s\n' "$suitable"
}

# Debian and Ubuntu ship Python without the module that makes environments.
add_venv_module() {
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    hint="$1 cannot make an environment yet; run:  sudo apt-get install $package"
    command -v apt-get >/dev/null || die "$1 lacks the modules venv and ensurepip; install them"
    . scripts/apt.sh
    apt_install "$package" || die "$hint"
    can_make_venv "$1" || die "$hint"
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    can_make_venv "$python" || add_venv_module "$python"
    say "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
is_suitable .venv/bin/python || die ".venv has an old Python; delete the folder and start again"
say "installing $1 with the versions of constraints.txt (the first time takes minutes)"
.venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e "$1"
