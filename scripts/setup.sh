#!/usr/bin/env bash
# Makes .venv/ with everything that the project's tests, simulators and documentation need; `make setup` calls it.
#
# It finds or gets uv and Python 3.12, installs the versions of requirements/all.txt (checked by hash) and the project
# itself, and on Debian or Ubuntu as root the few system packages that drawing in software needs. What it cannot do it
# says in words: a missing system package costs one simulator's pictures, not the setup. Running it again is quick.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PYTHON_VERSION=3.12   # the version the lock file is made for; ManiSkill's planner has no wheels for later ones
readonly VENV=.venv TOOLS=.venv-tools LOCK=requirements/all.txt
readonly NEEDED_GB=12

say() { printf 'setup: %s\n' "$*"; }
stop() { printf '\nsetup: %s\n' "$*" >&2; exit 1; }
home() { getent passwd "$(id -u)" 2>/dev/null | cut -d: -f6; }

# --- System packages ---------------------------------------------------------------------------------------------------

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }
installed() { dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null | grep -q '^ii'; }

apt_lists_fresh=no
apt_install() {  # installs the packages named, one after the other, and returns 1 if one of them failed
    local package failed=0
    for package in "$@"; do
        installed "$package" && continue
        if [ $apt_lists_fresh = no ]; then
            apt-get update -qq || say "the package lists could not all be refreshed; going on with those that are here."
            apt_lists_fresh=yes
        fi
        say "installing $package"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null || failed=1
    done
    return $failed
}

system_packages() {
    # OpenGL without a screen (LIBERO's cameras and the MuJoCo fallback), and a browser to test the HTML report in.
    local opengl=(libegl1 libgles2 libopengl0 libgl1 libegl-mesa0 libgl1-mesa-dri) browser=(chromium fonts-dejavu-core)
    local package missing=()
    if may_install; then
        apt_install "${opengl[@]}" || say "not all of ${opengl[*]} could be installed: LIBERO may have no camera images."
        apt_install "${browser[@]}" || say "no Chromium: the test that looks at the report in a browser will fail."
        return
    fi
    command -v dpkg-query >/dev/null || {
        say "this is not Debian or Ubuntu: if LIBERO finds no OpenGL, install EGL and Mesa by your system's own means."
        return
    }
    for package in "${opengl[@]}" "${browser[@]}"; do
        installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] ||
        say "not installed, because that takes root: ${missing[*]}. They are for LIBERO's cameras and the report's test;" \
            "'sudo apt-get install ${missing[*]}' mends it."
}

# --- uv ----------------------------------------------------------------------------------------------------------------

get_uv() {  # sets UV
    local candidate
    for candidate in "$(command -v uv || true)" "$TOOLS/bin/uv" "$(home)/.local/bin/uv"; do
        if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then
            UV=$candidate
            return
        fi
    done
    say "no uv here; installing it into $TOOLS"
    rm -rf "$TOOLS"
    local python
    for python in $(type -aP python3 || true) "$(find_python || true)"; do
        [ -n "$python" ] || continue
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && may_install && [ "$python" = /usr/bin/python3 ]; then
            apt_install python3-venv || true
        fi
        if "$python" -m venv "$TOOLS" >/dev/null 2>&1 &&
            "$TOOLS/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt; then
            UV=$TOOLS/bin/uv
            return
        fi
        rm -rf "$TOOLS"
    done
    stop "uv is not here and could not be installed, because no Python with venv and pip works (or the network does not)." \
        "Install uv (its documentation names several ways) or Debian's python3-venv, and run 'make setup' again."
}

# --- Python ------------------------------------------------------------------------------------------------------------

# The interpreter's own path if the candidate runs and is the right version: a pyenv shim can exist and still fail.
real_python() {
    "$1" -c "import sys
if sys.version_info[:2] != tuple(map(int, '$PYTHON_VERSION'.split('.'))): raise SystemExit(1)
print(getattr(sys, '_base_executable', '') or sys.executable)" 2>/dev/null </dev/null
}

find_python() {
    local candidate root
    for candidate in $(type -aP "python$PYTHON_VERSION" || true) $(type -aP python3 || true) \
        /usr/local/bin/python$PYTHON_VERSION /opt/python/*/bin/python$PYTHON_VERSION; do
        [ -x "$candidate" ] && real_python "$candidate" && return
    done
    for root in "${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv" "$(home)/.pyenv" /opt/pyenv; do
        [ -n "$root" ] || continue
        for candidate in "$root"/versions/"$PYTHON_VERSION"*/bin/python; do
            [ -x "$candidate" ] && real_python "$candidate" && return
        done
    done
    return 1
}

get_python() {  # sets PYTHON
    PYTHON=$(find_python) && return
    say "no Python $PYTHON_VERSION here; letting uv fetch one"
    "$UV" python install "$PYTHON_VERSION" && PYTHON=$("$UV" python find --managed-python "$PYTHON_VERSION") && return
    stop "Python $PYTHON_VERSION is not here, and uv could not download it (no way out to where uv keeps its builds?)." \
        "Install Python $PYTHON_VERSION by your system's own means, or with pyenv, and run 'make setup' again."
}

# --- The virtual environment -------------------------------------------------------------------------------------------

make_venv() {
    if [ -e "$VENV" ] && ! real_python "$VENV/bin/python" >/dev/null; then
        say "$VENV has no working Python $PYTHON_VERSION; making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -e "$VENV" ]; then
        local free
        free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
        [ "$free" -ge "$NEEDED_GB" ] || say "only $free GB are free here; the packages with PyTorch's CUDA libraries take about $NEEDED_GB."
        get_python
        say "Python: $PYTHON"
        "$UV" venv --quiet --python "$PYTHON" "$VENV"
    fi
    say "installing the packages of $LOCK (9 GB; half a minute where uv has them in its cache)"
    # The lock also constrains what builds the one package that comes as source only (bddl).
    "$UV" pip install --quiet --python "$VENV/bin/python" --require-hashes --build-constraints "$LOCK" -r "$LOCK" ||
        stop "the packages could not be installed; uv's message is above. If it is about the network, run 'make setup' again."
    "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps --no-build-isolation --editable .
    say "importing it all once, so that every later start is quick (about a minute)"
    env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" scripts/first_imports.py 2>/dev/null >&2
}

export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_NO_PROGRESS=1
# A company's proxy has its own certificate, which is in the system's store and not in uv's built-in one.
if [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]; then
    export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
fi
system_packages
get_uv
make_venv
sh scripts/install_vulkan.sh || true   # says itself what is missing and what follows from it
say "done: .venv/bin/embodyrl --help"
