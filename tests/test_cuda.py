"""Tests of only the cuda backend: faults that its emulation must find, selection, and the machine code from nvcc."""

import functools
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
from preloaded import forks
from test_backends import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode

import emulation
import fastattn
from fastattn import backends
from fastattn.backends.schema import (
    SCHEMAS,
    AttentionArgs,
    AttentionBackwardArgs,
    DropoutMaskArgs,
    LayerNormArgs,
    VarlenAttentionArgs,
)

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "csrc/tests/build.py").is_file():
    pytest.skip("the kernels' source is not here", allow_module_level=True)
sys.path.insert(0, str(ROOT / "csrc/tests"))
import build  # noqa: E402
import compile_gate  # noqa: E402
import native_build  # noqa: E402

# Planted faults by name: (operation, file in csrc/cuda, lines of its code, a part of them, the fault that replaces it,
# texts of the error of which one must appear). Lines are compared without indentation and comments. Together they stand
# in the file exactly once.
FAULTS = {
    "none": ("layer_norm", "rows.h", "", "", "", None),
    "none in attention": ("attention", "attention.cu", "", "", "", None),
    "no barrier before a sum's parts are written": (
        "layer_norm", "rows.h", "__syncthreads();\nif (lane == 0)", "__syncthreads();", "", "not close",
    ),
    "a barrier for some": (
        "softmax_dropout", "rows.h",
        "__syncthreads();\nfor (int n = 0; n < N; ++n)", "__sync", "if (lane < 16) __sync", "waits for",
    ),
    "no barrier of a warp before its weights are read": (
        "attention", "attention_tile.h",
        "}\n__syncwarp();\n#pragma unroll\nfor (int r = 0; r < kRows; ++r)", "__syncwarp();", "", "not close",
    ),
    "a load beyond the row": (
        "dropout", "vector.h",
        "for (int e = 0; e < kVector; ++e) x[e] = column + e < columns ? to_float(row[column + e]) : 0.0f;",
        "e < columns", "e <= columns", "outside the operands",
    ),
    "a store beyond the row": (
        "layer_norm", "vector.h", "if (column + e < columns) row[column + e] = values[e];",
        "e < columns", "e <= columns", "not close|outside the operands|written",
    ),
    "a vector across the row's end": (
        "softmax_dropout", "vector.h",
        "return columns % kVector == 0 && (int64_t)((uintptr_t)data % (uintptr_t)alignment) == 0 &&",
        "kVector", "4", "misaligned|outside the operands|not close",
    ),
    "a reduction without a lane": (
        "attention", "attention.cu", "visible = __reduce_or_sync(kAllLanes, visible);", "kAllLanes", "0x7fffffff",
        "lacks the lane itself",
    ),
    "shared memory taken to be 0 at first": (
        "layer_norm", "layer_norm.cu", "sum = (warp ? sum : 0.0f) + total[n][f][e];",
        "(warp ? sum : 0.0f)", "sum", "not close",
    ),
    "a shared array too short": (
        "softmax_dropout", "rows.h", "__shared__ float parts[N][kMaxThreads / kWarp];",
        "kMaxThreads / kWarp", "1", "index beyond an array",
    ),
}  # fmt: skip


def planted(path, lines, part, fault):
    """Return the file's source with `fault` in place of the part of these lines."""
    source = path.read_text().splitlines()
    code = [line.partition("//")[0].strip() for line in source]
    wanted = lines.split("\n")
    found = [n for n in range(len(code)) if code[n : n + len(wanted)] == wanted]
    assert len(found) == 1, f"{path.name} has {lines!r} {len(found)} times"
    assert part in lines
    source[found[0] : found[0] + len(wanted)] = [lines.replace(part, fault, 1)]
    return "\n".join((*source, ""))


@pytest.mark.parametrize("name", [name for name in FAULTS if FAULTS[name][2]])
def test_planted_faults_are_still_possible(name):
    """The lines that each fault replaces stand in the file exactly once."""
    _, file, *fault, _ = FAULTS[name]
    planted(ROOT / "csrc/cuda" / file, *fault)


@pytest.fixture(scope="module")
def compared():
    with forks("planted_faults_cuda") as call:
        yield call


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("name", FAULTS)
def test_the_emulation_finds_planted_faults(compared, name, tmp_path):
    require("cuda")
    operation, file, *fault, found = FAULTS[name]
    for folder in ("cuda", "common"):
        shutil.copytree(ROOT / "csrc" / folder, tmp_path / folder)
    path = tmp_path / "cuda" / file
    if fault[0]:
        path.write_text(planted(path, *fault))
    library = build.build_emulated(tmp_path / f"cuda/{operation}.cu")
    status, output = compared(library, operation)
    assert (status == 0) == (found is None), output
    assert found is None or re.search(found, output), output


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="for the emulation")
@pytest.mark.parametrize("columns", [512, 1024])
def test_launches(columns):
    """Row operations start one kernel forward, and at most two backward with all gradients. At the paper's sizes
    starting a kernel dominates the time."""
    require("cuda")
    _, controls = emulation.library()
    calls = (
        (
            functools.partial(fastattn.dropout_add_layer_norm, dropout_p=0.1),
            ((17, columns),) * 2 + ((columns,),) * 2,
            2,
        ),
        (functools.partial(fastattn.softmax_dropout, dropout_p=0.1, is_causal=True), ((17, columns),), 1),
        (fastattn.dropout, ((17, columns),), 1),
    )
    for function, shapes, backward in calls:
        with emulation.strict(), fastattn.backend("cuda"):
            tensors, counts = [torch.randn(shape, requires_grad=True) for shape in shapes], [controls.launches()]
            out = function(*tensors)
            counts.append(controls.launches())
            torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert controls.launches() - counts[1] == backward
        assert counts[1] - counts[0] == 1


# Choice of the backend


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that tensors on "cuda" are on a GPU of capability 9.0 and that the library has code for it."""
    for module in (backends.cuda, backends.common):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((9, 0), (9, 9)),))
    monkeypatch.setattr(backends.cuda, "MISSING", "")
    monkeypatch.setattr(backends.triton, "MISSING", "")


def norm(x):
    return LayerNormArgs(x, None, None, 1e-5)


def attend(query, key):
    return AttentionArgs(query, key, key, None, None, None, 0.25, query.size(2), key.size(2), False, 0)


def test_cuda_is_taken_before_triton_for_small_calls(hopper, monkeypatch):
    """Small calls go to cuda if its library has the operation and serves the dtype; otherwise `explain` says why not.
    If only one of the two backends can serve a call, it does so at any size."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"layer_norm": None})

    def assert_explained(x, chosen, other, reason, function=fastattn.layer_norm, arguments=((8,),)):
        explained = fastattn.explain(function, x, *arguments)
        assert explained.backend == chosen
        assert reason in explained.reasons[other]

    with FakeTensorMode():
        x, large = torch.empty(2, 8, device="cuda"), torch.empty(2**21, 8, device="cuda")
        assert_explained(x, "cuda", "triton", "cuda is faster")
        assert_explained(large, "triton", "cuda", "triton is faster")
        assert_explained(x, "triton", "cuda", "it has no dropout", fastattn.dropout, ())
        assert_explained(x.double(), "reference", "cuda", "float64")
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # its host cost differs
            assert backends.choose("layer_norm", norm(x)) == "triton"
        with mock.patch.object(backends.triton, "MISSING", "triton is not installed"):
            assert backends.choose("layer_norm", norm(large)) == "cuda"
        for elements, wanted in ((2**23 - 1, "cuda"), (2**23, "triton")):  # the limit counts bytes
            assert backends.choose("layer_norm", norm(torch.empty(elements, device="cuda"))) == wanted
        monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((8, 0), (8, 9)), ((10, 0), (10, 9))))
        reason = "its library has no code for this GPU's compute capability, 9.0"
        assert_explained(x, "triton", "cuda", reason)
        monkeypatch.setattr(backends.cuda, "MISSING", "its library is not loaded: no nvcc")
        assert_explained(x, "triton", "cuda", "its library is not loaded: no nvcc")


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


def test_a_large_mask_or_cache_is_left_to_triton(hopper, monkeypatch):
    """The bytes of keys and values decide, not those of the single query."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"dropout_mask": None, "attention": None})
    with FakeTensorMode():
        seed = torch.empty(2, dtype=torch.int64, device="cuda")
        token = torch.empty(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
        for less, wanted in ((1, "cuda"), (0, "triton")):
            mask = DropoutMaskArgs((2**10, 2**15 - less), seed, 6554)
            cache = torch.empty(1, 8, 2**16 - less, 64, device="cuda", dtype=torch.bfloat16)
            assert backends.choose("dropout_mask", mask) == wanted
            assert backends.choose("attention", attend(token, cache)) == wanted


def test_what_a_missing_triton_costs_is_said(hopper, monkeypatch):
    """One warning appears if the reference runs because Triton is missing. None appears if Triton would not serve the
    call either."""
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"layer_norm": None, "attention": None})
    monkeypatch.setattr(backends.triton, "MISSING", "triton is not installed")
    monkeypatch.setattr(backends, "_warned", set())
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        token, prompt = (torch.empty(1, 2, length, 16, device="cuda") for length in (1, 17))
        assert backends.choose("layer_norm", norm(token)) == "cuda"
        assert backends.choose("layer_norm", norm(token.double())) == "reference"
        assert backends.choose("attention", attend(token, prompt)) == "cuda"
        assert not caught
        for _ in range(2):
            assert backends.choose("attention", attend(prompt, prompt)) == "reference"
    assert [str(warning.message) for warning in caught] == [
        "fastattn runs its plain PyTorch reference on cuda tensors, slowly: triton is not installed"
    ]


def test_the_kernels_for_hopper_are_taken_only_if_forced(hopper, monkeypatch):
    """No GPU has run them, so the choice and its reasons leave them out, whatever the size of the call."""
    functions = dict.fromkeys(("attention", "varlen_attention", "attention_backward"))
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", functions)
    monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((9, 0), (9, 0)),))
    monkeypatch.setattr(backends, "_warned", {"cuda"})
    withheld = 'its kernels for Hopper have run on no GPU yet, so only backend("cuda") takes them'
    with FakeTensorMode():
        few, many = (torch.empty(1, 2, length, 64, device="cuda", dtype=torch.bfloat16) for length in (16, 64))
        seed, offsets = (torch.empty(2, dtype=torch.int64, device="cuda") for _ in range(2))
        tokens = torch.empty(64, 2, 64, device="cuda", dtype=torch.bfloat16)
        packed = VarlenAttentionArgs(tokens, tokens, tokens, offsets, offsets, None, None, 64, 64, 0.125, 64, 64, 0)
        decoding = attend(few, many)
        calls = attend(many, many), decoding._replace(threshold=5, seed=seed), decoding._replace(keep_residual=True)
        backward = AttentionBackwardArgs(few, None, few, few, few, decoding, False)
        for args in (*calls, packed, backward):
            op = {id(packed): "varlen_attention", id(backward): "attention_backward"}.get(id(args), "attention")
            assert backends.choose(op, args) == "triton"
            with fastattn.backend("cuda"):
                assert backends.choose(op, args) == "cuda"
            with mock.patch.object(backends.triton, "MISSING", "triton is not installed"):
                assert backends.choose(op, args) == "reference"
        assert backends.choose("attention", attend(few, many)) == "cuda"
        explanation = fastattn.explain(fastattn.scaled_dot_product_attention, many, many, many)
        assert explanation.backend == "triton"
        assert explanation.reasons["cuda"] == withheld
        with fastattn.backend("cuda"), pytest.raises(RuntimeError, match="no mask whose gradient is needed"):
            backends.choose("attention_backward", backward._replace(mask_grad=True))
        monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((9, 0), (9, 9)),))
        reason = backends.cuda.refusal("attention", calls[0])
        assert reason.endswith("that for Hopper is not in the library, which is built without 9.0a")
        monkeypatch.setattr(backends.cuda, "CAPABILITIES", (((8, 0), (8, 9)),))
        for module in (backends.cuda, backends.common):
            monkeypatch.setattr(module, "capability", lambda device: (8, 0))
        reason = backends.cuda.refusal("attention", calls[0])
        assert reason.endswith("that for Hopper GPUs of compute capability 9.0, this one has 8.0")


def test_capabilities(monkeypatch, tmp_path):
    """The capabilities are those that code for the recorded architectures runs on."""
    monkeypatch.setattr(backends.native, "PACKAGE", tmp_path)
    assert backends.native.capabilities() == (((0, 0), (999, 9)),)
    (tmp_path / "_build.json").write_text('{"cuda": {"architectures": ["8.6", "9.0a", "12.0+PTX"]}}')
    assert backends.native.capabilities() == (((8, 6), (8, 9)), ((9, 0), (9, 0)), ((12, 0), (999, 9)))


@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
def test_a_library_that_is_newer_than_the_driver(monkeypatch, tmp_path, cuda):
    """A driver runs the code of its own major version of CUDA and of older ones. torch's version does not matter."""
    native = backends.native
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (tmp_path / "_cuda.so").write_text("")
    (tmp_path / "_build.json").write_text('{"cuda": {"compiler": "nvcc 13.0"}}')
    monkeypatch.setattr(native, "_driver", lambda: 12)
    library, reason = native._load.__wrapped__("cuda")
    assert library is None
    assert reason == "_cuda.so is built by nvcc 13.0 and needs a driver of CUDA 13, this one is of CUDA 12"
    for driver in (0, 13, 14):  # 0: no driver, so there are no CUDA tensors
        monkeypatch.setattr(native, "_driver", lambda driver=driver: driver)
        assert "does not load" in native._load.__wrapped__("cuda")[1]


def test_no_decoding_inside_functorch(monkeypatch):
    """Inside vmap the operands do not show that a gradient is required. This attention has none, so it refuses."""
    for name, value in (("MISSING", ""), ("FUNCTIONS", {"attention": None}), ("DEVICE", "cpu")):
        monkeypatch.setattr(backends.cuda, name, value)
    reasons = []

    def f(q):
        reasons.append(backends.cuda.refusal("attention", attend(q[None], q[None])))
        return q.sum()

    q = torch.ones(2, 1, 4, 16, device="cpu")
    assert backends.cuda.refusal("attention", attend(q, q)) is None
    torch.func.grad(lambda q: torch.func.vmap(f)(q).sum())(q)
    assert reasons == ["its attention is not for functorch's transforms"]


@pytest.mark.parametrize(
    ("batch", "keys", "reason"),
    [
        (1, 2**29, None),
        (1, 2**29 + 1, "it takes up to 2**29 keys, not 536870913"),
        (2**27 - 1, 16, None),
        (2**27, 16, "it takes up to 2**31 - 1 rows of queries, not 2147483648"),
    ],
)
def test_what_is_counted_in_32_bits_is_refused(hopper, monkeypatch, batch, keys, reason):
    monkeypatch.setattr(backends.cuda, "FUNCTIONS", {"attention": None})
    with FakeTensorMode():
        query, key = (torch.empty(batch, 1, length, 16, device="cuda") for length in (16, keys))
        assert backends.cuda.refusal("attention", attend(query, key)) == reason


# Machine code from nvcc


def require_nvcc():
    """Skip without nvcc, or fail if FASTATTN_REQUIRE names it."""
    if DEVICE != "cpu":
        pytest.skip("needs no GPU, and minutes of every core")
    try:
        native_build.nvcc()
        compile_gate.cuobjdump("--version")
    except native_build.NotBuilt as reason:
        (pytest.fail if "nvcc" in REQUIRED else pytest.skip)(str(reason))


@pytest.fixture(scope="module")
def compiled():
    """Build the library for several architectures."""
    require_nvcc()
    return compile_gate.library(compile_gate.TESTED)


@pytest.mark.slow
def test_every_kernel_is_sound_machine_code(compiled):
    kernels = compile_gate.kernels_of(compiled)
    assert [str(kernel) for kernel in kernels if kernel.faults()] == []
    for architecture in ("80", "100"):
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
"""


@pytest.mark.slow
def test_the_gate_finds_planted_faults(compiled, tmp_path):
    (tmp_path / "planted.cu").write_text(PLANTED)
    flags = native_build.cuda_flags(["9.0"]).split()
    command = [native_build.nvcc()[0], *flags, "-c", tmp_path / "planted.cu", "-o", tmp_path / "planted.o"]
    subprocess.run(command, check=True)
    faults = {k.name.split("(")[0]: "; ".join(k.faults()) for k in compile_gate.kernels_of(tmp_path / "planted.o")}
    assert re.fullmatch(r"spills or has arrays in \d+ bytes of local memory", faults.pop("spilling"))
    assert faults == {"sound": "", "narrow": "lacks 128-bit loads or stores"}
