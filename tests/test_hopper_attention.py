"""The cuda backend's attention for Hopper: many queries, dropout, packed sequences, and the gradients of all these. Its
device code is emulated on the CPU.

Facts about Hopper's instructions and planted faults are in test_hopper.py. What gradients have alone is in
test_hopper_backward.py."""

import contextlib
import functools
import itertools
import math
import zlib

import pytest
import torch
from conftest import DEVICE, require
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_accurate, dropout_mask, gradients, varlen_attention, visible
from oracle import attention as exact
from pairs import in_turn, pairwise
from test_attention import (
    DIAGONALS,
    EXCLUDING,
    MASKS,
    NOTHING,
    WINDOWS,
    assert_nan_reaches_what_attends_to_it,
    excluding,
    mask_views,
    operands,
)
from test_attention import check as check_gradients
from test_cuda_attention import check as check_forward
from test_cuda_attention import emulated_controls

import emulation
import fastattn
from fastattn import scaled_dot_product_attention, varlen_attn
from fastattn.backends import TABLE
from fastattn.backends.schema import AttentionArgs, VarlenAttentionArgs

IS_EMULATED = DEVICE == "cpu"
HALVES = [torch.bfloat16, torch.float16]
SEED = torch.tensor([0x1234567890ABCDEF, 7])

SHAPES = [  # (B, Hq, Hk, Lq, Lk, E, Ev)
    *((1, 1, 1, 17, 1, 8, 8), (2, 3, 3, 20, 37, 64, 64), (1, 4, 2, 213, 203, 64, 64), (2, 6, 2, 21, 131, 96, 32)),
    *((1, 4, 1, 150, 260, 128, 128), (1, 1, 1, 70, 200, 192, 184), (1, 2, 1, 70, 140, 256, 256)),
    *((1, 1, 1, 20, 500, 16, 200), (1, 1, 1, 400, 50, 40, 72), (1, 2, 1, 129, 257, 128, 80)),
]

LAYOUTS = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "between others": lambda t: torch.nn.functional.pad(t, (0, 8, 2, 3))[:, :, 2:-3, :-8],
    "batch inside": lambda t: t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "transposed": lambda t: t.mT.contiguous().mT,
}


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


def each_schedule(controls, call):
    """Return the results of call() in several schedules and on several numbers of multiprocessors."""
    for schedule, count in zip(SCHEDULES, (132, 1, 2), strict=False):
        if IS_EMULATED:
            controls.seed_order(schedule)
            controls.set_multiprocessors(count)
        yield call()


def check(query, key, value, attn_mask=None, *, lse=True, **options):
    """Check output and LSE of a call without gradients, and all of one with gradients. A float mask has none here."""
    out, found_lse = check_forward(query, key, value, attn_mask, **options)
    options["enable_gqa"] = query.size(1) != key.size(1)
    _, grads = check_gradients(query, key, value, attn_mask, lse=lse, mask_grad=False, **options)
    return out, found_lse, grads


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    check(*operands(shape, dtype), lse=False)
    check(*operands(shape, dtype), is_causal=True)
    check(*operands(shape, dtype), dropout_p=0.2, seed=SEED)


def test_sections_of_heads():
    """Of three heads two fit into the cache together, by the length of their keys, of which few are seen."""
    check_forward(*operands((1, 3, 3, 20, 16200, 256, 256), torch.bfloat16), key_lengths=torch.tensor([40]))


def test_strides_of_dimensions_of_size_1():
    """They may be anything."""
    tensors = [t.as_strided(t.shape, (7, 5, 16, 1)) for t in operands((1, 1, 1, 40, 70, 16, 16), torch.bfloat16)]
    check(*tensors)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", EXCLUDING)
def test_excluded_keys_may_hold_anything(kind, dtype, bad):
    dropout = {"dropout_p": 0.2, "seed": SEED} if kind == "bias, lengths" else {}
    tensors, masks, gone = excluding(kind, dtype, 40, bad)
    _, _, (_, grad_key, grad_value) = check(*tensors, **masks, **dropout)
    assert (grad_key[gone] == 0).all()
    assert (grad_value[gone] == 0).all()


@pairwise(kind=NOTHING, dtype=HALVES, p=[0.0, 0.3])
def test_nothing_to_see(kind, dtype, p):
    _, lse, grads = check(*operands((2, 2, 2, 19, 40, 16, 16), dtype), dropout_p=p, seed=SEED, **NOTHING[kind]())
    is_seen = kind.startswith("some rows")
    assert lse.isfinite().any() == is_seen
    assert is_seen or not any(grad.any() for grad in grads)


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
    out, _, _ = check(*tensors, torch.full((143,), torch.finfo(torch.float32).min), lse=False)
    uniform = tensors[2].double().mean(-2, keepdim=True)
    assert (out.double() - uniform).abs().amax() <= 2 * torch.finfo(dtype).eps


def test_a_mask_of_the_smallest_number_beside_lower_scores():
    """Their sum is below float32, and still hides no key."""
    query, key, value = operands((1, 2, 2, 26, 143, 16, 16), torch.bfloat16)
    query, key = query.fill_(-1e16), key.fill_(1e15)
    out, _ = check_forward(query, key, value, torch.full((143,), torch.finfo(torch.float32).min))
    uniform = value.double().mean(-2, keepdim=True)
    assert (out.double() - uniform).abs().amax() <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("queries", [40, 150])
def test_bytes_of_a_mask_other_than_0_and_1(queries):
    tensors = operands((1, 1, 1, queries, 140, 16, 16), torch.bfloat16)
    given = torch.randint(0, 4, (queries, 280), dtype=torch.uint8)
    for mask in (given[:, :140], given[:1, :140], given[:, ::2]):
        wanted, found = (scaled_dot_product_attention(*tensors, m) for m in (mask != 0, mask.view(torch.bool)))
        assert torch.equal(wanted, found)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 385])
def test_lengths_around_tiles(dtype, length):
    check(*operands((1, 1, 1, length, length + 1, 32, 32), dtype), is_causal=True)
    check(*operands((1, 1, 1, 18, length, 192, 192), dtype), window_size=(100, 3), causal_variant="lower_right")
    check(*operands((1, 1, 1, length, 70, 128, 128), dtype), window_size=(20, 30))


@pytest.mark.parametrize(("e", "dtype"), in_turn(range(8, 257, 8), HALVES), ids=str)
def test_every_head_size(e, dtype):
    check(*operands((1, 2, 1, 18, 135, e, max(8, e - 24)), dtype), is_causal=True)
    check(*operands((1, 1, 1, 18, 70, max(8, e - 56), e), dtype), torch.randn(70), dropout_p=0.3, seed=SEED)


@pairwise(
    p=[0.0, 0.4],
    lengths=[None, (153, 0, 118)],
    window=[*WINDOWS[:4], (100, 30)],
    mask=MASKS,
    diagonal=DIAGONALS,
    queries=[21, 140],
    sizes=[(16, 24), (64, 64), (128, 128), (192, 192)],
    dtype=HALVES,
)
def test_masks_combine(p, lengths, window, mask, diagonal, queries, sizes, dtype):
    attn_mask = MASKS[mask]((3, 2, queries, 153))
    attn_mask = attn_mask.to(dtype) if mask == "float" else attn_mask
    lengths = None if lengths is None else torch.tensor(lengths)
    options = {"key_lengths": lengths, "window_size": window, **DIAGONALS[diagonal]}
    check(
        *operands((3, 2, 1, queries, 153, *sizes), dtype), attn_mask, dropout_p=p, seed=SEED if p else None, **options
    )


@pytest.mark.parametrize(
    ("view", "kind"),
    [*in_turn(mask_views(21), [torch.bool]), *in_turn(mask_views(21), [torch.float32, *HALVES])],
    ids=str,
)
def test_mask_broadcasts_and_strides(kind, view):
    shape, look = mask_views(21)[view]
    mask = torch.rand(shape) < 0.7 if kind == torch.bool else torch.randn(shape).to(kind)
    check(*operands((3, 4, 4, 21, 43, 8, 8), torch.bfloat16), look(mask))


def test_masks_that_leave_out_tiles():
    """Tiles to which a mask shows nothing, all or some, per head, are left out, taken whole or masked."""
    ends = torch.tensor([300, 128, 0, 131])[:, None]
    mask = (torch.arange(300) < ends).repeat_interleave(70, 0)[:270]
    both = torch.stack([mask, torch.ones_like(mask)])
    query, key, value = operands((1, 2, 1, 270, 300, 64, 64), torch.bfloat16)
    for some in (mask, both, torch.where(both, 0.0, -math.inf)):
        for options in ({}, {"window_size": (150, 20)}, {"key_lengths": torch.tensor([290]), "is_causal": True}):
            check(query, key, value, some, **options)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *((2, 2, 2, 20, 0, 8, 8), (0, 2, 2, 20, 5, 8, 8), (2, 0, 0, 20, 5, 8, 8), (2, 0, 2, 20, 5, 8, 8)),
        (2, 2, 2, 0, 5, 8, 8),
    ],
    ids=str,
)
def test_nothing_at_all(shape, dtype):
    check(*operands(shape, dtype))
    mask = torch.ones(shape[0], 1, shape[3], shape[4], dtype=torch.bool)
    check(*operands(shape, dtype), mask, dropout_p=0.3, seed=SEED)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scale", [0, -0.7, 3.5, 1e-3, 1e-50])
def test_scale(scale, dtype):
    tensors = operands((1, 2, 2, 21, 143, 16, 16), dtype)
    check(*tensors, scale=scale)
    check(*tensors, torch.randn(143), scale=scale, is_causal=True)
    check(*tensors, scale=scale, dropout_p=0.3, seed=SEED)


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": SEED}], ids=["plain", "dropout"])
@pytest.mark.parametrize(("scale", "of_query", "of_key"), [(3e38, 1e-30, 1e-8), (2e-38, 1e30, 1e7)])
def test_scales_at_the_ends_of_float32(scale, of_query, of_key, dropout):
    query, key, value = operands((1, 2, 2, 21, 143, 16, 16), torch.bfloat16)
    check(query * of_query, key * of_key, value, scale=scale, **dropout)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("largest", [100.0, -100.0, 1e4, -1e4])
def test_large_scores(largest, dtype):
    query, key, value = operands((1, 2, 2, 40, 143, 16, 16), dtype)
    scale = largest / (query.double() @ key.double().mT).abs().amax().item()
    check(query, key, value, scale=scale)


@pytest.mark.representative
@pytest.mark.parametrize("seed", [(2**63 - 1, 2**32 + 5), (-1, 0), (-(2**63), 2**40), (3, -1)], ids=str)
def test_dropout_seeds(seed):
    seed = torch.tensor(seed)
    check(*operands((1, 2, 2, 19, 45, 8, 8), torch.bfloat16), dropout_p=0.5, seed=seed)
    check(*operands((1, 2, 2, 19, 45, 8, 8), torch.bfloat16), dropout_p=0.5, seed=seed.repeat_interleave(2)[::2])


@settings(max_examples=25 if IS_EMULATED else 200)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 2, 3, 230, 330)), *(st.integers(1, 32),) * 2),
    mask=st.sampled_from(list(MASKS)),
    diagonal=st.sampled_from(list(DIAGONALS)),
    window=st.tuples(*(st.integers(-1, 330),) * 2),
    scale=st.sampled_from([None, 0.2, -0.1]),
    p=st.sampled_from([0.0, 0.1, 0.85]),
    dtype=st.sampled_from(HALVES),
    lengths=st.one_of(st.none(), st.tuples(*(st.floats(0, 1),) * 2)),
)
def test_any_problem(shape, mask, diagonal, window, scale, p, dtype, lengths):
    torch.manual_seed(0)
    b, hk, group, lq, lk, e, ev = shape
    tensors = operands((b, hk * group, hk, lq, lk, 8 * e, 8 * ev), dtype)
    attn_mask = MASKS[mask]((b, hk * group, lq, lk))
    options = {"window_size": window, "scale": scale, **DIAGONALS[diagonal]}
    if lengths:
        options["key_lengths"] = (torch.tensor(lengths[:b]) * lk).long()
    if p:
        options |= {"dropout_p": p, "seed": SEED}
    check(*tensors, attn_mask, **options)


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
    out, _, _ = check(*tensors, mask, dropout_p=p, seed=SEED)
    if p == 1e-6:
        assert torch.equal(out, scaled_dot_product_attention(*tensors, mask))
    if p == 1.0:
        assert (out == 0).all()


# Packed sequences

QUERIES, KEYS = (5, 0, 133, 1, 17, 64), (9, 4, 140, 0, 300, 64)


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def packed(queries, keys, heads, sizes, dtype):
    (hq, hk), (e, ev) = heads, sizes
    shapes = (sum(queries), hq, e), (sum(keys), hk, e), (sum(keys), hk, ev)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def check_packed(tensors, queries, keys, **options):
    """Check as ``check`` does. Return the output and the gradients."""
    sequences, longest = (boundaries(queries), boundaries(keys)), (max(queries), max(keys))

    def call(*tensors):
        return varlen_attn(*tensors, *sequences, *longest, return_lse=True, **options)

    def composed(dtype):
        def function(*tensors):
            return varlen_attention(*(t.to(dtype) for t in tensors), *sequences, dtype=dtype, **options)

        return gradients(function, tensors)

    (wanted, wanted_lse), wanted_grads = composed(torch.float64)
    (peer, _), peer_grads = composed(tensors[0].dtype)
    peer_lse = varlen_attention(*tensors, *sequences, dtype=torch.float32, **options)[1]
    out, lse = call(*tensors)
    assert_accurate(out, wanted, peer, f"out {options}")
    assert_accurate(lse, wanted_lse, peer_lse, f"lse {options}", magnitude=1.0)
    grads = gradients(call, tensors)[1]
    for name, *three in zip(("query", "key", "value"), grads, wanted_grads, peer_grads, strict=True):
        assert_accurate(*three, f"gradient of {name} {options}")
    return out, grads


@pairwise(
    options=[
        {},
        {"is_causal": True},
        {"window_size": (4, 2)},
        {"is_causal": True, "window_size": (6, -1), "scale": -0.3},
        {"is_causal": True, "dropout_p": 0.4},
    ],
    heads=[(2, 2), (4, 2), (3, 1)],
    sizes=[(16, 16), (64, 24), (128, 128)],
    dtype=HALVES,
)
def test_packed_sequences(options, heads, sizes, dtype):
    tensors = packed(QUERIES, KEYS, heads, sizes, dtype)
    check_packed(tensors, QUERIES, KEYS, seed=SEED, enable_gqa=heads[0] != heads[1], **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (5, 5), "dropout_p": 0.3}], ids=str)
def test_used_keys_of_packed_sequences(options):
    used = torch.tensor([3, 4, 131, 0, 216, 64])
    query, key, value = packed(QUERIES, KEYS, (2, 1), (16, 16), torch.bfloat16)
    unused = torch.cat([torch.arange(n) >= m for n, m in zip(KEYS, used, strict=True)])
    key[unused], value[unused] = math.nan, math.inf
    tensors = query, key, value
    _, grads = check_packed(tensors, QUERIES, KEYS, seqused_k=used, seed=SEED, enable_gqa=True, **options)
    assert not grads[1][unused].any()
    assert not grads[2][unused].any()


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
    tensors = operands((2, 4, 2, 23, 141, 16, 24), torch.bfloat16)
    call = functools.partial(scaled_dot_product_attention, enable_gqa=True, dropout_p=0.2, seed=SEED)
    out = call(*map(lay, tensors))
    assert torch.equal(out, call(*tensors))
    assert out.stride() == torch.empty_like(lay(tensors[0])[..., :1].expand(out.shape)).stride() or out.is_contiguous()
    found, wanted = gradients(lambda *t: call(*map(lay, t)), tensors)[1], gradients(call, tensors)[1]
    assert all(map(torch.equal, found, wanted))


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
    for found, wanted in zip(gradients(compiled, tensors), gradients(call, tensors), strict=True):
        assert all(map(torch.equal, found, wanted))
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), call(*tensors))
        moved = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in tensors]
        with pytest.raises(RuntimeError, match="rows that begin at multiples of 16 bytes"):
            compiled(*moved)
    torch._dynamo.reset()
