#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with torch, Triton, nvcc and one, and no network; together under ten minutes.
# usage: benchmarks/run_gpu.sh [--out OUT] [STAGE...]    stages: build tests sanitizer benchmarks tuning; default all
# A stage that fails or runs out of its time is reported and does not stop the others. OUT/summary.json says how each
# ended, on which device, with which versions and commit; the stages' logs and results lie beside it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=benchmarks/results/gpu
if [[ ${1:-} == --out ]]; then
  out=${2:?--out wants a folder}
  shift 2
fi
out=$(realpath -m "$out")
stages=${*:-build tests sanitizer benchmarks tuning}
mkdir -p "$out"
export PYTHONPATH=$PWD FASTATTN_TEST_DEVICE=cuda FASTATTN_REQUIRE=triton,cuda
export PATH=$PATH:/usr/local/cuda/bin
python=${PYTHON:-python} shards=12 test_seconds=155

build() { FASTATTN_BUILD=1 FASTATTN_CUDA=1 "$python" setup.py build_ext --inplace && "$python" -m fastattn.cli info; }
# Most of a test's time is Triton's compiler: many processes share the device, and each says what it has got through
# when its time is up.
tests() { seq "$shards" | xargs -P "$shards" -I{} bash -c "shard {}"; }
shard() {
  FASTATTN_TEST_SHARD=$1/$shards timeout --signal INT --kill-after 5 "$test_seconds" \
    "$python" -m pytest -q -m "slow or not slow" -k "triton or cuda" tests >"$out/tests-$1.log" 2>&1
  local status=$?
  grep -E "^(FAILED|ERROR) " "$out/tests-$1.log"
  tail -n 1 "$out/tests-$1.log"
  return "$status"
}
sanitizer() {
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  local check=(compute-sanitizer --error-exitcode 1 --tool) run=("$python" -m pytest -q -m representative tests -k)
  "${check[@]}" racecheck "${run[@]}" cuda && "${check[@]}" memcheck "${run[@]}" "triton or cuda"
}
benchmarks() { "$python" benchmarks/gpu.py "$out/benchmarks.json" --seconds 110; }
tuning() { "$python" benchmarks/tune.py "$out/tuning.json" --seconds 70; }
declare -A seconds=([build]=80 [tests]=175 [sanitizer]=85 [benchmarks]=140 [tuning]=90)

export -f build tests shard sanitizer benchmarks tuning
export python out shards test_seconds
results=() failed=0
for stage in $stages; do
  if [[ -z ${seconds[$stage]:-} ]]; then
    echo "unknown stage $stage; stages: ${!seconds[*]}" >&2
    exit 2
  fi
  began=$SECONDS
  timeout --kill-after 5 "${seconds[$stage]}" bash -c "$stage" >"$out/$stage.log" 2>&1
  status=$?
  case $status in 0) word=passed ;; 124 | 137) word="out of time" ;; *) word=failed ;; esac
  [[ $status == 0 ]] || failed=1
  echo "$stage: $word after $((SECONDS - began)) s, $out/$stage.log"
  [[ $status == 0 ]] || tail -n 5 "$out/$stage.log"
  results+=("$stage" "$word" "$((SECONDS - began))")
done
"$python" - "$out/summary.json" "${results[@]}" <<'PYTHON'
import importlib.util
import json
import sys

import torch

from fastattn.bench import report

path, *words = sys.argv[1:]
summary = {
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "triton": __import__("triton").__version__ if importlib.util.find_spec("triton") else None,
    "commit": report.commit(),
    "stages": {
        stage: {"result": result, "seconds": int(seconds)}
        for stage, result, seconds in zip(words[::3], words[1::3], words[2::3], strict=True)
    },
}
with open(path, "w") as file:
    file.write(json.dumps(summary, indent=1) + "\n")
PYTHON
exit "$failed"
