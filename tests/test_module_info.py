"""torch's own samples of nn.MultiheadAttention, its encoder and decoder layers and multi_head_attention_forward, run by
fastattn's module. The tests compare outputs, weights and gradients."""

import copy

import pytest
import torch
from conftest import slow
from hypothesis import settings
from oracle import assert_accurate, largest
from torch import nn
from torch_samples import databases, run_all

from fastattn import MultiHeadAttention

pytestmark = pytest.mark.torch_version
SEED = torch.tensor([17, 0])


def ours_of(theirs):
    """Return fastattn's module with the options, parameters and mode of torch's."""
    ours = MultiHeadAttention(
        theirs.embed_dim, theirs.num_heads, theirs.dropout, theirs.in_proj_bias is not None,
        theirs.bias_k is not None, theirs.add_zero_attn, theirs.kdim, theirs.vdim, theirs.batch_first,
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    return ours.train(theirs.training)


def with_ours(module):
    """Return a copy of the module that has fastattn's attention."""
    if isinstance(module, nn.MultiheadAttention):
        return ours_of(module)
    module = copy.deepcopy(module)
    for name in ("self_attn", "multihead_attn"):
        if hasattr(module, name):
            setattr(module, name, ours_of(getattr(module, name)))
    return module


def convert(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def results(function, tensors):
    """Return (outputs, gradients) of a function of a dictionary of tensors."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(leaves)
    outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape) for o in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return outputs, grads


def compare(ours, theirs, tensors):
    """Compare by the tolerance rule: ``theirs`` is the truth in float64 and the peer in float32."""
    wide = {name: t.double() for name, t in tensors.items()}
    got, exact, peer = results(ours, tensors), results(theirs, wide), results(theirs, tensors)
    for kind, a, e, p in zip(("output", "gradient"), got, exact, peer, strict=True):
        assert len(a) == len(e)
        magnitude = max(map(largest, e))  # one scale for all, as gradients are sums of terms that cancel
        for n, triple in enumerate(zip(a, e, p, strict=True)):
            assert_accurate(*triple, f"{kind} {n}", magnitude=magnitude)


def check_module(kind, training, sample):
    theirs = kind(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    ours, args, kwargs = with_ours(theirs), sample.forward_input.args, sample.forward_input.kwargs
    tensors = {f"parameter.{name}": p for name, p in theirs.named_parameters()}
    tensors |= {f"input.{n}": t for n, t in enumerate(args)}

    def run(module, leaves):
        inputs = [leaves[f"input.{n}"] for n in range(len(args))]
        parameters = {name.partition(".")[2]: t for name, t in leaves.items() if name.startswith("parameter.")}
        options = {name: convert(value, inputs[0].dtype) for name, value in kwargs.items()}
        return torch.func.functional_call(module, parameters, tuple(inputs), options)

    compare(lambda leaves: run(ours, leaves), lambda leaves: run(theirs, leaves), tensors)
    if not training:
        with torch.no_grad():  # the fast path of torch's encoder layer
            torch.testing.assert_close(run(ours, tensors), run(theirs, tensors), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("training", [True, *slow(False)], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "kind",
    [nn.MultiheadAttention, nn.TransformerDecoderLayer, *slow(nn.TransformerEncoderLayer)],
    ids=lambda k: k.__name__,
)
def test_samples_of_modules(kind, training):
    info, device = databases()[0][kind], torch.get_default_device().type
    samples = info.module_inputs_func(info, device, torch.float32, requires_grad=False, training=training)
    run_all(samples, lambda sample: check_module(kind, training, sample))


def test_reading_torchs_samples_leaves_no_trace():
    """Reading the samples has no side effect. Their import would change how hypothesis runs all later tests, and refuse
    torch.backends.x.y = z."""
    databases()
    assert settings.get_current_profile_name() in ("fixed", "explore")
    assert not torch.backends.flags_frozen()
