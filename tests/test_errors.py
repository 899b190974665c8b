"""Bad input of every public function.

The message names the argument, the value received and the value expected, and no kernel has run."""

import re

import numpy as np
import pytest
import torch

import fastattn
from fastattn import dropout, dropout_add_layer_norm, dropout_mask, layer_norm, nn, softmax_dropout, varlen_attn
from fastattn import scaled_dot_product_attention as attention

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 6)
K2, V2 = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 6)
X = torch.randn(3, 5, 8)
SEED = torch.tensor([1, 2])
T = torch.randn(9, 4, 8)
CU = torch.tensor([0, 4, 9], dtype=torch.int32)


def varlen(query=T, key=T, value=T, cu_q=CU, cu_k=CU, max_q=5, max_k=5, **options):
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options)


# Bad calls: (call, words that the message must contain). The words are the argument, then what was received.
BAD = [
    # scaled_dot_product_attention: operands
    (lambda: attention([1.0], K, V), "query", "list"),
    (lambda: attention(Q, None, V), "key", "NoneType"),
    (lambda: attention(Q, K, 3), "value", "int"),
    (lambda: attention(torch.ones(8), K, V), "query", "8"),
    (lambda: attention(Q, K[..., :7], V), "key", "7", "8"),
    (lambda: attention(Q, K, V[:, :, :8]), "value", "8", "9"),
    (lambda: attention(Q, K.double(), V), "key", "float64", "float32"),
    (lambda: attention(Q, K, V.bfloat16()), "value", "bfloat16", "float32"),
    (lambda: attention(Q.int(), K.int(), V.int()), "query", "int32"),
    (lambda: attention(Q, K.to("meta"), V), "key", "meta", "cpu"),
    (lambda: attention(Q, K[:1].expand(3, 4, 9, 8), V), "key", "3", "2"),
    (lambda: attention(Q, K2, V2), "3", "4"),
    (lambda: attention(Q, K2, V2, enable_gqa=True), "key", "3", "4"),
    (lambda: attention(Q, K2, V, enable_gqa=True), "3", "4"),
    # masks, shared with attention_weights
    *(
        (lambda o=o, call=call: call(**o), *words)
        for call in (lambda **o: attention(Q, K, V, **o), lambda **o: fastattn.attention_weights(Q, K, **o))
        for o, *words in (
            ({"attn_mask": torch.zeros(5, 8)}, "attn_mask", "(5, 8)", "9"),
            ({"attn_mask": torch.zeros(1, 2, 4, 5, 9)}, "attn_mask", "(1, 2, 4, 5, 9)"),
            ({"attn_mask": torch.zeros(5, 9, dtype=torch.int64)}, "attn_mask", "int64", "bool"),
            ({"attn_mask": torch.zeros(5, 9, device="meta")}, "attn_mask", "meta", "cpu"),
            ({"attn_mask": "causal"}, "attn_mask", "str"),
            ({"dropout_p": -0.1}, "dropout_p", "-0.1"),
            ({"dropout_p": 1.5}, "dropout_p", "1.5"),
            ({"dropout_p": float("nan")}, "dropout_p", "nan"),
            ({"dropout_p": "half"}, "dropout_p", "str"),
            ({"scale": float("nan")}, "scale", "nan"),
            ({"scale": float("inf")}, "scale", "inf"),
            ({"scale": "auto"}, "scale", "str"),
            ({"scale": -1e300}, "scale", "-1e+300"),
            ({"scale": 10**310}, "scale", "float32"),
            ({"enable_gqa": "yes"}, "enable_gqa", "yes"),
            ({"is_causal": 1}, "is_causal", "1", "True or False"),
            ({"is_causal": 2}, "is_causal", "2", "True or False"),
            ({"causal_variant": "lower"}, "causal_variant", "lower", "lower_right"),
            ({"key_lengths": torch.tensor([3, 10])}, "key_lengths", "10", "9"),
            ({"key_lengths": torch.tensor([-1, 3])}, "key_lengths", "-1"),
            ({"key_lengths": torch.tensor([3])}, "key_lengths", "(1,)", "(2,)"),
            ({"key_lengths": torch.tensor([[3, 3]])}, "key_lengths", "(1, 2)", "(2,)"),
            ({"key_lengths": torch.tensor([3.0, 4.0])}, "key_lengths", "float32", "integers"),
            ({"key_lengths": [3, 4]}, "key_lengths", "list"),
            ({"window_size": (-2, 0)}, "window_size", "-2"),
            ({"window_size": (1, 2, 3)}, "window_size", "(1, 2, 3)"),
            ({"window_size": 4}, "window_size", "4"),
            ({"window_size": (1.5, 2)}, "window_size", "1.5"),
            ({"window_size": np.array([1, 2])}, "window_size", "[1, 2]"),
            ({"scale": torch.tensor(0.5, device="meta")}, "scale", "Tensor"),
            ({"dropout_p": 0.1, "seed": 3}, "seed", "int"),
            ({"dropout_p": 0.1, "seed": torch.tensor([1])}, "seed", "(1,)", "(2,)"),
            ({"dropout_p": 0.1, "seed": torch.tensor([1.0, 2.0])}, "seed", "float32", "int64"),
            ({"dropout_p": 0.1, "seed": torch.zeros(2, dtype=torch.int64, device="meta")}, "seed", "meta", "cpu"),
        )
    ),
    # varlen_attn
    (lambda: varlen(query=torch.ones(1, 9, 4, 8)), "query", "(1, 9, 4, 8)"),
    (lambda: varlen(key=torch.ones(9, 3, 8), value=torch.ones(9, 3, 8)), "3", "4"),
    (lambda: varlen(key=T[..., :5]), "key", "5", "8"),
    (lambda: varlen(value=T[:8]), "value", "8", "9"),
    (lambda: varlen(key=T.bfloat16()), "key", "bfloat16", "float32"),
    (lambda: varlen(cu_q=[0, 4, 9]), "cu_seq_q", "list"),
    (lambda: varlen(cu_q=CU.float()), "cu_seq_q", "float32"),
    (lambda: varlen(cu_k=CU[None]), "cu_seq_k", "(1, 3)"),
    (lambda: varlen(cu_k=CU[:2]), "cu_seq_k", "[0, 4]", "9"),
    (lambda: varlen(cu_q=torch.tensor([0, 4, 8])), "cu_seq_q", "8", "9"),
    (lambda: varlen(cu_q=torch.tensor([1, 4, 9])), "cu_seq_q", "1", "0"),
    (lambda: varlen(T, T, T, *[torch.tensor([0, 13])] * 2, 13, 13, dropout_p=0.3), "cu_seq_q", "0 to 9"),
    (lambda: varlen(T, T, T, *[torch.tensor([0, 9, 8])] * 2, 9, 9, dropout_p=0.3), "cu_seq_q", "0 to 9"),
    (lambda: varlen(cu_k=torch.tensor([0, 12, 9])), "cu_seq_k", "12"),
    (lambda: varlen(max_q=3), "max_q", "3", "5"),
    (lambda: varlen(max_k=4), "max_k", "4", "5"),
    (lambda: varlen(max_q=5.5), "max_q", "5.5"),
    (lambda: varlen(max_k=2**63), "max_k", "2**63"),
    (lambda: varlen(dropout_p=2.0), "dropout_p", "2.0"),
    (lambda: varlen(dropout_p=0.1, seed=torch.tensor([1])), "seed", "(1,)"),
    (lambda: varlen(seqused_k=torch.tensor([5, 5], dtype=torch.int32)), "seqused_k", "5", "4"),
    (lambda: varlen(seqused_k=torch.tensor([4], dtype=torch.int32)), "seqused_k", "(1,)", "(2,)"),
    (lambda: varlen(block_table=torch.zeros(2, 1, dtype=torch.int32)), "block_table"),
    (lambda: varlen(num_splits=1), "num_splits"),
    (lambda: varlen(return_aux=True), "return_aux"),
    # softmax_dropout
    (lambda: softmax_dropout("x"), "input", "str"),
    (lambda: softmax_dropout(X.long()), "input", "int64"),
    (lambda: softmax_dropout(torch.tensor(1.0)), "input", "scalar"),
    (lambda: softmax_dropout(X, 1.1), "dropout_p", "1.1"),
    (lambda: softmax_dropout(X, 0.1, torch.zeros(7)), "attn_mask", "(7,)", "(3, 5, 8)"),
    (lambda: softmax_dropout(X, 0.1, torch.zeros(5, 8, dtype=torch.uint8)), "attn_mask", "uint8", "bool"),
    (lambda: softmax_dropout(X, scale=float("nan")), "scale", "nan"),
    (lambda: attention(Q, K, V, return_lse="yes"), "return_lse", "yes"),
    (lambda: varlen(return_lse="yes"), "return_lse", "yes"),
    (lambda: dropout_add_layer_norm(X, X, prenorm="yes"), "prenorm", "yes"),
    (lambda: dropout_add_layer_norm(X, X, out_dtype=torch.float64), "out_dtype", "float64", "float32"),
    (lambda: dropout_add_layer_norm(X, X, out_dtype="half"), "out_dtype", "half"),
    (lambda: dropout_add_layer_norm(X.half(), X.half(), out_dtype=torch.float32), "out_dtype", "float32", "float16"),
    (lambda: softmax_dropout(X, 0.1, seed=SEED.int()), "seed", "int32", "int64"),
    # layer_norm
    (lambda: layer_norm(3, (8,)), "input", "int"),
    (lambda: layer_norm(X.int(), (8,)), "input", "int32"),
    (lambda: layer_norm(X, (7,)), "normalized_shape", "7", "(3, 5, 8)"),
    (lambda: layer_norm(X, ()), "normalized_shape", "()"),
    (lambda: layer_norm(X, (2, 3, 5, 8)), "normalized_shape", "(2, 3, 5, 8)"),
    (lambda: layer_norm(X, "8"), "normalized_shape", "8"),
    (lambda: layer_norm(X, (8,), torch.ones(7)), "weight", "(7,)", "(8,)"),
    (lambda: layer_norm(X, (8,), None, torch.ones(5, 8)), "bias", "(5, 8)", "(8,)"),
    (lambda: layer_norm(X, (8,), torch.ones(8, dtype=torch.int32)), "weight", "int32"),
    (lambda: layer_norm(X, (8,), torch.ones(8, device="meta")), "weight", "meta", "cpu"),
    (lambda: layer_norm(X, (8,), eps="small"), "eps", "small"),
    # dropout_add_layer_norm
    (lambda: dropout_add_layer_norm(X, X[:2]), "residual", "(2, 5, 8)", "(3, 5, 8)"),
    (lambda: dropout_add_layer_norm(X, None), "residual", "NoneType"),
    (lambda: dropout_add_layer_norm(X, X.long()), "residual", "int64"),
    (lambda: dropout_add_layer_norm(X, X.to("meta")), "residual", "meta", "cpu"),
    (lambda: dropout_add_layer_norm(X, X, torch.ones(5)), "weight", "(5,)", "(8,)"),
    (lambda: dropout_add_layer_norm(X, X, None, torch.ones(5)), "bias", "(5,)", "(8,)"),
    (lambda: dropout_add_layer_norm(X, X, dropout_p=-1), "dropout_p", "-1"),
    (lambda: dropout_add_layer_norm(X, X, dropout_p=0.5, seed=torch.tensor(1)), "seed", "()", "(2,)"),
    # dropout, dropout_mask
    (lambda: dropout(None), "input", "NoneType"),
    (lambda: dropout(X.long(), 0.5), "input", "int64"),
    (lambda: dropout(X, 1.01), "p", "1.01"),
    (lambda: dropout(X, -0.5, training=False), "p", "-0.5"),
    (lambda: dropout(X, 0.5, seed=torch.zeros(3, dtype=torch.int64)), "seed", "(3,)", "(2,)"),
    (lambda: dropout_mask((3, -1), 0.5, SEED), "shape", "-1"),
    (lambda: dropout_mask("ab", 0.5, SEED), "shape", "'a'"),
    (lambda: dropout_mask((2**40, 2**40), 0.5, SEED), "shape", "1099511627776"),
    (lambda: dropout_mask((3, 4), 3.0, SEED), "dropout_p", "3.0"),
    # Proxies from torch.fx's tracer
    (lambda: torch.fx.symbolic_trace(lambda x: layer_norm(x, (8,))), "input", "Proxy", "torch.export"),
    (lambda: torch.fx.symbolic_trace(lambda q: attention(q, q, q)), "query", "Proxy", "is_leaf_module"),
    (lambda: dropout_mask((3, 4), 0.5, None), "seed", "NoneType"),
    (lambda: dropout_mask((3, 4), 0.5, (1, 2)), "seed", "tuple"),
]


def filled_cache():
    cache = nn.KeyValueCache()
    cache.append(K, K)
    return cache


def self_attention(**masks):
    return nn.MultiHeadAttention(16, 4)(*[torch.randn(5, 2, 16)] * 3, **masks)


BAD_MODULES = [
    (lambda: nn.MultiHeadAttention(16, 3), "embed_dim", "16", "3"),
    (lambda: nn.MultiHeadAttention(0, 1), "embed_dim", "0"),
    (lambda: nn.MultiHeadAttention(16, 0), "num_heads", "0"),
    (lambda: nn.MultiHeadAttention(16, 4, dropout=1.5), "dropout", "1.5"),
    (lambda: nn.MultiHeadAttention(16.0, 4), "MultiHeadAttention: embed_dim must be an integer, got 16.0"),
    (lambda: nn.MultiHeadAttention(16, 4, head_dim=16 / 4), "head_dim must be an integer, got 4.0"),
    (lambda: nn.MultiHeadAttention(16, 4, head_dim=0), "head_dim", "0"),
    (lambda: nn.MultiHeadAttention(16, 4, value_head_dim=-3), "value_head_dim", "-3"),
    (lambda: nn.MultiHeadAttention(16, 4, num_kv_heads=-1), "num_kv_heads must be positive, got -1"),
    (lambda: nn.MultiHeadAttention(16, 4, num_kv_heads=3), "num_kv_heads must divide num_heads, got 3 and 4"),
    # Arguments in another order: (n_head, d_model, d_k, d_v), (h, d_model) and (d_model, n_head, d_k, d_v).
    (lambda: nn.MultiHeadAttention(8, 512, 32, 32), "MultiHeadAttention(512, 8, head_dim=32)"),
    (lambda: nn.MultiHeadAttention(8, 512), "MultiHeadAttention(512, 8)"),
    (lambda: nn.MultiHeadAttention(512, 8, 64, 64), "MultiHeadAttention(512, 8, head_dim=64)"),
    (lambda: nn.MultiHeadAttention(512, 8, 64, 32), "MultiHeadAttention(512, 8, head_dim=64, value_head_dim=32)"),
    (lambda: nn.MultiHeadAttention(16, 1000, 62, 62), "MultiHeadAttention(1000, 16, head_dim=62)"),
    (lambda: nn.MultiHeadAttention(16, 4)(*[torch.randn(5, 2, 12)] * 3), "query", "12", "16"),
    (lambda: nn.MultiHeadAttention(16, 4)(*[torch.randn(5)] * 3), "query", "(5,)"),
    (lambda: nn.MultiHeadAttention(16, 4)(torch.randn(5, 2, 16), *[torch.randn(5, 3, 16)] * 2), "key", "3", "2"),
    (lambda: nn.MultiHeadAttention(16, 4)(torch.randn(5, 2, 16), *[torch.randn(5, 16)] * 2), "key", "2", "3"),
    (lambda: self_attention(attn_mask=torch.zeros(4, 5)), "attn_mask", "(4, 5)", "(5, 5)"),
    (lambda: self_attention(key_padding_mask=torch.zeros(5, 2)), "key_padding_mask", "(5, 2)", "(2, 5)"),
    (lambda: self_attention(key_padding_mask=torch.zeros(2, 5).int()), "key_padding_mask", "int32"),
    (lambda: nn.LayerNorm(8)(torch.randn(3, 9)), "normalized_shape", "9", "8"),
    (lambda: nn.Dropout(1.5), "dropout probability", "1.5"),
    (lambda: nn.SoftmaxDropout(-1), "p", "-1"),
    (lambda: nn.DropoutAddLayerNorm(8, p=2), "p", "2"),
    (lambda: nn.DropoutAddLayerNorm(8.0), "normalized_shape", "8.0"),
    (lambda: nn.MultiHeadAttention(8, 2, kdim=-3), "kdim", "-3"),
    (lambda: nn.MultiHeadAttention(8, 2, vdim=4.0), "vdim", "4.0"),
    (lambda: nn.KeyValueCache(-1), "max_length", "-1"),
    (lambda: nn.KeyValueCache().append(K, K[0]), "key", "value", "(4, 9, 8)"),
    (lambda: filled_cache().append(K.to("meta"), K.to("meta")), "key", "meta", "cpu"),
    (lambda: filled_cache().reorder([1, 0]), "index", "list"),
    (lambda: filled_cache().reorder(torch.tensor([True, False])), "index", "torch.bool"),
    (lambda: filled_cache().reorder(torch.tensor([[0]])), "index", "(1, 1)"),
    (lambda: filled_cache().reorder(torch.tensor([0, 2])), "index", "2"),
    (lambda: filled_cache().reorder(torch.tensor([-1, 0])), "index", "-1"),
    # backends
    (lambda: fastattn.backend("gpu").__enter__(), "gpu", "reference"),
    (lambda: fastattn.backend(None).__enter__(), "None", "reference"),
    (lambda: fastattn.backend(["cpu"]).__enter__(), "cpu", "reference"),
    (lambda: fastattn.explain(print, X), "print"),
]


CASES = [(*case, cases is BAD) for cases in (BAD, BAD_MODULES) for case in cases]


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{words[0]}" for n, (_, *words, _) in enumerate(CASES)])
def test_bad_input(case):
    """The message names everything in one line. Functions raise RuntimeError, as torch's do, before a seed is drawn."""
    call, *words, is_function = case
    state = torch.random.get_rng_state()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(word)}(?![\w]|\.\d)", message), f"{word!r} not in: {message}"
    assert "\n" not in message, message
    assert len(message) < 400, message
    if is_function:
        assert isinstance(caught.value, RuntimeError)
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["constant", "leaf"])
def test_bad_input_under_no_grad_and_with_gradients(requires_grad, context):
    """Bad input raises the same error with and without gradients."""
    with context(), pytest.raises(ValueError, match="key_lengths"):
        attention(Q.clone().requires_grad_(requires_grad), K, V, key_lengths=torch.tensor([3, 10]))
