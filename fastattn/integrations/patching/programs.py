"""Families of three public programs, recognised by the contents of their modules and by their code.

- ``jadore801120/attention-is-all-you-need-pytorch``
- a notebook with one module for each head
- the Annotated Transformer

Their arithmetic is kept with its errors. A query whose keys are all masked weighs all of them equally. The notebook
divides the scores by d_k^2 and adds the value instead of the query.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.backends.common import stat_dtype
from fastattn.integrations.patching import known, torch_modules
from fastattn.integrations.patching.family import Family, is_served, is_silent, patched_class
from fastattn.integrations.patching.torch_modules import add_norm, dropout_p
from fastattn.integrations.patching.weights import LazyWeights, weights_when_read
from fastattn.ops import check
from fastattn.ops.attention import scaled_dot_product_attention
from fastattn.ops.layer_norm import layer_norm

Call = tuple[tuple[Any, ...], dict[str, Any]]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float
) -> tuple[Tensor, Callable[[], Tensor | LazyWeights]]:
    """Compute dropout(softmax(masked_fill(scale * query @ key^T, mask == 0, -1e9))) @ value.

    In a row with a visible key, a score of -1e9 has weight 0. In a fully masked row it is the maximum, so all keys
    weigh the same, without a gradient to query and key. Such a row is computed as a query of 0 that sees all keys.

    Returns:
        The output, and a function that returns the weights.
    """
    query, key, value = check.autocast_low(query, key, value)
    visible = None
    if mask is not None:
        visible = mask != 0  # a copy: the program may change its mask before the weights are read
        blind = ~visible.any(-1, keepdim=True)
        if not check.is_readable(blind) or bool(blind.any()):
            query, visible = query.masked_fill(blind, 0.0), visible | blind
    seed = check.draw_seed(None, check.threshold("patch", dropout_p), query)
    out = scaled_dot_product_attention(query, key, value, visible, dropout_p, scale=scale, seed=seed)
    return out, lambda: weights_when_read(query, key, visible, dropout_p, scale, seed)


def is_usual(mask: Tensor | None, scores: tuple[int, ...], temperature: float = 1.0) -> bool:
    """Return whether :func:`attend` computes the same as the programs.

    The mask must broadcast to the scores, not the scores to the mask. A score of -1e9 must have weight 0 even after the
    division by the temperature.
    """
    if mask is not None:
        sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
        if mask.dim() > len(scores) or not all(size in (1, of_scores) for size, of_scores in sizes):
            return False
    return 1e-6 <= temperature <= 1e6


class ProgramFamily(Family):
    """Base of these families: recognised by names, confirmed by the code of the class and by a trial.

    The code must be a known version of the program's, or trusted by the user. The trial runs the class's own forward
    and the family's on a small stand-in, in evaluation and in training, with the same dropout. Both must give the same
    results. The stand-in also has the module's other attributes, because the forward may read them.
    """

    children_names: ClassVar[set[str]]
    attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes that its forward reads, in addition to its children."""
    arguments: ClassVar[str]
    """Arguments of its forward, as ``inspect.signature`` writes them without annotations."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return {name for name, _ in module.named_children()} == cls.children_names and all(
            hasattr(module, name) for name in cls.attributes
        )

    @classmethod
    def refusal(cls, module: nn.Module, trusted: bool) -> str | None:
        family, kind = cls, type(module)  # type: Any, Any
        arguments = _arguments(kind)
        if arguments != cls.arguments:
            return f"its forward takes ({arguments}), that of {cls.family} ({cls.arguments})"
        if not trusted and (reason := cls.unknown(kind)):
            return f"{reason}; to patch it if a trial finds no difference, pass patch(..., trust=({kind.__name__},))"
        try:
            usual = _stand_in(family, kind)
        except Exception as error:  # the class may raise any exception
            return f"no stand-in of it can be made for a trial: {error}"
        extra = {name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
        extra -= {name for name, _ in usual.named_parameters(recurse=False)}
        if extra:
            return f"it holds {', '.join(sorted(extra))}, which {cls.family} does not know"
        others = {
            name: held for name, held in vars(module).items() if name not in (*vars(usual), "_compiled_call_impl")
        }
        if not others:
            return _usual_trial(family, kind, kind.forward)
        try:
            others = copy.deepcopy(others)  # a forward may change the attributes
        except Exception as error:  # a copy method of their own may raise any exception
            return f"its {', '.join(others)} cannot be copied for a trial: {error}"
        return _trial(family, kind, others)

    @classmethod
    def unknown(cls, kind: type[nn.Module]) -> str | None:
        """Return which part of the class's code is not a known version of the program's; None if all of it is known."""
        classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
        held = {*cls.children_names, *cls.attributes}
        shadowing = sorted({name for each in classes for name in vars(each)} & held)
        if shadowing:
            return f"its class defines {', '.join(shadowing)}, which each instance of {cls.family} holds"
        return known.difference(kind.forward, cls.family)

    @classmethod
    def stand_in(cls, module: Any) -> None:
        """Give an empty module small versions of the parts that the class's forward reads."""
        raise NotImplementedError

    @classmethod
    def operands(cls) -> list[Call]:
        """Return the arguments of calls of the stand-in, positional and by name."""
        raise NotImplementedError


def _arguments(kind: type[nn.Module]) -> str:
    """Return the arguments of the class's forward, without annotations."""
    try:
        parameters = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return "unknown arguments"
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters).partition(", ")[2]


def _stand_in(family: Any, kind: Any) -> nn.Module:
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        family.stand_in(module)
        return module.float()


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@cache
def _usual_trial(family: Any, kind: Any, forward: Any) -> str | None:
    """Return the trial's result for all modules of ``kind`` without other attributes, cached per forward."""
    return _trial(family, kind, {})


def _trial(family: Any, kind: Any, others: dict[str, Any]) -> str | None:
    """Return how a module of ``kind`` with these attributes differs from the family; None if it computes the same."""
    with (
        _float32_by_default(), torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):  # fmt: skip
        module: Any = _stand_in(family, kind)
        vars(module).update(others)
        held = set(vars(module))
        for training in (False, True):
            module.train(training)
            for args, kwargs in family.operands():
                found = []
                for cls in (kind, patched_class(family, kind)):
                    torch.manual_seed(0)
                    module.__class__ = cls
                    try:
                        found.append(_tensors(module(*args, **kwargs), vars(module)))
                    except Exception as error:
                        return f"its forward fails where that of {family.family} works: {error}"
                    if set(vars(module)) != held:
                        return f"its forward sets {', '.join(set(vars(module)) - held)}"
                own, ours = found
                if len(own) != len(ours) or not all(
                    a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(own, ours, strict=True)
                ):
                    mode = "training" if training else "evaluation"
                    return f"its forward computes something else than {family.family} in {mode}"
    return None


def _tensors(*values: Any) -> list[Tensor]:
    """Return the tensors among results and attributes."""
    found = []
    for value in values:
        if isinstance(value, Tensor | LazyWeights):
            found.append(value if isinstance(value, Tensor) else value.read())
        elif isinstance(value, tuple | list):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _dropout() -> nn.Module:
    """Return a patched dropout, with which both forwards of a trial drop the same elements."""
    return _as_patched(torch_modules.Dropout, nn.Dropout(0.5))


def _norm(size: int) -> nn.Module:
    norm = nn.LayerNorm(size, eps=1e-3)
    nn.init.normal_(norm.weight)
    return _as_patched(torch_modules.LayerNorm, norm)


def _example(family: type[ProgramFamily]) -> nn.Module:
    module = nn.Module()
    family.stand_in(module)
    return _as_patched(family, module)


def _as_patched(family: type[Family], module: nn.Module) -> nn.Module:
    module.__class__ = patched_class(family, type(module))
    return module


def _masks() -> list[Tensor]:
    """Return a padding mask, bool (2, 1, 6), and an int64 mask (2, 4, 6) with a fully masked row."""
    padding = torch.arange(6) < torch.tensor([[[6]], [[4]]])
    mask = torch.ones(2, 4, 6, dtype=torch.int64).tril()
    mask[1, 2] = 0
    return [padding, mask]


def _sequences() -> list[Call]:
    """Return calls with 4 queries and 6 keys of size 8, without and with masks."""
    operands = torch.randn(2, 4, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    return [(operands, {}), *((operands, {"mask": mask}) for mask in _masks())]


# jadore801120/attention-is-all-you-need-pytorch


class ScaledDotProductAttention(ProgramFamily):
    family = "ScaledDotProductAttention of jadore801120"
    children_names: ClassVar = {"dropout"}
    attributes = ("temperature",)
    arguments = "q, k, v, mask=None"

    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | LazyWeights]:
        usual = is_usual(mask, (*q.shape[:-1], k.size(-2)), self.temperature)
        if not (usual and is_silent(self.dropout, torch_modules.Dropout) and is_served(q, k, v)):
            return super().forward(q, k, v, mask)
        out, weights = attend(q, k, v, mask, dropout_p(self.dropout), 1.0 / self.temperature)
        return out, weights()

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.temperature, module.dropout = 1.5, _dropout()

    @classmethod
    def operands(cls) -> list[Call]:
        q, k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6, 7)
        return [((q, k, v), {}), *(((q, k, v), {"mask": mask.unsqueeze(1)}) for mask in _masks())]


class MultiHeadAttention(ProgramFamily):
    family = "MultiHeadAttention of jadore801120"
    children_names: ClassVar = {"w_qs", "w_ks", "w_vs", "fc", "attention", "dropout", "layer_norm"}
    attributes = ("n_head", "d_k", "d_v")
    arguments = "q, k, v, mask=None"

    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | LazyWeights]:
        residual = q
        q = self.w_qs(q).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        k = self.w_ks(k).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        v = self.w_vs(v).unflatten(-1, (self.n_head, self.d_v)).transpose(1, 2)
        out, attn = self.attention(q, k, v, mask=mask if mask is None else mask.unsqueeze(1))
        out = self.fc(out.transpose(1, 2).flatten(2))
        return add_norm(out, residual.to(out.dtype), self.layer_norm, self.dropout), attn  # the program adds in place

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.n_head, module.d_k, module.d_v = 2, 3, 5
        module.w_qs, module.w_ks, module.w_vs = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 10)
        module.fc, module.dropout, module.layer_norm = nn.Linear(10, 8), _dropout(), _norm(8)
        module.attention = _example(ScaledDotProductAttention)

    @classmethod
    def operands(cls) -> list[Call]:
        return _sequences()


class PositionwiseFeedForward(ProgramFamily):
    family = "PositionwiseFeedForward of jadore801120"
    children_names: ClassVar = {"w_1", "w_2", "dropout", "layer_norm"}
    arguments = "x"

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.w_2(F.relu(self.w_1(x)))
        return add_norm(out, x.to(out.dtype), self.layer_norm, self.dropout)  # the program adds in place

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.w_1, module.w_2 = nn.Linear(8, 16), nn.Linear(16, 8)
        module.dropout, module.layer_norm = _dropout(), _norm(8)

    @classmethod
    def operands(cls) -> list[Call]:
        return [((torch.randn(2, 3, 8),), {})]


# The notebook


class AttentionHead(ProgramFamily):
    family = "AttentionHead of the notebook"
    children_names: ClassVar = {"W_Q", "W_K", "W_V", "dropout"}
    attributes = ("temperature",)
    arguments = "Q, K, V, mask=None"

    def forward(self: Any, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
        usual = is_usual(mask, (*Q.shape[:-1], K.size(-2)), self.temperature)
        if not (usual and is_silent(self.dropout, torch_modules.Dropout) and is_served(Q, K, V)):
            return super().forward(Q, K, V, mask)
        q, k, v = self.W_Q(Q), self.W_K(K), self.W_V(V)
        return attend(q, k, v, mask, dropout_p(self.dropout), 1.0 / self.temperature)[0]

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.W_Q, module.W_K, module.W_V = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 5)
        module.temperature, module.dropout = 1.5, _dropout()

    @classmethod
    def operands(cls) -> list[Call]:
        return _sequences()


class HeadList(ProgramFamily):
    """All heads in one call of attention, if they are alike and have no hooks; the heads share the call's seed."""

    family = "MultiHeadAttention of the notebook"
    children_names: ClassVar = {"W_O", "heads"}
    arguments = "Q, K, V, mask=None"

    def forward(self: Any, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
        heads: Any = list(self.heads)
        silent = all(is_silent(h, AttentionHead) and is_silent(h.dropout, torch_modules.Dropout) for h in heads)
        alike = {(head.temperature, dropout_p(head.dropout)) for head in heads} if silent else set()
        if len(alike) != 1 or not is_served(Q, K, V):
            return super().forward(Q, K, V, mask)
        ((temperature, p),) = alike
        if not is_usual(mask, (*Q.shape[:-1], K.size(-2)), temperature):
            return super().forward(Q, K, V, mask)
        q = torch.stack([head.W_Q(Q) for head in heads], 1)
        k = torch.stack([head.W_K(K) for head in heads], 1)
        v = torch.stack([head.W_V(V) for head in heads], 1)
        out, _ = attend(q, k, v, mask if mask is None else mask.unsqueeze(-3), p, 1.0 / temperature)
        return self.W_O(out.transpose(1, 2).flatten(2))

    @classmethod
    def recognises(cls, module: Any) -> bool:
        return super().recognises(module) and all(AttentionHead.recognises(head) for head in module.heads)

    @classmethod
    def refusal(cls, module: Any, trusted: bool) -> str | None:
        sizes = [[tuple(weight.shape) for weight in head.parameters()] for head in module.heads]
        if any(size != sizes[0] for size in sizes):
            return "its heads have different sizes"
        return super().refusal(module, trusted)

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.W_O, module.heads = nn.Linear(5, 8), nn.ModuleList([_example(AttentionHead)])

    @classmethod
    def operands(cls) -> list[Call]:
        return _sequences()


class Residual(ProgramFamily):
    family = "Residual of the notebook"
    children_names: ClassVar = {"layer_normalization", "current_sublayer"}
    arguments = "*x, mask=None"

    def forward(self: Any, *x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.current_sublayer(*x) if mask is None else self.current_sublayer(*x, mask=mask)
        return add_norm(out, x[-1], self.layer_normalization)  # the last operand, which is the value of attention

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.layer_normalization, module.current_sublayer = _norm(8), _example(HeadList)

    @classmethod
    def operands(cls) -> list[Call]:
        q, k, v = torch.randn(3, 2, 6, 8)
        return [((q, k, v), {}), ((q, k, v), {"mask": _masks()[0]})]


# The Annotated Transformer


class MultiHeadedAttention(ProgramFamily):
    family = "MultiHeadedAttention of the Annotated Transformer"
    children_names: ClassVar = {"linears", "dropout"}
    attributes = ("h", "d_k", "attn")
    arguments = "query, key, value, mask=None"

    @property
    def attn(self) -> Any:
        """Weights of the last call, a tensor or None; the instance's attribute ``attn`` holds what computes them."""
        held = dict(vars(self)).get("attn")  # a copy: in torch 2.10 dynamo takes vars(self)["attn"] for the property
        return held.compute() if isinstance(held, LazyWeights) else held

    @attn.setter
    def attn(self, weights: Any) -> None:
        vars(self)["attn"] = weights

    @attn.deleter
    def attn(self) -> None:
        del vars(self)["attn"]

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = query.size(0), self.h, query.size(-2), key.size(-2)
        usual = is_usual(mask if mask is None else mask.unsqueeze(1), scores)
        if not (usual and is_silent(self.dropout, torch_modules.Dropout) and is_served(query, key, value)):
            return super().forward(query, key, value, mask)
        q, k, v = (
            linear(x).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        mask = mask if mask is None else mask.unsqueeze(1)
        out, weights = attend(q, k, v, mask, dropout_p(self.dropout), 1.0 / math.sqrt(self.d_k))
        vars(self)["attn"] = weights()
        return self.linears[-1](out.transpose(1, 2).flatten(2))

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.h, module.d_k, module.attn, module.dropout = 2, 4, None, _dropout()
        module.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    @classmethod
    def operands(cls) -> list[Call]:
        return _sequences()


class UnbiasedLayerNorm(ProgramFamily):
    """Normalisation a (x - mean) / (s + eps) + b with the unbiased deviation s.

    It is computed as a LayerNorm whose eps is a constant e^2 (``_E``), times sqrt(variance + e^2) / (s + eps) per row.
    If values are about 1e19 and larger, ``layer_norm`` gives NaN, and torch's ``std`` on the CPU is right. There the
    program's own forward computes such tensors. On other devices a check would synchronise.
    """

    family = "LayerNorm of the Annotated Transformer"
    children_names: ClassVar = set()
    attributes = ("a_2", "b_2", "eps")
    arguments = "x"

    def forward(self: Any, x: Tensor) -> Tensor:
        size = x.size(-1)
        if size < 2 or self.a_2.shape != (size,) or not is_served(x):
            return super().forward(x)
        deviation = x.std(-1, keepdim=True)
        if check.is_readable(x):
            largest = math.sqrt(torch.finfo(stat_dtype(x.dtype)).max / size)  # larger sums of squares overflow
            if (deviation > largest).any():
                return super().forward(x)
        biased = deviation.to(stat_dtype(x.dtype)) * math.sqrt((size - 1) / size)
        # Computes hypot(biased, _E), which ONNX lacks. Division by the longer side keeps the squares from overflow.
        longer = biased.clamp(min=_E)
        length = (longer * ((biased / longer) ** 2 + (_E / longer) ** 2).sqrt()).to(deviation.dtype)
        normalised = layer_norm(x, (size,), self.a_2, None, _E**2)
        return torch.addcmul(self.b_2, normalised, length / (deviation + self.eps))

    @classmethod
    def stand_in(cls, module: Any) -> None:
        module.a_2, module.b_2, module.eps = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4)), 0.1

    @classmethod
    def operands(cls) -> list[Call]:
        return [((torch.randn(2, 3, 4),), {}), ((torch.ones(2, 4),), {})]


_E = 2.0**-20
"""The e of ``UnbiasedLayerNorm``; any value is correct, because it cancels.

This one is large enough for the gradient of a constant row, small compared with deviations in half precision, and
exact in half precision.
"""


class SublayerConnection(ProgramFamily):
    family = "SublayerConnection of the Annotated Transformer"
    children_names: ClassVar = {"norm", "dropout"}
    arguments = "x, sublayer"

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return super().recognises(module) and _arguments(type(module)) == cls.arguments

    @classmethod
    def refusal(cls, module: nn.Module, trusted: bool) -> str | None:
        return "its norm and its dropout are patched; a sub-layer is between them, so that nothing is left to fuse"


FAMILIES: tuple[type[Family], ...] = (
    ScaledDotProductAttention,
    MultiHeadAttention,
    PositionwiseFeedForward,
    AttentionHead,
    HeadList,
    Residual,
    MultiHeadedAttention,
    UnbiasedLayerNorm,
    SublayerConnection,
)
