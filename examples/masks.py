"""Combine masks: causal, padding, a window and a custom mask in one call, with dropout and a log-sum-exp."""

from functools import partial

import torch

import fastattn

torch.manual_seed(0)
query, key, value = torch.randn(3, 2, 8, 128, 64)  # (B, H, L, E) each

# The second sequence has 70 keys. Its other rows are padding and may hold any value.
key_lengths = torch.tensor([128, 70])
key[1, :, 70:] = value[1, :, 70:] = torch.nan

# Custom mask that hides every tenth key. True = takes part; it broadcasts to (B, H, Lq, Lk).
own = torch.arange(128) % 10 != 9

# A query sees itself and up to 31 keys before it, if all masks allow them.
attend = partial(
    fastattn.scaled_dot_product_attention, query, key, value,
    attn_mask=own, is_causal=True, key_lengths=key_lengths, window_size=(31, 0),
)  # fmt: skip
out, lse = attend(return_lse=True)
print("output", tuple(out.shape), "log-sum-exp", tuple(lse.shape))

# A query far behind the last key sees nothing: its output is 0 and its log-sum-exp -inf, never NaN.
assert not out.isnan().any()
assert (out[1, :, 110:] == 0).all()
assert (lse[1, :, 110:] == -torch.inf).all()

# Add dropout to these masks. On every backend, the seed and the position decide which weights are dropped.
seed = torch.tensor([1, 2])
dropped = attend(dropout_p=0.1, seed=seed)
with fastattn.backend("reference"):
    same = attend(dropout_p=0.1, seed=seed)
print("largest difference from plain PyTorch:", f"{(dropped - same).abs().max():.1e}")
torch.testing.assert_close(dropped, same)
