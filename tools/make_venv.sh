#!/usr/bin/env bash
# Makes .venv with Postlude and its tools in it, or brings the one that is there up to date.
# `make install` calls this; PYTHON names the interpreter to make it from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.installed       # written last; holds "own" or "found": whose torch this is
unfinished=$venv/.unfinished # there while this script works: a .venv that has it is made anew
pins=$venv/constraints.txt

say() { printf 'postlude: %s\n' "$*"; }
die() {
    printf 'postlude: %s\n' "$*" >&2
    exit 1
}

# Prints the interpreter to build from. With .venv activated, "python3" is .venv's own: take its parent.
find_python() {
    local name=${PYTHON:-python3} version
    command -v "$name" >/dev/null || die "there is no '$name' here: name a Python with make install PYTHON=..."
    version=$("$name" -c 'import platform; print(platform.python_version())') || die "'$name' does not run."
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "Postlude needs Python 3.10 or newer and '$name' is $version: name another with PYTHON=..."
    "$name" - "$venv" <<'PY'
import os, sys
own = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
print(sys._base_executable if own else sys.executable)
PY
}

# Prints the version of the torch that interpreter $1 imports, or nothing where it is absent or too old.
usable_torch() {
    "$1" 2>/dev/null <<'PY' || true
import importlib.metadata, re
import torch
version = importlib.metadata.version("torch")
release = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())
early = re.match(r"2\.11(\.0)*\.?(a|b|rc|dev)\d", version)  # sorts before 2.11 for pip as well
if release >= (2, 11) and not early:
    print(version)
PY
}

# A venv made from another venv sees only the base interpreter, so show it the caller's packages by hand.
link_packages_of() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1" >"$site/_packages_of_the_calling_python.pth" <<'PY'
import os, sys
for entry in sys.path:
    if os.path.basename(entry) in ("site-packages", "dist-packages"):
        print(f"import site; site.addsitedir({entry!r})")
PY
}

# Makes a fresh .venv from interpreter $1, around the torch of version $2 when that is not empty.
make_venv() {
    local python=$1 found=$2 in_venv
    local failed="$python could not make $venv (on Debian and Ubuntu the package python3-venv is needed)."
    say "making $venv with $python${found:+ and the torch $found it has}"
    mkdir "$venv"
    touch "$unfinished"
    if [[ -z $found ]]; then
        "$python" -m venv "$venv" || die "$failed"
        return
    fi
    in_venv=$("$python" -c 'import sys; print(sys.prefix != sys.base_prefix)')
    if [[ $in_venv == True ]]; then
        "$python" -m venv "$venv" || die "$failed"
        link_packages_of "$python"
    else
        "$python" -m venv --system-site-packages "$venv" || die "$failed"
    fi
    [[ $(usable_torch "$venv/bin/python") == "$found" ]] ||
        die "the torch $found of $python does not import inside $venv."
}

# Python compiles what is imported: compiling every file of every package took half of the processor time.
pip_install() { "$venv/bin/python" -m pip install -qq --no-input --no-compile "$@"; }

# Writes the constraints for everything after torch: the torch that is there stays, and so does its Triton.
write_pins() {
    "$venv/bin/python" - "$1" >"$pins" <<'PY'
import importlib.metadata as metadata, re, sys
brings_triton = any(re.match(r"triton\b", need) for need in metadata.requires("torch") or [])
for line in open("constraints.txt", encoding="utf-8"):
    name = re.match(r"[\w-]*", line).group()
    if name == "torch":
        line = f"torch=={metadata.version('torch')}\n"
    elif name == "triton" and brings_triton:
        continue
    elif name == "triton" and sys.argv[1] == "found":
        try:
            line = f"triton=={metadata.version('triton')}\n"
        except metadata.PackageNotFoundError:
            pass
    print(line, end="")
PY
}

# Prints the packages whose networks are tested.
networks() {
    "$venv/bin/python" - <<'PY'
import importlib.metadata as metadata
from packaging.requirements import Requirement
for need in map(Requirement, metadata.requires("postlude") or []):
    if need.marker and need.marker.evaluate({"extra": "networks"}) and not need.marker.evaluate({"extra": ""}):
        print(f"{need.name}{need.specifier}")
PY
}

python=$(find_python)
if [[ -e $unfinished ]]; then
    say "the last install did not finish: starting over"
    rm -rf "$venv"
elif [[ -e $stamp && $(<"$stamp") == found && -z $(usable_torch "$venv/bin/python") ]]; then
    say "the torch that $venv was made around is gone: starting over"
    rm -rf "$venv"
fi
if [[ ! -e $venv ]]; then
    found=$(usable_torch "$python")
    make_venv "$python" "$found"
    if [[ -n $found ]]; then torch=found; else torch=own; fi
elif [[ -e $stamp ]]; then
    say "bringing $venv up to date"
    torch=$(<"$stamp")
    mv "$stamp" "$unfinished"
else # made by hand: install into it, never delete it
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        die "$venv was not made by make install and has no working pip: move it away or call make clean first."
    say "installing into the $venv that is already here"
    torch=own
    [[ -z $(usable_torch "$venv/bin/python") ]] || torch=found
fi

if [[ $torch == own ]]; then
    pin=$(grep '^torch==' constraints.txt)
    say "installing $pin (the large one)"
    grep -v '^triton' constraints.txt >"$pins" # this torch may require a Triton of its own
    pip_install -c "$pins" "$pin"
fi
say "installing Postlude and its development tools"
write_pins "$torch"
pip_install -c "$pins" -e '.[dev]'
say "installing the networks that are tested"
mapfile -t packages < <(networks)
pip_install --no-deps "${packages[@]}" # their dependencies would bring another torch's torchvision
echo "$torch" >"$stamp"
rm -f "$unfinished"
say "ready: try make demo"
