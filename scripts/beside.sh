#!/bin/sh
# beside.sh FOLDER: make a virtual environment that shares the packages of .venv and changes nothing there.
set -eu

.venv/bin/python -m venv --clear --without-pip "$1"
site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat > "$site/beside.pth" <<'PTH'
import os, site, sys; site.addsitedir(os.path.join(os.path.dirname(sys.prefix), ".venv", "lib", "python%d.%d" % sys.version_info[:2], "site-packages"))
PTH
