# Sourced by scripts that need programs of Debian packages and may not be root.
#
#   unpack_debian ROOT PACKAGE...     the packages and all that they need and the system lacks,
#                                     unpacked below ROOT; calls the caller's fail SENTENCE

unpack_debian() {
    local root=$1 apt=$1.apt deb
    shift
    local options=(-qq -y -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt"
        -o "Dir::Cache::archives=$apt/archives" -o Debug::NoLocking=true -o APT::Sandbox::User=)
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    apt-get "${options[@]}" update >&2 || fail "apt-get update failed, is the network there?"
    apt-get "${options[@]}" --no-install-recommends --download-only install "$@" >&2 ||
        fail "apt-get could not fetch $*; Debian 12 and newer have them"
    for deb in "$apt"/archives/*.deb; do
        dpkg-deb -x "$deb" "$root" || fail "$deb could not be unpacked, is the disk full?"
    done
    rm -rf "$apt"
}
