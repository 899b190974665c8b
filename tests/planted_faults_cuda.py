"""Compare one operation of an emulated CUDA library with the reference, several times, in different orders of threads.

It runs in a process of its own (preloaded.py), because a process can hold only one such library. It raises if the
results differ or the emulation finds a fault.
"""

import functools

import torch
from oracle import gradients

import fastattn
from emulation import load, strict

SEED = torch.tensor([4, 5])


def dropout():
    """Yield (function, operands): a multiple of 16 bytes in all."""
    yield lambda x: fastattn.dropout(x, 0.3, seed=SEED), [torch.randn(3, 36, 41)]


def layer_norm():
    """Yield rows of a warp (41 columns) and of a block (600, a multiple of 8)."""
    for n in (41, 600):
        call = functools.partial(fastattn.dropout_add_layer_norm, dropout_p=0.3, prenorm=True, seed=SEED)
        yield call, [*torch.randn(2, 10, n), *torch.randn(2, n)]


def softmax_dropout():
    for n in (44, 600):
        mask = torch.rand(10, n) > 0.3
        yield lambda x, mask=mask: fastattn.softmax_dropout(x, 0.3, mask, scale=0.5, seed=SEED), [torch.randn(2, 10, n)]


def attention():
    """Yield split keys, some of which hold NaN, in float32 and float16, on aligned and unaligned rows."""
    window = {"window_size": (250, 0), "causal_variant": "lower_right"}
    for dtype, size in ((torch.float32, 20), (torch.float16, 40), (torch.float16, 13)):
        query, key, value = (torch.randn(2, h, n, size).to(dtype) for h, n in ((4, 3), (2, 300), (2, 300)))
        key[1, :, 37:] = value[1, :, 37:] = torch.nan
        for masks in ({}, {"attn_mask": torch.rand(300) < 0.7, **window}):
            options = {"enable_gqa": True, "key_lengths": torch.tensor([300, 37]), "return_lse": True, **masks}
            yield functools.partial(fastattn.scaled_dot_product_attention, **options), [query, key, value]


def main(path, operation):
    loaded = load(path)
    run = gradients if operation != "attention" else lambda function, operands: function(*operands)
    torch.set_num_threads(1)
    for order in range(3):
        torch.manual_seed(order)
        loaded[1].seed_order(order)
        with strict(loaded):
            for problem in globals()[operation]():
                ours, wanted = (fastattn.backend(name)(run)(*problem) for name in ("cuda", "reference"))
                # Float32 sums in another order differ by some 1e-6; a fault changes whole elements.
                torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
