# shellcheck shell=bash
# Sourced by the other scripts: makes .venv from pyproject.toml and constraints.txt, once, and again when they change.
# EXTRAS: the optional dependencies to install, comma-separated. PYTHON: the interpreter, 3.11 or newer; without it that
# of a .venv that works, else python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
venv=${VENV:-$root/.venv}
# The interpreter of an environment that works is kept unless PYTHON names another one.
own='import sys; sys.version_info >= (3, 11) and print(sys._base_executable)'
PYTHON=${PYTHON:-$("$venv/bin/python" -c "$own" 2>/dev/null || true)}
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ferrum_jax needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 1
}
stamp="$("$PYTHON" --version) $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(head -n 1 "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "setting up $(basename "$venv") (a minute, once) ..."
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv"
    echo "$stamp" >"$venv/.stamp"
fi
if ! grep -q "^installed .*$EXTRAS" "$venv/.stamp"; then # with no extras asked for, any installation will do
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${EXTRAS:+[$EXTRAS]}"
    echo "installed $EXTRAS" >>"$venv/.stamp"
fi
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
