#!/usr/bin/env bash
# From texts to a filled gap, and to an export that transformers loads, with nothing but the wheel: in a new virtual
# environment, in an empty folder, and without the variables of the shell that starts it. Ends at the first failure.
#   scripts/wheel_errand.sh [--wheel=FILE] [--python=PYTHON] [--constraints=FILE] [PIP_FLAG …]
# Without --wheel, it builds the wheel of this clone. The other flags are those of `pip install`, as for an index that
# has torch for CPUs alone. Needs network access, 2 to 6 GB and some minutes.
set -euo pipefail
clone=$(cd "$(dirname "$0")/.." && pwd)
python=python3 wheel='' pip_flags=()
for word in "$@"; do
    case $word in
        --wheel=*) wheel=$(realpath "${word#*=}") ;;
        --python=*) python=${word#*=} ;;
        --constraints=*) pip_flags+=(--constraint "$(realpath "${word#*=}")") ;;
        *) pip_flags+=("$word") ;;
    esac
done
at=$(mktemp -d)
trap 'rm -rf "$at"' EXIT
mkdir "$at/home" "$at/empty"
unset PYTHONPATH PYTHONHOME

step() { printf '\n== %s\n' "$*"; }
pip() { "$at/venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Runs a command of the environment in the empty folder.
run() {
    printf '$ %s\n' "$*"
    (cd "$at/empty" && env -i HOME="$at/home" PATH="$at/venv/bin:/usr/bin:/bin" "$@")
}

step "a new environment"
"$python" -m venv "$at/venv"
if [ -z "$wheel" ]; then
    step "the wheel of $clone"
    pip wheel --quiet --no-deps --wheel-dir="$at/wheel" "$clone"
    wheel=$(echo "$at"/wheel/palimpsest_lm-*.whl)
fi
step "installing $(basename "$wheel") with what it needs"
pip install --quiet "${pip_flags[@]}" "$wheel[pipeline,trainer,huggingface]"

step "the version, and the recipes"
# T5X projects have such a file beside their gin files.
echo 'raise SystemExit("tasks.py of the current folder was run")' > "$at/empty/tasks.py"
run palimpsest --version
run palimpsest recipes

step "a vocabulary and a cache, by a recipe of the wheel"
run palimpsest run demo --until=cache.docs

step "a model, by a copy of the recipe with fewer updates"
run palimpsest recipes --copy=demo
run sed -i 's/3600/40/; s/every_steps = [0-9]*/every_steps = 20/' demo.toml
run palimpsest run demo.toml
test -f "$at/empty/demo.lock"

step "a filled gap"
run palimpsest fill 'Raises ValueError if <extra_id_0> value is not present.' \
    --model_dir=demo/model --max_new_tokens=7 | tee "$at/filled"
grep -q 'Raises ValueError if \[' "$at/filled"

step "an export, loaded by transformers"
run palimpsest export --model_dir=demo/model --output=export
cat > "$at/empty/load.py" <<'END'
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("export")
model = AutoModelForSeq2SeqLM.from_pretrained("export")
ids = tokenizer("Raises ValueError if <extra_id_0> value.", return_tensors="pt")
logits = model(**ids, decoder_input_ids=torch.tensor([[0]])).logits
assert logits.isfinite().all() and logits.std() > 0, logits
print(tokenizer.decode(model.generate(**ids, max_new_tokens=8)[0]))
END
run python load.py
step "the wheel did it all"
