# Sourced by scripts/kerasmem and scripts/test: makes .venv once and installs kerasmem into it.
# KERASMEM_PYTHON chooses the Python; KERASMEM_VENV another folder for the environment.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${KERASMEM_VENV:-$root/.venv}
pythons="python3 python3.13 python3.12 python3.11 python3.10 python"
is_lowest=

say() { printf 'kerasmem: %s\n' "$*" >&2; }

# Prefers a Python that TensorFlow has wheels for (3.10 to 3.13) to a newer one.
find_python() {
    local candidate newest
    for newest in 13 99; do
        for candidate in ${KERASMEM_PYTHON:-$pythons}; do
            if "$candidate" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; then
                printf '%s\n' "$candidate"
                return
            fi
        done
    done
    if [ -n "${KERASMEM_PYTHON:-}" ]; then
        say "KERASMEM_PYTHON=$KERASMEM_PYTHON is not a Python 3.10 or newer"
    else
        say "no Python 3.10 or newer on PATH; install one, or name it: KERASMEM_PYTHON=/path/to/python3"
    fi
    return 1
}

# The lowest versions that setup.cfg allows, in an environment of their own; on the oldest Python that is found.
use_lowest_versions() {
    venv=${KERASMEM_VENV:-$root/.venv-lowest}
    pythons="python3.10 python3.11 python3.12 python3 python"
    is_lowest=1
}

# Tests that need more packages run in an environment of its own, which sees the packages of the first one beside its own.
# Sets `chosen` to what pytest runs there.
use_more_packages() {
    local name=$1 first=$venv packages wanted needs
    chosen=(tests/backends)
    needs=("$name")
    case $name in
        jax) wanted=(jax) ;;
        optional)
            # setuptools: gcp-storage-emulator imports pkg_resources
            wanted=(s3fs 'moto[s3]' flask flask-cors gcsfs gcp-storage-emulator 'setuptools<80' anndata distributed
                grain mlflow wandb)
            needs=(s3fs moto flask_cors gcsfs gcp_storage_emulator anndata distributed grain mlflow wandb)
            chosen=(-m "optional and not slow")
            ;;
        *)
            say "--with '$name': jax or optional"
            exit 2
            ;;
    esac
    venv=${KERASMEM_VENV:-$root/.venv}-$name
    [ "$name" = optional ] || export KERASMEM_TEST_BACKEND=$name
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    local there='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
    "$venv/bin/python" -c "$there" "${needs[@]}" keras 2>/dev/null && return
    say "making $venv (the first time only)"
    "$first/bin/python" -m venv "$venv" >&2
    packages=$("$first/bin/python" -c "$site")
    printf 'import site; site.addsitedir("%s")\n' "$packages" >"$("$venv/bin/python" -c "$site")/first.pth"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}" >&2
}

# A stamp holds the checksum of what was installed; an installation with an extra serves one without.
is_installed() {
    local stamp
    for stamp in "$1"*; do
        [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$2" ] && return 0
    done
    return 1
}

# ensure_environment EXTRAS: EXTRAS is "" or for example "[test]"
ensure_environment() {
    local extras=$1 stamp want python constraints=()
    stamp="$venv/kerasmem-installed$(tr -cd 'a-z' <<<"$extras")"
    want=$({ printf '%s\n' "$root" && cat "$root/setup.cfg" "$root/pyproject.toml"; } | cksum)
    is_installed "$stamp" "$want" && return

    mkdir -p "$venv"
    exec 9>"$venv/.lock"
    if command -v flock >/dev/null 2>&1; then flock 9; fi # two first starts at once: the second waits
    if is_installed "$stamp" "$want"; then
        exec 9>&-
        return
    fi

    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || exit 1
        say "making $venv with $("$python" --version 2>&1) (the first time only)"
        if ! "$python" -m venv "$venv" >&2; then
            say "could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
            exit 1
        fi
    fi
    say "installing kerasmem$extras and what it needs (TensorFlow is a large download)"
    if [ -n "$is_lowest" ]; then
        "$venv/bin/python" "$root/scripts/lowest_versions.py" >"$venv/lowest-versions.txt"
        constraints=(--constraint "$venv/lowest-versions.txt")
    fi
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${constraints[@]+"${constraints[@]}"} \
        -e "$root$extras" >&2; then
        say "the installation failed (see above); run the same command again once that is mended"
        exit 1
    fi
    printf '%s\n' "$want" >"$stamp"
    exec 9>&-
}
