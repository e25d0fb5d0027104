# Shared by the scripts beside it; sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SLURM_FT_VENV:-$root/.venv}

say() { printf '\n== %s\n' "$*" >&2; }

die() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2
  exit 1
}

# apt_install PACKAGE...: install Debian packages that are missing. Fails, with the line to type, where this
# user may not.
apt_install() {
  local missing=() package
  for package; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    printf 'hint: sudo apt-get install %s\n' "${missing[*]}" >&2
    return 1
  fi
  say "apt-get install ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# find_python: the newest Python from 3.11 on that is on the PATH.
find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3; do
    if command -v "$name" >/dev/null &&
      "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  return 1
}

# make_venv EXTRAS: the virtual environment of this checkout, with slurm-ft and these extras. Installs only
# when something it depends on has changed since the last time.
make_venv() {
  local python stamp want
  python=$(find_python) || die "there is no Python 3.11 or newer" "apt-get install python3 python3-venv"
  stamp=$venv/.installed
  want=$(cat "$root/setup.cfg" "$root/scripts/constraints.txt"; echo "$1")
  [ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || return 0
  say "making $venv"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    apt_install python3-venv || die "$python cannot make virtual environments"
  fi
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check \
    --constraint "$root/scripts/constraints.txt" --editable "${root}[$1]"
  echo "$want" >"$stamp"
}
