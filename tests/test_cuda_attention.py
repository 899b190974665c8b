"""The cuda backend's attention: few queries, split keys. Without a GPU its device code is emulated on the CPU."""

import contextlib
import functools
import itertools
import math

import pytest
import torch
from conftest import DEVICE, require, slow
from hypothesis import given
from oracle import assert_accurate
from oracle import attention as exact
from pairs import in_turn, pairwise
from test_attention import (
    DIAGONALS,
    EXCLUDING,
    MASKS,
    WINDOWS,
    excluding,
    mask_views,
    operands,
    problems,
    test_nan_reaches_what_attends_to_it,  # noqa: F401 (runs here too)
)

import emulation
import fastattn
from fastattn import scaled_dot_product_attention
from fastattn.backends import TABLE
from fastattn.backends.schema import AttentionArgs

IS_EMULATED = DEVICE == "cpu"
# float16 is slow: its code is bfloat16's except for one word.
LOW = [torch.float32, torch.bfloat16, *slow(torch.float16)]


@pytest.fixture(autouse=True)
def cuda():
    require("cuda")
    with emulation.strict() if IS_EMULATED else contextlib.nullcontext(), fastattn.backend("cuda"):
        yield


@pytest.fixture
def backend(cuda):
    return "cuda"


@pytest.fixture
def controls(cuda):
    """Yield the emulation's controls, or None on a GPU. ``set_multiprocessors`` says for how many keys are split."""
    yield from emulated_controls()


def emulated_controls():
    if not IS_EMULATED:
        yield None
        return
    _, controls = emulation.library()
    yield controls
    controls.set_multiprocessors(132)


def check(query, key, value, attn_mask=None, **options):
    """Check output and LSE against float64, within the bound that PyTorch's own error gives. Rows that see nothing are
    exactly 0."""
    options["enable_gqa"] = query.size(1) != key.size(1)
    out, lse = scaled_dot_product_attention(query, key, value, attn_mask, return_lse=True, **options)
    wanted, wanted_lse, _ = exact(query, key, value, attn_mask, **options)
    peer = exact(query, key, value, attn_mask, dtype=query.dtype, **options)[0]
    peer_lse = exact(query, key, value, attn_mask, dtype=torch.float32, **options)[1]
    assert out.dtype == query.dtype
    assert lse.dtype == torch.float32
    assert_accurate(out, wanted, peer, f"out {options}")
    assert_accurate(lse, wanted_lse, peer_lse, f"lse {options}", magnitude=1.0)  # m + log(sum), of at least 1 rounding
    assert not out[wanted_lse == -math.inf].any()
    return out, lse


SHAPES = [  # (B, Hq, Hk, Lq, Lk, E, Ev)
    *((1, 1, 1, 1, 1, 1, 1), (2, 3, 3, 1, 37, 64, 64), (1, 16, 1, 1, 70, 64, 64), (2, 6, 2, 5, 49, 96, 32)),
    *((1, 2, 1, 7, 40, 128, 128), (1, 1, 1, 2, 50, 200, 1), (1, 1, 1, 13, 20, 5, 256), (1, 4, 2, 16, 33, 85, 59)),
    (1, 2, 1, 3, 129, 256, 256),
]


@pytest.mark.representative
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    check(*operands(shape, dtype))
    check(*operands(shape, dtype), is_causal=True)


@pytest.mark.slow
@pairwise(group=range(1, 17), queries=[1, 2, 3, 9, 16], dtype=[torch.float32, torch.bfloat16])
def test_groups(group, queries, dtype):
    check(*operands((1, group, 1, queries, 35, 8, 8), dtype), is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("e", "dtype"),
    in_turn(
        [*range(1, 18), 31, 33, 56, 63, 65, 80, 120, 127, 129, 160, 191, 224, 255], [torch.float32, torch.bfloat16]
    ),
    ids=str,
)
def test_every_head_size(e, dtype):
    check(*operands((1, 2, 1, 3, 70, e, max(1, e - 3)), dtype), is_causal=True)
    check(*operands((1, 2, 1, 3, 70, max(1, e - 7), e), dtype))


@pairwise(
    lengths=[None, (43, 0, 18)],
    window=WINDOWS[::2],
    mask=MASKS,
    diagonal=DIAGONALS,
    dtype=[torch.float32, *slow(torch.bfloat16)],
)
def test_masks_combine(lengths, window, mask, diagonal, dtype):
    tensors = operands((3, 4, 2, 9, 43, 16, 24), dtype)
    lengths = None if lengths is None else torch.tensor(lengths)
    options = {"window_size": window, "key_lengths": lengths, **DIAGONALS[diagonal]}
    check(*tensors, MASKS[mask]((3, 4, 9, 43)), **options)


@pytest.mark.parametrize("kind", [torch.bool, *LOW], ids=str)
@pytest.mark.parametrize("view", mask_views(5))
def test_mask_broadcasts_and_strides(kind, view):
    shape, look = mask_views(5)[view]
    mask = torch.rand(shape) < 0.7 if kind == torch.bool else torch.randn(shape).to(kind)
    check(*operands((3, 4, 4, 5, 43, 8, 8), torch.float32 if kind == torch.bool else kind), look(mask))


@pytest.mark.slow
@given(problem=problems(most=(3, 3, 5, 16, 300, 256, 256), rates=[0.0]))
def test_any_problem(problem):
    tensors, options = problem()
    check(*tensors, **options)


@pytest.mark.representative
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_parts_of_the_keys(controls, dtype):
    """Keys may be split into parts of any number and size. The lengths are multiples of nothing, and some parts see
    nothing."""
    query, key, value = operands((4, 4, 2, 3, 773, 8, 12), dtype)
    lengths = torch.tensor([773, 0, 130, 5])
    for b, length in enumerate(lengths):
        key[b, :, length:] = math.nan
        value[b, :, length:] = math.nan
    hidden = torch.ones(4, 1, 3, 773, dtype=torch.bool)
    hidden[0, :, 0, 100:500] = False
    hidden[0, :, 2] = False
    results = []
    for count in (1, 3, 6):
        if IS_EMULATED:
            controls.set_multiprocessors(2 * count)
        results.append(check(query, key, value, key_lengths=lengths)[1])
        check(query, key, value, hidden, key_lengths=lengths)
        check(query, key, value, key_lengths=lengths, window_size=(300, 0), causal_variant="lower_right")
    # In the emulation the parts are summed in other groups each time. A GPU makes 6 parts each time.
    assert all(torch.equal(lse, results[0]) for lse in results) != IS_EMULATED


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", EXCLUDING)
def test_excluded_keys_may_hold_anything(kind, dtype, bad):
    tensors, masks, _ = excluding(kind, dtype, 9, bad)
    check(*tensors, **masks)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_with_nothing_to_see(kind, dtype):
    mask = torch.rand(2, 1, 9, 40) < 0.5
    mask[0, :, 3] = mask[1, :, 5:] = False
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    _, lse = check(*operands((2, 2, 2, 9, 40, 16, 16), dtype), mask)
    assert lse[1, :, 5:].isinf().all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 2, 0, 5, 8, 8), (2, 2, 2, 5, 0, 8, 8), (0, 2, 2, 3, 5, 8, 8)], ids=str)
def test_nothing_at_all(shape, dtype):
    check(*operands(shape, dtype))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("scale", "largest"), [(0, None), (-0.7, None), (3.5, None), (None, 1e4), (None, -1e4)])
def test_scale(scale, largest, dtype):
    query, key, value = operands((1, 2, 2, 6, 43, 16, 16), dtype)
    if scale is None:
        scale = largest / (query.double() @ key.double().mT).abs().amax().item()
    check(query, key, value, scale=scale)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_mask_of_the_smallest_number(dtype):
    tensors = operands((1, 2, 2, 6, 43, 16, 16), dtype)
    minimum = torch.finfo(dtype).min
    check(*tensors, torch.zeros(43, dtype=dtype).masked_fill(torch.arange(43) > 20, minimum))
    if dtype != torch.float16:  # at -65504 float32 still resolves the scores
        out, _ = check(*tensors, torch.full((43,), minimum, dtype=dtype))
        uniform = tensors[2].double().mean(-2, keepdim=True)
        assert (out.double() - uniform).abs().amax() <= 2 * torch.finfo(dtype).eps


LAYOUTS = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "between others": lambda t: torch.nn.functional.pad(t, (0, 8, 2, 3))[:, :, 2:-3, :-8],
    "unaligned rows": lambda t: torch.nn.functional.pad(t, (3, 2))[..., 3:-2],
    "transposed": lambda t: t.mT.contiguous().mT,
    "odd address": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(dtype, lay):
    """Operands may have any strides and addresses. The bits do not depend on whether rows are in units of 16 bytes."""
    query, key, value = operands((2, 4, 2, 3, 41, 16, 24), dtype)
    call = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    out = call(lay(query), lay(key), lay(value))
    assert torch.equal(out, call(query, key, value))
    assert out.stride() == torch.empty_like(lay(query)[..., :1].expand(out.shape)).stride() or out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expanded_keys(dtype):
    query, key, value = operands((2, 4, 2, 3, 41, 16, 24), dtype)
    call = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    expanded = key[:1].expand(2, -1, -1, -1), value[:1].expand(2, -1, -1, -1)
    assert torch.equal(call(query, *expanded)[0], call(query, key, value)[0])


def test_same_bits_in_every_order(controls):
    tensors = operands((1, 4, 2, 3, 400, 40, 40), torch.bfloat16)
    runs = []
    for order in range(3):
        if IS_EMULATED:
            controls.seed_order(order)
        runs.append(scaled_dot_product_attention(*tensors, enable_gqa=True, return_lse=True))
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


def test_statistics():
    """The statistics are a row's largest score, and its sum of exponentials relative to that score."""
    query, key, value = operands((2, 2, 2, 5, 43, 16, 16))
    mask = torch.zeros(2, 1, 1, 43)
    mask[1] = torch.finfo(torch.float32).min
    lengths = torch.tensor([30, 43])
    args = AttentionArgs(query, key, value, mask, lengths, None, 0.25, 5, 43, False, 0)
    _, lse, (point, total), _ = TABLE["cuda"].FUNCTIONS["attention"](args)
    scores = (query.double() @ key.double().mT * 0.25)[0, :, :, :30]
    torch.testing.assert_close(point[0], scores.amax(-1).float())
    torch.testing.assert_close(total[0], (scores - scores.amax(-1, keepdim=True)).exp().sum(-1).float())
    assert (total[1] == 43).all()
    torch.testing.assert_close(lse, point + total.log())


def test_selection():
    query, key, value = operands((1, 2, 2, 64, 40, 16, 16))
    explained = fastattn.explain(scaled_dot_product_attention, query, key, value)
    assert explained.backend is None
    hopper = "that for Hopper bfloat16 and float16, not float32"
    with pytest.raises(RuntimeError, match=f"its kernel for decoding takes up to 16 queries, not 64, {hopper}"):
        scaled_dot_product_attention(query, key, value)
    few = query[:, :, :16].clone()
    assert fastattn.explain(scaled_dot_product_attention, few, key, value).backend == "cuda"
    with pytest.raises(RuntimeError, match=f"its kernel for decoding takes no dropout, {hopper}"):
        scaled_dot_product_attention(few, key, value, dropout_p=0.1)
    few.requires_grad_()
    with pytest.raises(RuntimeError, match=f"its kernel for decoding takes no gradients, {hopper}"):
        scaled_dot_product_attention(few, key, value)
    with torch.no_grad():
        assert scaled_dot_product_attention(few, key, value).shape == few.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cached_decoding_reads_the_cache_where_it_lies(dtype, monkeypatch):
    """A decoder layer that attends token by token gets the uncached result. Its operands are read in place, as rows in
    units of 16 bytes."""
    torch.manual_seed(1)
    layer = fastattn.MultiHeadAttention(48, 2, batch_first=True, dtype=dtype).eval()
    x, memory = torch.randn(2, 70, 48).to(dtype), torch.randn(2, 11, 48).to(dtype)
    lengths = torch.tensor([11, 4])
    with fastattn.backend("reference"), torch.no_grad():
        wanted = layer(x[:, :5], x[:, :5], x[:, :5], is_causal=True, need_weights=False)[0]
        wanted_cross = layer(x[:, :5], memory, memory, key_lengths=lengths, need_weights=False)[0]
    tolerance = 8 * torch.finfo(dtype).eps  # results of order 1, after three products, each rounded to the dtype
    calls, original = [], TABLE["cuda"].FUNCTIONS["attention"]
    monkeypatch.setitem(TABLE["cuda"].FUNCTIONS, "attention", lambda args: calls.append(args[:3]) or original(args))
    cache, cross = fastattn.KeyValueCache(), fastattn.KeyValueCache(static=True)
    with torch.inference_mode():
        for n in range(5):
            token = x[:, n : n + 1]
            out = layer(token, token, token, is_causal=True, cache=cache, need_weights=False)[0]
            torch.testing.assert_close(out[:, 0], wanted[:, n], rtol=0, atol=tolerance)
            out = layer(token, memory, memory, key_lengths=lengths, cache=cross, need_weights=False)[0]
            torch.testing.assert_close(out[:, 0], wanted_cross[:, n], rtol=0, atol=tolerance)
    assert len(calls) == 10
    for tensor in itertools.chain.from_iterable(calls):
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        assert tensor.data_ptr() % 16 == 0
