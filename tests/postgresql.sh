#!/usr/bin/env bash
# Print the folder with PostgreSQL's programs for tests/test_database.py: the system's, or Debian's
# package unpacked into a folder of its own, so that nobody has to be root.
#
#   bash tests/postgresql.sh
set -euo pipefail

own="${TMPDIR:-/tmp}/tkernels-postgresql-$(id -u)"

fail() {
    printf 'postgresql: %s\n' "$*" >&2
    exit 1
}

# The newest folder below $1 that holds a server.
programs_below() { ls -d "$1"/usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1 || true; }

for root in "" "$own"; do
    found=$(programs_below "$root")
    if [ -n "$found" ] && [ -x "$found/postgres" ] && [ -x "$found/initdb" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
done

command -v apt-get >/dev/null ||
    fail "expected PostgreSQL's server in /usr/lib/postgresql, and found no apt-get to fetch it with"
. "$(dirname "${BASH_SOURCE[0]}")/debian.sh"
work="$own.$$"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
unpack_debian "$work/root" postgresql
chmod -R a+rX "$work/root" # a server started by root runs as another user
rm -rf "$own"
mv "$work/root" "$own"
chmod a+rx "$own"
found=$(programs_below "$own")
[ -n "$found" ] || fail "the package postgresql holds no usr/lib/postgresql/*/bin"
printf '%s\n' "$found"
