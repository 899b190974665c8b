"""float64 on the CPU: the reference leaves what it can to torch's fused kernels, which give the numbers of its
formulas."""

import pytest
import torch
import torch.nn.functional as F
from oracle import GRADIENT_LAYOUTS, gradients

from fastattn import backend, dropout_add_layer_norm, layer_norm, scaled_dot_product_attention, varlen_attn
from fastattn.backends.reference import attention as attention_module
from fastattn.backends.reference import layer_norm as layer_norm_module

SEED = torch.tensor([3, 4])


def double(*shape):
    return torch.randn(shape, dtype=torch.float64)


def visible():
    """Return a bool mask of 17 queries and 23 keys. One query sees nothing, one key is unused."""
    mask = torch.rand(17, 23) > 0.4
    mask[3] = mask[:, 5] = False
    return mask


MASKS = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "lower right": lambda: {"is_causal": True, "causal_variant": "lower_right"},
    "mask": lambda: {"attn_mask": visible()},
    "float mask": lambda: {"attn_mask": double(2, 1, 17, 23).masked_fill(~visible(), -torch.inf)},
    "float32 mask": lambda: {"attn_mask": torch.randn(4, 1, 23), "is_causal": True},
    "least value": lambda: {"attn_mask": torch.arange(17.0).eq(4).double()[:, None] * torch.finfo(torch.float64).min},
    "transposed mask": lambda: {"attn_mask": double(2, 4, 23, 17).mT},
    "transposed bool mask": lambda: {"attn_mask": (torch.rand(23, 2) > 0.3).T[:, None, None]},
    "lengths": lambda: {"key_lengths": torch.tensor([5, 0])},
    "window": lambda: {"window_size": (3, 2)},
    "all": lambda: {"attn_mask": visible(), "is_causal": True, "key_lengths": torch.tensor([20, 11])},
}


CLOSE = {torch.float64: (1e-13, 1e-13), torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 4e-5)}


def assert_close(found, wanted, **options):
    """Assert that (outputs, gradients) are equal except for roundings.

    Products of other batches may sum up to 23 terms in another order. In float64 the error is 23 * 2**-53 = 3e-15, for
    sums of numbers up to about 30: 1e-13. In float32 it is 23 * 2**-24 * 30 = 4e-5. bfloat16 is rounded from float32,
    and may round to the neighbour, at most 2**-7 away."""
    for got, expected in zip(sum(map(tuple, found), ()), sum(map(tuple, wanted), ()), strict=True):
        rtol, atol = CLOSE[got.dtype]
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, **options)


def agrees(monkeypatch, module, function, operands):
    """Assert that torch's kernels serve forward and backward and agree with the formulas."""
    answers = []
    is_torchs = module.is_torchs
    monkeypatch.setattr(module, "is_torchs", lambda *args: answers.append(is_torchs(*args)) or answers[-1])
    found = gradients(function, operands)
    assert answers == [True, True]
    monkeypatch.setattr(module, "is_torchs", lambda *args: False)
    assert_close(found, gradients(function, operands))


@pytest.mark.torch_version
@pytest.mark.parametrize("name", MASKS)
def test_attention(monkeypatch, name):
    """A row at the mask's least value has the formulas' gradient too. torch's backward pass reads only its log-sum-exp,
    which holds nothing of the sum."""
    options = MASKS[name]()
    agrees(
        monkeypatch,
        attention_module,
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True, **options),
        (double(2, 17, 4, 8).transpose(1, 2), double(2, 2, 23, 8), double(2, 2, 23, 8)),
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_mask_that_holds_nan_or_infinity(monkeypatch, value):
    mask = double(17, 23)
    mask[4, 5] = value
    operands = double(2, 4, 17, 8), double(2, 4, 23, 8), double(2, 4, 23, 8)
    found = scaled_dot_product_attention(*operands, attn_mask=mask)
    monkeypatch.setattr(attention_module, "is_torchs", lambda *args: False)
    wanted = scaled_dot_product_attention(*operands, attn_mask=mask)
    assert_close([[found]], [[wanted]], equal_nan=True)
    assert wanted.isnan().any(-1).sum() == 2 * 4  # the row of each head that holds it


@pytest.mark.parametrize("columns", [9, 33, 64, 700])
def test_statistics_that_overflow_are_nan(columns):
    """Statistics that overflow give NaN; torch 2.13's kernel gives 0 for some sizes. An infinite eps makes the other
    rows 0."""
    rows = double(3, columns)
    rows[1] *= 1e200
    ours, torchs = (gradients(lambda x, norm=norm: norm(x, (columns,)), (rows,)) for norm in (layer_norm, F.layer_norm))
    for got, expected in zip(sum(ours, ()), sum(torchs, ()), strict=True):
        assert got[1].isnan().all()
        assert_close([[got[::2]]], [[expected[::2]]])
    infinite = layer_norm(rows, (columns,), eps=torch.inf)
    assert (infinite[::2] == 0).all()
    assert infinite[1].isnan().all()


@pytest.fixture(params=[1, 3, 5, 11, 19], ids=["a head", "within a group", "a group", "a sequence", "two sequences"])
def in_parts(request, monkeypatch):
    """Return a function that asserts that results and gradients computed with `request.param` matrices at a time are
    those of the whole. A sequence has 8 matrices, one per head, in two groups."""

    def check(function, operands):
        whole, parts, probabilities = gradients(function, operands), [], attention_module._probabilities
        monkeypatch.setattr(attention_module, "CACHED", request.param * 17 * 23)
        monkeypatch.setattr(
            attention_module, "_probabilities", lambda args, take: parts.append(take) or probabilities(args, take)
        )
        assert_close(gradients(function, operands), whole)
        assert len(parts) >= 4  # both passes together

    return check


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, (3, 1, 17, 23), (8, 1, 23), (3, 8, 17, 1), (17, 23)])
def test_parts_are_the_whole(in_parts, mask, dtype):
    shapes = [(3, 8, 17, 8), (3, 2, 23, 8), (3, 2, 23, 5), *([mask] if mask else [])]
    options = {"dropout_p": 0.3, "seed": SEED, "key_lengths": torch.tensor([23, 9, 0]), "return_lse": True}

    def attend(*operands):
        with backend("reference"):
            return scaled_dot_product_attention(*operands, enable_gqa=True, **options)

    in_parts(attend, [double(*shape).to(dtype) for shape in shapes])


def test_packed_parts_are_the_whole(in_parts):
    offsets = torch.tensor([0, 17, 34, 51])
    operands = double(51, 8, 8), double(51, 2, 8), double(51, 2, 8)
    in_parts(
        lambda *packed: varlen_attn(*packed, offsets, offsets, 17, 17, dropout_p=0.3, seed=SEED, enable_gqa=True),
        operands,
    )


@pytest.mark.torch_version
def test_derivatives_of_parts(monkeypatch):
    """Derivatives computed in parts equal those of the whole, and the forward pass is recorded as one operation.

    A graph keeps everything that it records. It would add a gradient of the size of the whole for each part."""
    q, k, v, mask = (double(*shape) for shape in ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), (3, 5)))

    def attend(mask):
        with backend("reference"):
            return scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3, seed=SEED)

    def loss(mask):
        return attend(mask).square().sum()

    def derivatives():
        each = torch.stack((mask, 2 * mask))
        return (
            torch.func.jvp(attend, (mask,), (mask,))[1],
            torch.func.vmap(lambda tangent: torch.func.jvp(attend, (mask,), (tangent,))[1])(each),
            torch.func.vmap(torch.func.grad(loss))(each),
            torch.func.jacrev(attend)(mask),
            torch.func.hessian(loss)(mask),
        )

    whole = derivatives()
    taken, parts = [], attention_module._parts
    monkeypatch.setattr(attention_module, "CACHED", 1)
    monkeypatch.setattr(attention_module, "_parts", lambda *operands: taken.append(parts(*operands)) or taken[-1])
    assert_close([derivatives()], [whole])
    assert torch.autograd.gradgradcheck(attend, mask.requires_grad_())
    taken.clear()
    torch.autograd.grad(loss(mask), mask, create_graph=True)
    assert [len(found) for found in taken] == [4, 1]  # the forward pass is recorded as one operation


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w, b: layer_norm(x, 32, w, b), [(32,), (32,)]),
        (lambda x, b: layer_norm(x, 32, None, b), [(32,)]),
        (lambda x: layer_norm(x, 32), []),
        (lambda x, *parameters: dropout_add_layer_norm(x, *parameters, 0.3, seed=SEED), [(5, 7, 32), (32,), (32,)]),
    ],
    ids=["weight and bias", "bias", "neither", "dropout and addition"],
)
def test_layer_norm(monkeypatch, function, shapes):
    agrees(monkeypatch, layer_norm_module, function, (double(5, 7, 32), *(double(*shape) for shape in shapes)))


@pytest.mark.parametrize(
    ("options", "used"),
    [({"key_lengths": torch.tensor([4])}, 4), ({"is_causal": True}, 5), ({"window_size": (-1, 1)}, 6)],
)
def test_unused_keys_that_hold_nan_are_not_read(options, used):
    q, k = double(1, 2, 5, 4), double(1, 2, 9, 4)
    wanted = scaled_dot_product_attention(q, k, k, **options)
    k[:, :, used:] = torch.nan
    assert torch.equal(scaled_dot_product_attention(q, k, k, **options), wanted)


@pytest.mark.torch_version
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_lengths": torch.tensor([3, 5])}])
def test_columns_that_are_not_dense(monkeypatch, options):
    agrees(
        monkeypatch,
        attention_module,
        lambda *operands: scaled_dot_product_attention(*(t[..., ::2] for t in operands), **options),
        tuple(double(2, 2, 5, 8) for _ in range(3)),
    )


@pytest.mark.torch_version
@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_gradients_of_any_layout(layout):
    q, k, v = (double(2, 2, 5, 4).requires_grad_() for _ in range(3))
    out, grad = scaled_dot_product_attention(q, k, v), GRADIENT_LAYOUTS[layout](2, 2, 5, 4).double()
    found = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(out, (q, k, v), grad.contiguous())))
