#!/bin/sh
# Turn Debian's slim base into the root file system of a component: the libraries that the
# interpreter and the wheels link against, the nonroot user, and nothing that installs, builds or
# raises privileges. The package database stays, so that scanners can tell what is inside.
set -eu

apt-get update
apt-get install -y --no-install-recommends \
    ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libsqlite3-0 libssl3 libstdc++6 libuuid1 \
    netbase tzdata zlib1g

# A passwd entry, because Java and getpass look the user up; uid 65532 is nonroot by convention.
groupadd --gid 65532 nonroot
useradd --uid 65532 --gid 65532 --no-log-init --home-dir /home/nonroot --create-home \
    --shell /usr/sbin/nologin nonroot

# Package management, Perl (only its scripts need it) and file system tools. Forced, since these
# packages are marked essential; packages that this base lacks are not named by dpkg-query.
purge=$(dpkg-query -Wf '${Package} ${db:Status-Status}\n' | awk '$2 == "installed" {print $1}' |
    grep -E '^(adduser|apt|libapt-pkg.*|gpgv|debian-archive-keyring|debconf|perl.*|libperl.*|lib.*-perl|usrmerge|e2fsprogs|libext2fs2|libss2|logsave|libgdbm.*)$' |
    tr '\n' ' ')
# shellcheck disable=SC2086 # a list of package names
dpkg --purge --force-all $purge >/dev/null

find / -xdev -type f -perm /6000 -exec chmod a-s {} +
rm -rf /var/lib/apt /var/cache/* /var/log/* /var/lib/dpkg/*-old /tmp/* \
    /usr/share/doc/* /usr/share/man /usr/share/info /usr/share/locale /usr/share/perl*
