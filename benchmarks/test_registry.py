"""Time torch's function while fastattn is the active implementation.

It is compared with ours called directly, and with torch's own where the call goes on to torch.
"""

import functools

import pytest
import torch
from torch.nn import functional

import fastattn
from fastattn.bench.timer import interleave, wall_clock
from fastattn.integrations.registry import handle

MICROSECONDS = 5e-6  # of Python, that a call may take longer
LARGE, FEW = ((4, 8, 512, 64), (4, 8, 512, 64)), ((1, 8, 1, 64), (1, 8, 32, 64))


@pytest.mark.parametrize(
    ("shapes", "dtype", "share"),
    [(LARGE, torch.float32, 0.05), (FEW, torch.float32, 0.0), (FEW, torch.float64, 0.0)],
    ids=["large", "few", "torch serves"],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_cost(request, shapes, dtype, share, dropout_p):
    query, key = (torch.randn(shape, dtype=dtype) for shape in shapes)
    torchs = functional.scaled_dot_product_attention
    direct = torchs if dtype == torch.float64 else fastattn.scaled_dot_product_attention
    calls = {
        name: functools.partial(function, query, key, key, dropout_p=dropout_p)
        for name, function in (("active", torchs), ("direct", direct))
    }

    def measure(function, repeats):
        """Activate only around the calls of "active". Activation leaves caches cold, so uncounted calls come first."""
        if function is calls["active"]:
            handle.activate()
        try:
            wall_clock(function, 10)
            return wall_clock(function, repeats)
        finally:
            handle.remove()

    with torch.no_grad():
        timing = interleave(calls, measure=measure)
    seconds, most = timing.seconds("direct"), share * timing.seconds("direct") + MICROSECONDS * (share == 0)
    more = timing.seconds("active") - seconds
    if not request.config.getoption("--report"):
        assert more <= most, f"{more * 1e6:.1f} µs more than {seconds * 1e6:.1f}, at most {most * 1e6:.1f}"
