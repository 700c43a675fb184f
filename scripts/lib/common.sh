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

# What the script's own first lines say about its use.
usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[-1]}"; }

# usage_error MESSAGE [LINE...]: wrong usage, which is exit status 2 everywhere in this project.
usage_error() { (die "$@") || exit 2; }

# read_arguments KNOWN ARGUMENT...: refuse what the script does not know, before anything is installed or begun; --help prints
# its use. KNOWN is words: --flag, --option=KINDS, or KINDS for words without an option. KINDS are joined by | and are
# N (a whole number from 1), 20-240 (one in between), FILE and DIR (can be written), PATH (is there), or the word itself.
# Sets GIVEN to what was given, by option. The programs behind the scripts read the same arguments again.
declare -A GIVEN=()
read_arguments() {
    local known=() word name value spec
    read -ra known <<<"$1"
    shift
    while [ $# -gt 0 ]; do
        word="$1" name="${1%%=*}"
        shift
        case "$word" in -h | --help) usage; exit 0 ;; esac
        [[ "$word" == -* ]] || name=
        spec="$(spec_of "$name" "${known[@]}")" || usage_error "unknown argument: $word" "Known: ${known[*]} --help"
        if [ "$spec" = "$name" ]; then
            [ "$word" = "$name" ] || usage_error "$name takes no value"
            GIVEN[${name:-words}]=1
            continue
        fi
        if [ -z "$name" ] || [[ "$word" == *=* ]]; then
            value="${word#"${name:+$name=}"}"
        else
            [ $# -gt 0 ] || usage_error "$name needs a value: $(in_words "$spec")"
            value="$1"
            shift
        fi
        suits "$value" "$spec" || usage_error "${name:+$name }$value: must be $(in_words "$spec")"
        GIVEN[${name:-words}]="$value"
    done
}

# spec_of NAME KNOWN...: print the KINDS of an option or of plain words, or the name itself for a flag.
spec_of() {
    local name="$1" one
    shift
    for one in "$@"; do
        case "$one" in
        --*) [ -z "$name" ] || [ "${one%%=*}" != "$name" ] || { printf '%s' "${one#*=}"; return; } ;;
        *) [ -n "$name" ] || { printf '%s' "$one"; return; } ;;
        esac
    done
    return 1
}

# suits VALUE KINDS: whether the value is of one of them.
suits() {
    local IFS='|' kind
    for kind in $2; do
        case "$kind" in
        N) [[ ! "$1" =~ ^[1-9][0-9]{0,8}$ ]] || return 0 ;;
        [0-9]*-[0-9]*)
            [[ ! "$1" =~ ^[0-9]{1,9}$ ]] || ((10#$1 < ${kind%-*} || 10#$1 > ${kind#*-})) || return 0
            ;;
        FILE) ! can_write "$1" || return 0 ;;
        DIR) [ -z "$1" ] || ! mkdir -p -- "$1" 2>/dev/null || [ ! -w "$1" ] || return 0 ;;
        PATH) [ ! -e "$1" ] || return 0 ;;
        *) [ "$1" != "$kind" ] || return 0 ;;
        esac
    done
    return 1
}

# can_write FILE: also where there is none yet. Only trying tells, since root may write where a file system does not let it.
can_write() {
    if [ -e "$1" ]; then
        [ -f "$1" ] && [ -w "$1" ]
    else
        (: >"$1") 2>/dev/null && rm -- "$1"
    fi
}

in_words() {
    local IFS='|' kind text=''
    for kind in $1; do
        case "$kind" in
        N) kind="a whole number from 1" ;;
        [0-9]*-[0-9]*) kind="a whole number from ${kind%-*} to ${kind#*-}" ;;
        FILE) kind="a file that can be written, in a folder that is there" ;;
        DIR) kind="a folder that can be written" ;;
        PATH) kind="a file or folder that is there" ;;
        esac
        text+="${text:+, or }$kind"
    done
    printf '%s' "$text"
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
