"""What an SM does in a clock: every constant of the model, with its source.

[1] CUDA C++ Best Practices Guide 12.1, arithmetic throughput, and Programming Guide, compute capabilities.
[2] openxla/xla, ``xla/stream_executor/cuda/cuda_core_info_table.cc``.
[3] arXiv 2208.11174: Ampere's latencies. [4] arXiv 2402.13499, 2501.12084: Hopper. [5] arXiv 2512.02189: Blackwell.
[6] The data sheets of A100 SXM 80 GB, H100 SXM and B200.
[a] Assumed; conclusions that a change of a half in it would turn are not drawn.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """An SM a clock, and how many there are."""

    name: str
    multiprocessors: int  # [6]
    clock: float  # GHz under load [6]; H100, whose highest is 1.83, runs matrix products at about 1.65 [a]
    memory: float  # TB/s [6]
    mma: float  # multiply-adds of 16-bit operands in mma.sync; of H100 62 % of wgmma's [4], of B200 [a]
    matrix: float  # the same where operands come from shared memory: wgmma, tcgen05 [1, 6]; 0: there is none
    fp32: int  # lanes of FFMA, FADD, FMUL [1, 2]
    l2: float  # bytes from L2 [a]: 4.6 TB/s of A100, 5.5 TB/s of H100, in proportion to the SMs' clock of B200
    peak: float  # TFLOP/s of 16-bit matrix products, as published [6]
    sustained: float  # share of the peak that large matrix products reach under the power limit [a]
    shared: int  # bytes of shared memory that the programs of an SM have together [1]
    # The same of all three: lanes of integers and logic, multiplied integers, ex2, shuffles [1, 2]; bytes of shared
    # memory [1].
    alu: int = 64
    imad: int = 64
    mufu: int = 16
    shuffle: int = 32
    bytes: int = 128
    tensor_memory: int = 512  # bytes, of B200: a register of every thread of a warpgroup [a]

    @property
    def shares_multiplier(self) -> bool:
        """Whether integers are multiplied where floats are; elsewhere in one of two halves of those lanes [3, 4]."""
        return self.fp32 == self.imad


MACHINES = {
    80: Machine("A100", 108, 1.41, 2.039, 1024, 0, 64, 30.0, 312, 0.9, 164 << 10),
    90: Machine("H100", 132, 1.65, 3.35, 0.62 * 2048, 2048, 128, 25.0, 989, 0.8, 228 << 10),
    100: Machine("B200", 148, 1.85, 8.0, 1024, 4096, 128, 25.0, 2250, 0.8, 228 << 10),
}
SCHEDULERS = 4  # of an SM, each of which issues a warp's instruction a clock [1]
REGISTERS = 65536  # of an SM; a thread's are allotted by eights [1]
THREADS = 2048  # of an SM [1]
PROGRAMS = 32  # of an SM [1]
RESERVED_SHARED = 1024  # bytes of shared memory that the system takes of each program [1]

# Clocks from when a pipe is done to when the result is there [3, 4; "sync", "tmem" a], by pipe; 4 of all others.
LATENCY = {
    "mufu": 24, "shared": 30, "shuffle": 26, "global": 320, "local": 40, "sync": 20, "convert": 14, "int": 14,
    "wide": 6, "tmem": 30,
}  # fmt: skip
OPERANDS_READ = 8  # until a pipe has read its operands [a]
FENCE = 30  # more until a warp goes on behind a fence [a]
BARRIER = 6  # until the warps go on when the last one has come [a]
ARRIVAL = 12  # until one warpgroup's arrival at a named barrier lets another go on [a]
PRODUCTS = 24  # until a warpgroup's waiting for its matrix products ends [4]
COPY = 600  # of an asynchronous copy from global memory [4]
# Clocks of work that may wait in front of a pipe without keeping its warp [a].
QUEUE = {"memory": 64.0, "tmem": 64.0, "global": 64.0, "mufu": 16.0, "matrix": 256.0}
FULL_ROWS = 128  # of a product on a fifth-generation tensor core; fewer take as long [a]
