# shellcheck shell=bash
# Shared by the scripts: where things are, how they speak, and how a long step shows that it is alive.
# Sourced after `set -euo pipefail`. Knows nothing of what is being built.
# Not every script that sources this reads every name:
# shellcheck disable=SC2034

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
ENGINE_ENV="$ROOT/.venv/engine"
HA_ENV="$ROOT/.venv/ha"
BROWSER_ENV="$ROOT/.venv/browser"
EXLLAMAV2_ENV="$ROOT/.venv/exllamav2"
LOG_DIR="$ROOT/.venv/log"
CACHE_DIR="${XDG_CACHE_HOME:-$HOME/.cache}/fairhearth"

# Without bytecode Home Assistant takes 10 s longer to start, every time.
unset PYTHONDONTWRITEBYTECODE
# An active environment of the user's must not leak into ours.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 UV_NO_PROGRESS=1

# Which script speaks; each script may set it.
: "${SPEAKER:=$(basename "$0")}"

say() { printf '[%s] %s\n' "$SPEAKER" "$*"; }
warn() { printf '[%s] %s\n' "$SPEAKER" "$*" >&2; }
die() {
    warn "error: $1"
    shift
    while [ $# -gt 0 ]; do
        warn "       $1"
        shift
    done
    exit 1
}

# long_step TITLE ESTIMATE COMMAND...: run a command quietly, show that it is alive, and its last lines if it fails.
# The output is kept in .venv/log. Returns the command's exit status; the caller decides what a failure means. Because the
# caller asks, `set -e` is off inside the command: a function given here chains its commands with && or returns by itself.
long_step() {
    local title="$1" estimate="$2" log pid status=0 started=$SECONDS shown=0
    shift 2
    mkdir -p "$LOG_DIR"
    log="$LOG_DIR/$(printf '%s' "$title" | tr -cs '[:alnum:].' '-' | tr '[:upper:]' '[:lower:]').log"
    say "$title (about $estimate)"
    # A process group of its own: an interrupted script must not leave an installer running behind it.
    set -m
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    set +m
    trap 'kill -- "-$pid" 2>/dev/null; wait "$pid" 2>/dev/null; exit 130' INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ -t 1 ]; then
            printf '\r[%s]   %d s ' "$SPEAKER" $((SECONDS - started))
        elif [ $((SECONDS - started)) -ge $((shown + 15)) ]; then
            shown=$((SECONDS - started))
            say "  still working, $shown s: $(tail -n 1 "$log" | cut -c1-100)"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM HUP
    [ ! -t 1 ] || printf '\r\033[K'
    if [ "$status" -ne 0 ]; then
        warn "  failed after $((SECONDS - started)) s with status $status; the last lines of $log:"
        tail -n 25 "$log" | sed 's/^/    /' >&2
    else
        say "  done in $((SECONDS - started)) s"
    fi
    return "$status"
}

# apt_install PACKAGE...: say what is missing, then install it; die with the command to type where that is not possible.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null || die "missing here: $*" "This system has no apt-get: install the like of it, then run again."
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || die "missing here: $*" "As root, run: apt-get install -y --no-install-recommends $*"
        as_root=(sudo)
        # A password can be asked for only at a terminal, and before the output goes to a log.
        sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; } ||
            die "missing here: $*" "Run: sudo apt-get install -y --no-install-recommends $*"
    fi
    say "missing on this system: $*; installing with: apt-get install --no-install-recommends $*"
    long_step "apt-get install $*" "1 min" apt_install_now "${as_root[@]}" -- "$@" ||
        die "apt-get could not install: $*" "Install it by hand, then run again."
}

apt_install_now() {
    local as_root=()
    while [ "$1" != -- ]; do
        as_root+=("$1")
        shift
    done
    shift
    # The list may be missing or old: refreshed only if the first try fails.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ||
        { "${as_root[@]}" apt-get update &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }
}
