"""Swapping the import is enough: fastattn's functions run torch's own samples of the functions that they replace."""

import pytest
import torch
from conftest import slow
from oracle import EPSILON, SizesOfTerms, assert_accurate, attention, gradients, largest, score_rounding
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_samples import databases

import fastattn

pytestmark = pytest.mark.torch_version
FUNCTIONS = {name: f"nn.functional.{name}" for name in ("scaled_dot_product_attention", "layer_norm", "dropout")}
OPERATIONS = pytest.mark.parametrize("name", FUNCTIONS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, *slow(torch.float16)], ids=str)


@pytest.fixture(scope="module")
def operators():
    return databases()[1]


def samples(operator, dtype):
    torch.manual_seed(0)
    found = list(operator.sample_inputs("cpu", dtype))
    assert len(found) >= 5
    return found


def is_random(name, sample):
    """Return whether the sample drops some elements: torch chooses others than fastattn."""
    p = sample.kwargs.get("dropout_p", 0.0) if name != "dropout" else sample.kwargs.get("p", 0.5)
    return 0 < p < 1 and sample.kwargs.get("training", True)


def run(function, sample, dtype=None, **options):
    """Return (outputs, gradients of every tensor that can have one)."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[n].to(dtype) if dtype and leaves[n].is_floating_point() else leaves[n] for n in places]

    def call(*tensors):
        filled = list(leaves)
        for n, tensor in zip(places, tensors, strict=True):
            filled[n] = tensor
        input, args, kwargs = tree_unflatten(filled, spec)
        return function(input, *args, **kwargs)

    return gradients(call, tensors, **options)


def sizes_of_terms(name, sample, count):
    """Return the sizes of terms that the rounding of the output and of each gradient is relative to, 0 if no sum
    cancels."""
    if name == "dropout":
        return [0.0] * (1 + count)
    if name == "layer_norm":  # differences of numbers of the size of rstd * weight
        sizes, *parameters = sample.args
        rows = sample.input.double().flatten(-len(sizes))
        variance = (rows - rows.mean(-1, keepdim=True)).square().mean(-1)
        rstd = (variance + sample.kwargs.get("eps", 1e-5)).rsqrt().nan_to_num()
        return [0.0] + [largest(rstd) * max([1.0, *(largest(p) for p in parameters if p is not None)])] * count

    def terms(*args, **kwargs):
        return attention(*args, **kwargs, softmax=SizesOfTerms.apply)[0]

    sizes = [largest(sample.args[1]), *(largest(grad) for grad in run(terms, sample, torch.float64)[1])]
    sizes[3] = largest(run(terms, sample, torch.float64, positive=True)[1][2])  # P |dO|, since P is rounded
    dtype, rounding = sample.input.dtype, score_rounding(sample.input, sample.args[0])
    if dtype == torch.float32:
        return [size * rounding for size in sizes]
    if dtype.itemsize == 2:  # the terms of dQ and dK cancel in float32
        sizes[1:3] = [size * rounding * EPSILON[torch.float32] / EPSILON[dtype] for size in sizes[1:3]]
    return sizes


def facts(tensors):
    return [(t.dtype, t.shape, t.stride()) for t in tensors]


@OPERATIONS
@DTYPES
def test_values_and_gradients(operators, name, dtype):
    operator, function = operators[FUNCTIONS[name]], getattr(fastattn, name)
    for sample in samples(operator, dtype):
        (ours, grads), (theirs, their_grads) = run(function, sample), run(operator.op, sample)
        assert facts(ours) == facts(theirs), sample
        assert [t.dtype for t in grads] == [t.dtype for t in their_grads], sample
        if is_random(name, sample):
            continue
        wanted, wanted_grads = run(operator.op, sample, torch.float64)
        sizes = sizes_of_terms(name, sample, len(grads))
        results = (*ours, *grads), (*wanted, *wanted_grads), (*theirs, *their_grads), sizes
        for a, e, p, size in zip(*results, strict=True):
            assert torch.equal(a.isnan(), e.isnan()), sample
            assert_accurate(a.nan_to_num(), e.nan_to_num(), p.nan_to_num(), str(sample), magnitude=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attentions_gradients_in_16_bits(operators, dtype):
    """The errors of dQ and dK are at most 3 times those of torch's, in the norm. Torch's may be 0."""
    name = "scaled_dot_product_attention"
    operator = operators[FUNCTIONS[name]]
    for sample in samples(operator, dtype):
        if is_random(name, sample):
            continue
        (_, ours), (_, theirs) = run(fastattn.scaled_dot_product_attention, sample), run(operator.op, sample)
        _, wanted = run(operator.op, sample, torch.float64)
        sizes = sizes_of_terms(name, sample, len(ours))[1:3]
        for a, p, e, size in zip(ours[:2], theirs[:2], wanted[:2], sizes, strict=True):
            own, peers = ((t.double() - e).nan_to_num().norm().item() for t in (a, p))
            assert own <= 3 * peers + EPSILON[dtype] * size * e.numel() ** 0.5, sample
