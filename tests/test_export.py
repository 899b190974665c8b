"""Exported programs. torch.export keeps fastattn's ops; decomposed, and in ONNX, they are torch's own with all masks
merged."""

import contextlib
import functools
import traceback

import pytest
import torch
from conftest import require_package, slow
from torch import nn

import fastattn
from fastattn import Transformer, dropout, layer_norm, scaled_dot_product_attention, softmax_dropout, varlen_attn

pytestmark = pytest.mark.torch_version
SEED = torch.tensor([3, 4])


class Call(nn.Module):
    """Module that calls a function, because exporters require a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Attend(nn.Module):
    """Module of causal self-attention over a padded batch, followed by dropout, addition and LayerNorm."""

    def __init__(self):
        super().__init__()
        self.attention = fastattn.MultiHeadAttention(16, 4, batch_first=True)
        self.normalise = fastattn.DropoutAddLayerNorm(16, 0.1)

    def forward(self, x, padding):
        out, weights = self.attention(x, x, x, padding, is_causal=True)
        return self.normalise(out, x), weights


class Encode(Transformer):
    """Module that runs the Transformer's encoder."""

    forward = Transformer.encode


def attention(heads=2):
    """Return operands of 5 queries and 7 keys. The last key is unused memory that holds NaN."""
    q, k, v = torch.randn(3, 5, 4, 8).transpose(1, 2), torch.randn(3, heads, 7, 8), torch.randn(3, heads, 7, 6)
    k[:, :, 6] = v[:, :, 6] = torch.nan
    return q, k, v


LENGTHS = torch.tensor([6, 0, 4])  # the second sequence has no keys
SEES = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
SEES[2] = False
BIAS = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2))
CU_SEQ = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
SIZES = fastattn.TransformerConfig(40, d_model=16, d_ff=32, num_heads=2, encoder_layers=2, decoder_layers=1)

# Cases by name: (module, its arguments).
CASES = {
    "attention": (
        Call(lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.3)),
        tuple(t[:, :, :6].nan_to_num() for t in attention(4)),
    ),
    "attention, causal": (
        Call(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)),
        attention(),
    ),
    "attention, every mask": (
        Call(lambda q, k, v, mask, lengths: scaled_dot_product_attention(
            q, k, v, mask, is_causal=True, enable_gqa=True, causal_variant="lower_right", key_lengths=lengths,
            window_size=(2, -1), return_lse=True,
        )),
        (*attention(), BIAS, LENGTHS),
    ),
    "attention, float16 beside a float32 mask": (
        Call(lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)),
        (*(t.nan_to_num().half() for t in attention()), BIAS),
    ),
    "weights": (
        Call(lambda q, k, v, mask, used: fastattn.attention_weights(q, k, mask, enable_gqa=True, key_lengths=used)),
        (*attention(), SEES, LENGTHS),
    ),
    "varlen": (
        Call(lambda q, k, v, cu_seq, used: varlen_attn(
            q, k, v, cu_seq, cu_seq, 7, 7, window_size=(3, 0), enable_gqa=True, seqused_k=used, return_lse=True
        )),
        (torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 6), CU_SEQ, torch.tensor([2, 0, 5])),
    ),
    "softmax_dropout": (
        Call(lambda x, mask: softmax_dropout(x, 0.0, mask, True, 0.5)), (torch.randn(2, 3, 5, 7), SEES)
    ),
    "layer_norm": (
        Call(lambda x, w, b: layer_norm(x, (4, 8), w, b)),
        (torch.randn(3, 4, 8), torch.randn(4, 8), torch.randn(4, 8)),
    ),
    "dropout_add_layer_norm": (
        Call(lambda x, r, w: fastattn.dropout_add_layer_norm(x, r, w, None, prenorm=True, out_dtype=torch.float16)),
        (torch.randn(3, 8).half(), torch.randn(3, 8), torch.randn(8)),
    ),
    "dropout of nothing": (
        Call(lambda x: dropout(x, 0.0) + dropout(x, 0.3, training=False) + fastattn.dropout_mask(x.shape, 0.0, SEED)),
        (torch.randn(3, 8),),
    ),
    "MultiHeadAttention": (Attend().eval(), (torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [0], [3]]))),
    "Transformer": (Encode(SIZES).eval(), (torch.randint(4, 40, (3, 5)), torch.tensor([5, 1, 3]))),
}  # fmt: skip
USUAL = ("attention, every mask", "Transformer")  # each takes seconds
UNUSUAL = [name for name in CASES if name not in USUAL]
EVERY = pytest.mark.parametrize("name", [*USUAL, *slow(*UNUSUAL)])


def ops(program):
    """Return the names of the ops that an exported program calls."""
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def assert_equal(found, wanted):
    """Assert equality to rounding, with fully masked rows exactly 0 and their log-sum-exp exactly -inf."""
    leaves = [torch.utils._pytree.tree_leaves(results) for results in (found, wanted)]
    for got, expected in zip(*leaves, strict=True):
        torch.testing.assert_close(got, expected)
        assert torch.equal(got == 0, expected == 0)


@functools.cache
def exported(name):
    return torch.export.export(*CASES[name])


@EVERY
@torch.no_grad()
def test_export_keeps_the_ops_and_decomposition_replaces_them(name):
    module, args = CASES[name]
    program = exported(name)
    for kept in (True, False):
        assert any(op.startswith("fastattn") for op in ops(program)) == kept
        assert_equal(program.module()(*args), module(*args))
        program = program.run_decompositions(fastattn.decompositions())


@pytest.mark.parametrize("active", [False, True], ids=["plain", "within intercept_sdpa"])
@torch.no_grad()
def test_decomposed_attention_is_torchs_function(active):
    """Decomposed attention is one call of torch's function, without the operations that only the log-sum-exp would
    need."""
    with fastattn.intercept_sdpa() if active else contextlib.nullcontext():
        program = exported("attention").run_decompositions(fastattn.decompositions())
    assert ops(program) == {"aten.scaled_dot_product_attention.default"}


@pytest.mark.slow
@torch.no_grad()
def test_decomposed_with_free_sizes():
    module, (*_, lengths) = CASES["attention, every mask"]
    length = torch.export.Dim("length", min=2, max=64)
    sizes = ({2: length}, {2: length}, {2: length}, {2: length, 3: length}, None)

    def args(n):
        return *(torch.randn(3, h, n, 8) for h in (4, 2, 2)), torch.randn(1, 4, n, n), lengths

    program = torch.export.export(module, args(9), dynamic_shapes={"args": sizes})
    program = program.run_decompositions(fastattn.decompositions())
    for n in (9, 23):
        inputs = args(n)
        assert_equal(program.module()(*inputs), module(*inputs))


@pytest.mark.parametrize(
    ("name", "from_export"),
    [
        (USUAL[0], False),
        *(pytest.param(name, name == USUAL[0], marks=pytest.mark.slow) for name in USUAL),
        *(pytest.param(name, False, marks=[pytest.mark.slow, pytest.mark.this_torch]) for name in UNUSUAL),
    ],
)
@torch.no_grad()
def test_onnx(name, from_export):
    """ONNX Runtime computes the module's results from the module and from the exported program."""
    require_package("onnxscript")
    require_package("onnxruntime")
    module, args = CASES[name]
    given = (exported(name),) if from_export else (module, args)
    program = torch.onnx.export(*given, dynamo=True, verbose=False)
    assert {node.op_type for node in program.model_proto.graph.node}.isdisjoint({"Dropout", "RandomUniform"})
    assert_equal(program(*args), module(*args))


DROPPING = {
    "attention": lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "softmax_dropout": lambda x: softmax_dropout(x, 0.1),
    "dropout_add_layer_norm": lambda x: fastattn.dropout_add_layer_norm(x, x, dropout_p=0.1),
    "dropout": lambda x: dropout(x, 0.1),
    "dropout_mask": lambda x: fastattn.dropout_mask(x.shape, 0.1, SEED),
    "varlen_attention": lambda x: varlen_attn(x[0], x[0], x[0], CU_SEQ, CU_SEQ, 7, 7, dropout_p=0.1),
}


@pytest.mark.parametrize("name", DROPPING)
@torch.no_grad()
def test_dropout_is_kept_and_not_decomposed(name):
    x = torch.randn(1, 10, 4, 8)
    program = torch.export.export(Call(DROPPING[name]), (x,))
    torch.manual_seed(5)
    found = program.module()(x)
    torch.manual_seed(5)
    assert_equal(found, DROPPING[name](x))
    with pytest.raises(ValueError, match=rf"{name} with dropout .*\(model\.eval\(\)\)"):
        program.run_decompositions(fastattn.decompositions())


@pytest.mark.slow
@torch.no_grad()
def test_dropout_is_no_part_of_onnx():
    require_package("onnxscript")
    with pytest.raises(Exception) as caught:  # noqa: PT011 the exporter wraps it in its own
        torch.onnx.export(Attend().train(), CASES["MultiHeadAttention"][1], dynamo=True, verbose=False)
    formatted = "".join(traceback.format_exception(caught.value))  # with its causes
    assert "dropout_add_layer_norm with dropout" in formatted
