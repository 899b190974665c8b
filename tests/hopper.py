"""The test kernels of Hopper's instructions (csrc/tests/hopper), in the emulation or on a GPU, and the facts they show.

Run as a program on a GPU, it compares the facts with the emulation's in ``hopper_facts.txt``. Argument: the name of a
fact. Without it, each fact gets a process of its own, so that a fault or a wait without end costs one fact.

``python tests/hopper.py --record`` writes that file, from the emulation.
"""

import concurrent.futures
import ctypes
import functools
import math
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import oracle
import torch

ROOT = Path(__file__).resolve().parent.parent
FACTS = ROOT / "tests/hopper_facts.txt"
IMAGE = 96 << 10  # bytes of shared memory that a product's test fills
SWIZZLES = {"none": 0, "128": 1, "64": 2, "32": 3}


@functools.cache
def compiled():
    """Compile the test kernels for the GPU and return the library."""
    sys.path.insert(0, str(ROOT / "csrc"))
    import native_build

    product = [
        *native_build.HOPPER_SOURCES,
        *(ROOT / f"csrc/cuda/{name}.cu" for name in ("mask_tiles", "query_gradient")),
    ]
    sources = [*product, *sorted((ROOT / "csrc/tests/hopper").glob("*.cu"))]
    flags = native_build.cuda_flags(["9.0a"], len(sources))
    objects = [(f"{source.stem}.o", source, flags) for source in sources]
    path = native_build.run_ninja(
        ROOT / "build/hopper", objects, "hopper.so", f"-shared {native_build.host_flags()}", native_build.nvcc()[0]
    )
    return ctypes.CDLL(str(path))


def call(library, name, *arguments):
    """Call a function of the test kernels and wait for it. Raise RuntimeError with its message if it fails.

    Tensors are on the CPU. A GPU works on copies, which are copied back. Lists are arrays of 32 bits."""
    on_gpu = compiled.cache_info().currsize > 0
    copies = [given.cuda() if on_gpu and isinstance(given, torch.Tensor) else given for given in arguments]
    function = getattr(library, f"hopper_{name}")
    function.restype = ctypes.c_char_p
    message = function(*map(_argument, copies), ctypes.c_void_p(0))
    if message:
        raise RuntimeError(message.decode())
    for given, copy in zip(arguments, copies, strict=True):
        if copy is not given:
            given.copy_(copy)


def _argument(value):
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, (list, tuple)):
        return (ctypes.c_int * len(value))(*value)
    return value


# Facts. Each function takes the library and yields lines.


def as_map(values, bits, show=str):
    """Describe integers by index as a map of the index's bits by exclusive or, the form that every layout here has.

    Args:
        values: (n,) integers.
        bits: Names of the index's bits, the lowest first.
        show: Return the text of a value.
    """
    values = np.asarray(values)
    index, base = np.arange(len(values)), values[0]
    steps = [values[1 << b] ^ base for b in range(len(bits))]
    mapped = np.bitwise_xor.reduce([base + 0 * index, *((index >> b & 1) * step for b, step in enumerate(steps))])
    others = (mapped != values).sum()
    text = [f"0 is {show(base)}", *(f"{name} {show(step)}" for name, step in zip(bits, steps, strict=True))]
    return ", ".join(text) + (f"; {others} others" if others else "")


def names(label, count):
    return [f"{label}{1 << b}" for b in range((count - 1).bit_length())]


def swizzled(byte):
    return byte ^ (byte >> 7 & 7) << 4


def descriptor(offset, leading, stride, swizzle, base=0):
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | swizzle << 62


ROWS = descriptor(0, 16, 1024, SWIZZLES["128"])  # rows of 128 bytes, the depth contiguous


def place_rows(image, offset, rows):
    """Put (n, 16) numbers into an image where ``ROWS`` from this offset on reads them."""
    outer, depth = np.arange(len(rows))[:, None], np.arange(16)
    image[torch.from_numpy(swizzled(offset + 128 * outer + 2 * depth) // 2)] = rows.to(image.dtype)


COLUMNS = descriptor(0, 2048, 1024, SWIZZLES["128"])  # rows of 128 bytes, the other dimension contiguous


def place_columns(image, offset, rows):
    """Put (n, 16) numbers into an image where ``COLUMNS`` from this offset on reads them."""
    outer, depth = np.arange(len(rows))[:, None], np.arange(16)
    bytes = offset + outer // 64 * 2048 + outer % 64 * 2 + depth * 128
    image[torch.from_numpy(swizzled(bytes) // 2)] = rows.to(image.dtype)


def empty_image(dtype=torch.bfloat16):
    return torch.zeros(IMAGE // 2, dtype=dtype)


def product(library, columns, form, image, words, a, b):
    """Return the sums of one product, (thread, register)."""
    out = torch.full((128, columns // 2), torch.nan)
    call(library, "product", columns, form, image, words, ctypes.c_uint64(a), ctypes.c_uint64(b), out)
    return out


def no_words():
    return torch.zeros(128, 4, dtype=torch.int32)


def as_words(numbers):
    """Return (128, 8) numbers of 16 bits as (128, 4) words of pairs."""
    return numbers.view(torch.int32)


def matrix(sums):
    """Return sums (thread, register) as (64, columns)."""
    thread, register = torch.meshgrid(torch.arange(128), torch.arange(sums.shape[1]), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    found = torch.zeros(64, 2 * sums.shape[1])
    found[row, register // 4 * 8 + thread % 4 * 2 + register % 2] = sums
    return found


def by_bytes(measure):
    """Return which 16-bit cell of the image each result of ``measure(image)`` comes from, in bytes.

    Two images hold the low and the high half of each cell's number."""
    low, high = empty_image(), empty_image()
    count = 1 << 15
    low[:count], high[:count] = (torch.arange(count) % 256).bfloat16(), (torch.arange(count) // 256).bfloat16()
    return (2 * (measure(low) + 256 * measure(high))).int()


def sums(library):
    """Place of each register of the sums."""
    for columns in (32, 64, 96, 128, 160, 192, 256):
        image = empty_image()
        row, column = torch.zeros(64, 16), torch.zeros(columns, 16)
        row[:, 0], row[:, 1], column[:, 0], column[:, 1] = torch.arange(64), 1, 1, 64 * torch.arange(columns)
        place_rows(image, 0, row)
        place_rows(image, 8192, column)
        found = product(library, columns, 0, image, no_words(), ROWS, ROWS + (8192 >> 4))
        values = found.T.flatten().int()
        bits = names("thread", 128) + names("register", columns // 2)
        yield f"{columns} columns: " + as_map(values, bits, lambda value: f"({value % 64},{value // 64})")


def a_words(library):
    """Thread, register and half that each element of A in registers comes from."""
    image = empty_image()
    place_rows(image, 0, torch.eye(64, 16))
    numbers = torch.arange(1024).reshape(128, 8)
    low, high = (
        product(library, 64, 2, image, as_words(part.bfloat16()), 0, ROWS) for part in (numbers % 256, numbers // 256)
    )
    values = (matrix(low) + 256 * matrix(high))[:, :16].flatten().int()
    bits = names("depth", 16) + names("row", 64)
    yield as_map(values, bits, lambda value: f"({value // 8},{value // 2 % 4},{value % 2})")


# Form of the kernel's product, by dtype, and by where A is and which dimension of A and of B is contiguous.
FORMS = {
    (torch.bfloat16, "A depth, B depth"): 0, (torch.bfloat16, "A outer, B depth"): 1,
    (torch.bfloat16, "A in registers, B depth"): 2, (torch.bfloat16, "A in registers, B outer"): 3,
    (torch.bfloat16, "A outer, B outer"): 6,
    (torch.float16, "A depth, B depth"): 4, (torch.float16, "A in registers, B depth"): 5,
    (torch.float16, "A outer, B outer"): 7, (torch.float16, "A in registers, B outer"): 8,
}  # fmt: skip


def numbers(library):
    """Sums of products of random numbers, in float16 those that bfloat16 would round, by form of the product.

    The sums are exact in float32."""
    generator = torch.Generator().manual_seed(0)
    for (dtype, form), number in FORMS.items():
        largest = 2048 if dtype == torch.float16 else 256
        for columns in (64, 128):
            a = torch.randint(1 - largest, largest, (64, 16), generator=generator) / 1024
            b = torch.randint(-8, 9, (columns, 16), generator=generator).float()
            image = empty_image(dtype)
            (place_columns if "A outer" in form else place_rows)(image, 0, a)
            (place_columns if "B outer" in form else place_rows)(image, 8192, b)
            of_a, of_b = (COLUMNS if f"{name} outer" in form else ROWS for name in "AB")
            # (warp, row / 8, row % 8, depth / 8, depth % 8 / 2, depth % 2) by (thread, register, half)
            words = a.view(4, 2, 8, 2, 4, 2).permute(0, 2, 4, 3, 1, 5).reshape(128, 8).to(dtype)
            found = product(library, columns, number, image, as_words(words), of_a, of_b + (8192 >> 4))
            name = str(dtype).removeprefix("torch.")
            yield f"{name}, {form}: {int((matrix(found) != a @ b.T).sum())} of {64 * columns} differ"


# (offset, leading, stride, swizzle) in bytes
DEPTH_FORMS = [
    (0, 16, 1024, "128"), (32, 16, 1024, "128"), (96, 16, 1024, "128"), (8192, 16, 1024, "128"), (0, 0, 2048, "128"),
    (0, 16, 512, "64"), (32, 16, 512, "64"), (0, 16, 256, "32"), (0, 2048, 128, "none"),
]  # fmt: skip
OUTER_FORMS = [
    (0, 8192, 1024, "128"), (2048, 8192, 1024, "128"), (0, 4096, 512, "64"), (0, 2048, 256, "32"),
    (0, 4096, 256, "none"),
]  # fmt: skip


def b_bytes(library):
    """Byte of shared memory that each element of B comes from: B(depth, column) is the sum in row `depth`."""
    one_hot = torch.zeros(128, 8, dtype=torch.bfloat16)
    for thread in range(32):
        for half in range(8):
            if thread // 4 + 8 * (half // 2 % 2) == thread % 4 * 2 + half % 2 + 8 * (half // 4):
                one_hot[thread, half] = 1
    upper_half = [(64, 8192, 1024, "128")]  # of rows of 64 elements
    for label, form, forms, sizes in (
        ("depth", 2, DEPTH_FORMS, (64, 128)), ("outer", 3, OUTER_FORMS, (64, 128)), ("outer", 3, upper_half, (32,))
    ):  # fmt: skip
        for columns in sizes:
            for offset, leading, stride, swizzle in forms:
                b = descriptor(offset, leading, stride, SWIZZLES[swizzle])

                def measure(image, columns=columns, form=form, b=b):
                    return matrix(product(library, columns, form, image, as_words(one_hot), 0, b))[:16].T.flatten()

                values = as_map(by_bytes(measure), names("depth", 16) + names("column", columns))
                yield f"{label} contiguous, {columns} columns, {(offset, leading, stride)}, swizzle {swizzle}: {values}"


def a_bytes(library):
    """Byte of shared memory that each element of A comes from, by a product with the identity."""
    identity = torch.eye(64, 16)
    for label, form, forms in (("depth", 0, DEPTH_FORMS), ("outer", 1, OUTER_FORMS)):
        for offset, leading, stride, swizzle in forms:
            a = descriptor(offset, leading, stride, SWIZZLES[swizzle])

            def measure(image, form=form, a=a):
                place_rows(image, 1 << 16, identity)
                return matrix(product(library, 64, form, image, no_words(), a, ROWS + (1 << 12)))[:, :16].flatten()

            values = as_map(by_bytes(measure), names("depth", 16) + names("row", 64))
            yield f"{label} contiguous, {(offset, leading, stride)}, swizzle {swizzle}: {values}"


def base_offset(library):
    """Byte that each element of A comes from, counted from where the swizzle's pattern of 1024 bytes begins: at 512."""

    def measure(image):
        place_rows(image, 1 << 16, torch.eye(64, 16))
        a = descriptor(512, 16, 1024, SWIZZLES["128"], base=4)
        return matrix(product(library, 64, 0, image, no_words(), a, ROWS + (1 << 12)))[:, :16].flatten()

    yield as_map(by_bytes(measure) - 512, names("depth", 16) + names("row", 64))


# (sizes, strides in elements, box, swizzle, place)
TILES = [
    ((128, 300, 1, 1), (128, 38400, 38400), (64, 64, 1, 1), "128", (64, 32, 0, 0)),
    ((64, 300, 1, 1), (64, 19200, 19200), (64, 256, 1, 1), "128", (0, 8, 0, 0)),
    ((96, 300, 1, 1), (96, 28800, 28800), (32, 64, 1, 1), "64", (64, 32, 0, 0)),
    ((96, 300, 1, 1), (96, 28800, 28800), (16, 64, 1, 1), "32", (64, 32, 0, 0)),
    ((128, 300, 1, 1), (128, 38400, 38400), (64, 64, 1, 1), "none", (64, 32, 0, 0)),
    ((64, 100, 3, 3), (192, 64, 19200), (64, 64, 1, 1), "128", (0, 16, 1, 2)),  # heads inside rows
    ((64, 100, 3, 3), (192, 64, 19200), (64, 32, 2, 1), "128", (0, 16, 1, 2)),  # two heads
    ((64, 100, 3, 1), (64, 6400, 19200), (64, 128, 1, 1), "128", (0, 64, 1, 0)),  # rows beyond the end
    ((64, 100, 3, 1), (64, 6400, 19200), (64, 64, 1, 1), "128", (0, -16, 1, 0)),  # rows before the beginning
    ((80, 100, 3, 1), (80, 8000, 24000), (64, 64, 1, 1), "128", (64, 0, 1, 0)),  # columns beyond the end
    ((64, 100, 3, 1), (64, 6400, 19200), (64, 64, 1, 1), "128", (0, 0, 3, 0)),  # a head beyond the end
]


def digest(tensor):
    return f"{zlib.crc32(tensor.numpy().tobytes()):08x}"


def tiles(library):
    """Bytes to which a box of a tensor is loaded, whose elements hold their own number, and those it is stored from."""
    for sizes, strides, box, swizzle, at in TILES:
        cells = 1 + sum((size - 1) * stride for size, stride in zip(sizes, (1, *strides), strict=True))
        tensor = (torch.arange(cells) + 1).to(torch.int16)
        count = box[0] * box[1] * box[2] * box[3]
        image = torch.zeros(count, dtype=torch.int16)
        steps = [2 * stride for stride in strides]
        options = (ctypes.c_uint64 * 4)(*sizes), (ctypes.c_uint64 * 3)(*steps), box, SWIZZLES[swizzle], at
        call(library, "tile", tensor, *options, 0, image)
        loaded, stored = digest(image), torch.zeros_like(tensor)
        places = {value: 2 * i for i, value in enumerate(image.tolist())}
        first = 1 + at[0] + sum(place * stride for place, stride in zip(at[1:], strides, strict=True))
        text = ""
        if 0 not in places and box[2] == 1:
            values = [places[int(tensor[first - 1 + y * strides[0] + x])] for y in range(box[1]) for x in range(box[0])]
            text = "; " + as_map(values, names("column", box[0]) + names("row", box[1]))
        call(library, "tile", stored, *options, 1, image)
        zeros = int((image == 0).sum())
        yield f"{sizes}, {box} at {at}, swizzle {swizzle}: {loaded}, {zeros} zeros; stored {digest(stored)}{text}"


def barriers(library):
    """Which parities have ended (1: parity 0, 2: parity 1) by event, and words that were loaded."""
    data = ((torch.arange(4096) * 7 + 1) % 256).to(torch.uint8)
    out = torch.full((14,), -1, dtype=torch.int32)
    call(library, "barriers", data, out)
    yield " ".join(map(str, out.tolist()))


def turns(library):
    """Order of the turns of two and of three warpgroups."""
    for groups in (2, 3):
        out = torch.full((groups * 50,), -1, dtype=torch.int32)
        call(library, "turns", groups, 50, out)
        yield "".join(map(str, out.tolist()))


def ordered(library):
    """Sums that depend on the order of their summands, in which the blocks take turns."""
    blocks, size, tiles = 16, 256, 8
    generator = torch.Generator().manual_seed(0)
    summands = torch.randn(tiles, blocks, size, generator=generator) ** 5
    wanted = functools.reduce(torch.add, summands.unbind(1))
    out = torch.full((tiles, size), torch.nan)
    ticket, turns = torch.zeros(1, dtype=torch.int32), torch.zeros(tiles, dtype=torch.int32)
    call(library, "ordered", blocks, summands, size, tiles, ticket, turns, out)
    yield f"{int((out != wanted).sum())} of {wanted.numel()} differ"


def warp_products(library):
    """Sums of products of single warps, in blocks that are resident together."""
    blocks, warps, rounds = 16, 2, 20
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (blocks * warps, 16, n), generator=generator).float() for n in (16, 8))
    # (warp, row / 8, row % 8, depth / 8, depth % 8 / 2, depth % 2) by (warp, lane, word, half)
    of_a = a.view(-1, 2, 8, 2, 4, 2).permute(0, 2, 4, 3, 1, 5).reshape(-1, 32, 8)
    # (warp, depth / 8, depth % 8 / 2, depth % 2, column)
    of_b = b.view(-1, 2, 4, 2, 8).permute(0, 4, 2, 1, 3).reshape(-1, 32, 4)
    words = torch.cat([of_a, of_b], -1).bfloat16().contiguous().view(torch.int32)
    out = torch.full((blocks * warps, 8, 4, 2, 2), torch.nan)  # (warp, row % 8, column / 2, row / 8, column % 2)
    call(library, "warp_products", blocks, words, rounds, out)
    found = out.permute(0, 3, 1, 2, 4).reshape(-1, 16, 8)
    yield f"{int((found != rounds * (a @ b)).sum())} of {found.numel()} differ"


def registers(library):
    """Digest of 200 registers per thread after some rounds."""
    out = torch.full((256,), -1, dtype=torch.int32)
    call(library, "registers", torch.arange(1024, dtype=torch.int32) * 77, 5, out)
    yield digest(out)


def matrices(library):
    """Lane, register and half that each element of four stored matrices comes from."""
    out = torch.zeros(128, dtype=torch.int32)
    call(library, "matrices", out)
    values = out.view(torch.int16).tolist()
    bits = names("column", 8) + names("row", 8) + names("matrix", 4)
    yield as_map(values, bits, lambda value: f"({value // 8},{value // 2 % 4},{value % 2})")


def arithmetic(library):
    """Powers of 2 of integers, and pairs of 16-bit numbers."""
    numbers = torch.tensor([0.0, 1.0, -1.0, -24.0, -126.0, -127.0, -torch.inf, 1.00390625, 1.01171875])
    out = torch.zeros(3 * len(numbers), dtype=torch.int32)
    call(library, "arithmetic", numbers, len(numbers), out)
    powers, pairs = out[: len(numbers) - 2], out[len(numbers) :]
    yield " ".join(f"{value & 0xFFFFFFFF:08x}" for value in (*powers.tolist(), *pairs.tolist()))


FUNCTIONS = (
    sums, a_words, numbers, b_bytes, a_bytes, base_offset, tiles, barriers, turns, ordered, warp_products, registers,
    matrices, arithmetic,
)  # fmt: skip
BY_NAME = {function.__name__: function for function in FUNCTIONS}


def lines(library, name):
    return [f"{name}: {line}" for line in BY_NAME[name](library)]


def expected(name):
    return [line for line in FACTS.read_text().splitlines() if line.startswith(f"{name}: ")]


# Attention

SEED = (-0x123456789ABCDEF, 5_000_000_007)


def run_forward(library, query, key, value, lengths, dropout_p=0.0, is_causal=False, blocks=None):
    """Return (out, lse) of (matrices, length, head_dim), by so many blocks of threads or one per tile."""
    matrices, length, head_dim = query.shape
    out, lse = torch.full_like(query, torch.nan), torch.full((matrices, length), torch.nan)
    rows = 192 if head_dim == 64 else 128
    blocks = blocks or -(-length // rows) * matrices
    operands = query, key, value, out, lse, torch.tensor(lengths), torch.tensor(SEED)
    options = oracle.threshold(dropout_p), matrices, length, int(is_causal), head_dim**-0.5, blocks
    call(library, "forward", head_dim, *operands, *options)
    return out, lse


def run_backward(library, query, key, value, out, grad, stats, lengths=None, dropout_p=0.0, is_causal=False):
    """Return the gradients of (matrices, length, head_dim). The statistics of ``out`` are (2, matrices, length)."""
    matrices, length, head_dim = query.shape
    grads = [torch.full_like(query, torch.nan) for _ in range(3)]
    operands = query, key, value, out, grad, *grads, stats, torch.tensor(lengths or [length] * matrices)
    options = oracle.threshold(dropout_p), matrices, length, int(is_causal), head_dim**-0.5
    floats = ctypes.c_int64()
    for workspace in (None, True):
        workspace = workspace and torch.full((floats.value,), torch.nan)
        call(library, "backward", head_dim, *operands, torch.tensor(SEED), *options, workspace, ctypes.byref(floats))
    return grads


def operands(count, shape):
    generator = torch.Generator().manual_seed(shape[1])
    return (torch.randn(shape, generator=generator).bfloat16() for _ in range(count))


def run_exact(dtype, operands, grad, lengths, options):
    """Return (out, lse, the gradients if ``grad`` is given) of (matrices, length, head_dim), computed in a dtype."""
    leaves = [tensor[:, None].to(dtype).requires_grad_(grad is not None) for tensor in operands]
    seed, key_lengths = torch.tensor(SEED), torch.tensor(lengths)
    out, lse, _ = oracle.attention(*leaves, seed=seed, key_lengths=key_lengths, dtype=dtype, **dict(options))
    grads = () if grad is None else torch.autograd.grad(out, leaves, grad[:, None].to(dtype))
    return out.detach(), lse.detach(), grads


@functools.lru_cache(2)  # many schedules have the same problem
def problem(head_dim, length, lengths, has_grad, options):
    """Return the operands, of which keys and values beyond the lengths are NaN, the gradient of the output or None, and
    ``run_exact``'s results by dtype."""
    query, key, value, *grad = operands(3 + has_grad, (len(lengths), length, head_dim))
    grad = grad[0] if has_grad else None
    for matrix, count in enumerate(lengths):
        key[matrix, count:] = value[matrix, count:] = torch.nan
    given = query, key, value
    dtypes = torch.float64, torch.bfloat16, torch.float32
    return given, grad, {dtype: run_exact(dtype, given, grad, lengths, options) for dtype in dtypes}


def forward(library, head_dim, length, lengths=None, *, blocks=None, **options):
    """Run the forward pass and check it. Return its results. Keys and values beyond the lengths are NaN."""
    lengths = tuple(lengths or [length, length])
    given, _, exact = problem(head_dim, length, lengths, False, tuple(options.items()))
    out, lse = run_forward(library, *given, lengths, blocks=blocks, **options)
    wanted, peer, wide_peer = exact[torch.float64], exact[torch.bfloat16], exact[torch.float32]
    oracle.assert_accurate(out[:, None], wanted[0], peer[0], "out")
    oracle.assert_accurate(lse[:, None], wanted[1], wide_peer[1], "lse")
    return out, lse


def backward(library, head_dim, length, lengths=None, **options):
    """Run the backward pass and check it. Return its results. Keys and values beyond the lengths are NaN."""
    lengths = tuple(lengths or [length, length])
    given, grad, exact = problem(head_dim, length, lengths, True, tuple(options.items()))
    (out, lse, wanted), peer = exact[torch.float64], exact[torch.bfloat16][2]
    sees = lse[:, 0] > -math.inf
    stats = torch.stack([lse[:, 0].where(sees, torch.zeros(())), sees.double()]).float()
    found = run_backward(library, *given, out[:, 0].bfloat16(), grad, stats, lengths, **options)
    for name, got, want, other in zip(("query", "key", "value"), found, wanted, peer, strict=True):
        oracle.assert_accurate(got[:, None], want, other, f"gradient of {name}")
    return found


def kept(library, head_dim, length, dropout_p):
    """Return which weights (2, length, length) the forward and the backward pass keep.

    All scores are equal. Slices of the identity, as values and as the output's gradient, show single weights."""
    zeros = torch.zeros(2, length, head_dim, dtype=torch.bfloat16)
    stats = torch.tensor([math.log(length), 1.0])[:, None, None].expand(-1, 2, length).contiguous()
    by_pass = [], []
    for slice in torch.eye(length, dtype=torch.bfloat16).split(head_dim, 1):
        one = slice.expand(2, -1, -1).contiguous()
        by_pass[0].append(run_forward(library, zeros, zeros, one, [length, length], dropout_p)[0])
        by_pass[1].append(run_backward(library, zeros, zeros, zeros, zeros, one, stats, None, dropout_p)[2])
    ours, transposed = (torch.cat(parts, 2) != 0 for parts in by_pass)
    return ours, transposed.mT


def compared_alone(name):
    """Compare a fact with the emulation's in a process of its own. Return what differs, "" if nothing does."""
    try:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "no end after 20 s"
    return done.stdout + done.stderr if done.returncode else ""


def record():
    """Write the file of facts from the emulation."""
    import emulation

    with emulation.strict():
        library = emulation.library()[1]
        FACTS.write_text("".join(f"{line}\n" for name in BY_NAME for line in lines(library, name)))


def main():
    if sys.argv[1:] == ["--record"]:
        record()
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("nothing to do: no GPU of compute capability 9.0")
        return
    library = compiled()
    if len(sys.argv) == 2:
        found = lines(library, sys.argv[1])
        wrong = [f"found  {a}\nwanted {b}" for a, b in zip(found, expected(sys.argv[1]), strict=True) if a != b]
        sys.exit("\n".join(wrong) or 0)
    with concurrent.futures.ThreadPoolExecutor(len(BY_NAME)) as pool:
        running = {pool.submit(compared_alone, name): name for name in BY_NAME}
        different = False
        for done in concurrent.futures.as_completed(running):
            text = done.result().strip()
            different |= bool(text)
            print(f"{running[done]}: {text or 'as expected'}", flush=True)
    sys.exit(different)


if __name__ == "__main__":
    main()
