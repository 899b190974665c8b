"""The cuda backend's attention for Hopper: many queries, dropout, packed sequences. Its device code is emulated on the
CPU.

Facts about Hopper's instructions and planted faults are in test_hopper.py."""

import contextlib
import functools
import math
import zlib

import pytest
import torch
from conftest import require
from hopper_problems import *  # noqa: F403 (its tests run here too)
from hopper_problems import HALVES, IS_EMULATED, KEYS, LAYOUTS, QUERIES, SEED, SHAPES, boundaries, packed
from oracle import assert_accurate, dropout_mask, varlen_attention, visible
from oracle import attention as exact
from pairs import in_turn, pairwise
from test_attention import (
    DIAGONALS,
    EXCLUDING,
    MASKS,
    NOTHING,
    assert_nan_reaches_what_attends_to_it,
    excluding,
    operands,
)
from test_cuda_attention import check, emulated_controls

import emulation
import fastattn
from fastattn import scaled_dot_product_attention, varlen_attn
from fastattn.backends import TABLE
from fastattn.backends.schema import AttentionArgs, VarlenAttentionArgs

SCHEDULES = range(3 if IS_EMULATED else 1)


@pytest.fixture(params=["cuda"], autouse=True)  # a parameter, so that conftest.py marks these tests
def backend(request):
    """Force the backend. In the emulation a test's name decides how many blocks share the tiles."""
    require("cuda")
    if not IS_EMULATED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for GPUs of compute capability 9.0")
    with emulation.strict() if IS_EMULATED else contextlib.nullcontext(), fastattn.backend("cuda"):
        for controls in emulated_controls():
            if controls:
                controls.set_multiprocessors((132, 1, 3)[zlib.crc32(request.node.name.encode()) % 3])
            yield request.param


@pytest.fixture
def controls(backend):
    """Yield the emulation's controls, or None on a GPU. ``set_multiprocessors`` says how many blocks share tiles."""
    yield from emulated_controls()


@pytest.fixture(name="check")
def checks():
    return check


@pytest.fixture(name="check_packed")
def checks_of_packed():
    return check_packed


def each_schedule(controls, call):
    """Return the results of call() in several schedules and on several numbers of multiprocessors."""
    for schedule, count in zip(SCHEDULES, (132, 1, 2), strict=False):
        if IS_EMULATED:
            controls.seed_order(schedule)
            controls.set_multiprocessors(count)
        yield call()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    check(*operands(shape, dtype))
    check(*operands(shape, dtype), is_causal=True)
    check(*operands(shape, dtype), dropout_p=0.2, seed=SEED)


def test_sections_of_heads():
    """Of three heads two fit into the cache together, by the length of their keys, of which few are seen."""
    check(*operands((1, 3, 3, 20, 16200, 256, 256), torch.bfloat16), key_lengths=torch.tensor([40]))


def test_strides_of_dimensions_of_size_1():
    """They may be anything."""
    tensors = [t.as_strided(t.shape, (7, 5, 16, 1)) for t in operands((1, 1, 1, 40, 70, 16, 16), torch.bfloat16)]
    check(*tensors)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXCLUDING)
def test_excluded_keys_may_hold_anything(kind, dtype, bad):
    dropout = {"dropout_p": 0.2, "seed": SEED} if kind == "bias, lengths" else {}
    tensors, masks, _ = excluding(kind, dtype, 40, bad)
    check(*tensors, **masks, **dropout)


@pairwise(kind=NOTHING, dtype=HALVES, p=[0.0, 0.3])
def test_nothing_to_see(kind, dtype, p):
    _, lse = check(*operands((2, 2, 2, 19, 40, 16, 16), dtype), dropout_p=p, seed=SEED, **NOTHING[kind]())
    assert lse.isfinite().any() == kind.startswith("some rows")


@pytest.mark.representative
def test_rows_that_see_nothing_are_0_beside_nan():
    query, key, value = operands((1, 1, 1, 33, 200, 16, 16), torch.bfloat16)
    key[..., 0, :3] = value[..., 0, :3] = math.nan
    hidden = torch.arange(33) % 2 == 0
    mask = ~hidden[:, None] & ((torch.rand(33, 200) < 0.8) | (torch.arange(200) == 0))
    out, lse = scaled_dot_product_attention(query, key, value, mask, return_lse=True)
    assert (out[0, :, hidden] == 0).all()
    assert (lse[0, :, hidden] == -math.inf).all()
    assert out[0, :, ~hidden].isnan().all()


def test_nan_reaches_what_attends_to_it():
    assert_nan_reaches_what_attends_to_it(*operands((1, 1, 1, 40, 140, 8, 8), torch.bfloat16))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_huge_scores(dtype):
    """The largest score has probability 1, at scores of 1e8, where a unit in the last place is 8."""
    query, key = torch.zeros(1, 1, 33, 16), torch.zeros(1, 1, 200, 16)
    row, best = torch.arange(33), 37 * torch.arange(33) % 200
    query[0, 0, row, row % 16] = 2.0**12
    key[0, 0] = torch.randint(1, 100, (200, 16)).float()
    key[0, 0, best[:16], torch.arange(16)] = 2.0**8 - 1 - torch.arange(16)
    value = torch.randn(1, 1, 200, 16).to(dtype)
    out = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value, scale=123.4567)
    assert torch.equal(out, value[:, :, best[row % 16]])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("step", [0.02, 0.06, 0.5, -0.06])
def test_scores_that_grow(dtype, step):
    """A row's maximum may grow with every tile, by little and by much."""
    query, key, value = operands((1, 2, 2, 40, 700, 16, 16), dtype)
    query[..., 0], key[..., 0] = 1, step * torch.arange(700)
    check(query, key, value, scale=1.0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mask_of_the_smallest_number(dtype):
    tensors = operands((1, 2, 2, 26, 143, 16, 16), dtype)
    minimum = torch.finfo(dtype).min
    check(*tensors, torch.zeros(143, dtype=dtype).masked_fill(torch.arange(143) > 20, minimum))
    out, _ = check(*tensors, torch.full((143,), torch.finfo(torch.float32).min))
    uniform = tensors[2].double().mean(-2, keepdim=True)
    assert (out.double() - uniform).abs().amax() <= 2 * torch.finfo(dtype).eps


def test_a_mask_of_the_smallest_number_beside_lower_scores():
    """Their sum is below float32, and still hides no key."""
    query, key, value = operands((1, 2, 2, 26, 143, 16, 16), torch.bfloat16)
    query, key = query.fill_(-1e16), key.fill_(1e15)
    out, _ = check(query, key, value, torch.full((143,), torch.finfo(torch.float32).min))
    uniform = value.double().mean(-2, keepdim=True)
    assert (out.double() - uniform).abs().amax() <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("queries", [40, 150])
def test_bytes_of_a_mask_other_than_0_and_1(queries):
    tensors = operands((1, 1, 1, queries, 140, 16, 16), torch.bfloat16)
    given = torch.randint(0, 4, (queries, 280), dtype=torch.uint8)
    for mask in (given[:, :140], given[:1, :140], given[:, ::2]):
        wanted, found = (scaled_dot_product_attention(*tensors, m) for m in (mask != 0, mask.view(torch.bool)))
        assert torch.equal(wanted, found)


# Dropout


@pairwise(
    has_lengths=[False, True],
    window=[(-1, -1), (60, 37)],
    diagonal=DIAGONALS,
    kind=MASKS,
    dtype=HALVES,
    p=[0.0, 0.3],
    keys=[75, 120, 184, 250],  # the values' head size, which decides the kernel
)
def test_identity_value_shows_the_zero_pattern(has_lengths, window, diagonal, kind, dtype, p, keys):
    """With V = identity the output is P: zero exactly where it is masked or dropped, and nowhere else."""
    b, h, lq = 2, 2, 37
    query, key, _ = operands((b, h, 1, lq, keys, 16, 1), dtype)
    query, key = query / 4, key / 4
    value = torch.eye(keys, -(-keys // 8) * 8, dtype=dtype).expand(b, 1, -1, -1).contiguous()
    mask = MASKS[kind]((b, h, lq, keys))
    lengths = torch.tensor([50, keys]) if has_lengths else None
    masks = {"window_size": window, "key_lengths": lengths, **DIAGONALS[diagonal]}
    out = scaled_dot_product_attention(
        query, key, value, mask, dropout_p=p, enable_gqa=True, seed=SEED if p else None, **masks
    )
    kept = visible((b, h, lq, keys), mask, **masks)
    if p:
        kept = kept & dropout_mask((b, h, lq, keys), p, SEED)
    assert torch.equal(out[..., :keys] != 0, kept)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dropped_weights_of_long_rows(head_dim):
    """Tiles of queries and keys beyond the first ones drop what the formula says, without and with a mask."""
    lq, lk = 300, 400
    query, key = torch.zeros(1, 2, lq, 16, dtype=torch.bfloat16), torch.zeros(1, 2, lk, 16, dtype=torch.bfloat16)
    wanted = dropout_mask((1, 2, lq, lk), 0.3, SEED)
    for mask in (None, torch.ones(lq, lk, dtype=torch.bool)):
        parts = [
            scaled_dot_product_attention(query, key, part.expand(1, 2, -1, -1).contiguous(), mask, 0.3, seed=SEED)
            for part in torch.eye(lk, -(-lk // head_dim) * head_dim, dtype=torch.bfloat16).split(head_dim, 1)
        ]
        assert torch.equal(torch.cat(parts, -1)[..., :lk] != 0, wanted)


@pytest.mark.parametrize("mask", [None, torch.bool])
@pytest.mark.parametrize("p", [1e-6, 7.6e-6, 0.99999, 1.0])
def test_dropout_extremes(p, mask):
    tensors = operands((1, 2, 2, 19, 145, 8, 8), torch.bfloat16)
    mask = None if mask is None else torch.rand(19, 145) < 0.7
    out, _ = check(*tensors, mask, dropout_p=p, seed=SEED)
    if p == 1e-6:
        assert torch.equal(out, scaled_dot_product_attention(*tensors, mask))
    if p == 1.0:
        assert (out == 0).all()


# Packed sequences


def check_packed(tensors, queries, keys, **options):
    sequences, longest = (boundaries(queries), boundaries(keys)), (max(queries), max(keys))
    out, lse = varlen_attn(*tensors, *sequences, *longest, return_lse=True, **options)
    wanted, wanted_lse = varlen_attention(*tensors, *sequences, **options)
    peer = varlen_attention(*tensors, *sequences, dtype=tensors[0].dtype, **options)[0]
    peer_lse = varlen_attention(*tensors, *sequences, dtype=torch.float32, **options)[1]
    assert_accurate(out, wanted, peer, f"out {options}")
    assert_accurate(lse, wanted_lse, peer_lse, f"lse {options}", magnitude=1.0)
    return out, lse


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (5, 5), "dropout_p": 0.3}], ids=str)
def test_used_keys_of_packed_sequences(options):
    used = torch.tensor([3, 4, 131, 0, 216, 64])
    query, key, value = packed(QUERIES, KEYS, (2, 1), (16, 16), torch.bfloat16)
    for start, length, n in zip(boundaries(KEYS), KEYS, used, strict=False):
        key[start + n : start + length] = math.nan
        value[start + n : start + length] = math.inf
    check_packed((query, key, value), QUERIES, KEYS, seqused_k=used, seed=SEED, enable_gqa=True, **options)


@pytest.mark.representative
def test_empty_packed_sequences():
    for queries, keys in (((0, 0), (0, 3)), ((3,), (0,))):
        out, _ = check_packed(packed(queries, keys, (2, 2), (8, 8), torch.bfloat16), queries, keys)
        assert (out == 0).all()
    none = torch.randn(0, 2, 8).bfloat16()
    assert varlen_attn(none, none, none, boundaries(()), boundaries(()), 0, 0).shape == (0, 2, 8)


def test_strides_of_packed_sequences():
    """Slices of one packed projection, transposed heads and a last stride other than 1 are served."""
    projection = torch.randn(sum(QUERIES), 3, 2, 16).bfloat16()
    check_packed(projection.unbind(1), QUERIES, QUERIES, is_causal=True)
    key = torch.randn(2, sum(KEYS), 16).bfloat16().transpose(0, 1)
    value = torch.randn(sum(KEYS), 2, 32).bfloat16()[..., ::2]
    check_packed((projection[:, 0], key, value), QUERIES, KEYS, dropout_p=0.2, seed=SEED)


@pytest.mark.representative
@pytest.mark.parametrize("longest", [2**31, 2**62])
def test_longest_lengths_beyond_the_tokens(longest):
    q, k, v = (torch.randn(5, 2, 8).bfloat16() for _ in range(3))
    starts = torch.tensor([0, 2, 5])
    found, wanted = (
        varlen_attn(q, k, v, starts, starts, n, n, window_size=(1, 0), dropout_p=0.3, seed=SEED) for n in (longest, 3)
    )
    assert torch.equal(found, wanted)


# Layouts


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(lay):
    """Operands may have any strides of 16 bytes. The bits do not depend on them. A copy serves other last strides."""
    query, key, value = operands((2, 4, 2, 23, 141, 16, 24), torch.bfloat16)
    call = functools.partial(scaled_dot_product_attention, enable_gqa=True, dropout_p=0.2, seed=SEED)
    out = call(lay(query), lay(key), lay(value))
    assert torch.equal(out, call(query, key, value))
    assert out.stride() == torch.empty_like(lay(query)[..., :1].expand(out.shape)).stride() or out.is_contiguous()


REFUSED = {
    "float32": (lambda t: t.float(), "bfloat16 and float16, not float32"),
    "head size": (lambda t: t[..., :12].contiguous(), "head sizes that are multiples of 8, not 12"),
    "rows": (lambda t: torch.nn.functional.pad(t, (0, 2))[..., :-2], "rows that begin at multiples of 16 bytes"),
    "address": (
        lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "rows that begin at multiples of 16 bytes",
    ),
    "expanded": (lambda t: t[:, :1].expand(t.shape), "no expanded operands"),
}


@pytest.mark.representative
@pytest.mark.parametrize("kind", REFUSED)
def test_what_tma_cannot_address_is_refused(kind):
    change, reason = REFUSED[kind]
    tensors = list(map(change, operands((1, 2, 2, 40, 40, 16, 16), torch.bfloat16)))
    message = f"its kernel for decoding takes up to 16 queries, not 40, that for Hopper {reason}"
    with pytest.raises(RuntimeError, match=message):
        scaled_dot_product_attention(*tensors)
    if kind == "expanded":
        with pytest.raises(RuntimeError, match="no expanded dimension"):
            run(*tensors)
    packed = [t.transpose(1, 2)[0] for t in tensors]
    if kind != "address":
        with pytest.raises(RuntimeError, match=f"takes no packed sequences, that for Hopper {reason}"):
            varlen_attn(*packed, torch.tensor([0, 40]), torch.tensor([0, 40]), 40, 40)


# Results that the backward pass reads


def run(query, key, value, attn_mask=None, *, lengths=None, scale=None, window=None, threshold=0, keep=True):
    """Call the backend function. Return (out, lse, row_max, row_sum, residual)."""
    left, right = window or (query.size(2), key.size(2))
    scale = query.size(-1) ** -0.5 if scale is None else scale
    seed = SEED if threshold else None
    attn_mask = attn_mask if attn_mask is None or attn_mask.dim() == 4 else attn_mask[None, None]
    args = AttentionArgs(query, key, value, attn_mask, lengths, seed, scale, left, right, False, threshold, keep)
    out, lse, stats, residual = TABLE["cuda"].FUNCTIONS["attention"](args)
    return out, lse, *stats, residual


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_statistics(dtype, has_mask):
    """The statistics are a row's largest score, and its sum of exponentials relative to that score."""
    query, key, value = operands((2, 2, 2, 35, 243, 16, 16), dtype)
    lengths, mask = torch.tensor([230, 243]), None
    scores = query.double() @ key.double().mT * 0.25
    if has_mask:
        mask = torch.randn(2, 1, 1, 243)
        mask[1] = torch.finfo(torch.float32).min
        scores = scores + mask.double()
    _, lse, point, total, _ = run(query, key, value, mask, lengths=lengths, scale=0.25)
    seen = scores[0, :, :, :230]
    # A score is a float32 sum of 16 products: 16 * 2**-24 < 1e-6.
    torch.testing.assert_close(point[0], seen.amax(-1).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total[0], (seen - point[0].double()[..., None]).exp().sum(-1).float())
    torch.testing.assert_close(lse, point + total.log())
    if has_mask:
        assert (total[1] == 243).all()
        assert (point[1] == torch.finfo(torch.float32).min).all()
    empty = run(query, key, value, lengths=torch.tensor([0, 243]))
    assert not any(tensor[0].any() for tensor in (empty[0], empty[2], empty[3], empty[4]))


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("threshold", [0, 20000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_all_values_share_passes_exactly(dtype, head_dim, threshold, has_mask):
    """The result is divided by the sum of the rounded weights, and the residual is what its own rounding takes away."""
    query, key, value = operands((1, 2, 1, 40, 300, head_dim, head_dim), dtype)
    value[:] = torch.randn(head_dim).to(dtype)
    mask = torch.rand(40, 300) < 0.7 if has_mask else None
    out, *_, residual = run(query, key, value, mask, threshold=threshold)
    options = {"dropout_p": threshold / 65536, "seed": SEED, "enable_gqa": True}
    weights = exact(query, key, value, mask, **options)[2].sum(-1, keepdim=True)
    wanted = weights * value[:, :, :1].double()
    # A float32 sum of 300 weights: 300 * 2**-24 < 2e-5. The residual's own rounding is 2**-17 of the result at most.
    torch.testing.assert_close(out.double() + residual.double(), wanted, rtol=2e-5, atol=1e-6)
    assert residual.any()
    assert (residual.abs() <= out.abs() * torch.finfo(dtype).eps).all()
    assert torch.equal(out, run(query, key, value, mask, threshold=threshold, keep=False)[0])


@pytest.mark.representative
def test_residual_of_results_that_are_not_finite_is_0():
    query, key, value = operands((1, 1, 1, 20, 140, 8, 8), torch.bfloat16)
    value[0, 0, 3, :2] = torch.tensor([math.nan, math.inf])
    out, *_, residual = run(query, key, value)
    assert not out[..., :2].isfinite().any()
    assert not residual[..., :2].any()
    assert residual[..., 2:].any()


@pytest.mark.representative
def test_residual_of_packed_sequences():
    """Packed sequences give the results of a dense batch."""
    query, key, value = operands((3, 2, 1, 40, 40, 64, 64), torch.bfloat16)
    wanted = run(query, key, value, threshold=9000)
    flat = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (query, key, value)]
    starts = torch.arange(0, 121, 40)
    args = VarlenAttentionArgs(*flat, starts, starts, None, SEED, 40, 40, 0.125, 40, 40, 9000, True)
    out, lse, stats, residual = TABLE["cuda"].FUNCTIONS["varlen_attention"](args)
    found = (out, lse, *stats, residual)
    assert all(torch.equal(a, b.unflatten(0, (3, 40)).transpose(1, 2)) for a, b in zip(wanted, found, strict=True))


# Order, and the choice of the backend


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), in_turn([64, 96, 128, 192, 256], HALVES), ids=str)
def test_same_bits_in_every_schedule(controls, head_dim, dtype, masked):
    """Results depend on neither the order of threads nor the number of blocks."""
    tensors = operands((2, 2, 1, 410, 300, head_dim, head_dim), dtype)
    mask = torch.rand(410, 300) < torch.rand(300) if masked else None
    lengths = torch.tensor([300, 170])
    results = list(
        each_schedule(controls, lambda: run(*tensors, mask, lengths=lengths, window=(200, 0), threshold=6000))
    )
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_compiled_calls():
    """Compiled code gives the same bits. It cannot see addresses, so there the library refuses what TMA cannot load."""
    tensors = operands((1, 2, 2, 40, 40, 16, 16), torch.bfloat16)
    call = functools.partial(scaled_dot_product_attention, is_causal=True, dropout_p=0.2, seed=SEED)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), call(*tensors))
        moved = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors]
        with pytest.raises(RuntimeError, match="rows that begin at multiples of 16 bytes"):
            compiled(*moved)
    torch._dynamo.reset()
