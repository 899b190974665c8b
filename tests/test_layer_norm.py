"""layer_norm and dropout_add_layer_norm against the float64 oracle."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, KERNELS, interpreted, slow
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_accurate, assert_subsets_of_gradients, dropout_mask, gradients, largest
from oracle import dropout_add_layer_norm as exact_fused
from oracle import layer_norm as exact
from pairs import in_turn, pairwise

from fastattn import dropout_add_layer_norm, layer_norm

SEED = torch.tensor([4, 5])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def affine(shape, kind, dtype):
    return [torch.randn(shape).to(dtype) if letter in kind else None for letter in "wb"]


def check(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Check output and gradients of layer_norm.

    The peer is torch's own function, with weight and bias cast to the input's dtype."""
    tensors = input, weight, bias
    ours = gradients(lambda *t: layer_norm(t[0], normalized_shape, *t[1:], eps), tensors)
    wanted = gradients(lambda *t: exact(t[0], normalized_shape, *t[1:], eps), tensors)
    same = [t if t is None else t.to(input.dtype) for t in tensors]
    peer = gradients(lambda *t: F.layer_norm(t[0], normalized_shape, *t[1:], eps), same)
    assert ours[0][0].dtype == input.dtype
    assert ours[0][0].is_contiguous()
    assert [g.dtype for g in ours[1]] == [t.dtype for t in tensors if t is not None]
    names = ["out", "grad_input", "grad", "grad"]
    compare(ours, wanted, peer, names, input.dtype, input, normalized_shape, weight, eps)


def check_fused(input, residual, weight=None, bias=None, p=0.0, eps=1e-5):
    tensors = input, residual, weight, bias
    dtype = torch.promote_types(input.dtype, residual.dtype)
    total = exact_fused(*tensors, p, eps, seed=SEED)[1]
    for count in (1, 2):
        call = functools.partial(dropout_add_layer_norm, dropout_p=p, eps=eps, seed=SEED, prenorm=count == 2)
        ours = gradients(call, tensors)
        wanted = gradients(lambda *t, n=count: exact_fused(*t, p, eps, seed=SEED)[:n], tensors)
        peer = gradients(lambda *t, n=count: exact_fused(*t, p, eps, seed=SEED, dtype=dtype)[:n], tensors)
        assert [o.dtype for o in ours[0]] == [dtype] * count
        assert [g.dtype for g in ours[1]] == [t.dtype for t in tensors if t is not None]
        names = [*["out", "sum"][:count], "grad_input", "grad_residual", "grad", "grad"]
        compare(ours, wanted, peer, names, dtype, total, total.shape[-1:], weight, eps)
        for low in DTYPES[1:] if dtype == torch.float32 else []:  # the same numbers, rounded once more
            found = gradients(functools.partial(call, out_dtype=low), tensors)
            rounded = (ours[0][0].to(low), *ours[0][1:]), ours[1]
            torch.testing.assert_close(found, rounded, rtol=0, atol=0, equal_nan=True)  # which compares dtypes too


def compare(ours, wanted, peer, names, dtype, total, normalized_shape, weight, eps):
    """Check results and gradients against the oracle.

    `dtype` is the dtype of the normalised row. The gradient of a row is a difference of terms of the size of rstd *
    weight. The terms may cancel (for two columns, all except eps of them)."""
    rows = total.double().reshape(-1, math.prod(normalized_shape))
    rstd = ((rows - rows.mean(-1, keepdim=True)).square().mean(-1) + eps).rsqrt()
    terms = largest(rstd) * (1 if weight is None else largest(weight.double()))
    for name, a, e, p in zip(names, *([*o, *g] for o, g in (ours, wanted, peer)), strict=False):
        coarsest = max(dtype, a.dtype, key=lambda d: torch.finfo(d).eps)
        what = f"{name} of {tuple(total.shape)}, {dtype}"
        magnitude = terms if name in ("grad_input", "grad_residual") else None
        assert_accurate(a, e.double(), p, what, dtype=coarsest, magnitude=magnitude)


SHAPES = [
    *(((1,), (1,)), ((7,), (7,)), ((3, 1), (1,)), ((5, 2), (2,)), ((9, 64), (64,)), ((2, 3, 85), (85,))),
    *(((4, 512), (512,)), ((2, 3, 4, 17), (4, 17)), ((2, 6, 5), (2, 6, 5)), ((300, 40), (40,)), ((2, 4097), (4097,))),
    ((0, 8), (8,)),
]


NORMS = {
    "layer_norm": lambda x, w, b: layer_norm(x, x.shape[-1:], w, b),
    "dropout_add_layer_norm": lambda x, w, b: dropout_add_layer_norm(torch.zeros_like(x), x, w, b),
}
AFFINE = [pytest.param("", id="plain"), "w", "b", "wb"]


@pytest.mark.representative
@pytest.mark.parametrize("columns", [2, 4])
def test_gradients_of_large_constant_rows(backend, columns):
    """Lanes beyond a row that held its mean would make the sums of its gradient infinite."""
    x = torch.full((2, columns), 1e37, requires_grad=True)
    grad_out = torch.linspace(0, 1, 2 * columns).view(2, columns)
    (grad,) = torch.autograd.grad(layer_norm(x, (columns,)), x, grad_out)
    wanted = (grad_out.double() - grad_out.double().mean(-1, keepdim=True)) * 1e-5**-0.5
    torch.testing.assert_close(grad, wanted.float(), rtol=1e-5, atol=1e-3)


@pairwise(sizes=SHAPES, kind=AFFINE, dtype=DTYPES)
def test_shapes(backend, sizes, kind, dtype):
    shape, normalized = sizes
    check(torch.randn(shape).to(dtype), normalized, *affine(normalized, kind, dtype))


@pytest.mark.parametrize("eps", [-0.5, -2.0, 0, 1e300, math.nan, 2, torch.tensor(0.25)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_eps(eps, dtype):
    """Every eps gives torch's results. If the variance plus eps is negative, the row and its gradient are NaN."""
    tensors = torch.randn(6, 16, dtype=dtype), torch.randn(16, dtype=dtype), torch.randn(16, dtype=dtype)
    found = gradients(lambda *t: layer_norm(t[0], (16,), *t[1:], eps), tensors)
    wanted = gradients(lambda *t: F.layer_norm(t[0], (16,), *t[1:], eps), tensors)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12  # sums of 16 numbers, in another order
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=tolerance, atol=tolerance)
    out = layer_norm(tensors[0], (16,), *tensors[1:], eps)  # the fast path
    torch.testing.assert_close(out, found[0][0], equal_nan=True)


WIDTHS = [*range(1, 34), 47, 49, 63, 65, 127, 128, 255, 257, 511, 1023, 1025, 4096, 16385, 65536]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "dtype"), in_turn(WIDTHS, DTYPES), ids=str)
def test_every_width(backend, dtype, columns):
    rows = 5 if columns < 2**14 else 2
    parameters = affine((columns,), "wb", dtype)
    check(torch.randn(rows, columns).to(dtype), (columns,), *parameters)
    check_fused(torch.randn(rows, columns).to(dtype), torch.randn(rows, columns), *parameters, p=0.1)


@pytest.mark.parametrize(("kind", "dtype"), in_turn(["", "w", "b", "wb"], DTYPES[1:]), ids=str)
def test_weights_of_another_dtype(backend, kind, dtype):
    """16-bit activations take float32 weights, and the reverse. Weight gradients have the weight's dtype."""
    check(torch.randn(33, 85).to(dtype), (85,), *affine((85,), kind, torch.float32))
    check(torch.randn(33, 85), (85,), *affine((85,), kind, dtype))


@pytest.mark.representative
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_gradients_of_weight_and_bias_have_their_own_dtypes(backend, dtypes):
    """Neither passes through the other's dtype, which would round it to 8 bits."""
    parameters = [torch.randn(40).to(dtype) for dtype in dtypes]
    check(torch.randn(33, 40), (40,), *parameters)
    check_fused(torch.randn(33, 40), torch.randn(33, 40), *parameters, p=0.3)


def test_float64_is_the_references():
    tensors = torch.randn(9, 33, dtype=torch.float64), (33,), *affine((33,), "wb", torch.float64)
    check(*tensors)
    check_fused(tensors[0], torch.randn(9, 33, dtype=torch.float64), *tensors[2:], p=0.3)
    for kind in "wb":
        parameters = affine((33,), kind, torch.float64)
        check(torch.randn(9, 33), (33,), *parameters)
        check_fused(torch.randn(9, 33), torch.randn(9, 33), *parameters, p=0.3)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 1.0])
def test_eps(backend, eps):
    check(torch.randn(9, 33), (33,), *affine((33,), "wb", torch.float32), eps)
    check(torch.randn(9, 33) * 1e-3, (33,), eps=eps)


@pytest.mark.representative
def test_residuals_far_from_zero(backend):
    """Where the residual's mean is 1e3 or 1e4 deviations, output, sum and gradients are as near as those of torch's
    operations in float32, within half of their error and a rounding of each element."""
    columns = 512
    for mean, p in itertools.product((1e3, 1e4), (0.0, 0.25)):
        tensors = [torch.randn(32, columns), torch.randn(32, columns) + mean, *affine((columns,), "wb", torch.float32)]
        seeded = functools.partial(exact_fused, p=p, seed=SEED)
        ours = gradients(lambda *t, p=p: dropout_add_layer_norm(*t, p, seed=SEED, prenorm=True), tensors)
        wanted, peer = gradients(seeded, tensors), gradients(functools.partial(seeded, dtype=torch.float32), tensors)
        for one, exactly, torchs in zip(*(outs + grads for outs, grads in (ours, wanted, peer)), strict=True):
            assert (one - exactly).norm() <= 1.5 * (torchs - exactly).norm() + 2**-24 * exactly.norm()


@pytest.mark.parametrize("columns", [17, 512, 3001, 9003])
def test_rows_far_from_zero(backend, columns):
    """Rows whose mean is a thousand deviations from zero are accurate. A one-pass variance from squares would lose its
    digits. The parts of rows wider than a kernel holds may be far apart, their first element far from the others."""
    if backend == "reference" and columns == 9003:
        pytest.skip("its sums are plain ones of torch's")
    rows = torch.randn(2 if columns == 9003 else 9, columns)
    check(rows + 1000, (columns,), *affine((columns,), "wb", torch.float32))
    check(rows * 1e-4 + 1, (columns,))
    check(rows * 1e15, (columns,))
    check(rows * 1e19 / math.sqrt(columns), (columns,))  # squares sum to 1e38, a third of the range
    if columns == 9003:
        check(rows + torch.linspace(0, 1000, columns), (columns,))
        check(rows.index_fill(1, torch.tensor([0]), 1e4), (columns,))


@pytest.mark.representative
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 700])
def test_constant_rows_become_the_bias(backend, columns, dtype):
    """Large constant rows too, although the rounded mean of equal values may be off by more than sqrt(eps)."""
    values = [0, 3.25, -1024, *([100000.3, 1e12, 1e20] if dtype != torch.float16 else [])]
    input, (weight, bias) = torch.tensor(values)[:, None].repeat(1, columns).to(dtype), affine((columns,), "wb", dtype)
    assert not layer_norm(input, (columns,)).any()
    assert torch.equal(layer_norm(input, (columns,), weight, bias), bias.expand_as(input))
    assert torch.equal(dropout_add_layer_norm(torch.zeros_like(input), input, bias=bias), bias.expand_as(input))


@pytest.mark.representative
@pytest.mark.parametrize("columns", [64, 700])
def test_mean_and_rstd(backend, columns):
    """The statistics that the op returns are those of float64, rounded. The rounded mean of equal values may differ
    from them, and must be corrected too.

    A corrected mean is rounded once, by at most 2^-24 of it, or of the deviations where it is near 0. Twice that is
    allowed; a correction of the wrong sign makes 2.6 times. rstd has half of the variance's error, whose squares are
    added in chains of up to 175. By chance they add up as the square root of their number: 8 roundings are allowed."""
    rows = torch.cat([torch.randn(3, columns), torch.randn(3, columns) + 1000, torch.full((1, columns), 100000.3)])
    _, mean, rstd = torch.ops.fastattn.layer_norm(rows, None, None, 1e-5, backend.partition(":")[0])
    exactly = rows.double()
    wanted = (exactly.var(-1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(mean.double(), exactly.mean(-1), rtol=2**-23, atol=2**-23)
    torch.testing.assert_close(rstd.double(), wanted, rtol=2**-21, atol=0)


def rows_that_overflow(columns, dtype):
    """Return rows (7, columns): a healthy row, then one row for each way in which statistics overflow float32."""
    rows = torch.randn(7, columns)
    rows[1] *= 1e20
    rows[2] *= 1e30
    rows[3], rows[3, ::2] = 3e38, -3e38
    rows[4, 2] = 3e38
    rows[5, 2] = math.inf
    rows[6, 2] = math.nan
    return rows.to(dtype)


@pytest.mark.parametrize("operation", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [*(pytest.param(n, marks=pytest.mark.representative) for n in (9, 700)), 9003])
def test_statistics_that_overflow_are_nan(backend, operation, columns, dtype):
    """Statistics that overflow make the row and its gradient NaN, never 0. The healthy row and its gradient stay
    right."""
    rows, (weight, bias) = rows_that_overflow(columns, dtype), affine((columns,), "wb", torch.float32)
    (out,), (grad, grad_weight, grad_bias) = gradients(NORMS[operation], (rows, weight, bias))
    (wanted,), (wanted_grad, _, _) = gradients(lambda x, w, b: exact(x, (columns,), w, b), (rows, weight, bias))
    for name, got, healthy in (("out", out, wanted[0]), ("grad", grad, wanted_grad[0])):
        assert got[1:].isnan().all(), name
        torch.testing.assert_close(got[0], healthy.to(dtype), rtol=0.02, atol=0.02, msg=name)
    assert grad_weight.isnan().all()
    assert grad_bias.isfinite().all()


@pytest.mark.representative
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_that_overflow_are_nan(backend, dtype):
    """An infinite sum of finite operands makes its row and the row's gradients NaN."""
    input, residual = torch.randn(2, 2, 33).to(dtype)
    input[1] = residual[1] = 3e38
    (out, total), grads = gradients(lambda x, r: dropout_add_layer_norm(x, r, prenorm=True), (input, residual))
    assert total[1].isinf().all()
    for tensor in (out, *grads):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


@pytest.mark.representative
@pytest.mark.parametrize("eps", [2.5e38, 1e300])
def test_eps_beside_large_variances(backend, eps):
    """A row whose variance and finite eps sum to infinity is NaN. An eps that is infinite in float32 makes the row 0,
    as in torch."""
    large = torch.tensor([-1.2e19, 1.2e19])  # a variance of 1.4e38, and its sum with the smaller eps is infinite
    rows = torch.stack([torch.tensor([-3.0, 5.0]), large, 10 * large])
    (out,), (grad,) = gradients(lambda x: layer_norm(x, (2,), eps=eps), (rows,))
    (wanted,), (wanted_grad,) = gradients(lambda x: exact(x, (2,), eps=eps), (rows,))
    overflows = slice(1, 3) if eps == 2.5e38 else slice(2, 3)
    for got, expected in ((out, wanted), (grad, wanted_grad)):
        assert got[overflows].isnan().all()
        torch.testing.assert_close(got[: overflows.start], expected[: overflows.start].float(), rtol=1e-5, atol=1e-24)


@pytest.mark.parametrize(("columns", "dtype"), [(4104, torch.bfloat16), (4105, torch.float32)], ids=str)
def test_weight_gradients_of_wide_rows(backend, columns, dtype):
    """Weight gradients are accurate for more rows than groups of rows, and for more columns than a kernel holds."""
    weight, bias = affine((columns,), "wb", dtype)
    check(torch.randn(20, columns).to(dtype), (columns,), weight, bias)
    check_fused(torch.randn(20, columns).to(dtype), torch.randn(20, columns), weight, bias, p=0.1)


@pytest.mark.parametrize("rows", [1024, 20000])
def test_weight_gradients_of_many_rows(backend, rows):
    """Gradients of weight and bias are nearly as accurate as torch's ``sum``, which adds up blocks of rows.

    One float32 sum per column, as in torch's ``layer_norm``, is off by four to fifty times as much."""
    x, grad = torch.randn(rows, 64), torch.randn(rows, 64) + 0.5
    weight, bias = affine((64,), "wb", torch.float32)
    parameters = weight.requires_grad_(), bias.requires_grad_()
    found = torch.autograd.grad(layer_norm(x, (64,), weight, bias), parameters, grad)
    for ours, terms in zip(found, (grad.double() * exact(x, (64,)), grad.double()), strict=True):
        wanted = terms.sum(0)
        assert (ours - wanted).norm() < 2 * (terms.float().sum(0) - wanted).norm() + 2.0**-24 * wanted.norm()


@pytest.mark.parametrize("columns", [500, 3001, 9003])
def test_no_digit_is_lost_far_from_zero(backend, columns):
    """No digit is lost, without an allowance for torch's error. A mean that is rounded once costs a thousandth of a
    deviation."""
    if backend in ("reference", "cpu"):
        pytest.skip("rounds the mean once, as torch does")
    input, residual = torch.randn(2, columns) * 1e-4, torch.ones(2, columns)
    wanted = exact(input + residual, (columns,))
    assert_accurate(layer_norm(input + residual, (columns,)), wanted, wanted)
    assert_accurate(dropout_add_layer_norm(input, residual), wanted, wanted)


LAYOUTS = {
    "step": lambda t: t[..., ::2],
    "offset": lambda t: t[::2, 1:, :33],
    "transposed": lambda t: t.transpose(0, 1)[..., 33:],
    "last": lambda t: t[..., :33].mT.contiguous().mT,
    "expanded": lambda t: t[:, :1, :33].expand(-1, 5, 33),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param("step", marks=pytest.mark.representative), "expanded", *slow("offset", "transposed", "last")],
)
def test_layouts(backend, layout):
    input = LAYOUTS[layout](torch.randn(3, 4, 66) if interpreted(backend) else torch.randn(6, 10, 66))
    weight, bias = torch.randn(66)[::2], torch.randn(33, 2)[:, 1]
    check(input, (33,), weight, bias)
    check_fused(input, torch.randn(input.shape), weight, bias, p=0.2)
    check_fused(torch.randn(input.shape), input, p=0.2)


@pytest.mark.representative
def test_layout_of_two_normalized_dimensions(backend):
    check(torch.randn(6, 10, 66).permute(2, 0, 1), (6, 10), torch.randn(10, 6).T)


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pairwise(
    dtypes=[
        *((d, d) for d in DTYPES),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    shape=[(1, 1), (9, 33), (40,), (2, 3, 17, 85), (0, 5)],
    p=[0.0, 0.1, *slow(0.7)],
    kind=AFFINE,
)
def test_fused(backend, dtypes, shape, p, kind):
    """Fused dropout + residual + LayerNorm is accurate with and without the sum, for dtypes mixed as under autocast."""
    input, residual = torch.randn(shape).to(dtypes[0]), torch.randn(shape).to(dtypes[1])
    check_fused(input, residual, *affine(shape[-1:], kind, torch.float32), p=p)


@pytest.mark.representative
def test_fused_rate_of_1(backend):
    input, residual, weight = torch.randn(9, 40), torch.randn(9, 40), torch.randn(40)
    check_fused(input, residual, weight, p=1.0)
    fused = dropout_add_layer_norm(input, residual, weight, dropout_p=1.0)
    assert torch.equal(fused, layer_norm(residual, (40,), weight))


@pytest.mark.torch_version
@pytest.mark.parametrize("needed", [c for c in itertools.product((False, True), repeat=4) if any(c)], ids=str)
def test_subsets_of_gradients(backend, needed):
    tensors = torch.randn(9, 33), torch.randn(9, 33), torch.randn(33), torch.randn(33)
    assert_subsets_of_gradients(lambda *t: dropout_add_layer_norm(*t, 0.3, seed=SEED), tensors, needed)


@pytest.mark.torch_version
def test_gradient_of_the_sum_alone(backend):
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((9, 33), (9, 33), (33,), (33,))]
    _, total = dropout_add_layer_norm(*leaves, 0.3, seed=SEED, prenorm=True)
    total.sum().backward()  # nothing reaches weight and bias
    assert torch.equal(leaves[1].grad, torch.ones(9, 33))
    torch.testing.assert_close(leaves[0].grad, dropout_mask((9, 33), 0.3, SEED) / (1 - 19661 / 65536))


@pytest.mark.torch_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(backend, dtype):
    """Autocast gives the dtypes of torch's layer_norm: float32 on a GPU, the input's on the CPU."""
    input, (weight, bias) = torch.randn(9, 33).to(dtype), affine((33,), "wb", torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = layer_norm(input, (33,), weight, bias), F.layer_norm(input, (33,), weight, bias)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        out, total = dropout_add_layer_norm(input, torch.randn(9, 33), weight, bias, prenorm=True)
        assert total.dtype == torch.float32
        assert out.dtype == F.layer_norm(total, (33,), weight, bias).dtype


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES[:2]), st.sampled_from(DTYPES[:2]), st.sampled_from(DTYPES)),
    kind=st.sampled_from(["", "w", "b", "wb"]),
    p=st.sampled_from([0.0, 0.2, 0.9]),
    gap=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_any_problem(backend, rows, columns, dtypes, kind, p, gap, seed):
    torch.manual_seed(seed)
    input = torch.randn(rows, columns + gap).to(dtypes[0])[:, gap:]
    residual = torch.randn(columns, rows).to(dtypes[1]).T
    check(input, (columns,), *affine((columns,), kind, dtypes[0]))
    check_fused(input, residual, *affine((columns,), kind, dtypes[2]), p=p)
