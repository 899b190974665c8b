"""Tests of softmax_dropout against the float64 oracle."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, require, slow
from hypothesis import given
from hypothesis import strategies as st
from oracle import SizesOfTerms, assert_accurate, gradients, largest
from oracle import softmax_dropout as exact
from pairs import in_turn, pairwise

from fastattn import softmax_dropout

SEED = torch.tensor([99, 2**35 + 1])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(input, attn_mask=None, **options):
    tensors = input, attn_mask

    def call(function, **more):
        return gradients(lambda t, m: function(t, attn_mask=m, **options, **more), tensors)

    ours, wanted, peer = call(softmax_dropout), call(exact), call(exact, dtype=input.dtype)
    terms = call(exact, softmax=SizesOfTerms.apply)
    assert ours[0][0].dtype == input.dtype
    names = "out", "grad_input", "grad_mask"
    for name, a, e, p, t in zip(names, *([*o, *g] for o, g in (ours, wanted, peer, terms)), strict=False):
        assert_accurate(a, e.double(), p, f"{name} {options}", magnitude=largest(t))
    return ours


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn(
        [
            *((1,), (70,), (1, 1), (9, 1), (3, 17), (5, 33), (2, 3, 64), (2, 3, 16, 129), (2, 2, 2, 7, 40)),
            *((3, 1000), (2, 4097), (1, 0), (0, 5), (2, 0, 3, 4)),
        ],
        DTYPES,
    ),
    ids=str,
)
def test_shapes(backend, shape, dtype):
    input = torch.randn(shape).to(dtype)
    check(input)
    check(input, dropout_p=0.3, seed=SEED)
    check(input, scale=-1.7)


def test_small_exponentials_are_as_exact_as_large_ones(backend):
    """Small exponentials are exact down to the end of float32's normal numbers, e^-87.33. Below that 0 is as good."""
    input = torch.cat([torch.linspace(-87.3, 0, 1000), torch.linspace(-1e4, -87.4, 100), torch.tensor([-math.inf])])
    wanted = input.double().softmax(0) * (total := input.double().exp().sum())
    out = softmax_dropout(input).double() * total
    normal = input > -83  # Division by the sum, about 11, may leave the normal range earlier.
    # exp(x) = 2^(x log2 e). The product and its constant are off by 1.3 half eps, which x multiplies. The polynomial,
    # the sum and the division add a few eps.
    bound = (1.3 * input.double().abs() + 8) * 2.0**-24
    assert ((out - wanted).abs() <= bound * wanted)[normal].all()
    assert ((out >= 0) & (out <= wanted * 1.01 + 2.0**-126)).all()
    assert out[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "dtype"),
    in_turn([*range(1, 34), 47, 49, 63, 65, 127, 128, 255, 257, 511, 1023, 1025, 4096, 16385, 65536], DTYPES),
    ids=str,
)
def test_every_width(backend, dtype, columns):
    check(torch.randn(3, columns).to(dtype), dropout_p=0.2, seed=SEED)


MASKS = {
    "bool": lambda: torch.rand(2, 3, 21, 43) < 0.6,
    "padding": lambda: torch.arange(43).expand(2, 1, 1, 43) < 30,
    "rows": lambda: torch.rand(3, 21, 1) < 0.6,
    "float": lambda: torch.randn(2, 3, 21, 43),
    "bias": lambda: torch.randn(3, 1, 43).masked_fill(torch.rand(3, 1, 43) < 0.3, -math.inf),
    "strided": lambda: torch.randn(43, 42)[:, ::2].T,
    "bfloat16": lambda: torch.randn(43).bfloat16(),
}


@pairwise(mask=MASKS, dtype=DTYPES, causal=[False, True], p=[0.0, 0.4], scale=[1.0, 0.3])
def test_masks(backend, mask, dtype, causal, p, scale):
    """Every kind of mask, with and without causal, scale and dropout, has the oracle's results, gradients and exact
    zero pattern."""
    input = torch.randn(2, 3, 21, 43).to(dtype)
    attn_mask = MASKS[mask]()
    if mask == "bfloat16" and dtype == torch.float16:
        attn_mask = attn_mask.to(dtype)
    options = {"is_causal": causal, "dropout_p": p, "scale": scale, "seed": SEED if p else None}
    (out,), _ = check(input, attn_mask, **options)
    assert torch.equal(out == 0, exact(input, attn_mask=attn_mask, **options) == 0)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(torch.bool, marks=pytest.mark.representative), torch.bfloat16, *slow(torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("part", ["dense", "offset", "broadcast", "middle of a word", "one column"])
def test_masks_read_in_words(backend, part, kind):
    """Dense rows of a multiple of eight columns are read in words, also if they are broadcast or begin within a
    word."""
    base = torch.randn(2, 2, 5, 56)
    base = base < 0.5 if kind == torch.bool else base.to(kind)
    input = torch.randn(2, 2, 5, 48).to(torch.float32 if kind == torch.bool else kind)
    mask = {
        "dense": base[..., :48].contiguous(),
        "offset": base[..., 8:],
        "broadcast": base[:1, :, :1, :48],
        "middle of a word": base[..., 3:51],
        "one column": base[..., :1],
    }[part]
    (out,), _ = check(input, mask, dropout_p=0.4, seed=SEED)
    assert torch.equal(out == 0, exact(input, attn_mask=mask, dropout_p=0.4, seed=SEED) == 0)


@pytest.mark.representative
@pytest.mark.parametrize(("rows", "columns"), [(21, 43), (43, 21), (1, 9), (30, 30)])
def test_causal_is_upper_left(backend, rows, columns):
    (out,), _ = check(torch.randn(2, rows, columns), is_causal=True)
    assert torch.equal(out != 0, torch.ones(rows, columns).tril().bool().expand_as(out))


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2),
    "last": lambda t: t.mT,
    "step": lambda t: t[..., ::3],
    "offset": lambda t: t[:, 1:, :, 5:],
    "expanded": lambda t: t[:, :1].expand(3, 5, 4, 33),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout):
    check(LAYOUTS[layout](torch.randn(3, 17, 4, 33)), dropout_p=0.3, seed=SEED)


@pytest.mark.representative
@pytest.mark.parametrize("by", ["bool mask", "float mask", "scores"])
def test_rows_with_nothing_left(backend, by):
    input, mask = torch.randn(2, 5, 40), torch.arange(5)[:, None].expand(5, 40) != 2
    hiding = torch.zeros(5, 40).masked_fill(~mask, -math.inf)
    arguments = {"bool mask": (input, mask), "float mask": (input, hiding), "scores": (input + hiding,)}[by]
    (out,), (grad, *_) = check(*arguments)
    assert not out[:, 2].any()
    assert not grad[:, 2].any()


@pytest.mark.representative
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_what_a_mask_hides_may_hold_anything(backend, kind):
    clean = torch.randn(2, 5, 40)
    unused = clean.clone()
    unused[..., 3], unused[..., 9] = math.nan, math.inf
    mask = unused[0].isfinite()
    if kind != torch.bool:
        mask = torch.zeros(5, 40).masked_fill(~mask, -math.inf)
    ours, wanted = (gradients(lambda t: softmax_dropout(t, attn_mask=mask), [t]) for t in (unused, clean))
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0)


@pytest.mark.representative
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_and_extreme_values(backend, dtype):
    check((torch.randn(5, 90) * 1e4).to(dtype))
    extreme = torch.zeros(4, 90, dtype=dtype)
    extreme[0] = torch.finfo(dtype).min
    extreme[1, 9:] = torch.finfo(dtype).min
    check(torch.randn(2, 4, 90).to(dtype), extreme)
    check(torch.randn(4, 90).to(dtype), scale=0.0)


@pytest.mark.representative
@pytest.mark.parametrize("size", [1e10, 1e20, 1e37])
def test_scores_that_rounding_moves_by_hundreds(backend, size):
    """The largest score gets the whole weight, because every score is rounded before the row's maximum is
    subtracted."""
    input = torch.randn(8, 96) * size
    (out,), (grad,) = gradients(lambda t: softmax_dropout(t, scale=0.3), [input])
    assert torch.equal(out, F.one_hot(input.argmax(-1), 96).float())
    assert (grad == 0).all()


@pytest.mark.parametrize("columns", [*(pytest.param(n, marks=pytest.mark.representative) for n in (41, 96)), 9003])
def test_scores_that_overflow_are_nan(backend, columns):
    """A row without a finite maximum is NaN, as torch's. Other rows keep their weights."""
    input = torch.randn(4, columns)
    input[1, 7] = input[2] = 3e38
    input[3, 7], input[3, 8] = 3e38, -3e38
    (out,), (grad,) = gradients(lambda t: softmax_dropout(t, scale=2.0), [input])
    torch.testing.assert_close(out[0], (2 * input[0]).softmax(-1))
    assert grad[0].isfinite().all()
    assert out[1:].isnan().all()
    assert grad[1:].isnan().all()


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 2, 1, 64), (64, 1, 1, 64)])
def test_mask_gradients_of_many_rows(backend, shape):
    """Gradients of broadcast masks are nearly as accurate as torch's ``sum``, which adds up blocks of rows."""
    input, grad = torch.randn(64, 2, 128, 64), torch.randn(64, 2, 128, 64)
    mask = torch.zeros(shape, requires_grad=True)
    (found,) = torch.autograd.grad(softmax_dropout(input, attn_mask=mask), mask, grad)
    weights = input.double().softmax(-1)
    terms = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    wanted = terms.sum_to_size(shape)
    assert (found - wanted).norm() < 2 * (terms.float().sum_to_size(shape) - wanted).norm()


@pytest.mark.representative
@pytest.mark.parametrize("columns", [41, 9003])
def test_the_maximum_comes_late(backend, columns):
    """The maximum is found after much that is smaller, or masked, or in another place than in the row before."""
    rising = torch.linspace(-40, 40, columns) + torch.randn(2, columns)
    check(torch.stack([rising, rising.flip(-1)]))
    check(rising, torch.arange(columns) >= columns - 5)
    check(rising, torch.arange(columns) < 0)


@pytest.mark.torch_version
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(backend, dtype):
    """A softmax stays in float32 under autocast, like torch's."""
    input = torch.randn(3, 9).to(dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert softmax_dropout(input).dtype == F.softmax(input, -1).dtype


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    columns=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    p=st.sampled_from([0.0, 0.25, 0.9]),
    scale=st.sampled_from([1.0, -0.5, 0.1]),
    seed=st.integers(0, 2**31),
)
def test_any_problem(backend, shape, columns, dtype, causal, p, scale, seed):
    torch.manual_seed(seed)
    shape = shape[-4:] if math.prod(shape) * columns < 200_000 else shape[-2:]
    check(
        torch.randn(*shape, columns).to(dtype), is_causal=causal, dropout_p=p, scale=scale, seed=torch.tensor([seed, 0])
    )


def test_masks_are_read_by_vectors_where_they_are_aligned():
    """An aligned mask has None as the stride of its columns, from which the compiler knows that it is 1. The
    interpreter does not check that."""
    require("triton")
    from fastattn.backends.triton.softmax_dropout import _mask

    whole = torch.zeros(2, 3, 8, 64, dtype=torch.bool)
    one_byte_on, odd_rows = whole.new_zeros(1, 1, 8, 65)[..., 1:], whole.new_zeros(2, 3, 8, 70)[..., :64]
    for mask in (whole, whole[:1, :1, :1], whole[:, :, ::2]):
        assert _mask(mask, True)[1] is None
        assert _mask(mask, False)[1] is not None
    for mask in (one_byte_on, odd_rows, whole[..., :63], torch.zeros(1, 1, 8, 128)[..., ::2], torch.zeros(1, 1, 8, 1)):
        assert _mask(mask, True)[1] is not None
