#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with torch, Triton, nvcc and one, and no network; in about twelve minutes.
# usage: benchmarks/run_gpu.sh [--out OUT] [STAGE...]
# stages: build hopper replay compile benchmarks tests sanitizer tuning; default all
# The first ones answer open questions: whether Hopper's instructions are as the emulation has them, whether captured
# calls repeat their masks, how fast today's tiles are. `tests` goes on with the tests that have not passed yet at this
# commit; where the commit is unknown or the code differs from it, with all.
# Python packages beside torch and Triton: pytest>=8, hypothesis, numpy, ninja, setuptools>=77. Environment: PYTHON names
# the interpreter, python3 by default; FASTATTN_COMMIT the commit, where the files were copied without .git.
# A stage that fails or runs out of its time is reported and does not stop the others. OUT/summary.json says how each so
# far ended, on which device, with which versions and commit; the stages' logs and results.csv lie beside it. The stages
# that measure rely on `compile` before them for the time that they have. OUT is runs/gpu by default.
set -uo pipefail
cd "$(dirname "$0")/.."
out=runs/gpu
if [[ ${1:-} == --out ]]; then
  out=${2:?--out wants a folder}
  shift 2
fi
declare -A seconds=(
  [build]=75 [hopper]=90 [replay]=60 [tests]=135 [sanitizer]=75 [compile]=95 [benchmarks]=115 [tuning]=100
)
[[ $# -gt 0 ]] || set -- build hopper replay compile benchmarks tests sanitizer tuning
for stage; do
  if [[ -z ${seconds[$stage]:-} ]]; then
    echo "unknown stage $stage; stages: ${!seconds[*]}" >&2
    exit 2
  fi
done
out=$(realpath -m "$out")
mkdir -p "$out"
export PYTHONPATH=$PWD FASTATTN_TEST_DEVICE=cuda FASTATTN_REQUIRE=triton,cuda
export PATH=$PATH:/usr/local/cuda/bin
python=${PYTHON:-python3} shards=12 test_seconds=120 check_seconds=33 compile_seconds=90

build() { FASTATTN_BUILD=1 FASTATTN_CUDA=1 "$python" setup.py build_ext --inplace && "$python" -m fastattn info; }
# The facts first, each in a process of its own, then the kernels made of them.
hopper() {
  "$python" tests/hopper.py
  local facts=$?
  "$python" -m pytest -q -m "slow or not slow" -k "forward or backward or dropped" tests/test_hopper.py
  combined "$facts" "$?"
  local small=$?
  "$python" -m pytest -q -m "slow or not slow" tests/test_hopper_attention.py tests/test_hopper_backward.py
  combined "$small" "$?"
}
replay() { "$python" benchmarks/replay.py --seconds 40; }
# Most of a test's time is Triton's compiler: many processes share the device, and each says what it has got through
# when its time is up. The passed ones are in a folder of the commit, for the next run.
tests() {
  local commit
  commit=$("$python" -c "from fastattn.bench import report; print(report.commit())")
  passed=$out/passed/${commit:-unknown}
  [[ -n $commit && $commit != *+ ]] || rm -rf "$passed"
  export passed
  mkdir -p "$passed"
  cat "$passed"/shard-* >"$passed/all" 2>/dev/null
  echo "passed before: $(wc -l <"$passed/all")"
  parallel "$shards" shard
}
shard() {
  FASTATTN_TEST_SHARD=$1/$2 FASTATTN_TEST_PASSED=$passed timeout --signal=INT --kill-after=5 "$test_seconds" \
    "$python" -m pytest -q -m "slow or not slow" -k "triton or cuda" tests >"$out/tests-$1.log" 2>&1
  local status=$?
  [[ $status != 5 ]] || status=0 # no test is left
  grep -E "^(FAILED|ERROR) " "$out/tests-$1.log" && status=1 # whether or not its time was up later
  echo "shard $1: $(tail -n 1 "$out/tests-$1.log")"
  return "$status"
}
# A few of each kernel's tests: they take many times as long as without.
sanitizer() {
  local rows="layouts or inplace or fused_extremes or maximum_comes_late or rows_with_nothing_left" races
  check racecheck "cuda and ($rows or parts_of_the_keys)"
  races=$?
  check memcheck "(triton or cuda) and ($rows or parts_of_the_keys or one_key or dropout_seeds or seqused_k)"
  combined "$races" "$?"
}
check() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout --kill-after=3 "$check_seconds" \
    compute-sanitizer --error-exitcode 1 --tool "$1" "$python" -m pytest -q -m representative -k "$2" \
    tests/test_{dropout,softmax_dropout,layer_norm,attention,varlen,cuda_attention}.py
}
# What the later stages measure, compiled by all cores into the caches of Triton and torch.compile: most of their time.
compile() { parallel "$(nproc)" part; }
part() {
  local script statuses=()
  for script in benchmarks/gpu.py tools/tune.py; do
    ((SECONDS < compile_seconds)) || return 124
    TORCHINDUCTOR_COMPILE_THREADS=1 timeout --kill-after=3 $((compile_seconds - SECONDS)) \
      "$python" "$script" - --compile "$1" "$2"
    statuses+=("$?")
  done
  combined "${statuses[@]}"
}
benchmarks() { "$python" benchmarks/gpu.py "$out/results.csv" --seconds 95; }
tuning() { "$python" tools/tune.py "$out/results.csv" --seconds 80; }
# parallel COUNT FUNCTION: FUNCTION NUMBER COUNT for every number up to COUNT, all at a time.
parallel() {
  local pids=() statuses=() number pid
  for ((number = 1; number <= $1; ++number)); do
    "$2" "$number" "$1" &
    pids+=("$!")
  done
  for pid in "${pids[@]}"; do
    wait "$pid"
    statuses+=("$?")
  done
  combined "${statuses[@]}"
}
# One exit status for several: a failure before the end of the time, which is timeout's 124 or 137, before success.
combined() {
  local status all=0
  for status; do
    case $status in 0) ;; 124 | 137) [[ $all != 0 ]] || all=124 ;; *) all=1 ;; esac
  done
  return "$all"
}
# What the command prints becomes the summary, whole or not at all.
summarise() { "$@" >"$out/summary.json.part" && mv "$out/summary.json.part" "$out/summary.json"; }

export -f build hopper replay tests shard sanitizer check compile part benchmarks tuning parallel combined
export python out shards test_seconds check_seconds compile_seconds
summarise "$python" - <<'PYTHON' || exit 1
import importlib.util
import json

import torch

from fastattn.bench import report

summary = {
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "triton": __import__("triton").__version__ if importlib.util.find_spec("triton") else None,
    "commit": report.commit(),
    "stages": {},
}
print(json.dumps(summary, indent=1))
PYTHON
failed=0
for stage; do
  began=$SECONDS
  timeout --kill-after=5 "${seconds[$stage]}" bash -c "$stage" >"$out/$stage.log" 2>&1
  status=$?
  took=$((SECONDS - began))
  case $status in 0) word=passed ;; 124 | 137) word="out of time" ;; *) word=failed ;; esac
  [[ $status == 0 ]] || failed=1
  echo "$stage: $word after $took s, $out/$stage.log"
  [[ $status == 0 ]] || tail -n 5 "$out/$stage.log"
  summarise "$python" - "$out/summary.json" "$stage" "$word" "$took" <<'PYTHON'
import json
import sys

path, stage, result, seconds = sys.argv[1:]
with open(path) as file:
    summary = json.load(file)
summary["stages"][stage] = {"result": result, "seconds": int(seconds)}
print(json.dumps(summary, indent=1))
PYTHON
done
exit "$failed"
