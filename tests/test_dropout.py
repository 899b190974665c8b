"""dropout and dropout_mask: the formula of docs/design.md, bit for bit."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import BACKENDS, DEVICE, interpreted, require, slow
from hypothesis import given
from hypothesis import strategies as st
from oracle import GRADIENT_LAYOUTS, assert_same_bits, dropout_values, gradients, philox4x32, threshold
from oracle import dropout as exact
from oracle import dropout_mask as exact_mask
from pairs import in_turn

from fastattn import dropout, dropout_add_layer_norm, dropout_mask, layer_norm, softmax_dropout
from fastattn import scaled_dot_product_attention as attention

SEED = torch.tensor([-81985529216486896, 12345678901])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
)
def test_oracle_has_random123s_philox(counter, key, words):
    """The oracle's philox4x32 with 7 rounds gives the known answers of Random123's kat_vectors."""
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert [int(word) for word in philox4x32(counter, key)] == words


def test_oracle_tile():
    """One Philox call gives the eight values of a thread in the documented order. They are rows i, i + 8 and columns j,
    j + 8, j + 16, j + 24 of a 16 x 32 tile."""
    words = philox4x32((8 + 3, 2 * 8 + 5, 4, 6), (1, 2))
    for row, column in itertools.product(range(2), range(4)):
        v = 4 * row + column
        value = dropout_values(4, 32 + 5 + 8 * row, 32 + 3 + 8 * column, (2 * 2**32 + 1, 6))
        assert int(value) == (int(words[v // 2]) >> (16 * (v % 2))) & 0xFFFF


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16, 17, 33])
def test_mask_at_tile_edges(backend, rows):
    for columns, p in itertools.product([1, 7, 8, 9, 16, 24, 31, 32, 33, 40, 65, 129], [0.1, 0.5]):
        assert torch.equal(dropout_mask((3, rows, columns), p, SEED), exact_mask((3, rows, columns), p, SEED))


@pytest.mark.parametrize("shape", [(), (1,), (50,), (0,), (3, 0), (0, 3), (2, 3, 4, 5), (5, 1, 33)], ids=str)
def test_mask_shapes(backend, shape):
    """A mask may have any shape; one dimension is one row."""
    mask = dropout_mask(shape, 0.3, SEED)
    assert mask.dtype == torch.bool
    assert mask.shape == shape
    if shape:
        assert torch.equal(mask, exact_mask(shape, 0.3, SEED))


SEEDS = [(0, 0), (1, 0), (-1, 0), (2**32, 0), (2**63 - 1, 1), (-(2**63), 1)]
SEEDS += [(5, offset) for offset in (2**32, 2**32 - 1, 2**33 + 7, -1, -(2**63))]


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_mask_seeds(backend, seed):
    """The key is two's complement, low word first, and the offset counts modulo 2**32."""
    assert torch.equal(dropout_mask((2, 20, 70), 0.4, torch.tensor(seed)), exact_mask((2, 20, 70), 0.4, seed))


def test_a_rate_of_nearly_0_copies():
    """A rate of nearly 0 copies the input, and only a rate of 0 returns it, as in torch's dropout."""
    x = torch.ones(4)
    for p in (1e-6, 0.0):
        assert (dropout(x, p) is x) == (F.dropout(x, p) is x) == (p == 0.0)
        assert dropout(x, p, inplace=True) is x


@pytest.mark.parametrize("p", [0.0, 1e-9, 7e-6, 8e-6, 1 / 65536, 0.1, 1 / 3, 0.5, 0.99, 1 - 8e-6, 1 - 7e-6, 1.0])
def test_threshold_rounds_once(backend, p):
    """The threshold is floor(p * 65536 + 0.5). At 0 nothing changes, at 65536 nothing is left."""
    mask = dropout_mask((64, 2048), p, SEED)
    assert torch.equal(mask, exact_mask((64, 2048), p, SEED))
    assert mask.all() or threshold(p) > 0
    assert not mask.any() or threshold(p) < 65536
    input = torch.randn(64, 2048)
    out = dropout(input, p, seed=SEED)
    torch.testing.assert_close(out, exact(input, p, SEED).float(), rtol=3e-7, atol=0)
    if threshold(p) == 0:
        assert torch.equal(out, input)


def test_realised_rate_and_independence():
    """Counts of kept elements and of kept pairs lie within five standard deviations of their expectation.

    Pairs are neighbours, partners in one Philox call, or elements with another z, key or offset."""
    shape, p = (4, 256, 512), 0.3
    keep = 1 - threshold(p) / 65536
    mask = dropout_mask(shape, p, SEED)

    def check(kept, probability):
        n = kept.numel()
        assert abs(kept.sum().item() - n * probability) <= 5 * math.sqrt(n * probability * (1 - probability))

    check(mask, keep)
    for dim, step in ((0, 1), (1, 1), (1, 8), (2, 1), (2, 8), (2, 16), (2, 24), (2, 32)):
        rest = shape[dim] - step
        check(mask.narrow(dim, step, rest) & mask.narrow(dim, 0, rest), keep * keep)
    for change in ((1, 0), (0, 1), (2**32, 0)):
        check(mask & dropout_mask(shape, p, SEED + torch.tensor(change)), keep * keep)


SHAPES = [(1,), (77,), (9, 65), (3, 17, 33), (2, 3, 8, 40), (0, 4), (2, 2, 2, 3, 5)]


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES), ids=str)
def test_matches_the_formula(backend, shape, dtype):
    input = torch.randn(shape).to(dtype)
    (out,), (grad,) = gradients(lambda t: dropout(t, 0.3, seed=SEED), (input,))
    (wanted,), (wanted_grad,) = gradients(lambda t: exact(t, 0.3, SEED), (input,))
    for a, e in ((out, wanted), (grad, wanted_grad.double())):
        assert a.dtype == dtype
        assert a.shape == shape
        assert torch.equal(a == 0, e == 0)
        # Three roundings: of the scale in float32, of the product, and to the dtype.
        info = torch.finfo(dtype)
        torch.testing.assert_close(a.double(), e, rtol=info.eps, atol=info.eps * info.smallest_normal)


def test_more_than_2_to_the_16_matrices(backend):
    """z may exceed 2**16, because it is a whole word of the counter."""
    shape = (2**16 + 3, 1, 2)
    kept = exact_mask(shape, 0.3, SEED)
    assert torch.equal(dropout_mask(shape, 0.3, SEED), kept)
    if backend != "reference":
        assert torch.equal(dropout(torch.ones(shape), 0.3, seed=SEED) != 0, kept)


def test_float64_is_the_references():
    input = torch.randn(3, 9, 40, dtype=torch.float64)
    torch.testing.assert_close(dropout(input, 0.3, seed=SEED), exact(input, 0.3, SEED), rtol=1e-15, atol=0)


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2),
    "permuted": lambda t: t.permute(3, 0, 2, 1),
    "last": lambda t: t.mT,
    "step": lambda t: t[..., ::2],
    "offset": lambda t: t[:, 1:, 2:],
    "expanded": lambda t: t[:1].expand(5, 3, 9, 33),
    "expanded columns": lambda t: t[..., :1].expand(4, 3, 9, 20),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
}
USUAL_LAYOUTS = "permuted", "expanded", "channels last"


@pytest.mark.representative
@pytest.mark.parametrize("layout", [*USUAL_LAYOUTS, *slow(*(name for name in LAYOUTS if name not in USUAL_LAYOUTS))])
def test_layouts(backend, layout):
    """Positions are logical, whatever the strides. The output has the strides of a dense input, else it is
    contiguous."""
    input = LAYOUTS[layout](torch.randn(4, 3, 9, 33))
    (out,), (_grad,) = gradients(lambda t: dropout(t, 0.4, seed=SEED), (input,))
    torch.testing.assert_close(out.double(), exact(input, 0.4, SEED), rtol=3e-7, atol=0)
    dense = torch.empty_like(input).stride() == input.stride()
    assert out.stride() == (input.stride() if dense else torch.empty(input.shape).stride())


@pytest.mark.torch_version
def test_twice_differentiable(backend):
    """Double backward works on every backend: dropout is linear, and its backward is dropout itself."""
    input = torch.randn(9, 33, requires_grad=True)
    (grad,) = torch.autograd.grad(dropout(input, 0.4, seed=SEED).square().sum(), input, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), input)
    torch.testing.assert_close(second, 2 * exact(torch.ones(9, 33), 0.4, SEED).float() ** 2)


def test_a_sparse_gradient():
    """A sparse gradient is taken, as by torch's dropout: that of an embedding whose table is dropped."""
    table, index = torch.randn(50, 8, requires_grad=True), torch.tensor([3, 7, 3])
    out = F.embedding(index, dropout(table, 0.5, seed=SEED), sparse=True)
    (found,) = torch.autograd.grad(out.sum(), table)
    wanted = torch.zeros(50, 8).index_add(0, index, torch.ones(3, 8)) * exact(torch.ones(50, 8), 0.5, SEED)
    torch.testing.assert_close(found.to_dense(), wanted.float())


def test_out_of_memory_says_so():
    """The error has the words for which cli.py and other handlers look, because torch's own do not pass its stable
    ABI."""
    require("cpu")
    with pytest.raises(RuntimeError, match=r"out of memory, for a tensor of shape \(2147483648, 2147483648\)"):
        dropout_mask((2**31, 2**31), 0.5, SEED)


@pytest.mark.representative
def test_inplace(backend):
    input = torch.randn(4, 9, 33).transpose(0, 1)
    wanted = dropout(input, 0.4, seed=SEED)
    leaf = input.clone().requires_grad_()
    middle = leaf * 1
    out = dropout(middle, 0.4, inplace=True, seed=SEED)
    assert out.data_ptr() == middle.data_ptr()
    assert torch.equal(middle, wanted)
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, exact(torch.ones(input.shape), 0.4, SEED).float(), rtol=3e-7, atol=0)
    gap = torch.randn(9, 66)
    before = gap.clone()
    assert dropout(gap[:, ::2], 0.4, inplace=True, seed=SEED).data_ptr() == gap.data_ptr()
    assert torch.equal(gap[:, 1::2], before[:, 1::2])
    torch.testing.assert_close(gap[:, ::2].double(), exact(before[:, ::2], 0.4, SEED), rtol=3e-7, atol=0)
    assert dropout(input, 0.4, training=False, inplace=True) is input
    assert dropout(gap, 0.4, True, 1) is gap  # torch takes numbers too
    assert dropout(gap, 0.4, True, 0) is not gap
    with pytest.raises(RuntimeError, match="in-place"):
        dropout(torch.randn(3, requires_grad=True), 0.4, inplace=True)


def test_outside_training_it_is_the_identity(backend):
    """It draws no seed either."""
    input, integers, before = torch.randn(9, 33), torch.arange(5), torch.get_rng_state()
    assert torch.equal(dropout(input, 0.5, False), input)
    assert torch.equal(dropout(input, 0.0), input)
    assert dropout(integers, training=False) is integers
    assert torch.equal(dropout(integers, 0.0), F.dropout(integers, 0.0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.representative
def test_zero_times_infinity_is_dropped(backend):
    """A dropped element is 0 whatever it was, and p = 1 leaves only zeros."""
    input = torch.full((9, 33), math.inf)
    input[::2] = math.nan
    out = dropout(input, 0.5, seed=SEED)
    kept = exact_mask((9, 33), 0.5, SEED)
    assert (out[~kept] == 0).all()
    assert not out[kept].isfinite().any()
    assert (dropout(input, 1.0) == 0).all()


# Promises of several operations


@pytest.mark.representative
def test_every_operation_drops_the_same_elements(backend):
    """softmax_dropout followed by a product drops what fused attention drops, and both drop what dropout_mask says."""
    b, h, n = 2, 3, 40 if interpreted(backend) else 70
    seed = SEED.repeat_interleave(2)[::2]  # any strides
    zeros = torch.zeros(b, h, n, n)
    kept = dropout_mask((b, h, n, n), 0.4, SEED)
    assert torch.equal(dropout_mask((b, h, n, n), 0.4, seed), kept)
    assert torch.equal(dropout(zeros + 1, 0.4, seed=seed) != 0, kept)
    assert torch.equal(softmax_dropout(zeros, 0.4, seed=seed) != 0, kept)
    if backend != "cuda":
        query = torch.zeros(b, h, n, 8)
        value = torch.eye(n).expand(b, h, n, n)
        assert torch.equal(attention(query, query, value, dropout_p=0.4, seed=seed) != 0, kept)
    total = dropout_add_layer_norm(zeros + 1, zeros, dropout_p=0.4, prenorm=True, seed=seed)[1]
    assert torch.equal(total != 0, kept)


DROPPING = {
    "dropout": lambda x, p, **seed: dropout(x, p, **seed),
    "softmax_dropout": softmax_dropout,
    "dropout_add_layer_norm": lambda x, p, **seed: dropout_add_layer_norm(x, x, dropout_p=p, **seed),
    "attention": lambda x, p, **seed: attention(x, x, x, dropout_p=p, **seed),
}


@pytest.mark.torch_version
@pytest.mark.parametrize("name", DROPPING)
def test_seeds_are_drawn_from_torchs_generator(name):
    """No seed is drawn without need. The offset of a given one counts modulo 2**32, as for another chunk."""
    call = functools.partial(DROPPING[name], torch.randn(2, 2, 40, 50))
    torch.manual_seed(1)
    first, second = call(0.5), call(0.5)
    torch.manual_seed(1)
    call(0.0), call(0.5, seed=SEED)
    assert torch.equal(call(0.5), first)
    assert torch.equal(call(0.5), second)
    assert not torch.equal(first, second)
    for step, is_same in ((2**32, True), (1, False)):
        assert torch.equal(call(0.5, seed=SEED), call(0.5, seed=SEED + torch.tensor([0, step]))) == is_same


# Operations on rows with the shapes of their operands, for so many rows.
ROWS = {
    "dropout": (lambda x: dropout(x, 0.3, seed=SEED), lambda n: [(4, n, 333)]),
    "softmax_dropout": (lambda x, m: softmax_dropout(x, 0.3, m, seed=SEED), lambda n: [(4, n, 333), (4, 1, 333)]),
    "layer_norm": (lambda x, w, b: layer_norm(x, (333,), w, b), lambda n: [(4, n, 333), (333,), (333,)]),
    "dropout_add_layer_norm": (
        lambda *t: dropout_add_layer_norm(*t, 0.3, seed=SEED, prenorm=True),
        lambda n: [(4, n, 333), (4, n, 333), (333,), (333,)],
    ),
}


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_any_layout(backend, name, layout):
    """The outputs' gradients may have any strides."""
    function, shapes = ROWS[name]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes(9)]
    outs = torch.utils._pytree.tree_leaves(function(*tensors))
    grads = [GRADIENT_LAYOUTS[layout](*out.shape) for out in outs]
    wanted = torch.autograd.grad(outs, tensors, [grad.contiguous() for grad in grads], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(outs, tensors, grads), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)  # torch computes the reference's sums
def test_same_bits_for_every_thread_count(backend, name, dtype):
    function, shapes = ROWS[name]
    tensors = [torch.randn(shape) for shape in shapes(10 if interpreted(backend) else 150)]
    assert_same_bits(function, [tensors[0].to(dtype), *tensors[1:]])


@pytest.mark.torch_version
def test_autocast_keeps_the_dtype(backend):
    with torch.autocast(DEVICE, torch.bfloat16):
        assert dropout(torch.randn(3, 4)).dtype == F.dropout(torch.randn(3, 4)).dtype == torch.float32


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    p=st.floats(0, 1),
    key=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**63 - 1),
)
def test_any_mask(backend, shape, p, key, offset):
    seed = torch.tensor([key, offset])
    assert torch.equal(dropout_mask(shape, p, seed), exact_mask(shape, p, seed))
