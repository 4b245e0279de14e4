#!/bin/sh
# Print the path of a Chromium for the browser tests, installing Debian's where that is possible.
# BERTLAB_CHROMIUM chooses one. Prints nothing and fails when there is none.
set -eu
cd "$(dirname "$0")/.."
. scripts/apt.sh

find_chromium() {
    for name in "${BERTLAB_CHROMIUM:-}" chromium chromium-browser google-chrome; do
        [ -n "$name" ] && command -v "$name" && return
    done
    return 1
}

find_chromium || { apt_install chromium && find_chromium; }
