"""Say where the time of a call goes, by torch's profiler."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# Beginnings of the names of torch's operations. All others are the rest.
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("fastattn_cpu::attention", "fastattn_cpu::varlen_attention"),
    "softmax and sums of the loss": ("fastattn_cpu::softmax_dropout",),
    "dropout, residual, LayerNorm": ("fastattn_cpu::",),
    "copies, most of them casts of autocast's": ("aten::copy_", "aten::cat"),
    "embeddings": ("aten::embedding", "aten::index_select"),
}
REST = "other elementwise operations, Python"


def shares(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the share of each of PARTS in the time of some calls. An operation counts without those that it calls."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        total = 1e6 * (time.perf_counter() - started)
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        part = next((part for part, names in PARTS.items() if event.key.startswith(names)), REST)
        spent[part] += event.self_cpu_time_total
    spent[REST] = total - sum(spent[part] for part in PARTS)  # the time between operations too
    return {part: spent[part] / total for part in (*PARTS, REST)}
