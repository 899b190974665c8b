"""The cuda backend's gradients of attention for Hopper, beyond the problems of test_hopper_attention.py."""

import functools
import math

import pytest
import torch
from oracle import GRADIENT_LAYOUTS, dropout_mask, gradients
from pairs import pairwise
from test_attention import DIAGONALS, operands
from test_cuda_attention import emulated_controls
from test_exact_gradients import (
    CALLS,
    REGIMES,
    assert_pooled,
    draw,
    draw_packed,
    test_queries_that_see_one_key,  # noqa: F401 (runs here too)
    test_the_first_query_of_a_causal_call,  # noqa: F401
)
from test_hopper_attention import (
    HALVES,
    IS_EMULATED,
    SEED,
    backend,  # noqa: F401 (a fixture)
    boundaries,
    check,
    packed,
)

from fastattn import scaled_dot_product_attention, varlen_attn

SCHEDULES = range(3 if IS_EMULATED else 2)


@pytest.fixture
def controls():
    yield from emulated_controls()


@pytest.mark.representative
def test_small_problems():
    check(*operands((1, 2, 1, 70, 140, 64, 64), torch.bfloat16), is_causal=True, dropout_p=0.2, seed=SEED)
    check(*operands((1, 1, 1, 1, 1, 8, 8), torch.bfloat16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 256])
def test_nan_of_a_query_that_sees_nothing_stays_there(head_dim, dtype):
    """Neither NaN in such a query nor in its output's gradient reaches another gradient, and its own is 0."""
    query, key, value = operands((1, 2, 2, 70, 77, head_dim, head_dim), dtype)
    mask = torch.rand(70, 77) < 0.7
    mask[:, 0], mask[3] = True, False
    grad = torch.randn_like(query)
    query[:, :, 3] = grad[:, :, 3] = math.nan
    tensors = [t.requires_grad_() for t in (query, key, value)]
    lower = {"key_lengths": torch.tensor([66]), **DIAGONALS["lower"]}  # The first four queries see nothing.
    for masks in ({"attn_mask": mask}, lower):
        found = torch.autograd.grad(scaled_dot_product_attention(*tensors, **masks), tensors, grad)
        assert all(t.isfinite().all() for t in found)
        assert not found[0][:, :, 3].any()


def test_nan_reaches_what_attends_to_it():
    query, key, value = (t.requires_grad_() for t in operands((1, 1, 1, 70, 140, 8, 8), torch.bfloat16))
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    grad = torch.randn_like(out)
    grad[0, 0, 66, 3] = math.nan
    found = torch.autograd.grad(out, (query, key, value), grad)
    assert found[0].isnan().any(-1).squeeze().nonzero().tolist() == [[66]]
    assert found[2][..., :67, 3].isnan().all()
    assert not found[2][..., :3].isnan().any()
    assert not found[1][..., 67:, :].isnan().any()


# Dropout


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("has_mask", [False, True])
def test_dropped_weights_of_long_rows(head_dim, has_mask):
    """Tiles of queries and keys beyond the first ones drop what the formula says: with equal scores and slices of the
    identity as gradients of the output, the gradients of the values show single weights."""
    lq, lk = 150, 200
    query, key = torch.zeros(1, 2, lq, 16, dtype=torch.bfloat16), torch.zeros(1, 1, lk, 16, dtype=torch.bfloat16)
    value = torch.zeros(1, 1, lk, head_dim, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(lq, lk, dtype=torch.bool) if has_mask else None
    out = scaled_dot_product_attention(query, key, value, mask, 0.3, seed=SEED, enable_gqa=True)
    wanted = dropout_mask((1, 2, lq, lk), 0.3, SEED)
    for head in (0, 1):
        parts = []
        for part in torch.eye(lq, dtype=torch.bfloat16).split(head_dim, 1):
            grad = torch.zeros_like(out)
            grad[:, head, :, : part.size(1)] = part
            parts.append(torch.autograd.grad(out, value, grad, retain_graph=True)[0][0, 0, :, : part.size(1)])
        assert torch.equal(torch.cat(parts, 1).mT != 0, wanted[0, head])


# Packed sequences


def test_sequences_do_not_share_nan():
    """NaN in a sequence's query and gradient reaches no gradient of the sequence before it in the same tile."""
    query, key, value = (t.requires_grad_() for t in packed((70, 60), (70, 60), (1, 1), (64, 64), torch.bfloat16))
    with torch.no_grad():
        query[70:] = math.nan
    starts = torch.tensor([0, 70, 130])
    out = varlen_attn(query, key, value, starts, starts, 70, 70)
    grad = torch.randn_like(out)
    grad[70:] = math.nan
    for found in torch.autograd.grad(out, (query, key, value), grad):
        assert found[:70].isfinite().all()
        assert found[70:].isnan().all()


# Layouts


@pytest.mark.parametrize("layout", [*GRADIENT_LAYOUTS, "odd address"])
def test_gradients_of_any_layout(layout):
    """A gradient of the output that TMA cannot load is copied."""
    tensors = [t.requires_grad_() for t in operands((2, 2, 1, 23, 141, 16, 24), torch.bfloat16)]
    out = scaled_dot_product_attention(*tensors, enable_gqa=True, dropout_p=0.2, seed=SEED)
    if layout == "odd address":
        grad = torch.cat([out.new_zeros(1), torch.randn_like(out).flatten()])[1:].view(out.shape)
    else:
        grad = GRADIENT_LAYOUTS[layout](*out.shape).to(out.dtype)
    found = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    wanted = torch.autograd.grad(out, tensors, grad.clone(memory_format=torch.contiguous_format))
    assert all(map(torch.equal, found, wanted))


# Exactness


@pairwise(regime=REGIMES, call=CALLS, dtype=HALVES)
def test_gradients_are_as_exact_as_maths(call, regime, dtype):
    shape, options = CALLS[call]
    heads = [1, 1] if shape[1] == shape[2] else [2, 1]
    shape = math.ceil(shape[0] / 2), *heads, *shape[3:]
    assert_pooled(draw(regime, shape, dtype, **options) for _ in range(2))


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_wide_heads_are_as_exact_as_maths(head_dim, dtype):
    assert_pooled([draw("both + 20", (8, 2, 1, 40, 150, head_dim, head_dim), dtype, mask="padding")])
    assert_pooled([draw("both + 5", (8, 2, 1, 40, 150, head_dim, head_dim), dtype, is_causal=True, return_lse=True)])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_packed_gradients_are_as_exact_as_maths(dtype):
    queries, keys = (5, 0, 133, 1, 17, 40), (9, 4, 140, 0, 17, 70)
    for options in ({"is_causal": True}, {"dropout_p": 0.25}):
        assert_pooled([draw_packed("both + 20", dtype, queries, keys, **options)])


# Order, and the choice of the backend

ORDERED = {
    "dense": {},
    "window": {"key_lengths": torch.tensor([260, 170]), "window_size": (100, 40), "dropout_p": 0.1, "seed": SEED},
    "causal": {"is_causal": True},
}


@pairwise(masked=[False, True], kind=ORDERED, head_dim=[64, 96, 128, 192, 256], dtype=HALVES)
def test_same_bits_in_every_schedule(controls, head_dim, dtype, kind, masked):
    """Results depend on neither the order of threads and blocks nor how many blocks are resident."""
    tensors = operands((2, 2, 1, 140, 260, head_dim, head_dim), dtype)  # three tiles of queries and of keys, or more
    mask = torch.rand(140, 260) < torch.rand(260) if masked else None
    call = functools.partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True, **ORDERED[kind])
    assert_same_bits(controls, call, tensors)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.1, "seed": SEED}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_same_bits_of_packed_sequences_in_every_schedule(controls, head_dim, options):
    queries, keys = (210, 1, 70), (300, 140, 20)
    starts = boundaries(queries), boundaries(keys)
    tensors = packed(queries, keys, (2, 1), (head_dim, head_dim), torch.bfloat16)

    def call(*tensors):
        return varlen_attn(*tensors, *starts, max(queries), max(keys), enable_gqa=True, **options)

    assert_same_bits(controls, call, tensors)


def assert_same_bits(controls, call, tensors):
    results = []
    for schedule in SCHEDULES:
        if IS_EMULATED:
            controls.seed_order(schedule)
        results.append(gradients(call, tensors)[1])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


LATE = torch.arange(520)[:, None] >= torch.arange(520).flip(0)  # The last keys come first.
WAITS = {
    "causal": ({"is_causal": True}, lambda waits, tiles: waits == 0),
    "causal by a mask": ({"attn_mask": torch.ones(520, 520).tril() > 0}, lambda waits, tiles: waits == 0),
    "dense": ({}, lambda waits, tiles: waits == tiles - 1),
    "the reverse of causal": ({"attn_mask": LATE}, lambda waits, tiles: waits >= tiles),
}


@pytest.mark.skipif(not IS_EMULATED, reason="the emulation counts the waits")
@pytest.mark.parametrize(("options", "is_right"), WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_waits_for_turns(controls, head_dim, options, is_right):
    """If all blocks run at one speed, none waits for its turn in a causal call, and each but the first once in a dense
    one."""
    tiles = math.ceil(520 / (64 if head_dim > 128 else 128))
    tensors = [t.requires_grad_() for t in operands((1, 2, 1, 520, 520, head_dim, head_dim), torch.bfloat16)]
    out = scaled_dot_product_attention(*tensors, enable_gqa=True, **options)
    controls.turn_waits()
    out.backward(torch.randn_like(out))
    assert is_right(controls.turn_waits(), tiles)


@pytest.mark.representative
def test_what_has_no_gradient_here_is_refused():
    tensors = [t.requires_grad_() for t in operands((1, 2, 2, 40, 40, 16, 16), torch.bfloat16)]
    mask = torch.randn(40, 40, requires_grad=True)
    message = "its kernel for decoding takes up to 16 queries, not 40, that for Hopper no mask whose gradient is needed"
    with pytest.raises(RuntimeError, match=message):
        scaled_dot_product_attention(*tensors, mask)
    with torch.no_grad():
        assert scaled_dot_product_attention(*tensors, mask).shape == tensors[0].shape
    few = tensors[0][:, :, :3].float().detach().requires_grad_()
    with pytest.raises(RuntimeError, match="takes no gradients, that for Hopper bfloat16 and float16, not float32"):
        scaled_dot_product_attention(few, few, few)
