#!/usr/bin/env bash
# Runs the fast tests on several Pythons, each in a new environment with the newest packages it gets.
#
#   tools/test_pythons.sh [INTERPRETER...]         default: python3.11 python3.13
#
# TORCH_PYTHONS (default "3.11") lists the versions that also get torch. It is only a reference for
# tests, and comes with gigabytes of CUDA libraries where no CPU wheel is offered; without it the
# tests that compare with it are skipped.
set -euo pipefail
exec </dev/null
cd "$(dirname "$0")/.."

interpreters=("$@")
[ "$#" -gt 0 ] || interpreters=(python3.11 python3.13)
torch_pythons="${TORCH_PYTHONS-3.11}"
temp="$(mktemp -d)"
trap 'rm -rf "$temp"' EXIT

resolve() { # resolve NAME: an interpreter that starts, from PATH or from pyenv
  local name="$1" candidate
  if "$name" -c '' >/dev/null 2>&1; then
    command -v "$name"
    return
  fi
  if command -v pyenv >/dev/null; then
    for candidate in "$(pyenv root)/versions/${name#python}"*/bin/python; do
      if [ -x "$candidate" ] && "$candidate" -c '' >/dev/null 2>&1; then
        echo "$candidate"
        return
      fi
    done
  fi
  echo "$0: no interpreter $name here (not on PATH, not in pyenv)" >&2
  return 1
}

test_packages() { # the extra "test", one requirement a line, without torch and what needs it
  python - <<'PY'
import pathlib, re, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
for line in project["optional-dependencies"]["test"]:
    if re.match(r"[A-Za-z0-9-]+", line)[0] not in ("torch", "accelerate"):
        print(line)
PY
}

paths=()
for name in "${interpreters[@]}"; do # all of them before any work
  paths+=("$(resolve "$name")")
done

for interpreter in "${paths[@]}"; do
  version="$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  printf '\n=== Python %s (%s)\n' "$version" "$interpreter"
  "$interpreter" -m venv "$temp/$version"
  (
    export PATH="$temp/$version/bin:$PATH" VIRTUAL_ENV="$temp/$version"
    export XDG_CACHE_HOME="$temp/cache-$version" JAX_COMPILATION_CACHE_DIR="$temp/jax-$version"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CACHE_DIR="${PIP_CACHE_DIR:-$HOME/.cache/pip}"
    if [[ " $torch_pythons " == *" $version "* ]]; then
      pip install --quiet '.[test]'
    else
      pip install --quiet .
      test_packages >"$temp/requirements.txt"
      pip install --quiet -r "$temp/requirements.txt"
    fi
    pip list 2>/dev/null | grep -E '^(jax|jaxlib|flax|numpy|torch|transformers) ' || true
    pytest -m 'not slow'
  )
done
