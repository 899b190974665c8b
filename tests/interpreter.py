"""Triton's interpreter made strict: programs in a shuffled order, accesses only within operands, a GPU's rounding."""

import contextlib

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

_patch_lang_tensor = interpreter._patch_lang_tensor
_truncating_cast = interpreter.InterpreterBuilder.cast_impl


def _with_index(tensor, scope):
    """Let a scalar serve as a Python integer.

    Triton 3.6 converts an array of one element, which NumPy no longer allows."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _with_index


@contextlib.contextmanager
def strict(twice=False):
    """Make the interpreter strict inside the block.

    A kernel that reads or writes outside its operands raises InterpreterError. The programs of a grid run in random
    order. With ``twice`` each kernel runs again in another order and must leave the same bits."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    builders = "create_masked_load", "create_masked_store", "set_grid_dim", "set_grid_idx", "create_dot", "cast_impl"
    originals = {
        owner: {name: getattr(owner, name) for name in names}
        for owner, names in ((builder, builders), (executor, ["__call__"]), (interpreter, ["_patch_lang"]))
    }
    generator = np.random.default_rng(0)
    state = {}

    def call(self, *args, **kwargs):
        tensors = list(_tensors([*args, *kwargs.values()]))
        state["extents"] = _extents(tensors)

        def run():
            state["patched"] = set()
            originals[executor]["__call__"](self, *args, **kwargs)

        if twice:
            _run_twice(run, tensors, self.fn.__name__)
        else:
            run()

    def set_grid_dim(self, *grid):
        state["order"] = generator.permutation(np.prod(grid))
        originals[builder]["set_grid_dim"](self, *grid)

    def set_grid_idx(self, *index):
        place = np.unravel_index(state["order"][np.ravel_multi_index(index, self.grid_dim)], self.grid_dim)
        originals[builder]["set_grid_idx"](self, *(int(n) for n in place))

    def create_masked_load(self, ptrs, mask, *rest, **options):
        _check(state["extents"], ptrs, mask)
        return originals[builder]["create_masked_load"](self, ptrs, mask, *rest, **options)

    def create_masked_store(self, ptrs, value, mask, *rest):
        _check(state["extents"], ptrs, mask)
        return originals[builder]["create_masked_store"](self, ptrs, value, mask, *rest)

    def _patch_lang(function):
        """Patch each function once per launch. Patching at each call of a program would take most of the time."""
        if function not in state["patched"]:
            state["patched"].add(function)
            return originals[interpreter]["_patch_lang"](function)
        return None

    executor.__call__ = call
    interpreter._patch_lang = _patch_lang
    for function in (set_grid_dim, set_grid_idx, create_masked_load, create_masked_store, _create_dot, _cast_impl):
        setattr(builder, function.__name__.lstrip("_"), function)
    try:
        yield
    finally:
        for owner, functions in originals.items():
            for name, function in functions.items():
                setattr(owner, name, function)


def _run_twice(run, tensors, name):
    """Run twice from the same state of the tensors. Raise AssertionError if the second run leaves other bits."""
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors)}.values()
    before = [s.clone() for s in storages]
    run()
    after = [s.clone() for s in storages]
    for storage, content in zip(storages, before, strict=True):
        storage.copy_(content)
    run()
    for storage, content in zip(storages, after, strict=True):
        if bytes(storage) != bytes(content):
            raise AssertionError(f"{name}: another order of its programs gives other bits")


def _check(extents, ptrs, mask):
    """Raise IndexError if an access is outside the extents."""
    addresses = np.broadcast_to(ptrs.data, mask.data.shape)[mask.data]
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    starts, ends = extents
    place = np.searchsorted(starts, addresses, "right") - 1
    if addresses.size and not (len(starts) and (place >= 0).all() and (addresses + size <= ends[place]).all()):
        raise IndexError("an access outside the kernel's operands")


def _create_dot(self, a, b, accumulator, *rest):
    """Sum in float64, so that k q^T has the bits of q k^T.

    A GPU adds both in the same order, numpy does not. A gradient of scores of 1e4 shows the difference."""
    product = np.matmul(*(_as_float(x).data.astype(np.float64) for x in (a, b)))
    total = product.astype(accumulator.data.dtype) + accumulator.data
    return interpreter.TensorHandle(total, accumulator.dtype.scalar)


def _cast_impl(self, source, target):
    """Round float32 to the nearest bfloat16, as a GPU does. The interpreter truncates."""
    kinds = source.dtype.scalar, target.scalar
    if kinds == (tl.bfloat16, tl.float32):
        return _as_float(source)
    if kinds == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_as_bfloat16(source.data), tl.bfloat16)
    return _truncating_cast(self, source, target)


def _as_float(handle):
    """Return a bfloat16 operand in float32. The interpreter stores it as 16-bit integers and would multiply those."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _as_bfloat16(numbers):
    """Return the bits of the nearest bfloat16, ties to even. NaN stays NaN."""
    bits = numbers.view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)


def _tensors(arguments):
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, TensorDescriptor):
            yield argument.base
        elif isinstance(argument, (tuple, list)):
            yield from _tensors(argument)


def _extents(tensors):
    """Return (starts, ends), sorted and disjoint: the addresses of the memory that the tensors cover."""
    spans = []
    for t in tensors:
        if t.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            spans.append([t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()])
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    table = np.array(merged, dtype=np.uint64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
