"""Tests of operands whose memory the backward pass or a kernel may not simply read: changed, lazy, of inference
mode."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from conftest import DEVICE, require, slow, this_torch
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import fastattn
from fastattn import dropout, layer_norm, scaled_dot_product_attention, softmax_dropout, varlen_attn

L, E = 9, 8
OFFSETS = torch.tensor([0, 4, L])


def operand(*shape):
    return torch.randn(shape).requires_grad_()


def dense(**options):
    return lambda leaf: scaled_dot_product_attention(leaf, leaf, leaf, **options)


def packed(**options):
    offsets = options.pop("offsets", OFFSETS)
    return lambda leaf: varlen_attn(leaf[0], leaf[0], leaf[0], offsets, offsets, L, L, **options)


def jagged_heads(offsets):
    def call(leaf):
        heads = torch.nested.nested_tensor_from_jagged(leaf[0], offsets).transpose(1, 2)
        return scaled_dot_product_attention(heads, heads, heads).values()

    return call


def jagged_module(offsets):
    def call(leaf):
        x = torch.nested.nested_tensor_from_jagged(leaf[0, 0], offsets)
        out, weights = MODULE(x, x, x)
        return (x + out).values() + weights.square().sum()

    return call


def module(name, **options):
    """Return a call of the module with the argument as its mask of this name."""
    return lambda mask: lambda leaf: MODULE(leaf[0], leaf[0], leaf[0], **{name: mask}, **options)[0]


MASK, FLOATS, SEED = torch.randn(L, L) > 0, torch.linspace(-1, 1, L * L).view(L, L), torch.tensor([3, 4])
MODULE = fastattn.MultiHeadAttention(E, 2, batch_first=True)

# Calls by the argument that is changed: the call, the argument, and a function that changes it.
CHANGED = {
    "attention, mask": (lambda mask: dense(attn_mask=mask), MASK, torch.logical_not),
    "attention, expanded mask": (lambda mask: dense(attn_mask=mask.expand(1, L, L, L)), MASK, torch.logical_not),
    "attention, lengths": (lambda lengths: dense(key_lengths=lengths), torch.tensor([5]), lambda t: t + 2),
    "attention, seed": (lambda seed: dense(dropout_p=0.5, seed=seed), SEED, lambda t: t + 1),
    "softmax_dropout, mask": (
        lambda mask: lambda leaf: softmax_dropout(leaf @ leaf.mT, attn_mask=mask), MASK, torch.logical_not,
    ),
    "packed, offsets": (lambda offsets: packed(offsets=offsets), OFFSETS.clone(), lambda t: t - (t == 4).long()),
    "packed, used": (lambda used: packed(seqused_k=used), torch.tensor([3, 5]), lambda t: t - 1),
    "packed, seed": (lambda seed: packed(dropout_p=0.5, seed=seed), SEED, lambda t: t + 1),
    "module, float padding": (module("key_padding_mask", need_weights=False), FLOATS, torch.zeros_like),
    "module with weights, float padding": (module("key_padding_mask"), FLOATS, torch.zeros_like),
    "module with weights, float mask": (module("attn_mask"), FLOATS, torch.zeros_like),
    "jagged heads, offsets": (jagged_heads, OFFSETS.clone(), lambda t: t - (t == 4).long()),
    "jagged module, offsets": (jagged_module, OFFSETS.clone(), lambda t: t - (t == 4).long()),
    "dropout, seed": (lambda seed: lambda leaf: dropout(leaf, seed=seed), SEED, lambda t: t + 1),
    "dropout_add_layer_norm, seed": (
        lambda seed: lambda x: fastattn.dropout_add_layer_norm(x, x, dropout_p=0.5, seed=seed), SEED, lambda t: t + 1,
    ),
}  # fmt: skip


COPIES = {"in place": torch.Tensor.copy_, "through numpy": lambda changed, new: np.copyto(changed.numpy(), new.numpy())}


def gradient(out, leaf):
    return torch.autograd.grad(out.square().sum(), leaf)[0]


def assert_may_change(case):
    call, argument, change = CHANGED[case]
    leaf = operand(1, L, L, E)
    wanted = gradient(call(argument)(leaf), leaf)
    for change_to in COPIES.values():
        changed = argument.clone()
        out = call(changed)(leaf)
        change_to(changed, change(changed))
        assert torch.equal(gradient(out, leaf), wanted)
        assert not torch.equal(changed, argument)
    with torch.inference_mode():
        made = argument.clone()
    assert torch.equal(gradient(call(made)(leaf), leaf), wanted)


@pytest.mark.parametrize("case", CHANGED)
def test_arguments_without_a_gradient_may_change_before_the_backward_pass(backend, case):
    """The gradient is that of the argument at the call. Autograd does not notice a change through numpy, and torch's
    function is safe because it copies a mask. An argument made in inference mode serves too."""
    assert_may_change(case)


@pytest.mark.parametrize("case", CHANGED)
def test_arguments_of_plain_calls_may_change_before_the_backward_pass(case):
    """No backend is forced, so a library's fast path makes the copies."""
    assert_may_change(case)


@pytest.mark.torch_version
@pytest.mark.parametrize("case", [case for case in CHANGED if not case.startswith(("dropout", "jagged"))])
def test_arguments_may_change_before_the_backward_pass_of_a_transform(case):
    """Inside a transform a conversion without effect returns another tensor of the same memory. Transforms do not
    support nested tensors."""
    call, argument, change = CHANGED[case]
    leaf, changed = operand(1, L, L, E).detach(), argument.clone()
    found = []
    for given in (argument, changed):
        out, pull = torch.func.vjp(lambda leaf, given=given: call(given)(leaf), leaf)
        if given is changed:
            changed.copy_(change(changed))
        found += pull(torch.ones_like(out))
    assert torch.equal(*found)


def test_a_float_mask_that_is_changed_raises_as_torchs_does():
    for function in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        leaf, mask = operand(1, 2, L, E), torch.zeros(L, L)
        out = function(leaf, leaf, leaf, mask)
        mask += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_copy_of_a_mask_is_not_expanded():
    """The saved copy of a mask that is broadcast over heads has no more elements than the mask's own memory."""
    leaf, mask = operand(2, 4, L, E), torch.ones(L, L, dtype=torch.bool).expand(2, 4, L, L)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        scaled_dot_product_attention(leaf, leaf, leaf, mask)
    (copy,) = [tensor for tensor in saved if tensor.dtype == torch.bool]
    assert copy.untyped_storage().nbytes() == L * L
    assert copy.shape == mask.shape


# Calls of every operation with a gradient, by name.
PLAIN = {
    "attention": dense(is_causal=True, dropout_p=0.3, seed=SEED),
    "packed": packed(dropout_p=0.3, seed=SEED),
    "softmax_dropout": lambda leaf: softmax_dropout(leaf, 0.3, MASK[:, :E], seed=SEED),
    "layer_norm": lambda leaf: layer_norm(leaf, (E,)),
    "dropout_add_layer_norm": lambda leaf: fastattn.dropout_add_layer_norm(leaf, leaf, dropout_p=0.3, seed=SEED),
    "dropout": lambda leaf: dropout(leaf, 0.3, seed=SEED),
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "deterministic": deterministic,
    "saved in bytes": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.shape, t.dtype, t.contiguous().view(-1).view(torch.uint8).clone()),
        lambda kept: kept[2].view(kept[1]).view(kept[0]),
    ),
}


@pytest.mark.torch_version
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", PLAIN)
def test_modes_of_autograd(call, mode):
    """Plain calls have the same gradient in these modes."""
    leaf = operand(1, L, L, E)
    wanted = gradient(PLAIN[call](leaf), leaf)
    with MODES[mode]():
        assert torch.equal(gradient(PLAIN[call](leaf), leaf), wanted)


def test_anomaly_mode_names_the_operation(backend):
    """A NaN that the backward pass makes is an error that names the node."""
    leaf = operand(1, L, L, E)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="fastattn_layer_norm"):
        (layer_norm(leaf, (E,)) * math.inf).sum().backward()


@pytest.fixture
def kernels_of_cpu():
    """Require the kernels that refuse freed storage. Without them such a test could end the process."""
    if DEVICE != "cpu":
        pytest.skip("for CPU tensors")
    require("cpu")


def freed(*shape, dtype=torch.float32):
    tensor = torch.ones(shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


HEADS = torch.ones(1, L, L, E)
FREED = {
    "query": lambda: scaled_dot_product_attention(freed(1, L, L, E), HEADS, HEADS),
    "bool mask": lambda: scaled_dot_product_attention(HEADS, HEADS, HEADS, freed(1, 1, L, L, dtype=torch.bool)),
    "packed value": lambda: varlen_attn(HEADS[0], HEADS[0], freed(L, L, E), OFFSETS, OFFSETS, L, L),
    "weight": lambda: layer_norm(HEADS, (E,), freed(E)),
    "residual": lambda: fastattn.dropout_add_layer_norm(HEADS, freed(1, L, L, E)),
    "softmax_dropout": lambda: softmax_dropout(freed(1, L, L, E)),
    "dropout": lambda: dropout(freed(1, L, L, E), seed=SEED),
}


@pytest.mark.usefixtures("kernels_of_cpu")
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("case", FREED)
def test_an_operand_whose_storage_was_freed_is_refused(case, is_plain):
    """FSDP frees parameters so. The kernels would read from address 0, or take a weight as absent."""
    with contextlib.nullcontext() if is_plain else fastattn.backend("cpu"), pytest.raises(RuntimeError, match="freed"):
        FREED[case]()


@pytest.mark.usefixtures("kernels_of_cpu")
def test_an_operand_whose_storage_was_freed_before_the_backward_pass_is_refused():
    leaf, key, weight = operand(1, L, L, E), torch.ones(1, L, L, E), torch.ones(E)
    outs = scaled_dot_product_attention(leaf, key, key), layer_norm(leaf, (E,), weight)
    for tensor, out in zip((key, weight), outs, strict=True):
        tensor.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="freed"):
            out.sum().backward()


def negated(tensor):
    """Return the negated tensor as a view that torch negates when it reads it, like ``z.conj().imag`` but
    contiguous."""
    view = torch._neg_view(tensor.detach())
    assert view.is_neg()
    return view


def zeros(tensor):
    """Return zeros without memory, as torch makes them for gradients that it knows to be 0."""
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


LAZY = {
    "attention": lambda t: scaled_dot_product_attention(t, t, t, t[0, 0, :, :1]),
    "attention_weights": lambda t: fastattn.attention_weights(t, t, t[0, 0, :, :1]),
    "varlen_attn": lambda t: varlen_attn(t[0], t[0], t[0], OFFSETS, OFFSETS, L, L),
    "softmax_dropout": lambda t: softmax_dropout(t, attn_mask=t[:, :1]),
    "layer_norm": lambda t: layer_norm(t, (E,), t[0, 0, 0], t[0, 0, 1]),
    "dropout_add_layer_norm": lambda t: fastattn.dropout_add_layer_norm(t, t, t[0, 0, 0], t[0, 0, 1]),
    "dropout": lambda t: dropout(t, seed=torch.tensor([1, 2])),
}


QUICK = [("softmax_dropout", negated), ("layer_norm", negated), ("dropout", zeros)]
OTHERS = [*((name, negated) for name in LAZY if (name, negated) not in QUICK), ("layer_norm", zeros)]


@pytest.mark.parametrize(
    ("name", "lazy"), [*(pytest.param(*case, marks=pytest.mark.representative) for case in QUICK), *OTHERS]
)
def test_lazy_operands(backend, name, lazy):
    """Lazy operands give the results of plain ones. A kernel that reads their memory would miss the sign, or find
    none."""
    function, given = LAZY[name], lazy(torch.randn(1, L, L, E))
    assert torch.equal(function(given), function(given.clone()))
    grads = []
    for convert in (torch.Tensor.detach, torch.Tensor.clone):
        leaf = convert(given).detach().requires_grad_()
        out = function(leaf)
        grad_out = convert(lazy(torch.linspace(0, 1, out.numel()).view(out.shape)))
        grads += torch.autograd.grad(out, leaf, grad_out)
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", ["LayerNorm", "DropoutAddLayerNorm", "patched"])
def test_gradients_per_sample(kind):
    """Gradients per sample are torch's, in a patched model too. ``call_for_per_sample_grads`` replaces parameters by
    objects that know only torch's own functions."""
    x, norm = torch.randn(3, L, E), torch.nn.LayerNorm(E)
    torch.nn.init.normal_(norm.weight)
    operands = (x,) * (2 if kind == "DropoutAddLayerNorm" else 1)
    if kind == "patched":
        theirs = torch.nn.Sequential(torch.nn.Linear(E, E), norm, torch.nn.Dropout(0.0), torch.nn.Linear(E, 2))
        ours = copy.deepcopy(theirs)
        assert fastattn.patch(ours).changed
    else:
        ours, theirs = getattr(fastattn, kind)(E).eval(), norm
        ours.load_state_dict(theirs.state_dict())
    for module, given in ((ours, operands), (theirs, (sum(operands),))):
        call_for_per_sample_grads(module)(*given).square().sum().backward()
    found, wanted = ([parameter.grad_sample for parameter in module.parameters()] for module in (ours, theirs))
    torch.testing.assert_close(found, wanted)


COMPILED = [("aot_eager_decomp_partition", case) for case in CHANGED if not case.startswith("jagged")]
BY_INDUCTOR = [("inductor", case) for _, case in COMPILED]
# They are the same for every torch.
ALIKE = [("inductor", case) for case in ("attention, mask", "packed, used", "module with weights, float padding")]
ALONE = [case for case in BY_INDUCTOR if case not in ALIKE]


@pytest.mark.torch_version
@pytest.mark.parametrize("compiled_call", [*COMPILED, *slow(*ALIKE), *this_torch(*ALONE)], ids=str)
def test_arguments_may_change_before_a_compiled_backward_pass(compiled_call):
    """The gradient is that of the argument at the call. A compiler may remove a copy, or make it again in the backward
    pass; both would read the changed argument. A view of it shares its memory."""
    compiler, case = compiled_call
    call, argument, change = CHANGED[case]
    leaf = operand(1, L, L, E)
    wanted = gradient(call(argument)(leaf), leaf)
    torch.compiler.reset()  # dynamo compiles a function only a few times
    compiled = torch.compile(lambda leaf, changed: call(changed)(leaf), backend=compiler, fullgraph=True)
    with torch.compiler.config.patch(force_disable_caches=True):  # their keys do not have the code of ops
        for is_view in (False, True):
            for change_to in COPIES.values():
                changed = argument.clone()
                out = compiled(leaf, changed[:] if is_view else changed)
                change_to(changed, change(changed))
                torch.testing.assert_close(gradient(out, leaf), wanted)
