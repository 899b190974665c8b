"""The reference backend in plain PyTorch: the oracle of every other backend and the fallback on any device.

Low-precision operands are computed in float32, float64 in float64. Forward and backward functions consist of
differentiable torch operations, so forward mode and double backward work. Backward functions recompute everything from
the operands.
"""

from fastattn.backends.common import python_functions
from fastattn.backends.schema import AnyArgs

MISSING = ""
FUNCTIONS = python_functions(__name__)


def refusal(op: str, args: AnyArgs) -> None:
    """Return None: the reference serves every call."""
