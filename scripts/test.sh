#!/usr/bin/env bash
# Everything that must hold, the quick things first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 MPLBACKEND=Agg
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # each worker has one thread
bin=.venv/bin

if [ ! -d solutions ]; then  # a student's copy: judge the student's package, nothing else
    exec $bin/python -m pytest tests/public "$@"
fi

kept=  # pytest's -m; empty for all
if chromium=$(scripts/chromium.sh); then
    export BERTLAB_CHROMIUM="$chromium"
elif [ "${CI:-}" = true ]; then
    echo "test: no Chromium, and on CI the browser tests may not be left out" >&2
    exit 1
else
    echo "test: no Chromium found; the browser tests are left out" >&2
    kept="not browser"
fi

$bin/ruff check .
$bin/ruff format --check .
$bin/bertlab build --check
# Three workers suit two cores: a test often waits, for a browser or for a process that it killed.
$bin/python -m pytest -n 3 --dist worksteal -m "$kept" "$@"
