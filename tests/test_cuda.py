"""Tests of only the cuda backend: faults that its emulation must find, selection, and the machine code from nvcc."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import DEVICE, REQUIRED, require
from test_backends import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode

import emulation
import fastattn
from fastattn import backends
from fastattn.backends.schema import (
    SCHEMAS,
    AttentionArgs,
    DropoutAddLayerNormArgs,
    DropoutAddLayerNormBackwardArgs,
    DropoutArgs,
    DropoutMaskArgs,
    LayerNormArgs,
    SoftmaxDropoutArgs,
    SoftmaxDropoutBackwardArgs,
)

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "csrc/tests/build.py").is_file():
    pytest.skip("the kernels' source is not here", allow_module_level=True)
sys.path.insert(0, str(ROOT / "csrc/tests"))
import build  # noqa: E402
import compile_gate  # noqa: E402
import native_build  # noqa: E402

# Planted faults by name: (file in csrc/cuda, lines of its code, the fault that replaces them, operation, texts of the
# error of which one must appear). Lines are compared without indentation and comments. Together they stand in the file
# exactly once.
FAULTS = {
    "none": ("rows.h", "", "", "layer_norm", None),
    "none in attention": ("attention.cu", "", "", "attention", None),
    "no barrier before a sum's parts are written": (
        "rows.h",
        "__syncthreads();\nif (lane == 0)",
        "if (lane == 0)",
        "layer_norm",
        "not close",
    ),
    "no barrier before a sum's parts are read": (
        "rows.h",
        "__syncthreads();\nfor (int n = 0; n < N; ++n)",
        "for (int n = 0; n < N; ++n)",
        "softmax_dropout",
        "not close",
    ),
    "no barrier between the warps that add to a block's sums": (
        "layer_norm.cu",
        "__syncthreads();\n}\nfor (int n = 0; n < 2; ++n)",
        "} for (int n = 0; n < 2; ++n)",
        "layer_norm",
        "not close",
    ),
    "a barrier for some": (
        "rows.h",
        "__syncthreads();\nfor (int n = 0; n < N; ++n)",
        "if (lane < 16) __syncthreads(); for (int n = 0; n < N; ++n)",
        "softmax_dropout",
        "waits for",
    ),
    "a load beyond the row": (
        "vector.h",
        "for (int e = 0; e < kVector; ++e) x[e] = column + e < columns ? to_float(row[column + e]) : 0.0f;",
        "for (int e = 0; e < kVector; ++e) x[e] = column + e <= columns ? to_float(row[column + e]) : 0.0f;",
        "dropout",
        "outside the operands",
    ),
    "a store beyond the row": (
        "vector.h",
        "if (column + e < columns) row[column + e] = values[e];",
        "if (column + e <= columns) row[column + e] = values[e];",
        "layer_norm",
        "not close|outside the operands|written",
    ),
    "a vector across the row's end": (
        "vector.h",
        "return columns % kVector == 0 && (int64_t)((uintptr_t)data % (uintptr_t)alignment) == 0 &&",
        "return columns % 4 == 0 && (int64_t)((uintptr_t)data % (uintptr_t)alignment) == 0 &&",
        "softmax_dropout",
        "misaligned|outside the operands|not close",
    ),
    "a mask without half of the lanes": (
        "dropout_mask.h",
        "constexpr unsigned kAllLanes = 0xffffffff;",
        "constexpr unsigned kAllLanes = 0x0000ffff;",
        "dropout",
        "mask 0xffff lacks the lane itself",
    ),
    "a shuffle that leaves out lanes": (
        "rows.h",
        "for (int step = kWarp / 2; step > 0; step /= 2) x = operation(x, __shfl_xor_sync(kAllLanes, x, step));",
        "for (int step = kWarp / 4; step > 0; step /= 2) x = operation(x, __shfl_xor_sync(kAllLanes, x, step));",
        "layer_norm",
        "not close",
    ),
    "no barrier between the warps that are merged": (
        "attention.cu",
        "__syncthreads();\nif (w != warp) continue;",
        "if (w != warp) continue;",
        "attention",
        "not close",
    ),
    "no barrier before a merged row is read": (
        "attention.cu",
        "__syncthreads();\nif (group > 0) return;",
        "if (group > 0) return;",
        "attention",
        "not close",
    ),
    "no barrier of a warp before its weights are read": (
        "attention_tile.h",
        "}\n__syncwarp();\n#pragma unroll\nfor (int r = 0; r < kRows; ++r)",
        "}\n#pragma unroll\nfor (int r = 0; r < kRows; ++r)",
        "attention",
        "not close",
    ),
    "a key beyond the length": (
        "../common/visibility.h",
        "return center - window_left <= j && j <= center + window_right && j < length;",
        "return center - window_left <= j && j <= center + window_right && j <= length;",
        "attention",
        "not close",
    ),
    "values that nobody sees": (
        "attention_tile.h",
        "const bool wanted = visible >> j & 1;",
        "const bool wanted = true;",
        "attention",
        "not close|outside the operands",
    ),
    "a row's lanes without the last": (
        "attention_tile.h",
        "static constexpr int kNextLane = 1, kLastLane = 2;",
        "static constexpr int kNextLane = 1, kLastLane = 1;",
        "attention",
        "not close",
    ),
    "a reduction without a lane": (
        "attention.cu",
        "visible = __reduce_or_sync(kAllLanes, visible);",
        "visible = __reduce_or_sync(0x7fffffff, visible);",
        "attention",
        "lacks the lane itself",
    ),
    "rows of 8 bytes read by 16": (
        "attention.cu",
        "return ((int64_t)heads.data | strides * size_of(a.dtype)) % 16 == 0;",
        "return ((int64_t)heads.data | strides * size_of(a.dtype)) % 2 == 0;",
        "attention",
        "misaligned|outside",
    ),
    "shared memory taken to be 0 at first": (
        "layer_norm.cu",
        "sum = (warp ? sum : 0.0f) + total[n][f][e];",
        "sum = sum + total[n][f][e];",
        "layer_norm",
        "not close",
    ),
    "a shared array too short": (
        "rows.h",
        "__shared__ float parts[N][kMaxThreads / kWarp];",
        "__shared__ float parts[N][1];",
        "softmax_dropout",
        "index beyond an array",
    ),
}


def planted(path, lines, fault):
    """Return the file's source with `fault` instead of these lines."""
    source = path.read_text().splitlines()
    code = [line.partition("//")[0].strip() for line in source]
    wanted = lines.split("\n")
    found = [n for n in range(len(code)) if code[n : n + len(wanted)] == wanted]
    assert len(found) == 1, f"{path.name} has {lines!r} {len(found)} times"
    source[found[0] : found[0] + len(wanted)] = [fault]
    return "\n".join((*source, ""))


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name][1]])
def test_planted_faults_are_still_possible(name):
    """The lines that each fault replaces stand in the file exactly once."""
    file, lines, fault, *_ = FAULTS[name]
    path = ROOT / "csrc/cuda" / file
    assert planted(path, lines, fault) != path.read_text()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("name", FAULTS)
def test_the_emulation_finds_planted_faults(name, tmp_path):
    require("cuda")
    file, lines, fault, operation, found = FAULTS[name]
    for folder in ("cuda", "common"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    if lines:
        path = tmp_path / "cuda" / file
        path.write_text(planted(path, lines, fault))
    library = build.build_emulated(tmp_path / f"cuda/{operation}.cu")
    program = [sys.executable, ROOT / "tests/planted_faults_cuda.py", library, operation]
    tested = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parent.parent)}
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=tested)
    if found is None:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode != 0, "not found"
        assert any(words in done.stdout for words in found.split("|")), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("columns", [512, 1024])
def test_launches(columns):
    """Row operations start one kernel forward, and at most two backward with all gradients. At the paper's sizes
    starting a kernel dominates the time."""
    require("cuda")
    functions, controls = emulation.library()
    x, seed, weight = torch.randn(17, columns), torch.tensor([4, 5]), torch.ones(columns)
    scores = x.view(1, 1, 17, columns)

    def launches(name, args):
        before = controls.launches()
        return functions[name](args), controls.launches() - before

    args = DropoutAddLayerNormArgs(x, x, weight, weight, seed, 6554, 1e-5, True, x.dtype)
    (_, total, mean, rstd), forward = launches("dropout_add_layer_norm", args)
    args = DropoutAddLayerNormBackwardArgs(x, x, total, mean, rstd, weight, seed, 6554, *[x.dtype] * 3)
    _, backward = launches("dropout_add_layer_norm_backward", args)
    assert (forward, backward) == (1, 2)
    args = SoftmaxDropoutArgs(scores, None, None, seed, 1.0, 17, 0, False, 6554)
    (_, stats), forward = launches("softmax_dropout", args)
    _, backward = launches("softmax_dropout_backward", SoftmaxDropoutBackwardArgs(scores, stats, args, False))
    assert (forward, backward) == (1, 1)
    assert launches("dropout", DropoutArgs(x, seed, 6554))[1] == 1


# Choice of the backend


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that tensors on "cuda" are on a GPU of capability 9.0 and that the library has code for it."""
    for module in (backends.cuda, backends.common):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((9, 0), (9, 9)),))
    monkeypatch.setattr(backends.cuda, "MISSING", "")
    monkeypatch.setattr(backends.triton, "MISSING", "")


def test_cuda_is_taken_before_triton_for_small_calls(hopper, monkeypatch):
    """Small calls go to cuda if its library has the operation and serves the dtype; otherwise `explain` says why not.
    If only one of the two backends can serve a call, it does so at any size."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"layer_norm": None})
    with FakeTensorMode():
        x, large_x = torch.empty(2, 8, device="cuda"), torch.empty(2**21, 8, device="cuda")
        chosen = fastattn.explain(fastattn.layer_norm, x, (8,))
        assert chosen.backend == "cuda"
        assert chosen.reasons["triton"] == "cuda is faster"
        large = fastattn.explain(fastattn.layer_norm, large_x, (8,))
        assert large.backend == "triton"
        assert large.reasons["cuda"] == "triton is faster"
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # its host cost differs
            assert backends.choose("layer_norm", LayerNormArgs(x, None, None, 1e-5)) == "triton"
        with mock.patch.object(backends.triton, "MISSING", "triton is not installed"):
            assert backends.choose("layer_norm", LayerNormArgs(large_x, None, None, 1e-5)) == "cuda"
        under, over = (torch.empty(n, device="cuda") for n in (2**23 - 1, 2**23))  # the limit counts bytes
        assert backends.choose("layer_norm", LayerNormArgs(under, None, None, 1e-5)) == "cuda"
        assert backends.choose("layer_norm", LayerNormArgs(over, None, None, 1e-5)) == "triton"
        fallback = fastattn.explain(fastattn.dropout, x)
        assert fallback.backend == "triton"
        assert fallback.reasons["cuda"] == "it has no dropout"
        double = fastattn.explain(fastattn.layer_norm, x.double(), (8,))
        assert double.backend == "reference"
        assert "float64" in double.reasons["cuda"]
        monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((8, 0), (8, 9)), ((10, 0), (10, 9))))
        other = fastattn.explain(fastattn.layer_norm, x, (8,))
        assert other.backend == "triton"
        assert other.reasons["cuda"] == "its library has no code for this GPU's compute capability, 9.0"
        monkeypatch.setattr(backends.cuda, "MISSING", "its library is not loaded: no nvcc")
        missing = fastattn.explain(fastattn.layer_norm, x, (8,))
        assert missing.backend == "triton"
        assert missing.reasons["cuda"] == "its library is not loaded: no nvcc"


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_every_operation_has_its_order(function, hopper, monkeypatch):
    """Small calls go to cuda if the library has the operation, otherwise to triton."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {name: None for name in SCHEMAS if "varlen" not in name})
    with FakeTensorMode():
        arguments = (
            torch.empty(given.shape, dtype=given.dtype, device="cuda") if isinstance(given, torch.Tensor) else given
            for given in CALLS[function]
        )
        chosen = fastattn.explain(function, *arguments).backend
    assert chosen == ("triton" if function is fastattn.varlen_attn else "cuda")


def test_a_large_mask_is_left_to_triton(hopper, monkeypatch):
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"dropout_mask": None})
    with FakeTensorMode():
        seed = torch.empty(2, dtype=torch.int64, device="cuda")
        assert backends.choose("dropout_mask", DropoutMaskArgs((2**10, 2**15 - 1), seed, 6554)) == "cuda"
        assert backends.choose("dropout_mask", DropoutMaskArgs((2**10, 2**15), seed, 6554)) == "triton"


def test_a_large_cache_is_left_to_triton(hopper, monkeypatch):
    """The bytes of keys and values decide, not those of the single query."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"attention": None})
    with FakeTensorMode():
        token = torch.empty(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
        for keys, wanted in ((2**16 - 1, "cuda"), (2**16, "triton")):
            cache = torch.empty(1, 8, keys, 64, device="cuda", dtype=torch.bfloat16)
            settings = None, None, None, 0.25, keys, keys, False, 0
            assert backends.choose("attention", AttentionArgs(token, cache, cache, *settings)) == wanted


def test_what_a_missing_triton_costs_is_said(hopper, monkeypatch):
    """One warning appears if the reference runs because Triton is missing. None appears if Triton would not serve the
    call either."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"layer_norm": None, "attention": None})
    monkeypatch.setattr(backends.triton, "MISSING", "triton is not installed")
    monkeypatch.setattr(backends, "_warned", set())
    settings = None, None, None, 0.25, 17, 17, False, 0
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        token, prompt = (torch.empty(1, 2, length, 16, device="cuda") for length in (1, 17))
        assert backends.choose("layer_norm", LayerNormArgs(token, None, None, 1e-5)) == "cuda"
        assert backends.choose("layer_norm", LayerNormArgs(token.double(), None, None, 1e-5)) == "reference"
        assert backends.choose("attention", AttentionArgs(token, prompt, prompt, *settings)) == "cuda"
        assert not caught
        for _ in range(2):
            assert backends.choose("attention", AttentionArgs(prompt, prompt, prompt, *settings)) == "reference"
    assert [str(warning.message) for warning in caught] == [
        "fastattn runs its plain PyTorch reference on cuda tensors, slowly: triton is not installed"
    ]


def test_capabilities(monkeypatch, tmp_path):
    """The capabilities are those that code for the recorded architectures runs on."""
    monkeypatch.setattr(backends.native, "PACKAGE", tmp_path)
    assert backends.native.capabilities() == (((0, 0), (999, 9)),)
    (tmp_path / "_build.json").write_text('{"cuda": {"architectures": ["8.6", "9.0a", "12.0+PTX"]}}')
    assert backends.native.capabilities() == (((8, 6), (8, 9)), ((9, 0), (9, 0)), ((12, 0), (999, 9)))


def test_library_of_another_cuda(monkeypatch, tmp_path):
    """A library of another CUDA major version is not loaded: its runtime may be newer than this machine's driver."""
    monkeypatch.setattr(backends.native, "PACKAGE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (tmp_path / "_cuda.so").write_text("")
    (tmp_path / "_build.json").write_text('{"cuda": {"compiler": "nvcc 13.0"}}')
    library, reason = backends.native._load.__wrapped__("cuda")
    assert library is None
    assert reason == "_cuda.so is built by nvcc 13.0, torch is of CUDA 12.8; build it anew"
    (tmp_path / "_build.json").write_text('{"cuda": {"compiler": "nvcc 12.4"}}')
    assert "does not load" in backends.native._load.__wrapped__("cuda")[1]


def test_no_decoding_inside_functorch(monkeypatch):
    """Inside vmap the operands do not show that a gradient is required. This attention has none, so it refuses."""
    monkeypatch.setattr(backends.cuda, "MISSING", "")
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"attention": None})
    monkeypatch.setattr(backends.cuda, "DEVICE", "cpu")
    reasons = []

    def f(q):
        reasons.append(
            backends.cuda.refusal("attention", AttentionArgs(*[q[None]] * 3, None, None, None, 0.25, 4, 4, False, 0))
        )
        return q.sum()

    q = torch.ones(2, 1, 4, 16, device="cpu")
    assert backends.cuda.refusal("attention", AttentionArgs(q, q, q, None, None, None, 0.25, 4, 4, False, 0)) is None
    torch.func.grad(lambda q: torch.func.vmap(f)(q).sum())(q)
    assert reasons == ["its attention is not for functorch's transforms"]


def test_what_is_counted_in_32_bits_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"attention": None})
    settings = None, None, None, 0.25, 16, 16, False, 0
    with FakeTensorMode():
        q, fits, many = (torch.empty(rows, 1, 16, 16, device="cuda") for rows in (1, 2**27 - 1, 2**27))
        for keys, reason in ((2**29, None), (2**29 + 1, "it takes up to 2**29 keys, not 536870913")):
            key = torch.empty(1, 1, keys, 16, device="cuda")
            assert backends.cuda.refusal("attention", AttentionArgs(q, key, key, *settings)) == reason
        assert backends.cuda.refusal("attention", AttentionArgs(fits, fits, fits, *settings)) is None
        refused = backends.cuda.refusal("attention", AttentionArgs(many, many, many, *settings))
    assert refused == "it takes up to 2**31 - 1 rows of queries, not 2147483648"


# Machine code from nvcc


@pytest.fixture(scope="module")
def compiled():
    """Build the library for several architectures. Without nvcc, skip, or fail if FASTATTN_REQUIRE names nvcc."""
    if DEVICE != "cpu":
        pytest.skip("needs no GPU, and minutes of every core")
    try:
        native_build.nvcc()
        compile_gate.cuobjdump("--version")
    except native_build.NotBuilt as reason:
        (pytest.fail if "nvcc" in REQUIRED else pytest.skip)(str(reason))
    return compile_gate.library()


@pytest.mark.slow
def test_every_kernel_is_sound_machine_code(compiled):
    kernels = compile_gate.kernels_of(compiled)
    assert [str(kernel) for kernel in kernels if kernel.faults()] == []
    for architecture in ("80", "90", "100"):
        names = [kernel.name for kernel in kernels if kernel.architecture == architecture]
        assert names.count("drop_rows(Dropout)") == 1
        assert len([name for name in names if name.startswith("attend<")]) == 18
        for problem in ("LayerNorm", "LayerNormBackward", "SoftmaxDropout", "SoftmaxDropoutBackward"):
            assert len([name for name in names if name.endswith(f">({problem})")]) == 3, names
    print(*kernels, sep="\n")


@pytest.mark.slow
def test_the_library_uses_stable_symbols_alone(compiled):
    include = Path(torch.__file__).parent / "include/torch/csrc"
    shims = "".join((include / name).read_text() for name in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h"))

    def symbols(option):
        lines = subprocess.run(["nm", "-D", option, compiled], capture_output=True, text=True, check=True).stdout
        return [line.split()[-1] for line in lines.splitlines() if " w " not in line]

    assert symbols("--defined-only") == []
    undefined = symbols("--undefined-only")
    assert "aoti_torch_get_current_cuda_stream" in undefined
    assert [s for s in undefined if "@" not in s and not re.search(rf"\b{s}\(", shims)] == []
    assert {s.split("@")[1].split("_")[0] for s in undefined if "@" in s} <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


PLANTED = """
__global__ void __launch_bounds__(128) sound(uint4* out, const uint4* in) { out[threadIdx.x] = in[threadIdx.x]; }
__global__ void __launch_bounds__(128) narrow(unsigned* out, const unsigned* in) { out[threadIdx.x] = in[threadIdx.x]; }
__global__ void __launch_bounds__(1024) spilling(uint4* out, const uint4* in, int n) {
  uint4 held[32];
  for (int i = 0; i < 32; ++i) held[i] = in[threadIdx.x + i * 1024];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 32; ++i) held[i].x = held[i].x * held[(i + 1) % 32].y + held[(i + 5) % 32].z ^ held[i].w;
  for (int i = 0; i < 32; ++i) out[threadIdx.x + i * 1024] = held[i];
}
__global__ void __launch_bounds__(128) indexing(uint4* out, const uint4* in, int n) {
  unsigned array[64];
  for (int i = 0; i < 64; ++i) array[i * n % 64] = in[i].x;
  out[threadIdx.x] = make_uint4(array[n % 64], in[n].x, in[n].y, in[n].z);
}
"""


@pytest.mark.slow
def test_the_gate_finds_planted_faults(compiled, tmp_path):
    (tmp_path / "planted.cu").write_text(PLANTED)
    flags = native_build.cuda_flags(["9.0"]).split()
    command = [native_build.nvcc()[0], *flags, "-c", tmp_path / "planted.cu", "-o", tmp_path / "planted.o"]
    subprocess.run(command, check=True)
    faults = {k.name.split("(")[0]: "; ".join(k.faults()) for k in compile_gate.kernels_of(tmp_path / "planted.o")}
    assert faults.pop("sound") == ""
    assert faults.pop("narrow") == "lacks 128-bit loads or stores"
    assert re.fullmatch(r"spills or has arrays in \d+ bytes of local memory", faults.pop("spilling"))
    assert "of local memory" in faults.pop("indexing")
    assert not faults
