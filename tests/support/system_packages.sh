#!/bin/sh
# Installs what some tests run besides Python: SLURM, Open MPI and MPICH. Never an error: where it cannot, as
# without root or apt, those tests are skipped and say what is missing.
packages="slurm-wlm slurm-wlm-basic-plugins munge openmpi-bin mpich"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || exit 0
missing=""
for package in $packages; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "some tests will be skipped; to run them: sudo apt-get install$missing"
    exit 0
fi
echo "installing for tests:$missing"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
timeout 300 sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing" >/dev/null 2>&1 ||
    echo "they could not be installed; some tests will be skipped"
exit 0
