"""Pack sequences of different lengths one after the other, so that padding costs neither time nor memory."""

import itertools

import torch

import fastattn

torch.manual_seed(0)
lengths = torch.tensor([5, 64, 17])
tokens, longest = int(lengths.sum()), int(lengths.max())
offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))  # sequence s is rows offsets[s:s + 2]

# Attention of operands (tokens, heads, head size). No token sees another sequence.
query, key, value = (torch.randn(tokens, 4, 32, requires_grad=True) for _ in range(3))
out = fastattn.varlen_attn(query, key, value, offsets, offsets, longest, longest, is_causal=True)
out.sum().backward()
print("packed", tuple(out.shape), "instead of padded", (len(lengths), longest, 4, 32))

# Each sequence has the same result as in a call by itself.
for start, end in itertools.pairwise(offsets.tolist()):
    q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
    alone = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[start:end], alone.transpose(0, 1))

# The module takes packed sequences (tokens, E) too, and nested tensors of layout jagged.
module = fastattn.MultiHeadAttention(128, 4, batch_first=True).eval()
x = torch.randn(tokens, 128)
attended, _ = module(x, x, x, need_weights=False, cu_seq_q=offsets, cu_seq_k=offsets, max_q=longest, max_k=longest)
jagged = torch.nested.nested_tensor_from_jagged(x, offsets)
nested, _ = module(jagged, jagged, jagged, need_weights=False)
torch.testing.assert_close(nested.values(), attended)
print("a module's output", tuple(attended.shape))
