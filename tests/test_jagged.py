"""Nested tensors: jagged ones agree with dense calls per sequence and with torch; other layouts are refused."""

import pytest
import torch
import torch.nn.functional as F

import fastattn
from fastattn import dropout, dropout_mask, layer_norm, softmax_dropout, varlen_attn
from fastattn import scaled_dot_product_attention as attention

pytestmark = pytest.mark.torch_version
SEED = torch.tensor([3, 4])
QUERIES, KEYS = (3, 5, 1), (4, 5, 6)


def jagged(lengths, *sizes):
    """Return a jagged tensor (N, length, *sizes), where each sequence has its own length."""
    rows = [torch.randn(length, *sizes) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def heads(lengths, count=2, size=8):
    return jagged(lengths, count, size).detach().transpose(1, 2).requires_grad_()


def gradients(out, leaves):
    """Return the gradients of the sum of the output's squares."""
    return torch.autograd.grad((out.values() if out.is_nested else out).square().sum(), leaves)


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (QUERIES, QUERIES, {}),
        (QUERIES, QUERIES, {"is_causal": True}),
        (QUERIES, KEYS, {}),
        (QUERIES, KEYS, {"scale": 0.3, "enable_gqa": True}),
        (QUERIES, KEYS, {"is_causal": True, "causal_variant": "lower_right"}),
        (QUERIES, QUERIES, {"window_size": (1, 1)}),
    ],
    ids=str,
)
def test_attention(queries, keys, options):
    """Each sequence has the results and gradients of the dense function. The output has the query's lengths for torch,
    and its heads can be joined."""
    q = heads(queries, 4 if "enable_gqa" in options else 2)
    leaves = [q] if queries is keys else [q, heads(keys), heads(keys, size=6)]
    out, lse = attention(*(leaves * 3)[:3], return_lse=True, **options)
    assert out.shape[:3] == q.shape[:3]
    assert out.transpose(1, 2).flatten(2).shape[:2] == q.transpose(1, 2).shape[:2]
    assert torch.equal(out.offsets(), q.offsets())
    grads = gradients(out, leaves)
    for n in range(len(queries)):
        dense = [leaf.detach().unbind()[n].requires_grad_() for leaf in leaves]
        wanted, wanted_lse = attention(*(dense * 3)[:3], return_lse=True, **options)
        torch.testing.assert_close(out.unbind()[n], wanted)
        torch.testing.assert_close(lse.unbind()[n], wanted_lse)
        for got, e in zip(grads, gradients(wanted, dense), strict=True):
            torch.testing.assert_close(got.unbind()[n], e)


def same_values(found, wanted):
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.values(), expected.values())


def test_attention_drops_by_the_formula():
    q = heads(QUERIES)
    out = attention(q, q, q, dropout_p=0.5, seed=SEED)
    mask = dropout_mask((6, 5, 5), 0.5, SEED).view(3, 2, 5, 5)  # z = sequence * heads + head
    for n, (part, got) in enumerate(zip(q.detach().unbind(), out.unbind(), strict=True)):
        length = part.size(1)
        weights = torch.softmax(part @ part.mT / 8**0.5, -1) * mask[n, :, :length, :length] * 2
        torch.testing.assert_close(got, weights @ part)


def each_operation(q, x):
    return attention(q, q, q), layer_norm(x, (16,)), dropout(x, 0.5, seed=SEED)


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    operands = heads(QUERIES), jagged(QUERIES, 16)
    compiled = torch.compile(each_operation, fullgraph=True, backend="aot_eager")
    same_values(compiled(*operands), each_operation(*operands))
    torch.compiler.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    operands = heads(QUERIES), jagged(QUERIES, 16)
    wanted = each_operation(*operands)
    with mode():
        same_values(each_operation(*operands), wanted)


def test_autocast():
    q = heads(QUERIES)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, q, q)
    low = q.bfloat16()
    assert torch.equal(out.values(), attention(low, low, low).values())


def test_layer_norm():
    x, weight, bias = jagged(QUERIES, 16), torch.randn(16), torch.randn(16)
    ours, theirs = layer_norm(x, (16,), weight, bias), F.layer_norm(x, (16,), weight, bias)
    assert (ours + x).shape == x.shape
    same_values([ours, *gradients(ours, [x])], [theirs, *gradients(theirs, [x])])


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout(inplace):
    x = jagged(QUERIES, 16).detach()
    wanted = x.values() * dropout_mask((9, 16), 0.5, SEED) * 2
    out = dropout(x, 0.5, inplace=inplace, seed=SEED)
    assert torch.equal(out.values(), wanted)
    assert torch.equal(x.values(), wanted) == inplace
    assert (out + x).shape == x.shape


X = torch.randn(2, 3, 4, 8)
NESTED = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
JAGGED, OTHER = heads(QUERIES).detach(), heads(KEYS).detach()
REFUSED = {
    "a mask": (lambda: attention(JAGGED, JAGGED, JAGGED, torch.ones(5, 5)), "attn_mask .* key_lengths"),
    "lengths": (lambda: attention(JAGGED, JAGGED, JAGGED, key_lengths=torch.ones(3).int()), "key_lengths"),
    "two diagonals": (lambda: attention(JAGGED, OTHER, OTHER, is_causal=True), 'causal_variant="lower_right"'),
    "key and value": (lambda: attention(JAGGED, JAGGED, OTHER), "key and value"),
    "no heads": (lambda: attention(*[jagged(QUERIES, 8)] * 3), "unflatten"),
    "beside dense": (lambda: attention(JAGGED, X, X), "query .* make all operands jagged"),
    "dense query": (lambda: attention(X, JAGGED, JAGGED), "key .* make all operands jagged"),
    "weights": (lambda: fastattn.attention_weights(JAGGED, JAGGED), "to_padded_tensor"),
    "strided": (lambda: attention(NESTED, NESTED, NESTED), "strided.* to_padded_tensor"),
    "strided layer_norm": (lambda: layer_norm(NESTED, (8,)), "strided.* to_padded_tensor"),
    "strided dropout": (lambda: dropout(NESTED), "strided.* to_padded_tensor"),
    "sparse": (lambda: attention(*[X.to_sparse()] * 3), "query .*sparse_coo.* to_dense"),
    "sparse mask": (lambda: attention(X, X, X, torch.ones(4, 4).to_sparse()), "attn_mask .*sparse_coo.* to_dense"),
    "sparse layer_norm": (lambda: layer_norm(X.to_sparse(), (8,)), "input .* to_dense"),
    "sparse weight": (lambda: layer_norm(X, (8,), torch.ones(8).to_sparse()), "weight .* to_dense"),
    "sparse dropout": (lambda: dropout(X.to_sparse()), "input .* to_dense"),
    "sparse softmax": (lambda: softmax_dropout(X.to_sparse()), "input .* to_dense"),
    "sparse residual": (lambda: fastattn.dropout_add_layer_norm(X, X.to_sparse()), "residual .* to_dense"),
    "sparse packed": (lambda: varlen_attn(*[X[0].to_sparse()] * 3, *[torch.tensor([0, 3])] * 2, 3, 3), "to_dense"),
    "mkldnn": (lambda: attention(*[X.to_mkldnn()] * 3), "query .*mkldnn.* to_dense"),
}


def test_a_module_takes_a_tensor_with_holes():
    rows, lengths = torch.randn(2, 6, 8), torch.tensor([3, 2])
    narrowed = torch.nested.narrow(rows, 1, torch.tensor([0, 1]), lengths, layout=torch.jagged)
    assert narrowed.lengths() is not None
    out, _ = HEADS(narrowed, narrowed, narrowed)
    wanted, _ = HEADS(*[narrowed.contiguous()] * 3)
    assert torch.equal(out.values(), wanted.values())
    assert torch.equal(out.offsets(), torch.tensor([0, 3, 5]))


HEADS = fastattn.MultiHeadAttention(8, 2, batch_first=True)
PACKED, ROWS = X[0], torch.tensor([0, 3])
SECONDARY = {
    "attn_mask": lambda t: attention(X, X, X, t.bool()),
    "key_lengths": lambda t: attention(X, X, X, key_lengths=t),
    "seed": lambda t: attention(X, X, X, dropout_p=0.1, seed=t),
    "cu_seq_q": lambda t: varlen_attn(PACKED, PACKED, PACKED, t, ROWS, 3, 3),
    "cu_seq_k": lambda t: varlen_attn(PACKED, PACKED, PACKED, ROWS, t, 3, 3),
    "seqused_k": lambda t: varlen_attn(PACKED, PACKED, PACKED, ROWS, ROWS, 3, 3, seqused_k=t),
    "softmax_dropout: attn_mask": lambda t: softmax_dropout(X, attn_mask=t.bool()),
    "weight": lambda t: layer_norm(X, (8,), t.float()),
    "bias": lambda t: layer_norm(X, (8,), None, t.float()),
    "residual": lambda t: fastattn.dropout_add_layer_norm(X, t.float()),
    "dropout_mask: seed": lambda t: dropout_mask((2, 3), 0.1, t),
    "MultiHeadAttention: attn_mask": lambda t: HEADS(X[0], X[0], X[0], attn_mask=t.bool()),
    "MultiHeadAttention: key_padding_mask": lambda t: HEADS(X[0], X[0], X[0], key_padding_mask=t.float()),
    "MultiHeadAttention: query": lambda t: HEADS(t.float(), X[0], X[0]),
}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", SECONDARY)
def test_nested_arguments_are_refused_by_name(name, layout):
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=layout, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=name):
        SECONDARY[name](nested)


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
