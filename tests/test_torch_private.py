"""Tests of the private parts of torch that tell where a call runs or change what an op does. A failure here means that
torch has changed. The results of what fastattn does with the other parts are tested where they are used."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fastattn import _torch_private

pytestmark = pytest.mark.torch_version
X = torch.ones(3)


@contextlib.contextmanager
def autocast(device):
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def within(context, *args, **options):
    def run(ask):
        with context(*args, **options):
            ask(X)

    return run


def inside_onnx_export(ask):
    """Ask while the exporter's flag is set, which the public function reports too."""
    from torch.onnx._internal.exporter import _flags

    assert _flags.set_onnx_exporting_flag(lambda: (ask(X), torch.onnx.is_in_onnx_export())[1])()


SURROUNDINGS = {
    "a dispatch mode": within(FlopCounterMode, display=False),
    "vmap": lambda ask: torch.func.vmap(ask)(X),
    "grad": lambda ask: torch.func.grad(lambda x: ask(x).sum())(X),
    "a dual level": within(forward_ad.dual_level),
    "jvp": lambda ask: torch.func.jvp(ask, (X,), (X,)),
    "torch.compile": lambda ask: torch.compile(ask, backend="eager", fullgraph=True)(X),
    "jit.trace": lambda ask: torch.jit.trace(ask, (X,)),
    "make_fx": lambda ask: make_fx(ask)(X),
    "make_fx before dispatch": lambda ask: make_fx(ask, pre_dispatch=True)(X),
    "ONNX export": inside_onnx_export,
    "autocast": within(autocast, "cpu"),
    "autocast on CUDA": within(autocast, "cuda"),
}
NOTICED = {
    "is_observed": ["a dispatch mode", "vmap", "grad", "a dual level", "torch.compile"],
    "is_transformed": ["vmap", "grad"],
    "is_forward_mode": ["a dual level", "jvp"],
    "is_traced": ["jit.trace"],
    "is_proxied": ["make_fx", "make_fx before dispatch"],
    "is_onnx_export": ["ONNX export"],
    "is_autocast_enabled": ["autocast", "autocast on CUDA"],
}
IGNORED = [("is_observed", "autocast"), ("is_forward_mode", "grad")]


@pytest.mark.parametrize(
    ("name", "around"), [*((name, around) for name in NOTICED for around in NOTICED[name]), *IGNORED]
)
def test_surroundings_are_noticed(name, around):
    question, found = getattr(_torch_private, name), []
    torch.compiler.reset()
    SURROUNDINGS[around](lambda x: found.append(question()) or x * 2)
    assert found[0] == ((name, around) not in IGNORED), f"torch no longer says that {around} is active"
    assert not question()


def test_an_attention_implementation_is_forgotten():
    torch.nn.attention.register_flash_attention_impl("ours", register_fn=lambda: SimpleNamespace(remove=lambda: None))
    torch.nn.attention.activate_flash_attention_impl("ours")
    _torch_private.forget_attention_impl("another")
    assert torch.nn.attention.current_flash_attention_impl() == "ours"
    _torch_private.forget_attention_impl("ours")
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_implementations_come_and_go():
    """With the set of dispatch keys as an argument and without it."""
    ours = _torch_private.Implementations(
        {("relu", "AutogradCPU"): lambda x: x * 2}, {("sigmoid", "CPU"): lambda keys, x: x * 3}
    )
    with torch.no_grad():
        assert torch.equal(torch.relu(-X), X * -2)
        assert torch.equal(torch.sigmoid(X), X * 3)
        ours.remove()
        assert torch.equal(torch.relu(-X), X * 0)
        assert torch.equal(torch.sigmoid(X * 0), X / 2)
