"""Observers of calls: parametrisations that count, adapters of low rank, and a recorder of ops."""

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(nn.Module):
    """Parametrisation without effect that counts how often it is computed."""

    calls = 0

    def forward(self, original):
        self.calls += 1
        return original


def count_reads(model):
    """Put a :class:`Counted` on each parameter in ``model``. Return {(module, parameter's name): its Counted}."""
    owned = [(module, name) for module in model.modules() for name, parameter in module.named_parameters(recurse=False)]
    counts = {}
    for module, name in owned:
        counts[module, name] = Counted()
        parametrize.register_parametrization(module, name, counts[module, name])
    for count in counts.values():
        count.calls = 0
    return counts


class Lora(nn.Module):
    """Linear module ``base`` with an adapter of rank 2."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()

    def merged(self):
        """Return the weight of the linear module that computes the same."""
        return self.base.weight + self.up @ self.down


class Recorder(TorchDispatchMode):
    """Dispatch mode that records (op, args, kwargs) of every call below autograd."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))
