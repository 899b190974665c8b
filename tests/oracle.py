"""Oracle of the operations: docs/design.md's definitions, implemented a second time and as plainly as possible.

Masks and dropout bits are NumPy. The arithmetic is torch in float64, whose autograd gives every gradient. With another
`dtype` the same compositions are PyTorch's own computation in that dtype. The tolerance rule compares with its
error."""

import functools
import math

import numpy as np
import torch

MASK32 = 0xFFFFFFFF


def philox4x32(counter, key, rounds=7):
    """Return Philox4x32 of a counter of four words.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(rounds):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        high0, low0 = first >> np.uint64(32), first & np.uint64(MASK32)
        high1, low1 = second >> np.uint64(32), second & np.uint64(MASK32)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def on_device(array):
    """Return a NumPy array as a tensor on the tests' default device."""
    return torch.from_numpy(array).to(torch.get_default_device())


def threshold(p):
    return math.floor(p * 65536 + 0.5)


def dropout_values(z, i, j, seed):
    """Return the 16-bit values of the elements (i, j) of the matrices z; the arguments broadcast."""
    key, offset = map(int, seed)
    z, i, j = np.broadcast_arrays(z, i, j)
    counter = ((j // 32) * 8 + j % 8, (i // 16) * 8 + i % 8, z & MASK32, np.full(z.shape, offset % 2**32))
    words = philox4x32(counter, (key & MASK32, (key >> 32) & MASK32))
    v = 4 * ((i // 8) % 2) + (j // 8) % 4
    word = np.choose(v // 2, words)
    return np.where(v % 2 == 0, word & np.uint64(0xFFFF), (word >> np.uint64(16)) & np.uint64(0xFFFF))


def dropout_mask(shape, p, seed):
    """Return the bool mask, True = kept.

    Rows and columns are the last two dimensions, and z counts the rest. One dimension is one row."""
    return _dropout_mask(tuple(shape), p, tuple(map(int, seed)))


@functools.lru_cache(maxsize=16)  # a comparison needs the same mask for results, gradients and each precision
def _dropout_mask(shape, p, seed):
    rows, columns = ([1, 1, *list(shape)])[-2:]
    matrices = math.prod(shape[:-2])
    z, i, j = np.arange(matrices)[:, None, None], np.arange(rows)[:, None], np.arange(columns)
    return on_device(dropout_values(z, i, j, seed) >= threshold(p)).reshape(shape)


def dropout_factor(shape, p, seed):
    """Return dropout's factors: 0, or 65536 / (65536 - threshold), which is unbiased for the rate that is realised."""
    if threshold(p) == 0:
        return torch.ones(shape, dtype=torch.float64)
    if threshold(p) == 65536:
        return torch.zeros(shape, dtype=torch.float64)
    return dropout_mask(shape, p, seed).double() * (65536 / (65536 - threshold(p)))


def dropout(input, p, seed, dtype=torch.float64):
    return input.to(dtype) * dropout_factor(input.shape, p, seed).to(dtype)


def visible(
    shape, attn_mask=None, is_causal=False, causal_variant="upper_left", key_lengths=None, window_size=(-1, -1)
):
    """Return bool (..., Hq, Lq, Lk), True = query sees key, computed one sequence at a time."""
    queries, keys = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    result = np.ones((math.prod(shape[:-3]), heads, queries, keys), dtype=bool)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    left, right = window_size
    for b in range(len(result)):
        length = keys if key_lengths is None else int(key_lengths[b])
        diagonal = i + (length - queries if causal_variant == "lower_right" else 0)
        result[b] &= j < length
        if is_causal:
            result[b] &= j <= diagonal
        if left >= 0:
            result[b] &= j >= diagonal - left
        if right >= 0:
            result[b] &= j <= diagonal + right
    result = on_device(result).reshape(shape)
    if attn_mask is not None:
        result = result & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -math.inf)
    return result


def softmax(scores):
    """Return softmax and log-sum-exp over the last dimension. A row that is all -inf gives zeros and -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - math.inf
    point = scores.detach().amax(-1, keepdim=True)
    point = point.masked_fill(point == -math.inf, 0)
    exponentials = torch.exp(scores - point)
    total = exponentials.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    return exponentials / total, (point + total.log()).masked_fill(empty, -math.inf).squeeze(-1)


class SizesOfTerms(torch.autograd.Function):
    """softmax() with a gradient that adds the sizes of its terms instead of their values.

    The gradient is P (dP - rowsum(P dP) + dlse). Its rounding error is relative to the sizes of these terms. (In a row
    that sees one key they cancel to 0.)"""

    @staticmethod
    def forward(ctx, scores):
        weights, lse = softmax(scores)
        ctx.save_for_backward(weights)
        return weights, lse

    @staticmethod
    def backward(ctx, grad_weights, grad_lse):
        (weights,) = ctx.saved_tensors
        rows = (weights * grad_weights).sum(-1, keepdim=True).abs() + grad_lse.abs()[..., None]
        return weights * (grad_weights.abs() + rows)


def add_float_mask(scores, attn_mask):
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return scores
    return scores + attn_mask.to(torch.promote_types(scores.dtype, attn_mask.dtype))


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *, seed=None,
    dtype=torch.float64, softmax=softmax, **window,
):  # fmt: skip
    """Return (out, lse, weights after dropout)."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (t.expand(*batch, *t.shape[-2:]) for t in (query, key, value))

    seen = visible((*batch, query.shape[-2], key.shape[-2]), attn_mask, is_causal, **window)
    unused = ~seen.any(dim=-2)[..., None]  # keys that no query sees may hold NaN
    scores = add_float_mask(scale * (query @ key.masked_fill(unused, 0).mT), attn_mask)
    if dtype.itemsize == 2:
        scores = scores.float()  # as PyTorch programs do: products in 16 bits, softmax in float32
    weights, lse = softmax(scores.masked_fill(~seen, -math.inf))
    weights = dropout(weights, dropout_p, seed, weights.dtype)
    return weights.to(dtype) @ value.masked_fill(unused, 0), lse, weights


def varlen_attention(query, key, value, cu_seq_q, cu_seq_k, dropout_p=0.0, seqused_k=None, seed=None, **options):
    """Return (out, lse (total, Hq)), computed per sequence, lower-right. Dropout counts matrices as sequence * Hq +
    h."""
    outs, lses = [], []
    for n in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[n] : cu_seq_q[n + 1]].transpose(0, 1)
        k, v = (t[cu_seq_k[n] : cu_seq_k[n + 1]].transpose(0, 1) for t in (key, value))
        # n dummy sequences put this one's heads at their z
        q, k, v = (torch.cat([t.new_zeros(n, *t.shape), t[None]]) for t in (q, k, v))
        lengths = None if seqused_k is None else torch.cat([seqused_k.new_zeros(n), seqused_k[n : n + 1]])
        options = {"causal_variant": "lower_right", **options, "key_lengths": lengths}
        out, lse, _ = attention(q, k, v, dropout_p=dropout_p, seed=seed, **options)
        outs.append(out[n].transpose(0, 1))
        lses.append(lse[n].transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def softmax_dropout(
    input, dropout_p=0.0, attn_mask=None, is_causal=False, scale=1.0, *, seed=None, dtype=torch.float64, softmax=softmax
):
    seen = visible((1, 1, *input.shape), attn_mask, is_causal).reshape(input.shape)
    scores = add_float_mask(scale * input.to(dtype), attn_mask)
    weights, _ = softmax(scores.masked_fill(~seen, -math.inf))
    return dropout(weights, dropout_p, seed, weights.dtype).to(dtype)


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, dtype=torch.float64):
    dims = tuple(range(-len(normalized_shape), 0))
    input = input.to(dtype)
    centred = input - input.mean(dims, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(dims, keepdim=True) + eps)
    out = out if weight is None else out * weight.to(dtype)
    return out if bias is None else out + bias.to(dtype)


def dropout_add_layer_norm(input, residual, weight=None, bias=None, p=0.0, eps=1e-5, *, seed=None, dtype=torch.float64):
    """Return (LN(residual + dropout(input)), the sum)."""
    total = residual.to(dtype) + dropout(input, p, seed, dtype)
    return layer_norm(total, total.shape[-1:], weight, bias, eps, dtype), total


# Epsilon of the tolerance rule, in units of the largest expected magnitude. It is a few roundings of the result's own
# dtype, for cases in which PyTorch's own result happens to be exact.
EPSILON = {
    dtype: factor * torch.finfo(dtype).eps
    for dtype, factor in {torch.float64: 64, torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}.items()
}


def score_rounding(query, key, scale=None, attn_mask=None):
    """Return the relative error of P = exp(s - lse) in units of EPSILON, at least 1.

    The backward pass sums s again in another order, so s is rounded relative to the sizes of its terms. For float32
    operands, where EPSILON is 8 roundings. (In a row that sees one key PyTorch's own P is exactly 1.)"""
    norms = [largest(t.detach().double().nan_to_num(0, 0, 0).norm(dim=-1)) for t in (query, key)]
    score = norms[0] * norms[1] * (query.shape[-1] ** -0.5 if scale is None else abs(scale))
    if attn_mask is not None and attn_mask.is_floating_point():
        score += largest(attn_mask[attn_mask.isfinite()])
    return max(1.0, score / 8)


def assert_accurate(actual, expected, peer, what="", *, dtype=None, magnitude=None):
    """Assert the tolerance rule.

    The error against float64 is at most twice that of PyTorch's own computation `peer` in the same dtype, plus EPSILON
    times the largest expected magnitude. Infinities must agree exactly.

    `dtype` is the dtype of the coarsest rounding on the way, by default the result's. `magnitude` is the size of the
    terms of a sum that cancels, where the result is smaller."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    wide, finite = actual.double(), expected.isfinite()
    assert torch.equal(wide[~finite], expected[~finite]), f"{what}: infinities differ"
    assert wide[finite].isfinite().all(), f"{what}: not finite where the expected values are"
    error = largest((wide - expected)[finite])
    peer_error = largest((peer.double() - expected)[finite & peer.isfinite()])
    magnitude = max(largest(expected[finite]), magnitude or 0.0)
    bound = 2 * peer_error + EPSILON[dtype or actual.dtype] * magnitude
    assert error <= bound, (
        f"{what}: error {error:.3e} > {bound:.3e}; PyTorch's {peer_error:.3e}, values to {magnitude:.3e}"
    )


def largest(tensor):
    return tensor.abs().amax().item() if tensor.numel() else 0.0


def gradients(function, tensors, seeds=0, positive=False):
    """Return (outputs, gradients of the float tensors) of function(*tensors).

    Output gradients are random and fixed by `seeds`; with `positive` their absolute values are used.

    The tensors keep their strides. One float64 draw gives the output gradients, which are cast to each output's dtype.
    Calls with other dtypes therefore receive the same numbers."""
    leaves = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator(torch.get_default_device()).manual_seed(seeds)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16) for o in outputs]
    grads = [g.abs() for g in grads] if positive else grads
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    got = torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    return tuple(o.detach() for o in outputs), got


def both_passes(function, tensors):
    """Return the results without and with a gradient, and the gradients of fixed weights of the result."""
    with torch.no_grad():
        found = [function(*tensors)]
    found.append(function(*tensors))
    weight = torch.linspace(-1, 1, found[1].numel()).reshape(found[1].shape).to(found[1].dtype)
    return found + list(torch.autograd.grad(found[1], tensors, weight, materialize_grads=True))


def assert_same_bits(function, tensors):
    """Assert that results and gradients of function(*tensors) have the same bits in every run, on 1 to 3 threads."""
    runs = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        outputs, grads = gradients(function, tensors)
        runs.append((*outputs, *grads))
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def assert_subsets_of_gradients(function, tensors, needed):
    """Assert that the gradients of those tensors that are `needed` are the same as with all others."""
    everything = [t.clone().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(function(*everything).square().sum(), everything)
    some = [t.clone().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
    function(*some).square().sum().backward()
    for t, n, g in zip(some, needed, wanted, strict=True):
        assert torch.equal(t.grad, g) if n else t.grad is None


# Gradients of an output of this shape, in layouts other than the output's.
GRADIENT_LAYOUTS = {
    "expanded": lambda *shape: torch.ones(()).expand(shape),  # from .sum()
    "last": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).mT,
    "transposed, step": lambda *shape: torch.randn(shape[1], shape[0], *shape[2:], 2).transpose(0, 1)[..., 0],
}
