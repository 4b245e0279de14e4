# To be sourced: apt_install PACKAGE, as root or through sudo; fails where neither is possible.

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif ! command -v sudo >/dev/null; then return 1
    elif [ -t 0 ]; then sudo "$@"
    else sudo -n "$@"
    fi
}

apt_install() {
    command -v apt-get >/dev/null || return 1
    echo "installing Debian's $1" >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" >&2 && return
    as_root apt-get update -q >&2 || return 1
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" >&2
}
