"""Plain PyTorch: the oracle of every other backend and the fallback on any device.

Low-precision operands are computed in float32, float64 in float64. The backward functions recompute everything
from the operands by differentiable torch operations, so that double backward works here, and so are the forward ones,
for forward mode.
"""

from fastattn.backends.common import python_functions

MISSING = ""
FUNCTIONS = python_functions(__name__)


def refusal(op: str, args: tuple) -> None:
    """None: it serves every call."""
