#!/bin/sh
# Makes camera images possible in ManiSkill on a machine without a GPU: installs Mesa's software Vulkan driver (lavapipe).
#
# SAPIEN, ManiSkill's engine, needs lavapipe from Mesa 24.3 or newer; Debian 12 has 22.3, so there the package comes from
# the release's own backports suite, at the address the machine's apt sources already name. Running it twice does no harm.
# Exit status: 0 a driver is there, 3 it is not and the text says what to do. State observations need none of this.
#
# usage: scripts/install_vulkan.sh [--check]      --check only says how things stand and changes nothing
set -eu

WANTED=24.3
PACKAGE=mesa-vulkan-drivers
check_only=no
case "${1:-}" in
    "") ;;
    --check) check_only=yes ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

say() { printf 'vulkan: %s\n' "$*"; }

give_up() {
    say "$*"
    say "Without it ManiSkill runs with state observations only; the other simulators do not need it."
    exit 3
}

new_enough() { dpkg --compare-versions "$1" ge "$WANTED"; }

installed() { dpkg-query -W -f='${db:Status-Abbrev} ${Version}\n' "$PACKAGE" 2>/dev/null | sed -n 's/^ii  *//p' | head -n 1; }

candidate() { apt-cache policy "$PACKAGE" 2>/dev/null | sed -n 's/^ *Candidate: //p' | grep -v '(none)' || true; }

# --- Is a driver there already? ----------------------------------------------------------------------------------------
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    for folder in /usr/share/vulkan/icd.d /etc/vulkan/icd.d; do
        if [ -e "$folder/nvidia_icd.json" ] || [ -e "$folder/nvidia_icd.x86_64.json" ]; then
            say "an NVIDIA GPU and its Vulkan driver are here; nothing to do."
            exit 0
        fi
    done
    say "there is an NVIDIA GPU but not its Vulkan driver (no nvidia_icd.json in /usr/share/vulkan/icd.d or /etc/vulkan/icd.d):"
    say "the driver package lacks its graphics part; in a container set NVIDIA_DRIVER_CAPABILITIES=all. Until then software will draw."
fi
if command -v vulkaninfo >/dev/null 2>&1; then
    mesa=$(vulkaninfo --summary 2>/dev/null | sed -n 's/.*driverInfo *= *Mesa \([0-9.]*\).*/\1/p' | head -n 1)
    if [ -n "$mesa" ] && command -v dpkg >/dev/null 2>&1 && new_enough "$mesa"; then
        say "Mesa $mesa is here; nothing to do."
        exit 0
    fi
fi

# --- May it be installed here? -----------------------------------------------------------------------------------------
advice="Install a Vulkan driver by your system's own means: Mesa $WANTED or newer with lavapipe (often called $PACKAGE or vulkan-swrast)."
[ "$(uname -s)" = Linux ] || give_up "this is not Linux. $advice"
if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg >/dev/null 2>&1 || [ ! -r /etc/os-release ]; then
    give_up "this is not Debian or Ubuntu. $advice"
fi
version=$(installed)
if [ -n "$version" ] && new_enough "$version"; then
    say "$PACKAGE $version is installed; nothing to do."
    exit 0
fi
[ "$check_only" = no ] || give_up "there is no Vulkan driver that SAPIEN can use (installed: ${version:-none}). Run scripts/install_vulkan.sh as root."
[ "$(id -u)" = 0 ] || give_up "installing $PACKAGE takes root: run 'sudo $0', or ask who looks after this machine for Mesa $WANTED or newer."

# --- Install -----------------------------------------------------------------------------------------------------------
export DEBIAN_FRONTEND=noninteractive
. /etc/os-release
apt-get update -qq || say "the package lists could not all be refreshed; going on with those that are here."
suite=
version=$(candidate)
if [ -z "$version" ] || ! new_enough "$version"; then
    [ "${ID:-}" = debian ] || give_up "${PRETTY_NAME:-this release} offers $PACKAGE ${version:-(none)}, but $WANTED or newer is needed. $advice"
    suite="${VERSION_CODENAME:?}-backports"
    if ! apt-get indextargets --format '$(RELEASE)' | grep -qx "$suite"; then
        # The release itself (not its updates or security suite) and its backports live at the same address.
        address=$(apt-get indextargets --format '$(CREATED_BY)|$(RELEASE)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)' |
            awk -F'|' -v code="$VERSION_CODENAME" '$1 == "Packages" && $3 == code && $4 == "main" && $5 !~ /security/ { print $5; exit }')
        [ -n "$address" ] || give_up "no apt source for $VERSION_CODENAME main was found, so the address of $suite is not known. $advice"
        keyring=/usr/share/keyrings/debian-archive-keyring.gpg
        list="/etc/apt/sources.list.d/$suite.list"
        if [ -e "$keyring" ]; then
            echo "deb [signed-by=$keyring] $address $suite main" >"$list"
        else
            echo "deb $address $suite main" >"$list"
        fi
        say "added the suite $suite in $list."
        if ! apt-get update -qq; then
            rm -f "$list"
            give_up "$suite could not be read from the machine's package server, so it was taken out again. $advice"
        fi
    fi
fi
# -t also takes what the driver depends on (LLVM, libdrm) from the suite, and upgrades Mesa's OpenGL packages that must match it.
apt-get install -y -qq --no-install-recommends ${suite:+-t "$suite"} "$PACKAGE" >/dev/null ||
    give_up "apt could not install $PACKAGE${suite:+ from $suite}; its message is above. $advice"
version=$(installed)
if [ -z "$version" ] || ! new_enough "$version"; then
    give_up "$PACKAGE ${version:-(none)} was installed, but $WANTED or newer is needed. $advice"
fi
say "$PACKAGE $version is installed: ManiSkill can draw in software."
