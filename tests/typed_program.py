"""Calls every public function with the types that a user gives. `mypy --strict` checks it (tests/test_types.py).

`assert_type` states the type of each result: a call that returned Any would fail there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastattn
from fastattn.backends import Explanation
from fastattn.integrations import huggingface, registry

Pair = tuple[Tensor, Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool) -> None:
    lengths, mask = torch.tensor([5, 3]), torch.ones(6, 6, dtype=torch.bool)
    assert_type(fastattn.scaled_dot_product_attention(query, key, value), Tensor)
    assert_type(fastattn.scaled_dot_product_attention(query, key, value, mask, 0.1, True, enable_gqa=True), Tensor)
    assert_type(fastattn.scaled_dot_product_attention(query, key, value, return_lse=False), Tensor)
    assert_type(
        fastattn.scaled_dot_product_attention(query, key, value, key_lengths=lengths, return_lse=True, scale=0.5), Pair
    )
    assert_type(fastattn.scaled_dot_product_attention(query, key, value, return_lse=return_lse), Tensor | Pair)
    assert_type(fastattn.attention_weights(query, key, mask, window_size=(2, 0)), Tensor)


def packed_attention(tokens: Tensor, offsets: Tensor, *, return_lse: bool) -> None:
    sequences = offsets, offsets, 4, 4
    assert_type(fastattn.varlen_attn(tokens, tokens, tokens, *sequences, is_causal=True), Tensor)
    assert_type(fastattn.varlen_attn(tokens, tokens, tokens, *sequences, return_lse=True), Pair)
    assert_type(fastattn.varlen_attn(tokens, tokens, tokens, *sequences, return_lse=return_lse), Tensor | Pair)


def rows(x: Tensor, residual: Tensor, seed: Tensor, *, prenorm: bool) -> None:
    weight = torch.ones(x.size(-1))
    assert_type(fastattn.softmax_dropout(x, 0.1, is_causal=True, seed=seed), Tensor)
    assert_type(fastattn.layer_norm(x, (x.size(-1),), weight, eps=1e-6), Tensor)
    assert_type(fastattn.dropout_add_layer_norm(x, residual, weight, dropout_p=0.1), Tensor)
    assert_type(fastattn.dropout_add_layer_norm(x, residual, prenorm=True, out_dtype=torch.float32), Pair)
    assert_type(fastattn.dropout_add_layer_norm(x, residual, prenorm=prenorm), Tensor | Pair)
    assert_type(fastattn.dropout(x, 0.5, training=True, seed=seed), Tensor)
    assert_type(fastattn.dropout_mask((6, 6), 0.5, seed), Tensor)


def modules(x: Tensor, *, need_weights: bool) -> None:
    attend = fastattn.MultiHeadAttention(8, 2, batch_first=True)
    assert_type(attend(x, x, x, key_lengths=torch.tensor([5, 3])), Pair)
    assert_type(attend(x, x, x, need_weights=need_weights), tuple[Tensor, Tensor | None])
    assert_type(fastattn.MultiheadAttention(8, 2, batch_first=True).forward(x, x, x), Pair)
    assert_type(fastattn.LayerNorm(8)(x), Tensor)
    assert_type(fastattn.SoftmaxDropout(0.1)(x, is_causal=True), Tensor)
    assert_type(fastattn.Dropout(0.1)(x), Tensor)
    assert_type(fastattn.DropoutAddLayerNorm(8, p=0.1).forward(x, x), Tensor | Pair)
    cache = fastattn.KeyValueCache(16)
    assert_type(cache.append(x[:, None], x[:, None]), Pair)
    assert_type(cache.contents(), Pair)


def transformer(source: Tensor, target: Tensor) -> None:
    config = fastattn.TransformerConfig(
        vocab_size=16, d_model=8, num_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1
    )
    model = fastattn.Transformer(config).eval()
    assert_type(model(source, target), Tensor)
    with torch.no_grad():
        state = model.begin(source)
        assert_type(model.logits(model.step(target[:, :1], state)), Tensor)


def choices(x: Tensor) -> None:
    forced: AbstractContextManager[None] = fastattn.backend("reference")
    with forced, fastattn.intercept_sdpa():
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert_type(fastattn.checkpoint_contexts(), tuple[AbstractContextManager[None], AbstractContextManager[None]])
    explanation = fastattn.explain(fastattn.layer_norm, x, (8,))
    assert_type(explanation, Explanation)
    assert_type(explanation.backend, str | None)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert_type(fastattn.patch(model), fastattn.PatchReport)
    assert_type(fastattn.unpatch(model), fastattn.PatchReport)
    exported = torch.export.export(fastattn.LayerNorm(8), (x,))
    exported.run_decompositions(fastattn.decompositions())
    assert_type((huggingface.register, registry.handle.remove), tuple[Callable[[], None], Callable[[], None]])


def refused(x: Tensor) -> None:
    """Never called. With `--strict` an unneeded `type: ignore` is an error, so mypy must refuse each line."""
    fastattn.layer_norm(x)  # type: ignore[call-arg]
    fastattn.scaled_dot_product_attention(x, x, x, casual=True)  # type: ignore[call-overload]
    fastattn.dropout(x, "half")  # type: ignore[arg-type]
    fastattn.dropout_add_layer_norm(x, x, prenorm="yes")  # type: ignore[call-overload]
    fastattn.LayerNorm(8)(x, x)  # type: ignore[call-arg]
    fastattn.MultiHeadAttention(8, 2)(x, x, x, weights=True)  # type: ignore[call-overload]


def main() -> None:
    q, x, seed = torch.randn(2, 2, 6, 4), torch.randn(2, 6, 8), torch.tensor([1, 2])
    attention(q, q, q, return_lse=True)
    packed_attention(torch.randn(7, 2, 4), torch.tensor([0, 4, 7]), return_lse=True)
    rows(x, x, seed, prenorm=True)
    modules(x, need_weights=False)
    transformer(torch.randint(4, 16, (2, 5)), torch.randint(4, 16, (2, 5)))
    choices(x)


if __name__ == "__main__":
    main()
