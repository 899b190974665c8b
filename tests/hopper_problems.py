"""Problems for both passes of attention for Hopper.

A test module that imports these tests has two fixtures. ``check`` is a function that checks a call with these operands
and options, ``check_packed`` one of operands, lengths of queries, lengths of keys, and options."""

import itertools
import math

import pytest
import torch
from conftest import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import in_turn, pairwise
from test_attention import DIAGONALS, MASKS, WINDOWS, mask_views, operands

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


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 385])
def test_lengths_around_tiles(check, dtype, length):
    check(*operands((1, 1, 1, length, length + 1, 32, 32), dtype), is_causal=True)
    check(*operands((1, 1, 1, 18, length, 192, 192), dtype), window_size=(100, 3), causal_variant="lower_right")
    check(*operands((1, 1, 1, length, 70, 128, 128), dtype), window_size=(20, 30))


@pytest.mark.parametrize(("e", "dtype"), in_turn(range(8, 257, 8), HALVES), ids=str)
def test_every_head_size(check, e, dtype):
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
def test_masks_combine(check, p, lengths, window, mask, diagonal, queries, sizes, dtype):
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
def test_mask_broadcasts_and_strides(check, kind, view):
    shape, look = mask_views(21)[view]
    mask = torch.rand(shape) < 0.7 if kind == torch.bool else torch.randn(shape).to(kind)
    check(*operands((3, 4, 4, 21, 43, 8, 8), torch.bfloat16), look(mask))


def test_masks_that_leave_out_tiles(check):
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
def test_nothing_at_all(check, shape, dtype):
    check(*operands(shape, dtype))
    mask = torch.ones(shape[0], 1, shape[3], shape[4], dtype=torch.bool)
    check(*operands(shape, dtype), mask, dropout_p=0.3, seed=SEED)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scale", [0, -0.7, 3.5, 1e-3, 1e-50])
def test_scale(check, scale, dtype):
    tensors = operands((1, 2, 2, 21, 143, 16, 16), dtype)
    check(*tensors, scale=scale)
    check(*tensors, torch.randn(143), scale=scale, is_causal=True)
    check(*tensors, scale=scale, dropout_p=0.3, seed=SEED)


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "seed": SEED}], ids=["plain", "dropout"])
@pytest.mark.parametrize(("scale", "of_query", "of_key"), [(3e38, 1e-30, 1e-8), (2e-38, 1e30, 1e7)])
def test_scales_at_the_ends_of_float32(check, scale, of_query, of_key, dropout):
    query, key, value = operands((1, 2, 2, 21, 143, 16, 16), torch.bfloat16)
    check(query * of_query, key * of_key, value, scale=scale, **dropout)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("largest", [100.0, -100.0, 1e4, -1e4])
def test_large_scores(check, largest, dtype):
    query, key, value = operands((1, 2, 2, 40, 143, 16, 16), dtype)
    scale = largest / (query.double() @ key.double().mT).abs().amax().item()
    check(query, key, value, scale=scale)


@pytest.mark.representative
@pytest.mark.parametrize("seed", [(2**63 - 1, 2**32 + 5), (-1, 0), (-(2**63), 2**40), (3, -1)], ids=str)
def test_dropout_seeds(check, seed):
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
def test_any_problem(check, shape, mask, diagonal, window, scale, p, dtype, lengths):
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


# Packed sequences

QUERIES, KEYS = (5, 0, 133, 1, 17, 64), (9, 4, 140, 0, 300, 64)


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def packed(queries, keys, heads, sizes, dtype):
    (hq, hk), (e, ev) = heads, sizes
    shapes = (sum(queries), hq, e), (sum(keys), hk, e), (sum(keys), hk, ev)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


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
def test_packed_sequences(check_packed, options, heads, sizes, dtype):
    tensors = packed(QUERIES, KEYS, heads, sizes, dtype)
    check_packed(tensors, QUERIES, KEYS, seed=SEED, enable_gqa=heads[0] != heads[1], **options)
