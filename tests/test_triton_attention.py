"""Tests of Triton's attention only: lists of the tiles that a mask leaves, split-KV, tensor descriptors."""

# ruff: noqa: E402 (where Triton is not installed, nothing here can be imported)

import math
import sys

import pytest
import torch
from conftest import require, slow
from oracle import visible
from pairs import pairwise
from test_attention import check

require("triton", allow_module_level=True)

import triton
import triton.language as tl
from interpreter import strict
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn import backend
from fastattn.backends.schema import AttentionArgs, AttentionBackwardArgs, VarlenAttentionArgs
from fastattn.backends.triton.attention import _Call, attention, attention_backward, tiles
from fastattn.backends.triton.kernel import cdiv
from fastattn.backends.triton.visibility import Window, band_of, owned, visible_part, visible_tiles

SEED = torch.tensor([5, 6])
TILE = tiles.Tile(32, 64, 4, 1)


def finite(window, m, n, lower_right=False):
    """Return the window as the backend functions get it: a distance that reaches every position replaces -1."""
    return tuple(
        most if side < 0 else side for side, most in zip(window, (n, m) if lower_right else (m, n), strict=True)
    )


def call(query, key, value, attn_mask=None, lengths=None, seed=None, window=(-1, -1), lower_right=False, p=0.0):
    scale, window = 1 / math.sqrt(query.size(-1)), finite(window, query.size(2), key.size(2), lower_right)
    threshold = int(p * 65536 + 0.5)
    args = AttentionArgs(query, key, value, attn_mask, lengths, seed, scale, *window, lower_right, threshold)
    return attention(args)[:3]


def attention_call(query, key, value, attn_mask=None, lengths=None, window=(-1, -1)):
    window = finite(window, query.size(2), key.size(2))
    return _Call(AttentionArgs(query, key, value, attn_mask, lengths, None, 1.0, *window, False, 0))


@pytest.mark.parametrize(
    ("window", "keys_own", "counts"),
    [
        ((-1, -1), False, [[[1, 1]] * 4, [[4, 1]] * 4]),
        ((-1, -1), True, [[[3, 1], [0, 4], *[[0, 0]] * 3], [[3, 1]] * 5]),
        ((70, 10), False, [[[0, 1], *[[0, 2]] * 3]] * 2),
        ((70, 10), True, [[[0, 4], [0, 3], *[[0, 0]] * 3], [[0, 4], [0, 3], [0, 1], *[[0, 0]] * 2]]),
    ],
)
def test_lists_name_the_tiles_that_a_mask_leaves(window, keys_own, counts):
    """The numbers of full and partial tiles are known for 100 queries in tiles of 32, and 300 keys in tiles of 64 of
    which the first sequence sees 100. Every result depends on the right tiles being listed."""
    tensors = [torch.empty(2, 2, size, 8) for size in (100, 300, 300)]
    padding = torch.arange(300) < torch.tensor([100, 300]).view(2, 1, 1, 1)
    with strict():
        (lists, *_), _ = attention_call(*tensors, padding, torch.tensor([200, 300]), window).lists(TILE, keys_own)
    assert lists[:, 0, :, :2].tolist() == counts


@triton.jit
def _tiles_of(
    ranges, parts, seqlen_q, length, left, right, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, LOWER_RIGHT: tl.constexpr, KEYS_OWN: tl.constexpr,
):  # fmt: skip
    """Store ``visible_tiles`` of each owned tile, (tiles, 4), and its ``visible_part`` of each other tile, (tiles,
    count, 2)."""
    tile = tl.program_id(0)
    band = band_of(length, seqlen_q, Window(left, right), LOWER_RIGHT)
    last, band = owned(tile * SIZE, SIZE, seqlen_q, band, KEYS_OWN)
    begin, full_begin, full_end, end = visible_tiles(tile * SIZE, last, band, BLOCK)
    tl.store(ranges + 4 * tile, begin)
    tl.store(ranges + 4 * tile + 1, full_begin)
    tl.store(ranges + 4 * tile + 2, full_end)
    tl.store(ranges + 4 * tile + 3, end)
    for other in range(count):
        some, every = visible_part(tile * SIZE, last, other * BLOCK, other * BLOCK + BLOCK - 1, band)
        tl.store(parts + 2 * (tile * count + other), some)
        tl.store(parts + 2 * (tile * count + other) + 1, every)


@pairwise(
    window=[(-1, -1), (-1, 0), (20, 45), *slow((40, 0), (0, -1), (0, 0), (63, 31))],
    sizes=[(100, 75, 75), (37, 150, 130), (64, 96, 0), (1, 33, 33), (90, 40, 7)],
    lower_right=[False, True],
    keys_own=[*slow(False), True],
)
def test_tiles_that_a_window_leaves(window, sizes, lower_right, keys_own):
    """The ranges of tiles agree with a mask of all pairs. A tile is full iff it exists and each of its pairs with the
    existing part of the owned tile is visible, however ragged that is. No tile of a visible pair is missing."""
    size, block = 32, 16
    m, n, length = sizes
    own_count, other_count, other_end = (n, m, m) if keys_own else (m, n, length)
    pairs = visible(
        (1, 1, m, n), None, window_size=window, key_lengths=torch.tensor([length]),
        causal_variant="lower_right" if lower_right else "upper_left",
    )[0, 0]  # fmt: skip
    pairs, exist = (pairs.mT, length) if keys_own else (pairs, m)
    ranges = torch.zeros(cdiv(own_count, size), 4, dtype=torch.int32)
    parts = torch.zeros(len(ranges), cdiv(other_count, block), 2, dtype=torch.bool)
    _tiles_of[(len(ranges),)](
        ranges, parts, m, length, *finite(window, m, n, lower_right), parts.size(1), size, block, lower_right, keys_own
    )
    for tile, (begin, full_begin, full_end, end) in enumerate(ranges.tolist()):
        assert 0 <= begin <= full_begin <= full_end <= end <= parts.size(1)
        rows = pairs[tile * size : min((tile + 1) * size, exist)]
        for other in range(parts.size(1)):
            block_pairs = rows[:, other * block : (other + 1) * block]
            every = len(rows) > 0 and (other + 1) * block <= other_end and bool(block_pairs.all())
            some, all_visible = parts[tile, other].tolist()
            assert (some and all_visible) == every == (full_begin <= other < full_end), (tile, other)
            if block_pairs.any():
                assert some, (tile, other)
                assert begin <= other < end, (tile, other)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        *slow(
            {"window_size": (200, 0), "causal_variant": "lower_right"},
            {"attn_mask": lambda: torch.randn(2, 1, 300).masked_fill(torch.rand(2, 1, 300) < 0.5, -math.inf)},
            {"seed": SEED, "dropout_p": 0.3},
        ),
    ],
    ids=["plain", "window", "mask", "dropout"],
)
def test_splits_of_the_keys_merge(options, dtype, monkeypatch):
    """Splits of many keys merge for few queries; a program's split may be empty."""
    monkeypatch.setattr(tiles, "num_splits", lambda programs, key_tiles, device: 3)
    query, key, value = (torch.randn(3, h, n, e).to(dtype) for h, n, e in ((2, 5, 32), (1, 300, 32), (1, 300, 24)))
    key[2, :, 130:] = value[2, :, 130:] = math.nan
    options = {name: option() if name == "attn_mask" else option for name, option in options.items()}
    with strict(twice=not options), backend("triton"):
        check(query, key, value, key_lengths=torch.tensor([300, 0, 130]), enable_gqa=True, **options)


DESCRIBED = {
    "plain": {"scale": -0.1},
    "lower right": {"window_size": (-1, 30), "causal_variant": "lower_right"},
    "window": {"window_size": (70, 130)},
    "lengths": {"key_lengths": torch.tensor([150, 70])},
    "lengths, dropout": {"key_lengths": torch.tensor([0, 100]), "seed": SEED, "dropout_p": 0.3},
    "bool": {"attn_mask": lambda: (torch.rand(2, 1, 80, 150) < 0.3) | (torch.arange(150) < 128)},
    "float": {
        "attn_mask": lambda: (torch.randn(1, 4, 80, 150) * (torch.arange(150) >= 128)).masked_fill(
            (torch.rand(150) < 0.3) & (torch.arange(150) >= 128), -math.inf
        )
    },
}


@pytest.fixture
def described(monkeypatch):
    """Return the list of the tensors that descriptors are made of, however few rows they have."""
    tensors, examine = [], TensorDescriptor.__post_init__
    monkeypatch.setattr(tiles, "DESCRIPTOR_ROWS", 1)
    if not tiles.has_descriptors(1, torch.get_default_device()):
        pytest.skip("everything is read by pointers on this GPU")
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda self: (examine(self), tensors.append(self.base))[0])
    return tensors


@pytest.mark.parametrize("options", ["bool", *slow(*(name for name in DESCRIBED if name != "bool"))])
def test_tensor_descriptors(options, described):
    """Full tiles are read through tensor descriptors, forward and backward. Head sizes are padded, tiles reach beyond
    the last key and query, and keys that nothing sees hold NaN. The heads of a query and of a key lie within a row of
    memory, those of values one by one."""
    sizes = (64, 64) if options == "plain" else (80, 24)
    options = {name: option() if name == "attn_mask" else option for name, option in DESCRIBED[options].items()}
    query, key = (torch.randn(2, n, h, sizes[0]).bfloat16().transpose(1, 2) for h, n in ((4, 80), (2, 150)))
    value = torch.randn(2, 2, 150, sizes[1]).bfloat16()
    unseen = torch.arange(150) >= options.get("key_lengths", torch.tensor([150, 150]))[:, None]
    if "attn_mask" in options and options["attn_mask"].dtype != torch.bool:
        unseen = (options["attn_mask"] == -math.inf).all(2)[:, 0].expand(2, 150)
    for tensor in (key, value):
        tensor.masked_fill_(unseen[:, None, :, None], math.nan)
    with strict(), backend("triton"):
        check(query, key, value, enable_gqa=True, **options)
    found = [tensor.stride() for tensor in described]
    grad_stride = 4 * 80 * sizes[1], 80 * sizes[1], sizes[1], 1
    assert {*found} == {query.stride(), key.stride(), value.stride(), grad_stride}
    assert found.count(key.stride()) == 2 * found.count(query.stride())  # keys: forward and dQ; queries: dK and dV


@pytest.mark.parametrize(
    "layout",
    ["heads within rows", *slow("one for all heads", "odd rows", "every other column")],
)
def test_descriptors_of_any_output_gradient(layout, described, monkeypatch):
    """The gradients through descriptors are those through pointers, whatever the strides of the output's gradient."""
    query, key, value = (torch.randn(1, 2, n, 64).bfloat16() for n in (80, 150, 150))
    args = AttentionArgs(query, key, value, None, None, None, 0.125, 80, 150, False, 0)
    grad = {
        "heads within rows": lambda: torch.randn(1, 80, 2, 64).bfloat16().transpose(1, 2),
        "one for all heads": lambda: torch.randn(1, 1, 80, 64).bfloat16().expand(1, 2, 80, 64),
        "odd rows": lambda: torch.randn(1, 2, 80, 65).bfloat16()[..., 1:],
        "every other column": lambda: torch.randn(1, 2, 80, 128).bfloat16()[..., ::2],
    }[layout]()
    with strict():
        out, _, stats, residual = attention(args)
        backward = AttentionBackwardArgs(grad, None, out, stats, residual, args, False)
        described.clear()
        got = attention_backward(backward)
        assert ({t.shape for t in described} == {key.shape}) == (layout == "one for all heads")
        monkeypatch.setattr(tiles, "DESCRIPTOR_ROWS", 10**9)
        for kernel in ("grad_query", "grad_key_value"):
            monkeypatch.setitem(tiles.HALF, f"{kernel}_pointers", tiles.HALF[kernel])
        wanted = attention_backward(backward)
    for g, w in zip(got, wanted, strict=True):  # the same products in the same order, so the same bits
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def test_what_has_descriptors(monkeypatch):
    """Half-precision operands are read through descriptors. Short or unaligned ones, and devices without descriptors,
    use pointers."""

    def is_described(key, rows=1, capability=(9, 0), size=None, mask=None):
        monkeypatch.setattr(tiles, "DESCRIPTOR_ROWS", rows)
        monkeypatch.setattr(tiles, "capability", lambda device: capability)
        described = attention_call(key, key, key[..., :size], mask)
        found = described.descriptors(described.problem[1:3], key.size(2), 32)
        assert found == (None, None) or all(isinstance(one, TensorDescriptor) for one in found)
        return found != (None, None)

    key, odd, wide = (torch.empty(2, 3, 40, size, dtype=torch.bfloat16) for size in (64, 68, 136))
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    for described in (key, key[..., :56], key[..., ::2]):  # the last is copied first
        assert is_described(described)
    assert is_described(key.half(), capability=(10, 3))
    assert is_described(key, mask=mask)
    assert is_described(key, size=8)
    for other in (key.float(), key[:0], key[:, :1].expand(2, 3, 40, 64), key[..., :60], key[..., 4:36], odd[..., :64]):
        assert not is_described(other)
    for options in ({"rows": 41}, {"capability": (8, 9)}, {"capability": (12, 0)}, {"size": 0}):
        assert not is_described(key, **options)
    assert not is_described(wide, mask=mask)


def test_every_kind_of_operands_has_tiles():
    """No kind of operands lacks a tile."""
    for lines in (tiles.HALF, tiles.HALF_10):
        for kernel in ("forward", "grad_query", "grad_key_value"):
            for kind in ("regular", "pointers", "irregular", "masked", "float_masked"):
                assert lines.get(f"{kernel}_{kind}", lines[kernel]).keys() == {64, 128, 256}


def test_number_of_splits():
    device = torch.device("cpu")
    assert tiles.num_splits(1, 3, device) == 1  # few keys
    assert tiles.num_splits(1000, 500, device) == 1  # many programs
    assert tiles.num_splits(8, 500, device) == tiles.multiprocessors(device) // 8
    assert tiles.num_splits(1, 10**6, device) == 64
    assert tiles.num_splits(0, 3, device) == 1  # no programs


@pytest.fixture
def precisions(monkeypatch):
    """Return the list of the precisions of the attention kernels started. Afterwards, restore torch's own setting."""
    module, found = sys.modules["fastattn.backends.triton.attention"], []

    def launch(*arguments, launch=module.launch, **constants):
        if "PRECISION" in constants:
            found.append(constants["PRECISION"])
        launch(*arguments, **constants)

    monkeypatch.setattr(module, "launch", launch)
    before = torch.backends.cuda.matmul.fp32_precision
    yield found
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(("name", "value"), [("allow_tf32", True), ("fp32_precision", "tf32")])
def test_tf32_where_torch_allows_it(precisions, name, value):
    """Either of torch's settings allows tf32. Reading the older one raises once the newer one has been used."""
    query = torch.randn(1, 1, 4, 16)
    call(query, query, query)
    setattr(torch.backends.cuda.matmul, name, value)
    call(query, query, query)
    call(*[query.bfloat16()] * 3)
    assert precisions == ["ieee", "tf32", "ieee"]


@pytest.mark.parametrize(("capability", "largest"), [((9, 0), 128), ((10, 0), 64), ((12, 0), 64)])
def test_tf32_where_it_fits(monkeypatch, precisions, capability, largest):
    monkeypatch.setattr(tiles, "capability", lambda device: capability)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    query, mask = torch.randn(1, 1, 4, 128), torch.ones(4, 4, dtype=torch.bool).tril().expand(1, 1, 4, 4)
    for size in (64, 128):
        call(*[query[..., :size].contiguous()] * 3)
        call(*[query[..., :size].contiguous()] * 3, mask)
    assert precisions == ["tf32", "tf32", "tf32", "tf32" if largest == 128 else "ieee"]


@pytest.mark.slow
def test_positions_beyond_2_to_the_30():
    """A window at the end of 2**30 + 64 keys, which share their memory, is right: its sums with positions stay within
    32 bits."""
    keys = 2**30 + 64
    key, value = torch.randn(1, 1, 1, 16).expand(1, 1, keys, 16), torch.randn(1, 1, 1, 24).expand(1, 1, keys, 24)
    out, lse, _ = call(torch.zeros(1, 1, 3, 16), key, value, window=(64, -1), lower_right=True)
    torch.testing.assert_close(out, value[:, :, :3])
    torch.testing.assert_close(lse, torch.tensor([67.0, 66.0, 65.0]).log().view(1, 1, 3))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_numbers_of_rows_lie_where_the_hint_says(heads, length):
    """The float32 numbers of a dense head's rows lie side by side, from a multiple of 16 bytes on. The interpreter does
    not check the hint that says so."""
    dense, packed = torch.randn(2, heads, length, 16), torch.randn(length, heads, 16)
    starts = torch.tensor([0, length])
    of_dense = AttentionArgs(*[dense] * 3, None, None, None, 0.5, length, length, True, 0)
    of_packed = VarlenAttentionArgs(*[packed] * 3, starts, starts, None, None, *[length] * 2, 0.5, *[length] * 2, 0)
    for args in (of_dense, of_packed):
        rows = _Call(args)._rows(torch.zeros(2, *args.query.shape[:-1]))
        if args is of_packed:  # a sequence begins anywhere
            assert rows.row == heads
            continue
        assert rows.row is None
        for number in rows[:3]:
            assert number.stride(2) == 1
            assert (number.data_ptr() | 4 * rows.batch | 4 * rows.head) % 16 == 0
