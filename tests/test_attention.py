"""scaled_dot_product_attention and attention_weights against the float64 oracle, for every rule of docs/design.md."""

import functools
import itertools
import math

import oracle
import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from conftest import BACKENDS, DEVICE, KERNELS, interpreted, slow
from hypothesis import given
from hypothesis import strategies as st
from oracle import EPSILON, GRADIENT_LAYOUTS, SizesOfTerms, assert_accurate, gradients, largest, visible
from oracle import attention as exact
from pairs import in_turn, pairwise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn import attention_weights
from fastattn import scaled_dot_product_attention as attention

LOW = [torch.float32, torch.bfloat16, torch.float16]
SEED = torch.tensor([0x1234567890ABCDEF, 7])


def operands(shape, dtype=torch.float32):
    """Return query, key and value for the shape (B, Hq, Hk, Lq, Lk, E, Ev)."""
    b, hq, hk, lq, lk, e, ev = shape
    sizes = (b, hq, lq, e), (b, hk, lk, e), (b, hk, lk, ev)
    return [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]


def check(query, key, value, attn_mask=None, *, lse=True, mask_grad=True, **options):
    """Check output, LSE and every gradient, at the tensors' own strides. Rows that see nothing are exactly 0.

    The peer is PyTorch's fused function if it has the semantics and returns enough, else the plain composition."""
    tensors, fixed = ((query, key, value, attn_mask), ()) if mask_grad else ((query, key, value), (attn_mask,))
    outputs = 2 if lse else 1

    def composed(dtype=torch.float64):
        return gradients(lambda *t: exact(*t, *fixed, dtype=dtype, **options)[:outputs], tensors)

    def composed_of_sizes(query, key, value, attn_mask=attn_mask):
        return exact(query, key, value.abs(), attn_mask, softmax=SizesOfTerms.apply, **options)[:outputs]

    ours = gradients(lambda *t: attention(*t, *fixed, return_lse=lse, **options), tensors)
    wanted = composed()
    if lse or options.get("dropout_p"):
        peer = composed(query.dtype)
    else:
        peer = gradients(lambda *t: torch_attention(*t, *fixed, **options), tensors)
    # Rounding errors are relative to the terms of the sums. These are P |V| for the output, P |dO| for dV and |dO| |V|
    # for dP. P is itself rounded.
    terms = gradients(composed_of_sizes, tensors, positive=True)
    is_single = query.dtype == torch.float32
    rounding = oracle.score_rounding(query, key, options.get("scale"), attn_mask) if is_single else 1.0
    names = [*["out", "lse"][:outputs], "grad_query", "grad_key", "grad_value", "grad_mask"]
    for name, a, e, p, t in zip(names, *([*o, *g] for o, g in (ours, wanted, peer, terms)), strict=False):
        size = largest(t) * (rounding if name.startswith("grad") else 1.0)
        if name == "lse":
            assert a.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
            p = exact(*tensors, *fixed, dtype=torch.promote_types(query.dtype, torch.float32), **options)[1].detach()
            size = 1.0  # m + log(sum): a relative error of the sum (>= 1 rounding) is absolute in log(sum)
        elif name != "grad_mask":
            assert a.dtype == query.dtype, name
        # The mask's dtype may be wider than the operands'. Its gradient is P (dP - rowsum(dO O)), where P is rounded to
        # their dtype.
        coarsest = max(a.dtype, query.dtype, key=EPSILON.get) if name == "grad_mask" else None
        assert_accurate(a, e.double(), p, f"{name} {options}", magnitude=size, dtype=coarsest)
    empty = wanted[0][-1] == -math.inf
    if empty.shape == query.shape[:-1]:
        assert not ours[0][0][empty].any()
        assert not ours[1][0][empty].any()
    return ours


def torch_attention(query, key, value, attn_mask=None, scale=None, enable_gqa=False, **masks):
    """Call PyTorch's function with all masks folded into one."""
    shape = (*query.shape[:-1], key.shape[-2])
    if not enable_gqa:
        shape = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), *shape[-2:])
    seen = visible(shape, attn_mask, **masks)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        seen = torch.where(seen, attn_mask.to(query.dtype), -math.inf)
    return F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=enable_gqa)


SHAPES = [
    *((1, 1, 1, 1, 1, 1, 1), (2, 3, 3, 1, 37, 64, 64), (1, 2, 2, 19, 1, 7, 3), (2, 2, 2, 33, 65, 59, 59)),
    *((1, 2, 2, 17, 40, 85, 85), (1, 4, 2, 113, 203, 64, 64), (2, 6, 2, 16, 31, 96, 32), (1, 4, 1, 8, 32, 128, 128)),
    *((1, 1, 1, 50, 100, 200, 1), (1, 2, 1, 7, 49, 256, 256), (3, 1, 1, 129, 130, 16, 200), (1, 1, 1, 20, 30, 5, 256)),
]


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.torch_version
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(backend, shape, dtype):
    check(*operands(shape, dtype), lse=False, enable_gqa=shape[1] != shape[2])
    check(*operands(shape, dtype), is_causal=True, enable_gqa=shape[1] != shape[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_long(backend, dtype):
    torch.set_num_threads(2)
    check(*operands((1, 1, 1, 511, 512, 64, 64), dtype), is_causal=True, lse=False)
    # Sums over more than 3072 elements are sums of sums.
    check(*operands((1, 1, 1, 40, 3200, 64, 64), dtype))
    check(*operands((1, 1, 1, 3200, 40, 64, 64), dtype), dropout_p=0.1, seed=SEED)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", *BACKENDS[4:]], indirect=True)
def test_long_rows_of_many_queries(backend, dtype):
    """Enough queries that they share packed keys get the right result, over several chunks. A mask ends within a
    chunk."""
    mask = (torch.arange(3100) < torch.tensor([3100, 3075, 3000, 50])[:, None]).repeat_interleave(80, 0)[:300]
    check(*operands((1, 8, 8, 300, 3100, 16, 16), dtype), mask)


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 255, 257, 513, *slow(31, 32, 95, 96, 191, 192)])
@pytest.mark.parametrize("dtype", LOW[:2], ids=str)
def test_lengths_around_tiles(backend, dtype, length):
    check(*operands((1, 2, 1, length, length + 1, 32, 32), dtype), is_causal=True, enable_gqa=True)
    check(*operands((1, 1, 1, 5, length, 64, 64), dtype), lse=False)


@pytest.mark.representative
def test_lengths_beside_a_mask_of_all_sequences(backend):
    """The first sequence ends tiles before the second one."""
    mask = torch.rand(200) < 0.7
    check(*operands((2, 1, 1, 20, 200, 16, 16), torch.float32), mask, key_lengths=torch.tensor([3, 200]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["one row", "rows", *slow("float")])
def test_masks_that_end_within_tiles(backend, dtype, kind):
    """Masks that show the keys up to an end, which differs for every 32 queries, give the right result. The second call
    adds a window, which may start beyond that end."""
    ends = torch.tensor([97]) if kind == "one row" else torch.tensor([95, 97, 190, 0]).repeat_interleave(32)[:100]
    mask = torch.arange(200) < ends[:, None]
    mask = torch.where(mask, torch.randn(100, 200), -math.inf) if kind == "float" else mask
    tensors = operands((1, 2, 2, 100, 200, 16, 16), dtype)
    check(*tensors, mask)
    check(*tensors, mask, window_size=(3, 20), dropout_p=0.1, seed=SEED)


@pytest.mark.parametrize("queries", [40, pytest.param(2, marks=pytest.mark.representative)])
def test_bytes_of_a_mask_other_than_0_and_1(backend, queries):
    """Every byte except 0 means True, as in torch: in a mask of rows, of one row, and of every other column."""
    keys = 40 if interpreted(backend) else 200
    tensors = operands((1, 1, 1, queries, keys, 16, 16))
    given = torch.randint(0, 4, (queries, 2 * keys), dtype=torch.uint8)
    for mask in (given[:, :keys], given[:1, :keys], given[:, ::2]):
        wanted, got = (gradients(attention, [*tensors, m]) for m in (mask != 0, mask.view(torch.bool)))
        assert all(map(torch.equal, wanted[0] + wanted[1], got[0] + got[1]))


def test_reference_serves_float64_and_wide_heads():
    check(*operands((2, 2, 2, 9, 11, 8, 6), torch.float64), is_causal=True, dropout_p=0.3, seed=SEED)
    check(*operands((1, 2, 2, 9, 11, 300, 257), torch.float32), causal_variant="lower_right", is_causal=True)
    with fastattn.backend("reference"):
        check(*operands((1, 2, 2, 9, 11, 300, 300), torch.bfloat16), lse=False)


@pytest.mark.representative
@pairwise(
    shape=[(2, 2, 2, 0, 5, 8, 8), (2, 2, 2, 5, 0, 8, 8), (0, 2, 2, 3, 5, 8, 8)],
    mask=[None, "full", "expanded", *slow("keys", "queries")],
    kind=[torch.float32, torch.bool],
)
def test_empty(backend, shape, mask, kind):
    b, h, _, lq, lk, _, ev = shape
    sizes = {"full": (b, h, lq, lk), "keys": (b, 1, 1, lk), "queries": (1, h, lq, 1), "expanded": (1, 1, 1, lk)}
    attn_mask = None if mask is None else torch.ones(sizes[mask], dtype=kind)
    if mask == "expanded":
        attn_mask = attn_mask.expand(b, h, lq, lk)
    function = functools.partial(attention, return_lse=True)
    (out, lse), grads = gradients(function, [*operands(shape), attn_mask])
    assert out.shape == (b, h, lq, ev)
    assert lse.shape == (b, h, lq)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert all((g == 0).all() for g in grads)


MASKS = {
    "none": lambda shape: None,
    "bool": lambda shape: torch.rand(shape) < 0.6,
    "padding": lambda shape: torch.arange(shape[-1]).expand(shape[0], 1, 1, -1) < 23,
    "float": lambda shape: torch.randn(shape),
    "bias": lambda shape: torch.randn(shape[1], 1, shape[-1]).masked_fill(
        torch.rand(shape[1], 1, shape[-1]) < 0.3, -math.inf
    ),
}
DIAGONALS = {"full": {}, "causal": {"is_causal": True}, "lower": {"is_causal": True, "causal_variant": "lower_right"}}
WINDOWS = [(-1, -1), (6, 3), (0, -1), (-1, 5), (9, 0), (40, 0)]


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pairwise(
    p=[0.0, 0.4],
    lengths=[None, (43, 0, 18)],
    window=[*WINDOWS[:3], *slow(*WINDOWS[3:])],
    mask=MASKS,
    diagonal=DIAGONALS,
    queries=[21, *slow(7, 3)],
    sizes=[(16, 24, torch.float32), (64, 64, torch.bfloat16), *slow((64, 64, torch.float16))],
)
def test_masks_combine(backend, p, lengths, window, mask, diagonal, queries, sizes):
    """Masks of every kind combine with either diagonal, key lengths, windows and dropout, in the output and all
    gradients. 16-bit operands have a float mask of their own dtype, and a bias in float32."""
    *sizes, dtype = sizes
    attn_mask = MASKS[mask]((3, 2, queries, 43))
    attn_mask = attn_mask.to(dtype) if mask == "float" else attn_mask
    lengths = None if lengths is None else torch.tensor(lengths)
    options = {"key_lengths": lengths, "window_size": window, "enable_gqa": True, **DIAGONALS[diagonal]}
    tensors = *operands((3, 2, 1, queries, 43, *sizes), dtype), attn_mask
    check(*tensors, dropout_p=p, seed=SEED if p else None, **options)
    if dtype != torch.float32 and (attn_mask is None or attn_mask.dtype == torch.bool):
        check(*tensors, lse=False, **options)


def mask_views(rows):
    """Return masks of (3, 4, rows, 43) scores by name: a shape, and what makes the mask of a tensor of that shape."""
    shapes = [
        *((1, 1, 1, 43), (3, 1, 1, 43), (1, 4, rows, 1), (3, 4, rows, 43), (3, 1, rows, 43)),
        *((4, 1, 1), (rows, 43), (1, 43), (rows, 1), (43,), (1,)),
    ]
    return {str(shape): (shape, lambda mask: mask) for shape in shapes} | {
        "transposed": ((3, 4, 43, rows), lambda mask: mask.mT),
        "step": ((3, 4, rows, 86), lambda mask: mask[..., ::2]),
        "offset": ((3, 4, rows + 1, 50), lambda mask: mask[:, :, 1:, 7:]),
        "expanded": ((rows, 43), lambda mask: mask.expand(3, 4, rows, 43)),
        "expanded rows": ((3, 1, 1, 43), lambda mask: mask.expand(3, 4, rows, 43)),
        "heads outside": ((4, 3, 43), lambda mask: mask.transpose(0, 1)[:, :, None]),
    }


VIEWS = [*in_turn(mask_views(21), [torch.bool]), *in_turn(mask_views(21), [torch.float32, torch.bfloat16])]


@pytest.mark.parametrize(("view", "kind"), VIEWS, ids=str)
def test_mask_broadcasts_and_strides(backend, view, kind):
    shape, look = mask_views(21)[view]
    mask = torch.rand(shape) < 0.7 if kind == torch.bool else torch.randn(shape).to(kind)
    check(*operands((3, 4, 4, 21, 43, 8, 8)), look(mask))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("e", "ev"), [(130, 72), (72, 200), (97, 129)])
def test_mask_gradient_of_wide_heads(backend, dtype, e, ev):
    """NaN beyond the last column of a head changes no result, although kernels may read a head in parts."""
    tensors = []
    for tensor in operands((1, 2, 1, 19, 40, e, ev), dtype):
        wider = tensor.new_full((*tensor.shape[:-1], 264), math.nan)
        wider[..., : tensor.size(-1)] = tensor
        tensors.append(wider[..., : tensor.size(-1)])
    check(*tensors, torch.randn(2, 1, 40), enable_gqa=True)


@pytest.mark.torch_version
@pytest.mark.representative
@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
def test_causal_bias(backend, variant):
    bias = getattr(torch.nn.attention.bias, f"causal_{variant}")(5, 9)
    tensors = operands((2, 2, 2, 5, 9, 8, 8))
    wanted = exact(*tensors, is_causal=True, causal_variant=variant)[0]
    assert_accurate(attention(*tensors, bias), wanted, wanted)
    for function in (attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="CausalBias"):
            function(*tensors, bias, is_causal=True)


BATCHES = [((), (), ()), ((3,), (3,), (3,)), ((2, 3), (), (3,)), ((2, 3), (1, 3), (1, 3)), ((1, 3), (2, 3), (2, 1))]
BATCHES += [((2, 2, 3),) * 3, ((2, 1, 3), (4, 3), (1, 4, 3)), ((2, 2, 1, 2),) * 3]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batch_dimensions(backend, batches):
    tensors = [torch.randn(*batch, *size) for batch, size in zip(batches, ((5, 8), (9, 8), (9, 6)), strict=True)]
    check(*tensors, lse=False)
    check(*tensors, is_causal=True, dropout_p=0.5, seed=SEED)


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_heads_broadcast_as_torchs(backend, enable_gqa):
    """Every combination of head counts gives torch's result, or an error where torch refuses it. Counts of 0 are
    included, for which torch's own function may end the process."""
    for heads in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3)):
        tensors = [torch.randn(2, n, 5, 8) for n in heads]
        try:
            with sdpa_kernel(SDPBackend.MATH):
                wanted = F.scaled_dot_product_attention(*tensors, enable_gqa=enable_gqa)
        except RuntimeError:
            with pytest.raises(ValueError, match="heads"):
                attention(*tensors, enable_gqa=enable_gqa)
            continue
        torch.testing.assert_close(attention(*tensors, enable_gqa=enable_gqa), wanted)
    with pytest.raises(ValueError, match="heads"):
        attention(*(torch.randn(2, n, 5, 8) for n in (0, 0, 2)), enable_gqa=enable_gqa)
    for heads in () if enable_gqa else ((0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (0, 0, 0)):
        tensors = [torch.randn(2, n, 5, 8) for n in heads]
        assert attention(*tensors).shape == (2, 0, 5, 8)


LAYOUTS = {
    "transposed": lambda b, h, n, e: torch.randn(b, n, h, e).transpose(1, 2),
    "packed": lambda b, h, n, e: torch.randn(b, n, 3, h, e)[:, :, 1].transpose(1, 2),
    "last": lambda b, h, n, e: torch.randn(b, h, e, n).mT,
    "step": lambda b, h, n, e: torch.randn(b, h, n, 2 * e)[..., ::2],
    "expanded": lambda b, h, n, e: torch.randn(1, 1, n, e).expand(b, h, n, e),
    "row": lambda b, h, n, e: torch.randn(b, h, 1, e).expand(b, h, n, e),
    "offset": lambda b, h, n, e: torch.randn(b + 1, h + 2, n + 3, e + 5)[1:, 1:-1, 3:, 2:-3],  # and odd strides
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_strides(backend, kind):
    """Operands may be transposed, sliced, expanded or offset, or have a last stride other than 1. Gradients flow back
    through each."""
    kinds = list(LAYOUTS)
    other = kinds[(kinds.index(kind) + 3) % len(kinds)]
    tensors = LAYOUTS[kind](2, 3, 33, 20), LAYOUTS[other](2, 3, 41, 20), LAYOUTS[kind](2, 3, 41, 24)
    check(*tensors, lse=False)
    check(*(t.bfloat16() for t in tensors), is_causal=True)


def in_order(order, sizes, dtype=torch.float32):
    """Return a tensor of these sizes whose dimensions lie in this order in memory."""
    return torch.randn([sizes[dim] for dim in order], dtype=dtype).permute([order.index(dim) for dim in range(4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_output_layout_is_querys(backend, order, dtype):
    """Output and gradients keep every memory order of B, H and L, and fakes report the same strides."""
    query = in_order((*order, 3), (2, 3, 5, 8), dtype)
    key = in_order((*order[::-1], 3), (2, 3, 7, 8), dtype)
    value = in_order((*order[1:], order[0], 3), (2, 3, 7, 8), dtype)
    (out,), grads = gradients(attention, (query, key, value))
    assert out.stride() == query.stride()
    if DEVICE == "cpu":  # on a GPU torch's layout depends on which of its kernels runs
        assert out.stride() == F.scaled_dot_product_attention(query, key, value).stride()
    assert [g.stride() for g in grads] == [query.stride(), key.stride(), value.stride()]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (query, key, value)]
        assert attention(*fakes).stride() == out.stride()
        assert [g.stride() for g in gradients(attention, fakes)[1]] == [g.stride() for g in grads]


QUERIES_OF_CONTIGUOUS_OUTPUTS = {
    "(B, H, E, L)": lambda: in_order((0, 1, 3, 2), (2, 3, 5, 8)),
    "(B, E, L, H)": lambda: in_order((0, 3, 2, 1), (2, 3, 5, 8)),
    "(E, H, B, L)": lambda: in_order((3, 1, 0, 2), (2, 3, 5, 8)),
    "expanded heads": lambda: torch.randn(2, 1, 5, 8).expand(2, 3, 5, 8),
    "expanded batch": lambda: torch.randn(1, 3, 5, 8).expand(2, 3, 5, 8),
    "expanded": lambda: torch.randn(1, 1, 5, 8).expand(2, 3, 5, 8),
    "three dimensions": lambda: torch.randn(5, 3, 8).transpose(0, 1),
    "five dimensions": lambda: torch.randn(2, 2, 5, 3, 8).transpose(2, 3),
}


@pytest.mark.parametrize("name", QUERIES_OF_CONTIGUOUS_OUTPUTS)
def test_output_of_other_queries_is_contiguous(backend, name):
    query = QUERIES_OF_CONTIGUOUS_OUTPUTS[name]()
    key = torch.randn(*query.shape[:-2], 7, 8)
    (out,), grads = gradients(attention, (query, key, key.clone()))
    assert out.is_contiguous()
    torch.testing.assert_close(out, attention(query.contiguous(), key, key))
    if DEVICE == "cpu" and query.dim() == 4:  # on a GPU torch's layout depends on which of its kernels runs
        assert out.stride() == F.scaled_dot_product_attention(query, key, key).stride()
    if name.startswith("expanded"):
        assert all(g.is_contiguous() for g in grads)
    with FakeTensorMode() as mode:
        assert attention(*map(mode.from_tensor, (query, key, key))).stride() == out.stride()


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"window_size": (2, 1)}], ids=["", "causal", "window"])
def test_head_size_0_is_the_mean_of_the_values(masks):
    tensors = torch.randn(2, 3, 5, 0), torch.randn(2, 3, 7, 0), torch.randn(2, 3, 7, 4)
    found, wanted = (gradients(functools.partial(f, **masks), tensors) for f in (attention, torch_attention))
    torch.testing.assert_close(found, wanted)
    assert fastattn.explain(attention, *tensors).backend == "reference"


@pytest.mark.torch_version
@pytest.mark.parametrize("scale", [1e-40, -1e-40, 2.0**-126, torch.tensor(0.5), 0, 1, True], ids=str)
def test_one_scale_on_every_way(scale):
    """A scale means the same directly, through torch's dispatcher and on the reference. If it is smaller than a normal
    number, it is 0 on all three."""
    tensors = operands((1, 2, 2, 5, 7, 8, 8))

    def loss(*tensors):
        return attention(*tensors, scale=scale).square().sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    direct = torch.autograd.grad(loss(*leaves), leaves)
    assert bool(direct[0].any()) == bool(direct[1].any()) == (abs(scale) >= 2.0**-126)
    assert all(map(torch.equal, torch.func.grad(loss, (0, 1, 2))(*tensors), direct))
    with fastattn.backend("reference"):
        for a, e in zip(torch.autograd.grad(loss(*leaves), leaves), direct, strict=True):
            torch.testing.assert_close(a, e, atol=1e-6 * largest(e), rtol=1e-5)


def test_operands_are_left_alone(backend):
    tensors = [*operands((2, 2, 2, 9, 21, 8, 8)), torch.randn(21)]
    before = [t.clone() for t in tensors]
    gradients(functools.partial(attention, is_causal=True, dropout_p=0.5), tensors)
    assert all(map(torch.equal, tensors, before))


NOTHING = {
    "lengths": lambda: {"key_lengths": torch.tensor([0, 0])},
    "lengths, lower right": lambda: NOTHING["lengths"]() | DIAGONALS["lower"],
    "bool": lambda: {"attn_mask": torch.zeros(1, 1, 1, 40, dtype=torch.bool)},
    "float": lambda: {"attn_mask": torch.full((40,), -math.inf)},
    "some rows, bool": lambda: {"attn_mask": ROWS_THAT_SEE},
    "some rows, float": lambda: {"attn_mask": torch.where(ROWS_THAT_SEE, 0.0, -math.inf)},
}
ROWS_THAT_SEE = torch.stack([torch.arange(19) != 3, torch.arange(19) < 16])[:, None, :, None].expand(2, 1, 19, 40)


@pairwise(kind=NOTHING, dtype=LOW, p=[0.0, 0.3])
def test_nothing_to_see(backend, kind, dtype, p):
    tensors = operands((2, 2, 2, 19, 40, 16, 16), dtype)
    (_, lse), (_, *grads) = check(*tensors, dropout_p=p, seed=SEED, **NOTHING[kind]())
    assert lse.isfinite().any() == kind.startswith("some rows") == any(grad.any() for grad in grads)


EXCLUDING = {
    "lengths": lambda lengths, padding: {"key_lengths": lengths},
    "lengths, lower right": lambda lengths, padding: {"key_lengths": lengths, **DIAGONALS["lower"]},
    "causal": lambda lengths, padding: DIAGONALS["causal"],
    "window": lambda lengths, padding: {"window_size": (3, 2)},
    "window, lower right": lambda lengths, padding: {"window_size": (3, -1), "causal_variant": "lower_right"},
    "padding": lambda lengths, padding: {"attn_mask": padding},
    "bool": lambda lengths, padding: {"attn_mask": padding & (torch.rand(padding.shape) < 0.8)},
    "padding, causal": lambda lengths, padding: {"attn_mask": padding, "is_causal": True},
    "float": lambda lengths, padding: {"attn_mask": torch.where(padding[:, :1, :1], 0.0, -math.inf)},
    "bias, lengths": lambda lengths, padding: {"attn_mask": torch.randn(70), "key_lengths": lengths},
}


def excluding(kind, dtype, queries, bad):
    """Return operands whose excluded keys and values are `bad`, the masks, and which keys those are, (B, Hk, Lk)."""
    lengths = torch.tensor([37, 64])
    padding = (torch.arange(70) < lengths[:, None, None, None]).expand(2, 4, queries, 70)
    masks = EXCLUDING[kind](lengths, padding)
    query, key, value = operands((2, 4, 2, queries, 70, 16, 24), dtype)
    gone = ~visible((2, 4, queries, 70), **masks).unflatten(1, (2, 2)).any(3).any(2)
    key[gone] = value[gone] = bad
    return (query, key, value), masks, gone


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pairwise(kind=EXCLUDING, dtype=[*LOW[:2], *slow(LOW[2])], queries=[9, 2], bad=[math.nan, *slow(math.inf, -math.inf)])
def test_excluded_keys_may_hold_anything(backend, kind, dtype, queries, bad):
    tensors, masks, gone = excluding(kind, dtype, queries, bad)
    dropout = {"dropout_p": 0.2, "seed": SEED} if kind == "bias, lengths" else {}
    _, (_, grad_key, grad_value, *_) = check(*tensors, enable_gqa=True, **masks, **dropout)
    assert (grad_key[gone] == 0).all()
    assert (grad_value[gone] == 0).all()


@pytest.mark.parametrize("queries", [33, 3])
@pytest.mark.parametrize("keys", [pytest.param(6, marks=pytest.mark.representative), 1100])
@pytest.mark.parametrize("kind", ["mask", *slow("lengths", "dropout")])
def test_rows_that_see_nothing_are_0_beside_nan(backend, kind, queries, keys):
    """Rows that see nothing give 0 although a key holds NaN that other rows of their tile and split see."""
    query, key, value = operands((1, 1, 1, queries, keys, 16, 16))
    key[..., 0, :3] = value[..., 0, :3] = math.nan
    if kind == "lengths":
        length = min(queries - 2, keys)
        hidden = torch.arange(queries) < queries - length
        masks = {"key_lengths": torch.tensor([length]), "is_causal": True, "causal_variant": "lower_right"}
    else:
        hidden = torch.arange(queries) % 2 == 0
        masks = {"attn_mask": ~hidden[:, None] & ((torch.rand(queries, keys) < 0.8) | (torch.arange(keys) == 0))}
        masks |= {"dropout_p": 0.1, "seed": SEED} if kind == "dropout" else {}
    query.requires_grad_()
    out, lse = attention(query, key, value, return_lse=True, **masks)
    (grad,) = torch.autograd.grad(out, query, torch.randn_like(out))
    for found in (out.detach(), grad):
        assert (found[0, :, hidden] == 0).all()
        assert found[0, :, ~hidden].isnan().any()
    assert (lse[0, :, hidden] == -math.inf).all()


NAN_STAYS = [("reference", d) for d in (torch.float32, torch.float64)] + [("cpu", d) for d in LOW[:2]]


@pytest.mark.parametrize(("backend", "dtype"), NAN_STAYS, indirect=["backend"])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_nan_of_a_query_that_sees_nothing_stays_there(backend, p, dtype):
    """NaN in a query that sees nothing, and in its output's gradient, stays there. The rule covers attention and its
    weights. On triton such NaN reaches dK and dV, so it is not tested here."""
    query, key, value = operands((1, 2, 2, 5, 7, 16, 16), dtype)
    mask = torch.rand(5, 7, dtype=torch.float64) < 0.7
    mask[:, 0], mask[3] = True, False
    grad = torch.randn_like(query)
    query[:, :, 3] = grad[:, :, 3] = math.nan
    tensors = [t.requires_grad_() for t in (query, key, value)]
    out = attention(*tensors, mask, p, seed=SEED)
    found = torch.autograd.grad(out, tensors, grad)
    weights = attention_weights(query, key, mask, p, seed=SEED)
    found += torch.autograd.grad(weights, (query, key), torch.randn_like(weights))
    assert all(t.isfinite().all() for t in (out, weights, *found))


def test_nan_reaches_what_attends_to_it(backend):
    assert_nan_reaches_what_attends_to_it(*operands((1, 1, 1, 9, 40, 8, 8)))


def assert_nan_reaches_what_attends_to_it(query, key, value):
    value[0, 0, 20, 3] = math.nan
    out = attention(query, key, value)
    assert out[..., 3].isnan().all()
    assert not out[..., :3].isnan().any()
    query[0, 0, 4] = math.nan
    out = attention(query, key, key)
    assert out[0, 0, 4].isnan().all()
    assert not out[0, 0, 5:].isnan().any()


@pytest.mark.parametrize("scale", [3e38, -3e38])
@pytest.mark.parametrize("magnitude", [0, 1e-38])
def test_largest_scale(backend, scale, magnitude):
    """A query of 0 gives its keys a gradient of 0, even if log2(e) times the scale overflows float32. A score's
    gradient times the scale overflows too."""
    query, key, value = operands((1, 2, 2, 5, 43, 16, 16), torch.float32)
    key.requires_grad_()
    query *= magnitude
    out, lse = attention(query, key, value, scale=scale, return_lse=True)
    wanted, wanted_lse = exact(query, key.detach(), value, scale=scale)[:2]
    if magnitude == 0:
        grad = torch.autograd.grad(out, key, 1000 * torch.randn_like(out), retain_graph=True)[0]
        assert torch.equal(grad, torch.zeros_like(key))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0, 0.0, 1, -0.7, 1e-3, 3.5, 1e-50, -1e-50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale(backend, dtype, scale):
    tensors = operands((1, 2, 2, 21, 43, 16, 16), dtype)
    check(*tensors, scale=scale, lse=False)
    check(*tensors, torch.randn(43), scale=scale, is_causal=True)
    check(*tensors, scale=scale, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [100.0, -100.0, 1e4, -1e4])
def test_large_scores(backend, dtype, magnitude):
    """Scores up to 1e4 are accurate: the softmax selects one key, or two that tie."""
    query, key, value = operands((1, 2, 2, 17, 90, 16, 16), dtype)
    key[:, :, 50] = key[:, :, 7]
    scores = (query.double() @ key.double().mT).abs().amax().item()
    check(query, key, value, scale=magnitude / scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_scores(backend, dtype):
    """The largest score has probability 1, forward and backward, at scores of 1e8. The scale rounds them: a unit in the
    last place is 8."""
    query, key = torch.zeros(1, 1, 33, 16), torch.zeros(1, 1, 200, 16)
    row, best = torch.arange(33), 37 * torch.arange(33) % 200
    query[0, 0, row, row % 16] = 2.0**12
    key[0, 0] = torch.randint(1, 100, (200, 16)).float()
    key[0, 0, best[:16], torch.arange(16)] = 2.0**8 - 1 - torch.arange(16)
    value = torch.randn(1, 1, 200, 16, dtype=dtype, requires_grad=True)
    chosen, grad = best[row % 16], torch.randint(-8, 8, (1, 1, 33, 16)).to(dtype)
    out = attention(query.to(dtype), key.to(dtype), value, scale=123.4567)
    wanted = torch.zeros_like(value).index_add(2, chosen, grad)
    assert torch.equal(out, value[:, :, chosen])
    # P is exp(x) * (1 / exp(x)) with a rounded statistic. It has 4 roundings of a sum of at most 3 terms, each at most
    # 8.
    torch.testing.assert_close(*torch.autograd.grad(out, value, grad), wanted, rtol=0, atol=4 * 24 * 6e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.02, 0.06, 0.5, -0.06])
def test_scores_that_grow(backend, dtype, step):
    """A row's maximum may grow with every tile, by little and by much."""
    query, key, value = operands((1, 2, 2, 40, 700, 16, 16), dtype)
    query[..., 0], key[..., 0] = 1, step * torch.arange(700)
    check(query, key, value, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_large_values(backend, dtype):
    """No sum exceeds the number of keys times the largest value, even if a later tile has the largest scores."""
    query, key = torch.zeros(1, 1, 40, 16, dtype=dtype), torch.zeros(1, 1, 700, 16, dtype=dtype)
    query[..., 0], key[:, :, 300:, 0] = 1, 7.5
    value = torch.full((1, 1, 700, 16), 1e35, dtype=dtype)
    out = attention(query, key, value, scale=1.0)
    # Tolerance: one rounding of P per key, all of one sign, relative to their sum, and the rounding of the output.
    torch.testing.assert_close(out, value[:, :, :40], rtol=2 * torch.finfo(dtype).eps + 700 * 6e-8, atol=0)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.float32, None], ids=["float32", "own"])
def test_finite_extremes_are_numbers(backend, dtype, mask_dtype):
    """A mask of finfo.min gives torch's result: a row that is all at the minimum is uniform, other rows ignore those
    keys."""
    query, key, value = operands((2, 2, 2, 11, 45, 16, 16), dtype)
    mask_dtype = mask_dtype or dtype
    mask = torch.zeros(2, 1, 11, 45, dtype=mask_dtype)
    mask[0, :, :, 30:] = torch.finfo(mask_dtype).min
    mask[1, :, 4] = torch.finfo(mask_dtype).min
    tensors = query, key, value, mask
    wanted = gradients(F.scaled_dot_product_attention, [t.double() for t in tensors])
    got = gradients(attention, tensors)
    peer = gradients(lambda *t: exact(*t, dtype=dtype)[0], tensors)
    for a, e, p in zip(*(outs + grads for outs, grads in (got, wanted, peer)), strict=True):
        assert_accurate(a, e, p)
    if mask_dtype != torch.float16:  # at -65504 float32 still resolves the scores
        difference = got[0][0][1, :, 4].double() - value[1].double().mean(dim=-2)
        assert difference.abs().amax() <= 2 * torch.finfo(dtype).eps
    everywhere = torch.full((45,), torch.finfo(mask_dtype).min, dtype=mask_dtype)
    check(query, key, value, everywhere, key_lengths=torch.tensor([45, 20]), dropout_p=0.2, seed=SEED)


@pytest.mark.representative
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mask_that_leaves_one_key(backend, dtype):
    query, key, value = operands((1, 2, 2, 40, 70, 16, 16), dtype)
    only = torch.randint(70, (40,))
    mask = torch.arange(70) == only[:, None]
    (out,), (grad_query, *_) = check(query, key, value, mask, lse=False)
    assert torch.equal(out, value[:, :, only])
    assert (grad_query.abs() <= 1e-6).all()


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pairwise(
    has_lengths=[False, True],
    window=[(-1, -1), (30, 17)],
    diagonal=DIAGONALS,
    kind=MASKS,
    dtype=[*LOW[:2], *slow(LOW[2])],
    p=[0.0, 0.3],
)
def test_identity_value_shows_the_zero_pattern(backend, has_lengths, window, diagonal, kind, dtype, p):
    """With V = identity the output is P: zero exactly where it is masked or dropped, and nowhere else."""
    b, h, lq, lk = (1, 2, 37, 75) if interpreted(backend) else (2, 4, 70, 113)
    query, key, _ = operands((b, h, h // 2, lq, lk, 16, 1), dtype)
    query, key = query / 4, key / 4
    value = torch.eye(lk, dtype=dtype).expand(b, h // 2, lk, lk)
    mask = MASKS[kind]((b, h, lq, lk))
    lengths = torch.tensor([50, lk][:b]) if has_lengths else None
    masks = {"window_size": window, "key_lengths": lengths, **DIAGONALS[diagonal]}
    call = functools.partial(attention, query, key, dropout_p=p, enable_gqa=True, seed=SEED if p else None, **masks)
    kept = visible((b, h, lq, lk), mask, **masks)
    if p:
        kept = kept & oracle.dropout_mask((b, h, lq, lk), p, SEED)
    assert torch.equal(call(value, mask) != 0, kept)
    # The gradient of V is P^T times the output gradient, which is again the identity.
    leaf = value[:, :, :, :lq].clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf, mask), leaf, torch.eye(lq, dtype=dtype).expand(b, h, lq, lq))
    assert torch.equal(grad != 0, kept.view(b, h // 2, 2, lq, lk).any(2).mT)


@pytest.mark.representative
@pytest.mark.parametrize("p", [1e-6, 1.0, *slow(7.6e-6, 0.99999)])
def test_dropout_extremes(backend, p):
    """The rate 1e-6 is rounded to 0. The slow ones are rounded to 1 / 65536 and 65535 / 65536."""
    tensors = operands((2, 2, 2, 19, 45, 8, 8))
    (out, _), grads = check(*tensors, dropout_p=p, seed=SEED)
    if p == 1e-6:
        assert torch.equal(out, attention(*tensors))
    if p == 1.0:
        assert (out == 0).all()
        assert all((g == 0).all() for g in grads[2:])


@pytest.mark.representative
@pytest.mark.parametrize("seed", [(2**63 - 1, 2**32 + 5), *slow((-1, 0), (-(2**63), 2**40), (3, -1))], ids=str)
def test_dropout_seeds(backend, seed):
    seed = torch.tensor(seed)
    check(*operands((1, 2, 2, 19, 45, 8, 8)), dropout_p=0.5, seed=seed)
    check(*operands((1, 2, 2, 19, 45, 8, 8)), dropout_p=0.5, seed=seed.repeat_interleave(2)[::2])


@pytest.mark.parametrize("kind", ["window", "window, lower right", "lengths, lower right"])
def test_keys_that_weights_exclude_may_be_nan(backend, kind):
    results = []
    for bad in (0.0, math.nan):
        torch.manual_seed(0)
        (query, key, _), masks, gone = excluding(kind, torch.float32, 9, bad)
        (weights,), grads = gradients(functools.partial(attention_weights, enable_gqa=True, **masks), (query, key))
        results.append((weights, grads[0], grads[1][~gone]))
        assert not grads[1].isnan().any()
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pairwise(p=[0.0, 0.3], kind=MASKS, diagonal=DIAGONALS, dtype=LOW)
def test_attention_weights(backend, p, kind, diagonal, dtype):
    query, key, value = operands((2, 4, 2, 37, 75, 16, 8), dtype)
    tensors = query, key, MASKS[kind]((2, 4, 37, 75))
    options = {"key_lengths": torch.tensor([75, 20]), "window_size": (30, -1), **DIAGONALS[diagonal]}
    options |= {"enable_gqa": True, "dropout_p": p, "seed": SEED if p else None}

    def of_oracle(rounded=torch.float64, **more):
        return gradients(lambda q, k, m: exact(q, k, value, m, **options, **more)[2].to(rounded), tensors)

    got = gradients(functools.partial(attention_weights, **options), tensors)
    wanted, peer, terms = of_oracle(), of_oracle(dtype, dtype=dtype), of_oracle(softmax=SizesOfTerms.apply)
    assert got[0][0].dtype == dtype
    assert torch.equal(got[0][0] == 0, wanted[0][0] == 0) or dtype == torch.float16  # float16 underflows
    for a, e, q, t in zip(*((*o, *g) for o, g in (got, wanted, peer, terms)), strict=True):
        assert_accurate(a, e.double(), q, magnitude=largest(t))


@pytest.mark.torch_version
@pytest.mark.parametrize("needed", [c for c in itertools.product((False, True), repeat=4) if any(c)], ids=str)
def test_subsets_of_gradients(backend, needed):
    oracle.assert_subsets_of_gradients(attention, (*operands((1, 2, 2, 9, 21, 8, 12)), torch.randn(2, 1, 21)), needed)


@pytest.mark.parametrize("layout", [*GRADIENT_LAYOUTS, None], ids=str)
def test_gradients_of_any_layout(backend, layout):
    """The output's gradient may have any strides, or be missing if only the LSE has one, which may be expanded."""
    tensors = [t.requires_grad_() for t in operands((2, 2, 2, 9, 21, 8, 8))]
    (out, lse), (wanted_out, wanted_lse, _) = attention(*tensors, return_lse=True), exact(*tensors)
    if layout is None:
        results, grad = (lse, wanted_lse), torch.ones(()).expand(2, 2, 9)
    else:
        results, grad = (out, wanted_out), GRADIENT_LAYOUTS[layout](2, 2, 9, 8)
    given = [(result, tensors, grad.to(result.dtype)) for result in results]
    for a, e in zip(*(torch.autograd.grad(*one, materialize_grads=True) for one in given), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.torch_version
def test_gradcheck():
    """The reference passes gradcheck in float64: first and second derivatives, those of the LSE and the mask
    included."""
    query, key, value = (t.requires_grad_() for t in operands((1, 2, 1, 3, 5, 3, 2), torch.float64))
    mask = torch.randn(2, 1, 5, dtype=torch.float64, requires_grad=True)
    options = {"enable_gqa": True, "is_causal": True, "causal_variant": "lower_right", "key_lengths": torch.tensor([4])}

    def call(*tensors):
        return attention(*tensors, 0.3, return_lse=True, seed=SEED, **options)

    with fastattn.backend("reference"):
        assert torch.autograd.gradcheck(call, (query, key, value, mask))
        assert torch.autograd.gradgradcheck(call, (query, key, value, mask))


@pytest.mark.torch_version
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(backend, dtype):
    tensors = operands((2, 2, 2, 9, 21, 8, 8))
    with torch.autocast(DEVICE, dtype):
        out = attention(*tensors)
        theirs = F.scaled_dot_product_attention(*tensors)
        mixed = attention(tensors[0].to(dtype), *tensors[1:], torch.randn(21))
    assert out.dtype == theirs.dtype == mixed.dtype == dtype
    assert torch.equal(out, attention(*(t.to(dtype) for t in tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)  # torch's products depend on the thread count
def test_same_bits_for_every_thread_count(backend, dtype):
    queries, keys = (150, 333) if backend.startswith("cpu") else (40, 90)
    options = {"is_causal": True, "dropout_p": 0.1, "seed": SEED, "enable_gqa": True, "return_lse": True}
    tensors = *operands((2, 4, 2, queries, keys, 32, 32), dtype), torch.randn(4, 1, keys)
    oracle.assert_same_bits(functools.partial(attention, **options), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", *BACKENDS[4:]], indirect=True)
def test_queries_that_share_a_task_do_not_change_the_bits(backend, dtype):
    """The thread count decides how many queries share a task, and changes no bit. Each window begins at another key and
    is longer than a chunk of the sum."""
    tensors = operands((1, 1, 1, 1000, 7000, 16, 16), dtype)
    window = {"window_size": (3500, 0), "causal_variant": "lower_right"}
    runs = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        runs.append(attention(*tensors, **window))
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
    check(*tensors, lse=False, **window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", *BACKENDS[4:]], indirect=True)
def test_queries_that_share_a_task_do_not_share_its_nan(backend, dtype):
    """An infinite value reaches only the rows that see its key, although a matrix instruction reads it for others
    too."""
    query, key, value = operands((1, 1, 1, 512, 512, 16, 16), dtype)
    mask = torch.ones(512, 512, dtype=torch.bool)
    mask[:64, 301:] = False
    mask[128:192, 300:] = False
    value[..., 301, :] = math.inf
    for n in (1, 2, 8):
        torch.set_num_threads(n)
        out = attention(query, key, value, mask)
        sees = mask[:, 301]
        assert out[..., ~sees, :].isfinite().all()
        assert (out[..., sees, :] == math.inf).all()


@st.composite
def problems(draw, most=(3, 3, 3, 70, 140, 130, 130), rates=(0.0, 0.1, 0.5, 0.85)):
    """Draw a function that returns the operands and options of a small problem: shapes, dtypes, layouts, masks and
    dropout together. Each is at most `most` in (batch, heads of keys, group, queries, keys, head sizes)."""
    b, hk, group, lq, lk, e, ev = (draw(st.integers(1, n)) for n in most)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    mask = MASKS[draw(st.sampled_from(list(MASKS)))]
    options = {"enable_gqa": group > 1, **DIAGONALS[draw(st.sampled_from(list(DIAGONALS)))]}
    options["window_size"] = (draw(st.integers(-1, lk)), draw(st.integers(-1, lk)))
    options["scale"] = draw(st.sampled_from([None, 0.2, -0.1]))
    if draw(st.booleans()):
        options["key_lengths"] = torch.tensor(draw(st.lists(st.integers(0, lk), min_size=b, max_size=b)))
    if p := draw(st.sampled_from(rates)):
        seed = [draw(st.integers(-(2**63), 2**63 - 1)), draw(st.integers(0, 2**62))]
        options |= {"dropout_p": p, "seed": torch.tensor(seed)}
    orders, seed = [draw(st.permutations(range(4))) for _ in range(3)], draw(st.integers(0, 2**31))

    def problem():
        torch.manual_seed(seed)
        sizes = (b, hk * group, lq, e), (b, hk, lk, e), (b, hk, lk, ev)
        tensors = [in_order(order, size, dtype) for order, size in zip(orders, sizes, strict=True)]
        return (*tensors, mask((b, hk * group, lq, lk))), options

    return problem


@given(problem=problems())
def test_any_problem(backend, problem):
    tensors, options = problem()
    check(*tensors, **options)


HEAD_SIZES = [*range(1, 18), 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 65, 79, 80, 127, 129, 160, 191, 224, 255]


@pytest.mark.slow
@pytest.mark.parametrize(("e", "dtype"), in_turn(HEAD_SIZES, LOW), ids=str)
def test_every_head_size(backend, dtype, e):
    check(*operands((1, 2, 1, 35, 70, e, max(1, e - 3)), dtype), is_causal=True, enable_gqa=True)


@pytest.mark.slow
@pairwise(
    diagonal=DIAGONALS,
    p=[0.0, 0.5],
    dtype=LOW[:2],
    lq=[1, 7, 8, 16, 17, 31, 63, 65, 96],
    lk=[1, 7, 31, 33, 63, 64, 65, 97, 512],
)
def test_every_tile_edge(backend, diagonal, p, dtype, lq, lk):
    tensors = operands((1, 1, 1, lq, lk, 16, 16), dtype)
    masks = {"attn_mask": torch.randn(lq, lk) > 0, "window_size": (5, 40)}
    # Interpreted kernels get either dropout or masks at each edge. test_any_problem combines both.
    for options in ({} if p else masks,) if interpreted(backend) else ({}, masks):
        check(*tensors, dropout_p=p, seed=SEED, **options, **DIAGONALS[diagonal])
