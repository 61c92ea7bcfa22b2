#!/usr/bin/env bash
# Runs the tests of the C code of pipeline/native with AddressSanitizer and UBSan, and random
# tokenizers. Fails if a test fails, or if a sanitizer reports anything. Needs gcc and its libasan.
#
#   scripts/sanitize.sh [PYTHON]   the Python of the tests' environment (default: .venv/bin/python)
#
# A copy of the tree is compiled and tested, so that the libraries of this one stay. TRIALS and
# TEXTS are the numbers of random tokenizers and of each one's texts (10 and 300 if unset), SEED
# is theirs.
set -euo pipefail

python=$(realpath --no-symlinks "${1:-.venv/bin/python}")
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard |
    xargs -0 cp --parents --target-directory="$copy"
cd "$copy"

# Every name of a library is that of the same code, so the processor's level does not matter.
read -r -a names < <("$python" -c "
from pipeline.native import build
names = [build.file_name(*build.machine(), level)
         for level in build.LEVELS.get(build.machine()[1], (build.ANY,))]
print(*names)")
level=()
[ "$(uname -m)" = x86_64 ] && grep -qw avx2 /proc/cpuinfo && level=(-march=x86-64-v3)
gcc -std=gnu11 -O1 -g -shared -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno \
    -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
    -Wall -Wextra -Werror -Wno-psabi \
    "${level[@]}" pipeline/native/*.c -o "pipeline/native/${names[0]}" -lm
for name in "${names[@]:1}"; do cp "pipeline/native/${names[0]}" "pipeline/native/$name"; done

# A report ends the process. Leaks are not looked for, since Python keeps memory until it ends.
# Within Python's pools, ASan would see no single block; pytest must not keep what they print.
preload=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libubsan.so)
export PYTHONMALLOC=malloc PYTHONPATH=$copy
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
failed=0
run() {
    LD_PRELOAD=$preload "$python" -m "$@" 2>&1 | tee -a report || failed=1
}
run pytest --numprocesses=0 --quiet --capture=sys -m 'not slow and not processes' \
    -p no:cacheprovider tests/pipeline/tokenizer tests/pipeline/native \
    tests/pipeline/building/test_rows.py tests/pipeline/building/test_unknown.py \
    tests/vocab/test_word_splitter.py
run tests.laboratory tokenizers --count="${TRIALS:-10}" --texts="${TEXTS:-300}" --jobs=1 \
    --seed="${SEED:-$RANDOM}"
reports=$(grep -cE 'runtime error:|ERROR: AddressSanitizer' report || true)
echo "reports of the sanitizers: $reports"
[ "$failed" = 0 ] && [ "$reports" = 0 ]
