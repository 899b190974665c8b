"""What only the Triton backend has: its forms of the dropout formula."""

import os

import pytest
import torch
from oracle import dropout_mask as exact_mask
from oracle import threshold

os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

from fastattn.backends.triton import philox  # noqa: E402


@triton.jit
def _keep(out, seed, threshold, rows, columns, z, i, j, M: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr):
    """Writes the block of rows from i and columns from j of matrix z of `out` by the named function."""
    rows_of = i + tl.arange(0, M)
    columns_of = j + tl.arange(0, N)
    pointers = out + z * rows * columns + rows_of[:, None] * columns + columns_of[None, :]
    inside = (rows_of[:, None] < rows) & (columns_of[None, :] < columns)
    if FORM == "tile":
        kept = philox.keep(seed, z, i, j, threshold, M, N)
    elif FORM == "transposed":
        kept = philox.keep_transposed(seed, z, i, j, threshold, M, N).trans()
    elif FORM == "rows":
        kept = philox.keep_rows(seed, z + rows_of * 0, rows_of, j, threshold, N)
    else:
        kept = philox.keep_elements(seed, z, rows_of[:, None], columns_of[None, :], threshold)
    tl.store(pointers, kept, mask=inside)


@pytest.mark.parametrize("seed", [(0, 0), (-81985529216486896, 12345678901), (2**63 - 1, -1)], ids=str)
@pytest.mark.parametrize("form", ["tile", "transposed", "rows", "elements"])
def test_every_form_of_the_formula(form, seed):
    shape, p, (m, n) = (3, 40, 200), 0.3, (32, 64)
    out = torch.zeros(shape, dtype=torch.bool)
    for z in range(shape[0]):
        for i in range(0, shape[1], m):
            for j in range(0, shape[2], n):
                _keep[(1,)](out, torch.tensor(seed), threshold(p), *shape[1:], z, i, j, m, n, form)
    assert torch.equal(out, exact_mask(shape, p, seed))


@pytest.mark.parametrize("p", [1e-9, 1 / 65536, 1 - 8e-6, 1.0])
@pytest.mark.parametrize("form", ["tile", "transposed", "rows", "elements"])
def test_extreme_thresholds(form, p):
    out = torch.zeros(1, 32, 64, dtype=torch.bool)
    _keep[(1,)](out, torch.tensor([1, 2]), threshold(p), 32, 64, 0, 0, 0, 32, 64, form)
    assert torch.equal(out, exact_mask(out.shape, p, (1, 2)))
