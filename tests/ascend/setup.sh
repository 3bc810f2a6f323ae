#!/usr/bin/env bash
# Make what the Ascend check needs: .venv-ascend (triton-ascend, Huawei's compiler) and LLVM 19's tools.
#
#   bash tests/ascend/setup.sh [VENV]     VENV: the project's environment, default .venv
#
# .venv-ascend borrows torch, pytest and the rest from VENV through a .pth file, which puts them
# behind its own packages: `import triton` finds triton-ascend there, and triton in VENV stays as it is.
# Safe to run again; it does only what is missing.
set -euo pipefail

triton_ascend=3.2.0
ascendnpu_ir=1.2.0
pybind11=3.1.0 # triton-ascend imports it, and does not say so

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tests/debian.sh
main=${1:-.venv}
own=.venv-ascend

say() { printf 'ascend: %s\n' "$*"; }
fail() {
    printf 'ascend: %s\n' "$*" >&2
    exit 1
}

# Exit status 0 if mlir-opt, mlir-translate, llc and ld are there, from the system or unpacked by us.
host_tools_ready() {
    local tool
    for tool in mlir-opt mlir-translate llc; do
        [ -x "/usr/lib/llvm-19/bin/$tool" ] || [ -x "$own/llvm-19/usr/lib/llvm-19/bin/$tool" ] || return 1
    done
    [ -x /usr/bin/ld ] || [ -x "$own/llvm-19/usr/bin/ld" ]
}

# Unpacks Debian's packages into $own/llvm-19 instead of installing them, so that nobody has to be root.
unpack_host_tools() {
    local packages=(mlir-19-tools llvm-19 binutils)
    command -v apt-get >/dev/null ||
        fail "expected LLVM 19's mlir-opt, mlir-translate and llc in /usr/lib/llvm-19/bin and /usr/bin/ld, and found no apt-get to fetch them with"
    say "fetching ${packages[*]} (about 110 MB, 500 MB unpacked)"
    unpack_debian "$PWD/$own/llvm-19" "${packages[@]}"
    host_tools_ready || fail "the packages ${packages[*]} lack mlir-opt, mlir-translate, llc or ld"
}

python_of() { "$1/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Exit status 0 if exactly our versions are there, with triton from our own folder.
packages_ready() {
    "$own/bin/python" - "$own" "$triton_ascend" "$ascendnpu_ir" <<'EOF' 2>/dev/null
import importlib.metadata as metadata, importlib.util as util, pathlib, sys
own = pathlib.Path(sys.argv[1]).resolve()
assert [metadata.version(n) for n in ("triton-ascend", "ascendnpu-ir")] == sys.argv[2:]
for name in ("triton", "ascendnpuir"):
    assert own in pathlib.Path(util.find_spec(name).origin).parents, name
assert all(util.find_spec(name) for name in ("pybind11", "torch", "numpy", "pytest"))
EOF
}

[ -x "$main/bin/python" ] || fail "expected the project's environment in $main with torch and pytest, found none; make it first"
"$main/bin/python" -c 'from importlib.util import find_spec as f; assert f("torch") and f("pytest")' 2>/dev/null ||
    fail "expected torch and pytest in $main, found at least one of them missing"

if [ -d "$own" ] && [ "$(python_of "$own")" != "$(python_of "$main")" ]; then
    say "$own was made with another Python than $main, making it again"
    rm -rf "$own"
fi
if [ ! -x "$own/bin/python" ]; then
    say "making $own"
    "$main/bin/python" -m venv "$own" ||
        fail "$main/bin/python cannot make environments, on Debian: apt-get install python3-venv"
fi

site=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
borrowed=$("$main/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$(cat "$site/main_venv.pth" 2>/dev/null)" != "$borrowed" ]; then
    printf '%s\n' "$borrowed" >"$site/main_venv.pth"
fi

if ! packages_ready; then
    say "installing triton-ascend $triton_ascend and ascendnpu-ir $ascendnpu_ir (about 250 MB to fetch)"
    # --no-deps: what they list is either borrowed from $main or not needed to compile.
    "$own/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps \
        "triton-ascend==$triton_ascend" "ascendnpu-ir==$ascendnpu_ir" "pybind11==$pybind11" ||
        fail "pip could not install triton-ascend $triton_ascend and ascendnpu-ir $ascendnpu_ir for Python $(python_of "$own") on $(uname -m): the network may be missing, or there is no wheel for this Python or machine"
    packages_ready || fail "$own is broken: remove it and run this again"
fi
host_tools_ready || unpack_host_tools
say "ready: $own with triton-ascend $triton_ascend, ascendnpu-ir $ascendnpu_ir, LLVM 19"
