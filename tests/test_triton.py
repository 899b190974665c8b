"""Tests of the Triton backend only: its forms of the dropout formula, the order of programs, compiled kernels."""

# ruff: noqa: E402 (where Triton is not installed, nothing here can be imported)

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, require, slow, this_torch
from oracle import dropout_mask as exact_mask
from oracle import gradients, threshold

require("triton", allow_module_level=True)
if DEVICE != "cpu":
    pytest.skip("for Triton's interpreter and compiler", allow_module_level=True)

import triton
import triton.language as tl
from interpreter import strict
from test_dropout import ROWS
from triton.runtime.errors import InterpreterError

import fake_gpu
import fastattn
from fastattn.backends.triton import kernel, philox, rows

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
SEED = torch.tensor([4, 5])


@triton.jit
def _keep(out, seed, threshold, height, columns, z, i, j, M: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr):
    """Write to `out` the mask of the rows from i and the columns from j of matrix z, by the named function."""
    dropout = philox.Dropout(seed, threshold, 1.0)
    rows_of = i + tl.arange(0, M)
    if FORM == "pairs":
        place = i // 2 + tl.arange(0, M) // 2
        rows_of = place // 8 * 16 + place % 8 + tl.arange(0, M) % 2 * 8
    columns_of = j + tl.arange(0, N)
    pointers = out + z * height * columns + rows_of[:, None] * columns + columns_of[None, :]
    inside = (rows_of[:, None] < height) & (columns_of[None, :] < columns)
    if FORM == "tile":
        kept = philox.keep(dropout, z, i, j, M, N)
    elif FORM == "transposed":
        kept = philox.keep_transposed(dropout, z, i, j, M, N).trans()
    elif FORM == "pairs":
        pair = i // 2 + tl.arange(0, M // 2)
        kept = philox.keep_pairs(dropout, rows.Rows(z, rows_of, rows_of, True, z + pair * 0, pair), j, N)
    else:
        kept = philox.keep_rows(dropout, z + rows_of * 0, rows_of, j, N)
    tl.store(pointers, kept, mask=inside)


@pytest.mark.parametrize(
    ("seed", "p"),
    [
        ((-81985529216486896, 12345678901), 0.3),
        *(((1, 2), p) for p in (1 / 65536, 1 - 8e-6, 1.0)),
        *(pytest.param(seed, 0.3, marks=pytest.mark.slow) for seed in ((0, 0), (2**63 - 1, -1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["tile", "transposed", "pairs", "rows"])
def test_every_form_of_the_formula(form, seed, p):
    shape, (m, n) = (2, 40, 70), (32, 64)
    out = torch.zeros(shape, dtype=torch.bool)
    for z in range(shape[0]):
        for i in range(0, shape[1], m):
            for j in range(0, shape[2], n):
                _keep[(1,)](out, torch.tensor(seed), threshold(p), *shape[1:], z, i, j, m, n, form)
    assert torch.equal(out, exact_mask(shape, p, seed))


# Calls with the shapes of their operands. The first operand has the test's dtype.
PROBLEMS = {
    **{name: (call, shapes(10)) for name, (call, shapes) in ROWS.items()},
    "softmax of wide rows": (lambda s: fastattn.softmax_dropout(s, 0.3, is_causal=True, seed=SEED), [(2, 8200)]),
    "layer_norm of wide rows": (lambda x, w, b: fastattn.layer_norm(x, w.shape, w, b), [(2, 8200), (8200,), (8200,)]),
    "attention": (
        lambda q, k, v, m: fastattn.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), m, 0.3, is_causal=True, enable_gqa=True, return_lse=True, seed=SEED
        ),
        [(1, 4, 40, 16), (1, 2, 50, 16), (1, 2, 50, 24), (4, 40, 1)],
    ),
}


# In 16 bits attention also has a residual. Otherwise programs of all dtypes access the same places.
IN_16_BITS = ("dropout_add_layer_norm", "layer_norm of wide rows", "attention")


@pytest.mark.parametrize(
    "problem", ["softmax_dropout", *slow(*(name for name in PROBLEMS if name != "softmax_dropout"))]
)
def test_programs_in_any_order(problem):
    """No program sees what another has written, none touches memory outside the operands, and each run has the same
    bits. Values equal the reference's; every other test checks them too."""
    call, shapes = PROBLEMS[problem]
    dtype = torch.bfloat16 if problem in IN_16_BITS else torch.float32
    tensors = [torch.randn(shape).to(torch.float32 if n else dtype) for n, shape in enumerate(shapes)]
    with fastattn.backend("triton"), strict(twice=True):
        outs, grads = gradients(call, tensors)
    with fastattn.backend("reference"):
        wanted, wanted_grads = gradients(call, tensors)
    eps = torch.finfo(dtype).eps  # a few roundings to the dtype, relative to the largest terms of sums that cancel
    for ours, theirs in zip((*outs, *grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8 * eps, atol=8 * eps * theirs.abs().max().item())


@triton.jit
def _unmasked(source, out, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(source + place))


@triton.jit
def _racing(source, out):
    tl.store(out, tl.load(source + tl.program_id(0)))


def test_planted_boundary_and_order_faults():
    """Both faults are found: without a boundary mask an access is outside the operands, and programs that write one
    place depend on order."""
    source, out = torch.randn(48), torch.empty(48)
    with strict():
        _unmasked[(3,)](source, out, 16)
        assert torch.equal(out, source)
        with pytest.raises(InterpreterError, match="outside"):
            _unmasked[(2,)](source, out, 32)
    with strict(twice=True), pytest.raises(AssertionError, match="order"):
        _racing[(48,)](source, out[:1])


def program(*arguments, seconds=900):
    """Return (exit status, output) of a Python program for which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=seconds
    )
    return result.returncode, result.stdout + result.stderr


def last_json(output):
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))


@pytest.mark.slow
def test_planted_compile_faults():
    """The ahead-of-time checks find each planted fault, and none in a sound kernel. They see its matrix instructions on
    every architecture."""
    status, output = program(str(TOOLS / "planted_faults_triton.py"))
    assert status == 0, output
    found = last_json(output)
    assert found["sound"] == [[]] * 4
    for name in (
        "tf32 asked for", "not converted", "spill beside the loop", "wide rows", "a sound loop",
        "a loop of one stage", "known shared memory",
    ):  # fmt: skip
        assert found[name] == [], name
    messages = {
        "spill": "spills",
        "tf32": "tf32",
        "narrow": "32 bits",
        "described": "bulk loads",
        "converted": "layout conversions",
        "no products": "no matrix products",
        "no matrix instructions": "no matrix instructions",
        "mma": "no wgmma",
        "nothing beside it": "no case without dropout",
        "too large": "shared memory",
        "large stack": "392 bytes of stack",
        "spill in the loop": "8 of 199 instructions",
        "narrow rows": "1 accesses to global memory of 16 bits",
        "rows by 64 bits": "40% of what is loaded and stored is accessed by 128 bits",
        "barriers": "3 barriers in the main loop, at most 2",
        "drains": "2 waits for all products in the main loop, at most 1",
        "shared memory of one stage": "1.20 times as long as products, at most 1.15",
        "shared memory": "1.20 times as long as products, at most 1.15",
        "narrow loads": "40% of what the main loop loads",
    }
    assert {name: found[name] for name, message in messages.items() if message not in str(found[name])} == {}


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("sample", ["usual", *this_torch("hard")])
def test_ahead_of_time(sample):
    """The gate passes a sample of every operation with the installed Triton."""
    status, output = program(str(TOOLS / "aot_gate.py"), "--arch", "90", "--sample", sample)
    assert status == 0, output
    assert "0 faults" in output


@pytest.mark.triton
@pytest.mark.parametrize("capability", fake_gpu.SHARED_MEMORY)
def test_ahead_of_time_on_every_architecture(capability):
    status, output = program(str(TOOLS / "aot_gate.py"), "--arch", str(capability), seconds=3600)
    assert status == 0, output


def test_what_a_compiled_kernel_is_started_for():
    """A compiled kernel serves all numbers of the same width and all tensors of the same dtype. The kernel of a dense
    mask serves no other mask."""
    mask = torch.zeros(8)
    known = kernel._types((3, (mask, 1, 16, None), 0.5))
    same = (48, (mask[1:], 7, 1, None), 2.0), (-1, (mask[3:5], 0, 2**31 - 1, None), 0.0)
    assert [arguments for arguments in same if kernel._types(arguments) != known] == []
    others = (
        (3, (mask, 1, 16, 0), 0.5),
        (3, (mask.half(), 1, 16, None), 0.5),
        (2**31, (mask, 1, 16, None), 0.5),
        (3, (mask, 1, 2**31, None), 0.5),
        (3, (None, 1, 16, None), 0.5),
    )
    assert [arguments for arguments in others if kernel._types(arguments) == known] == []


@pytest.mark.slow
def test_dry_launch():
    """The public functions run on fake CUDA tensors through Triton's launcher. No call waits for the device, grids are
    within limits, and many lengths share a few kernels."""
    lengths = 40, 1, 16, 33, 48, 63, 64, 100, 256, 1000
    status, output = program(str(TOOLS / "dry_launch.py"), *map(str, lengths))
    assert status == 0, output
    found = last_json(output)
    attention = {"forward_kernel", "grad_query_kernel", "grad_key_value_kernel"}
    wanted = {
        call: kernels
        for calls, kernels in (
            ("layer_norm dropout_add_layer_norm", {"_forward", "_backward", "_reduce"}),
            ("softmax_dropout attention_weights", {"_forward", "_backward"}),
            ("dropout dropout_mask", {"_dropout"}),
            ("attention long_attention varlen_attn flash_pair efficient_pair packed_pair", attention),
            ("masked_attention torchs_attention", attention | {"cover_kernel", "list_kernel", "grad_mask_kernel"}),
            ("decoding", {"forward_kernel", "merge_kernel"}),
        )
        for call in calls.split()
    }
    assert {call: set(kernels) for call, kernels in found["started"].items()} == wanted
    # Triton looks at a call's arguments once per dtype, set of constants and device.
    assert found["faults"] == []
    known, other = ("again", "another length", "again there"), ("another dtype", "another constexpr", "another device")
    assert found["lookups"] == dict.fromkeys(("first", *other), 1) | dict.fromkeys(known, 0)
    assert found["places"] == [[0, 5], [1, 7]]  # each device's own current stream
    assert found["device afterwards"] == 0
    assert found["descriptors"] == {"90": [2], "80": [0]}  # per kernel of long attention, forward and backward
    of_one, of_all = found["specialisations"]
    assert of_all <= 3 * of_one
