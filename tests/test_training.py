"""Tests of translation: data, tokenizer, loss, schedule, training on both backends, search, checkpoints, scores."""

import contextlib
import ctypes
import dataclasses
import errno
import functools
import gzip
import io
import itertools
import json
import math
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import refused, slow
from matplotlib.axes import Axes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import Transformer, TransformerConfig
from fastattn.errors import InputError
from fastattn.files import check_file, write_file
from fastattn.translation import checkpoint, data, memory, plots
from fastattn.translation import tokenizer as tokenizer_module
from fastattn.translation.config import TrainingConfig
from fastattn.translation.evaluate import held_out, scores, smoothed_loss
from fastattn.translation.model import ROW_MULTIPLE, AttentionWeights
from fastattn.translation.precision import DTYPES
from fastattn.translation.search import Search, _draw, _largest, beam_search, candidates, sample, translate
from fastattn.translation.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from fastattn.translation.train import Trainer, dropout_seeds, read_metrics, train

OPTIONS = TrainingConfig(batch_tokens=150, warmup=40, precision="fp32", seed=3)
EXACT = torch.autocast("cpu", enabled=False)


@pytest.fixture(scope="module")
def verses():
    """Return 300 pairs of real sentences, and a tokenizer trained on them."""
    sources, targets = (data.read_lines(data.VERSES / f"dev.{language}")[:300] for language in ("en", "es"))
    return sources, targets, Tokenizer.train(sources + targets, 200)


@pytest.fixture(scope="module")
def tokenizer(verses):
    return verses[2]


@pytest.fixture(scope="module")
def text(verses):
    sources, targets, tokenizer = verses
    return data.ParallelText.encoded(tokenizer, sources, targets, "training")


@pytest.fixture
def model():
    return small_model().eval()


class Killed(BaseException):
    """Exception that no handler of the program catches."""


@contextlib.contextmanager
def killed_in(target):
    """Kill the program in a call of ``target``."""
    with pytest.raises(Killed), mock.patch(target, side_effect=Killed):
        yield


def small_model(dropout=0.1, d_ff=64):
    torch.manual_seed(0)
    rates = {"dropout": dropout, "attention_dropout": dropout, "ffn_dropout": dropout}
    config = TransformerConfig(200, d_model=32, d_ff=d_ff, num_heads=4, encoder_layers=1, decoder_layers=1, **rates)
    return Transformer(config)


# --- text ---


def test_reading(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    content = "\ufeffuna línea\r\n\nla «última»\u2028línea\n"
    plain.write_bytes(content.encode())
    packed.write_bytes(gzip.compress(content.encode()))
    assert data.read_lines(plain) == data.read_lines(packed) == ["una línea", "", "la «última»\u2028línea"]
    plain.write_bytes(b"no end")
    assert data.read_lines(plain) == ["no end"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "cannot read .*missing: No such file"),
        ("empty", b"", "is empty: expected one sentence a line"),
        ("blank", b"\n  \n", "is empty"),
        ("latin1", "a\nseñor".encode("latin-1"), "is not UTF-8: byte 0xf1 in line 2"),
        ("after a mark", b"\xef\xbb\xbfab\xffcd\n", "is not UTF-8: byte 0xff in line 1"),
        ("cut.gz", gzip.compress(b"text" * 100, mtime=0)[:-9], "is not a complete gzip file"),
        ("plain.gz", b"text", "cannot read .*plain.gz: Not a gzipped file"),
        ("three", b"one\ntwo\nthree\n", "three has 3 lines but .*one has 1"),
    ],
)
def test_unreadable_text(tmp_path, name, content, message):
    (tmp_path / "one").write_text("one\n")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(message, data.read_parallel, tmp_path / name, tmp_path / "one")


@pytest.mark.parametrize("piped", [0, 1], ids=["training", "validation"])
def test_training_refuses_a_pipe_without_opening_it(tmp_path, piped):
    """Training refuses a pipe before it opens it, because opening one without a writer blocks for ever."""
    (tmp_path / "text").write_text("one\n")
    os.mkfifo(tmp_path / "pipe")
    files = [[tmp_path / "text", tmp_path / ("pipe" if side == piped else "text")] for side in range(2)]
    message = f"^{tmp_path / 'pipe'} is no regular file, and training reads its text again and again"
    refused(message, train, *files, tmp_path / "run", preset="tiny", max_steps=1)
    assert not (tmp_path / "run").exists()


def test_text_that_is_read_once_may_be_a_pipe(tmp_path):
    (tmp_path / "text").write_text("one\n")
    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as stream:
        stream.write("uno\n")
        stream.close()
        assert data.read_parallel(tmp_path / "text", f"/dev/fd/{reader}") == (["one"], ["uno"])


def test_tokenizer(verses):
    sources, targets, tokenizer = verses
    ids = tokenizer.encode(["God", ""])
    assert ids[1] == []
    assert tokenizer.decode([[BOS_ID, *ids[0], EOS_ID, PAD_ID]]) == ["God"]
    long = Tokenizer.train([" ".join(sources), " ".join(targets[:50]) + " ж"], 150)  # above sentencepiece's 4192 B
    assert UNK_ID not in long.encode(["ж"])[0]


def test_a_vocabulary_of_many_lines_is_the_same_every_time(verses, monkeypatch):
    """The lines to learn from are drawn from the whole text, and are the same on every run."""
    monkeypatch.setattr(tokenizer_module, "LEARNED_FROM", 100)
    lines = verses[0] + verses[1]
    drawn = list(tokenizer_module._drawn(lines))
    assert len(drawn) == 100
    places = sorted(map(lines.index, drawn))
    assert places[0] < len(lines) / 10
    assert places[-1] > len(lines) * 9 / 10
    assert Tokenizer.train(lines, 120).model == Tokenizer.train(lines, 120).model
    assert list(tokenizer_module._drawn(lines[:100])) == lines[:100]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error"), InputError("no")], ids=repr)
def test_what_interrupts_the_lines_of_a_vocabulary_is_raised(error):
    def lines():
        yield "one"
        raise error

    with pytest.raises(type(error)) as raised:
        Tokenizer.train(lines(), 10)
    assert raised.value is error


# --- batches ---


def test_a_batch(verses):
    sources, targets, tokenizer = verses
    batch = data.ParallelText.encoded(tokenizer, sources, targets, "training").batch(torch.tensor([4, 0]))
    source, target = ([tokenizer.encode([side[i]])[0] for i in (4, 0)] for side in (sources, targets))
    wanted = [[[*ids, EOS_ID] for ids in source], [[BOS_ID, *ids] for ids in target]]
    for side, sentences in zip((batch.source, batch.target), wanted, strict=True):
        lengths = [len(ids) for ids in sentences]
        rest = len(side.tokens) - sum(lengths)
        assert len(side.tokens) % ROW_MULTIPLE == 0 <= rest < ROW_MULTIPLE
        assert side.tokens[: sum(lengths)].tolist() == [*sentences[0], *sentences[1]]
        assert side.places.tolist() == [*range(lengths[0]), *range(lengths[1]), *[0] * rest]
        assert side.offsets.tolist() == [0, lengths[0], sum(lengths), len(side.tokens)]
        assert side.longest == max(lengths)
    labels = [*target[0], EOS_ID, *target[1], EOS_ID]
    assert batch.labels.tolist() == labels + [PAD_ID] * (len(batch.target.tokens) - len(labels))
    assert (batch.tokens, batch.filled) == (len(labels), len(labels) + sum(len(ids) + 1 for ids in source))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_batches(text, seed):
    """Every pair occurs once, in the order of the seed. Each batch is within the budget, and the next pair would exceed
    it. A sentence longer than a batch is a batch of its own."""

    def batches(seed):
        return list(text.batches(600, seed and torch.Generator().manual_seed(seed)))

    indices = batches(seed)
    order = torch.cat(indices).tolist()
    assert sorted(order) == list(range(300))
    assert (order == list(range(300))) == (seed is None)
    assert order == torch.cat(batches(seed)).tolist() != torch.cat(batches(3)).tolist()
    for index, following in itertools.pairwise(indices):
        for of_batch, fits in ((index, True), (torch.cat((index, following[:1])), False)):
            tokens = max(int(side.lengths_of(of_batch).sum()) for side in (text.sources, text.targets))
            assert (tokens <= 600) == fits
    assert [len(index) for index in text.batches(1)] == [1] * 300


def test_epochs_can_be_entered_anywhere(text):
    def entered(count, **where):
        found = itertools.islice(text.epochs(600, seed=5, **where), count)
        return [(epoch, place, index.tolist()) for epoch, place, index in found]

    count = len(list(text.batches(600)))
    whole = entered(2 * count)
    assert [(epoch, place) for epoch, place, _ in whole] == [(e, p) for e in range(2) for p in range(count)]
    assert whole[0][2] != whole[count][2]
    for start in (0, 3, count - 1, count + 2):
        assert entered(3, epoch=start // count, skip=start % count) == whole[start : start + 3]


@pytest.mark.parametrize("chunk", [7, 1000])
def test_encoded_text_is_mapped(verses, text, tmp_path, monkeypatch, chunk):
    """Mapped files, packed or not, give the sentences and batches that memory gives. Pairs left out are counted."""
    (source, *sources), (target, *targets), tokenizer = verses
    monkeypatch.setattr("fastattn.translation.data.CHUNK", chunk)
    files, folder = (tmp_path / "en", tmp_path / "es.gz"), tmp_path / "text"
    files[0].write_text("\n".join([source, "", *sources, "God " * 300, "x"]))
    files[1].write_bytes(gzip.compress("\n".join([target, "x", *targets, "x", " "]).encode()))
    data.encode(tokenizer, files, data.digest(*files), folder)
    mapped = data.ParallelText.mapped(folder)
    assert (len(mapped.sources), mapped.left_out, mapped.first_left_out) == (300, 3, 2)
    for wanted, found in zip(text.batches(600), mapped.batches(600), strict=True):
        assert torch.equal(wanted, found)
        torch.testing.assert_close(*(dataclasses.asdict(t.batch(found)) for t in (mapped, text)), rtol=0, atol=0)
    mapped.sources._tokens.zero_()  # in this process alone
    assert data.ParallelText.mapped(folder).sources._tokens.any()


def test_arriving_lines_leave_the_stream_open(tmp_path):
    """A stream in memory is left open; of a file, the duplicate that was read is closed."""
    (tmp_path / "text").write_text("uno\ndos\n")
    with io.BytesIO(b"uno\ndos\n") as memory, open(tmp_path / "text", "rb") as file:
        for stream in (memory, file):
            before = os.listdir("/proc/self/fd")
            assert [*itertools.chain(*data.arriving_lines(stream, "text", 9))] == ["uno", "dos"]
            assert os.listdir("/proc/self/fd") == before
            assert not stream.closed


def test_mapped_text_is_read_as_it_is_needed(tmp_path):
    """A batch of an 8 GB text, here a sparse file, brings only its own sentences into memory."""
    length, count = 2**16, 2**15
    (tmp_path / "source.tokens").touch()
    os.truncate(tmp_path / "source.tokens", 4 * length * count)
    (torch.arange(count + 1) * length).numpy().tofile(tmp_path / "source.offsets")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    sentences, before = data.Sentences.mapped(tmp_path / "source"), resident()
    assert sentences.packed(torch.tensor([3, count - 1])).tokens.tolist() == [0] * 2 * length
    assert resident() - before < 2**26


def test_damaged_encoded_text(tokenizer, pairs, tmp_path):
    folder = tmp_path / "text"
    tokens, offsets = folder / "source.tokens", folder / "target.offsets"
    data.encode(tokenizer, pairs, data.digest(*pairs), folder)
    whole = offsets.read_bytes()
    changes = (0, 1), (5, 2**40), (5, -1), (5, 0)
    damaged = [whole[: 8 * i] + struct.pack("<q", value) + whole[8 * i + 8 :] for i, value in changes]
    for damage in (whole[:-8], *damaged):
        offsets.write_bytes(damage)
        refused(f"target.* differ: remove {folder}", data.ParallelText.mapped, folder)
    offsets.write_bytes(whole)
    tokens.write_bytes(tokens.read_bytes()[:-8])
    refused(f"source.* differ: remove {folder}", data.ParallelText.mapped, folder)


def test_text_is_encoded_once_and_whole(verses, pairs, tmp_path):
    sources, _, tokenizer = verses
    folder, names = tmp_path / "text", [tmp_path / path.name for path in pairs]
    with killed_in("os.fsync"):
        data.encode(tokenizer, pairs, data.digest(*pairs), folder)
    assert not folder.exists()
    for files in (pairs, pairs[::-1]):  # other text under the same names
        for name, path in zip(names, files, strict=True):
            shutil.copy(path, name)
        data.encode(tokenizer, names, data.digest(*names), folder)
    lengths = [len(ids) + 1 for ids in tokenizer.encode(data.read_lines(pairs[1]))]
    assert data.ParallelText.mapped(folder).sources.lengths.tolist() == lengths
    with mock.patch.object(Tokenizer, "encode", side_effect=Killed):
        data.encode(tokenizer, pairs[::-1], data.digest(*pairs[::-1]), folder)  # the same text under other names
        with pytest.raises(Killed):
            data.encode(Tokenizer.train(sources, 150), names, data.digest(*names), folder)


# --- loss and schedule ---


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_smoothed_loss(monkeypatch, dtype, smoothing, with_bias):
    """The loss agrees with torch's in float64 and with the smoothed cross-entropy written out. Gradients agree with
    torch's. The 700 rows are computed in two parts."""
    monkeypatch.setattr("fastattn.translation.evaluate.LOGIT_BYTES", 400 * 11 * dtype.itemsize)
    labels = torch.randint(0, 11, (700,))
    operands = [torch.randn(700, 6), torch.randn(11, 6), torch.randn(11)][: 3 if with_bias else 2]
    given, operands = ([tensor.to(of).requires_grad_() for tensor in operands] for of in (dtype, torch.float64))
    logits = F.linear(*operands)
    loss, nll, correct = smoothed_loss(*given, *([] if with_bias else [None]), labels, smoothing, PAD_ID)
    wanted = F.cross_entropy(logits, labels, ignore_index=PAD_ID, label_smoothing=smoothing, reduction="sum")
    kept = labels != PAD_ID
    target = (1 - smoothing) * F.one_hot(labels, 11).double() + smoothing / 11
    by_hand = -(target * logits.log_softmax(-1))[kept].sum()
    plain = F.cross_entropy(logits[kept], labels[kept], reduction="sum")
    # A logit is a sum of 6 products and a bias. It is of order 10 and rounded to 5 eps. The log-sum-exp is too, hence
    # also a row's loss of a few nats and, relatively, its probabilities. An element of a gradient is a mean over 700
    # rows. Each term is a probability minus its target, times a number of order 1.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close([loss, loss, nll], [wanted, by_hand, plain], rtol=10 * eps, atol=0, check_dtype=False)
    assert correct == (logits.argmax(-1) == labels)[kept].sum()
    ours = torch.autograd.grad(loss / 700, given)
    assert {gradient.dtype for gradient in ours} == {dtype}
    exact = torch.autograd.grad(wanted / 700, operands)
    torch.testing.assert_close(ours, exact, rtol=0, atol=10 * eps, check_dtype=False)
    assert ours[0][~kept].abs().max() == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("mean", "sharpness"), [(0, 1), (1, 1), (1, 4)])
def test_smoothed_loss_is_as_near_as_torchs(monkeypatch, mean, sharpness, smoothing):
    """In bfloat16, computed in two parts, loss and gradients are as near to float64 as torch's. Pieces that no label
    names are also compared separately, since their gradient is the small difference of a probability and its target."""
    monkeypatch.setattr("fastattn.translation.evaluate.LOGIT_BYTES", 300 * 2000 * 2)
    features, weight = torch.randn(512, 64) + mean * torch.randn(64), torch.randn(2000, 64) * sharpness / 8
    bias = torch.randn(2000)
    labels = (features @ weight.t() + bias + 3 * torch.randn(512, 2000)).argmax(-1).clamp(min=1)

    def found(dtype, loss):
        given = [tensor.to(dtype).requires_grad_() for tensor in (features, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            value = loss(*given)
        gradients = torch.autograd.grad(value, given)
        unseen = [gradient[1:].index_fill(0, labels - 1, 0.0) for gradient in gradients[1:]]
        return [tensor.detach().double() for tensor in (value, *gradients, *unseen)]

    def torchs(*operands):
        return F.cross_entropy(F.linear(*operands), labels, label_smoothing=smoothing, reduction="sum")

    exact, peer = found(torch.float64, torchs), found(torch.float32, torchs)
    ours = found(torch.float32, lambda *operands: smoothed_loss(*operands, labels, smoothing, PAD_ID)[0])
    for value, of_torch, wanted in zip(ours, peer, exact, strict=True):
        assert (value - wanted).norm() <= 2 * (of_torch - wanted).norm() + 1e-6 * wanted.norm()


def test_smoothed_loss_of_confident_labels_is_as_near_as_torchs():
    """The loss of labels that exceed all other pieces by a margin is tiny, and keeps its digits. Errors are pooled over
    20 draws. Beyond a margin of 17, float32 has no digit left, here as in torch."""
    pieces = 300
    for margin, smoothing, rows in itertools.product((6, 8, 10, 12, 14, 16, 25, 40, 90), (0.0, 0.1), (1, 32, 300)):
        errors = torch.zeros(2, dtype=torch.float64)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            labels = torch.randint(1, pieces, (rows,), generator=generator)
            logits = torch.randn(rows, pieces, generator=generator)
            logits[torch.arange(rows), labels] = logits.amax(1) + margin
            peer, wanted = (
                F.cross_entropy(logits.to(dtype), labels, label_smoothing=smoothing, reduction="sum")
                for dtype in (torch.float32, torch.float64)
            )
            loss, nll, _ = smoothed_loss(logits, torch.eye(pieces), None, labels, smoothing, PAD_ID)
            assert smoothing or loss == nll
            errors += torch.stack([loss - wanted, peer - wanted]).double().square()
        ours, torchs = errors.sqrt().tolist()
        assert ours <= 1.5 * torchs, f"margin {margin}, smoothing {smoothing}, {rows} rows"


@pytest.mark.parametrize("label", [-100, 11])
def test_smoothed_loss_of_a_label_that_is_no_piece(label):
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        smoothed_loss(torch.randn(2, 6), torch.randn(11, 6), None, torch.tensor([3, label]), 0.1, PAD_ID)


def test_smoothed_loss_of_labels_without_probability():
    """A label 1000 nats below the best has probability 0 in any format, but a loss of 1000."""
    features, weight = torch.eye(2, requires_grad=True), torch.tensor([[0.0, 0.0], [1000.0, 0.0], [0.0, 1000.0]])
    loss, nll, correct = smoothed_loss(features, weight, None, torch.tensor([2, 2]), 0.0, PAD_ID)
    assert [loss.item(), nll.item(), correct.item()] == [1000.0, 1000.0, 1.0]
    assert torch.autograd.grad(loss, features)[0].tolist() == [[1000.0, -1000.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_smoothed_loss_that_is_not_finite(value):
    """The loss is not finite either, so that the run ends, instead of a number that looks like a loss."""
    weight = torch.randn(11, 6)
    weight[3, 2] = value
    loss, nll, _ = smoothed_loss(torch.randn(4, 6).abs(), weight, None, torch.tensor([3, 4, 5, 6]), 0.1, PAD_ID)
    assert not any((loss.isfinite(), nll.isfinite()))


def test_smoothed_loss_reads_no_row_of_padding():
    labels = torch.tensor([3, PAD_ID, 5, PAD_ID])
    features, *rest = torch.randn(4, 6), torch.randn(11, 6), torch.randn(11)

    def found(rows):
        leaves = [tensor.clone().requires_grad_() for tensor in (features, *rest)]
        sums = smoothed_loss(leaves[0][rows], *leaves[1:], labels[rows], 0.1, PAD_ID)
        return *sums, *torch.autograd.grad(sums[0], leaves)

    wanted = found(labels != PAD_ID)
    features[labels == PAD_ID] = torch.nan
    torch.testing.assert_close(found(slice(None)), wanted)
    assert not any(tensor.count_nonzero() for tensor in found(slice(0)))


class Made(TorchDispatchMode):
    """Record of the tensors that operations make, views excluded.

    ``sizes`` holds their numbers of elements. ``most`` is the largest number of elements that tensors of more than
    ``large`` elements held at a time.
    """

    def __init__(self, large=0):
        super().__init__()
        self.sizes, self.large, self.most = [], large, 0
        self._alive = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        returned = zip(found if isinstance(found, tuple | list) else [found], function._schema.returns, strict=False)
        made = [t for t, about in returned if isinstance(t, torch.Tensor) and not about.alias_info]
        self.sizes += [t.numel() for t in made]
        self._alive += [(StorageWeakRef(t.untyped_storage()), t.numel()) for t in made if t.numel() > self.large]
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        self.most = max(self.most, sum(size for _, size in self._alive))
        return found


@pytest.mark.parametrize(
    ("dtype", "most", "parts"),
    [
        (torch.float32, 2**24, [524] * 4 + [304]),
        (torch.bfloat16, 2**24, [1048, 1048, 304]),
        (torch.bfloat16, 2**26, [1200, 1200]),
        (torch.float32, 2**26, [132, 131]),
        (torch.float32, 2**26, [262]),
    ],
)
def test_the_loss_holds_the_logits_of_a_few_rows(dtype, most, parts, monkeypatch):
    """No tensor holds logits of the vocabulary for all tokens: logits and softmax are computed for some rows at a
    time. Logits of up to 8 MiB, here 262 rows of 32,000 bytes, are computed at once. Validation makes no gradients,
    which saves a tensor of the weight's size."""
    pieces = 8000
    monkeypatch.setattr("fastattn.translation.evaluate.LOGIT_BYTES", most)
    features, weight = (torch.randn(rows, 32, requires_grad=True) for rows in (sum(parts), pieces))
    labels = torch.randint(0, pieces, (sum(parts),))
    with Made(32 * pieces) as made, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)[0].backward()
    assert made.most == 2 * parts[0] * pieces
    large = [size for size in made.sizes if size > made.large]
    assert large == [part * pieces for part in parts for _ in ("logits", "softmax")]
    with torch.no_grad(), Made() as validating:
        smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)
    assert [weight.numel() in run.sizes for run in (made, validating)] == [True, False]


def test_smoothed_loss_waits_for_no_gpu():
    """The loss needs no value on the host. Fake tensors raise at operations that do, such as selecting the rows without
    padding."""
    with FakeTensorMode():
        features, weight = (torch.empty(rows, 32, requires_grad=True) for rows in (600, 50))
        found = smoothed_loss(features, weight, None, torch.empty(600, dtype=torch.int64), 0.1, PAD_ID)
    assert [value.shape for value in found] == [()] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [(-4, 0), (-1, -1)]),
        ({"PYTHONMALLOC": "debug", "GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, [(-4, 0), (-1, -1)]),  # other settings
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, []),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, []),
    ],
)
def test_settings_of_malloc_in_the_environment_go_first(given, expected, monkeypatch):
    called = []
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=lambda *pair: called.append(pair)))
    memory.keep_freed()
    assert called == expected


@pytest.mark.torch_version
def test_the_loss_of_an_update_compiles_whole(text):
    """Compiled without a graph break, the loss of a packed batch and its gradients are the eager ones."""
    trainer = Trainer(small_model(), text, TrainingConfig(batch_tokens=300, precision="fp32"))
    batch, seeds = text.batch(torch.arange(6)), dropout_seeds(1, 1, 0, trainer.model.dropout_sites)
    parameters = list(trainer.model.parameters())
    found = []
    for loss in (trainer.loss, torch.compile(trainer.loss, fullgraph=True, backend="aot_eager")):
        values = loss(batch, seeds)
        found.append((*values, *torch.autograd.grad(values[0], parameters)))
    torch.testing.assert_close(*found)


def test_the_schedule_is_the_papers(text):
    """The rate of formula 3, with warm-up 4000 and d_model 512, peaks at 6.99e-4."""
    config = TransformerConfig.preset("base", 200, encoder_layers=1, decoder_layers=1)
    trainer = Trainer(Transformer(config), text, TrainingConfig.of_preset("base"))
    rates = [trainer.learning_rate(step) / 6.9877e-4 for step in (4000, 1, 16000)]
    assert rates == pytest.approx([1, 1 / 4000, 1 / 2], rel=1e-4)
    group = trainer.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)


def test_dropout_seeds_name_update_and_site():
    seeds = torch.stack([dropout_seeds(*where, sites=5) for where in ((1, 1, 0), (1, 2, 0), (1, 1, 1), (2, 1, 0))])
    assert (seeds.shape, seeds.dtype) == ((4, 5, 2), torch.int64)
    assert len(seeds.flatten(0, 1).unique(dim=0)) == 20
    assert torch.equal(seeds[0], dropout_seeds(1, 1, 0, sites=5))


# --- training ---


class PretendedGPU(TorchFunctionMode):
    """CPU under the name of a GPU. It counts the copies there, which must be asynchronous and from pinned memory."""

    def __init__(self):
        super().__init__()
        self.pinned, self.sent = [], 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.tensor:
            assert kwargs.get("device", "cpu") == "cpu", "a number is copied there, and waits"
        if function is torch.Tensor.pin_memory:
            self.pinned.append(args[0])
            return args[0]
        devices = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.device) and arg.type == "cuda"]
        if devices and function is torch.Tensor.to:
            assert kwargs == {"non_blocking": True}
            assert any(args[0] is pinned for pinned in self.pinned)
            self.sent += 1
            return args[0]
        if devices:
            assert function in (torch.zeros, torch.full), f"{function} copies to the GPU and waits"
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def test_an_update_waits_for_no_gpu(text):
    """An update copies to the GPU asynchronously and from pinned memory. Other copies wait for all of the GPU's
    work."""
    trainer = Trainer(small_model(), text, dataclasses.replace(OPTIONS, micro_batches=2))
    trainer.update()
    trainer.device, device = torch.device("cuda"), trainer.device
    with PretendedGPU() as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that autocast finds no GPU
        trainer.update()
    assert gpu.sent == 2 * 9  # per micro-batch: seven tensors, its seeds and its counts
    assert data.sent(torch.ones(2), device).tolist() == [1, 1]


def test_training_learns_and_search_finds_it():
    """Eight memorised sentences come back word for word in every batch, in either order, with every beam."""
    sources = [f"{word} {tail}" for word in ("one", "two", "three", "four") for tail in ("day", "night and day")]
    targets = [f"{tail} {word}" for word in ("uno", "dos", "tres", "cuatro") for tail in ("dia", "noche y dia")]
    tokenizer = Tokenizer.train(sources + targets, 45)
    text = data.ParallelText.encoded(tokenizer, sources, targets, "training")
    torch.manual_seed(0)
    config = TransformerConfig(45, d_model=64, d_ff=128, num_heads=4, encoder_layers=1, decoder_layers=1, dropout=0.0)
    trainer = Trainer(Transformer(config), text, OPTIONS)
    for _ in range(120):
        _, _, correct, tokens, *_ = trainer.update().tolist()
    assert correct == tokens == text.targets.lengths.sum()
    found = functools.partial(translate, trainer.model.eval(), tokenizer)
    for beam, batch_size in ((1, 8), (4, 8), (4, 1), (2, 3)):
        assert found(sources, Search(beam, batch_size=batch_size)) == targets
    assert found([*sources[::-1], "", sources[2]]) == [*targets[::-1], "", targets[2]]
    assert found([]) == []
    trainer.model.to(torch.bfloat16)
    assert found(sources) == targets


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_with_a_hook_of_the_last_product(text, precision):
    """The hook is called once per micro-batch, and the updates equal those without it."""
    config = dataclasses.replace(OPTIONS, micro_batches=2, precision=precision)
    found, seen = [], []
    for observed in (False, True):
        trainer = Trainer(small_model(), text, config)
        if observed:
            trainer.model.output.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        found.append(torch.stack([trainer.update() for _ in range(3)]))
        assert trainer.model.output.weight[PAD_ID].abs().max() == 0
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float32] * 6
    # The gradient of the logits is rounded to the dtype of the products.
    torch.testing.assert_close(*found, rtol=1e-5 if precision == "fp32" else 2**-8, atol=0)


# --- search ---


def texts(found):
    """Return the texts of each sentence's translations."""
    return [[translation.text for translation in translations] for translations in found]


@pytest.fixture
def found(verses, model):
    """Return a function that returns a search's translations of these of the verses."""

    def found(order=range(4), **search):
        lines = [verses[0][i] for i in order]
        return candidates(model, verses[2], lines, Search(**{"extra_tokens": 9, **search}))

    return found


def every_hypothesis(model, source, length_penalty, longest):
    """Yield (score, tokens) of every hypothesis of at most ``longest`` tokens, each scored from scratch."""
    stack = [([], 0.0)]
    while stack:
        tokens, log_p = stack.pop()
        log_probs = model(source, torch.tensor([[BOS_ID, *tokens]]))[0, -1].log_softmax(-1).tolist()
        for token in range(EOS_ID, model.config.vocab_size):
            total, longer = log_p + log_probs[token], tokens if token == EOS_ID else [*tokens, token]
            if token == EOS_ID or len(longer) == longest:
                yield total / ((5 + len(tokens) + 1) / 6) ** length_penalty, longer
            else:
                stack.append((longer, total))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@torch.no_grad()
def test_a_wide_beam_finds_the_best_hypotheses(length_penalty):
    """A beam as wide as all 4**4 prefixes finds what exhaustive search finds, in its order: vocabulary of 6, at most 4
    tokens."""
    torch.manual_seed(5)
    config = TransformerConfig(6, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = Transformer(config).eval()
    source = torch.tensor([[3, 4, EOS_ID], [5, 3, EOS_ID]])
    found = beam_search(model, source, torch.tensor([3, 3]), Search(256, length_penalty, n_best=5, extra_tokens=1))
    for row, hypotheses in enumerate(found):
        wanted = sorted(every_hypothesis(model, source[row : row + 1], length_penalty, 4), reverse=True)[:5]
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens for _, tokens in wanted]
        assert [hypothesis.score for hypothesis in hypotheses] == pytest.approx(
            [score for score, _ in wanted], abs=1e-4
        )


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (3, 1.0, [1, 2, 4]),
        (0, 0.6, [1, 4]),
        (4, 0.8, [1, 2, 4]),
        (1, 1.0, [1]),
        (0, 1e-9, [1]),
    ],
)
def test_draws_follow_the_distribution(top_k, top_p, kept):
    """Uniform numbers on an equidistant grid draw each token as often as it is probable."""
    p = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3], dtype=torch.float64)
    wanted = torch.zeros(5, dtype=torch.float64)
    wanted[kept] = p[kept] / p[kept].sum()
    count = 10_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = _draw(p.log().expand(count, -1), uniform, top_k, top_p)
    torch.testing.assert_close(drawn.bincount(minlength=5) / count, wanted.float(), rtol=0, atol=2 / count)


def test_samples_depend_on_seed_and_sentence_alone(found):
    sampled = functools.partial(found, temperature=1.0, n_best=3, seed=5)
    together = sampled(range(6))
    for translations in together:
        assert len({translation.text for translation in translations}) == 3
        scores = [translation.score for translation in translations]
        assert scores == sorted(scores, reverse=True)
    assert texts(sampled(range(5, -1, -1), batch_size=2)[::-1]) == texts(together)
    assert texts(sampled(range(6), seed=6)) != texts(together)


def test_a_sample_of_the_likeliest_is_greedy_and_its_score_is_the_models(found):
    greedy, sampled = found(beam=1), found(temperature=3.0, top_k=1)
    assert texts(sampled) == texts(greedy)
    assert [found[0].score for found in sampled] == pytest.approx([found[0].score for found in greedy], abs=1e-4)
    for temperature in (1e-30, 1e-46, 1e-300):  # float32 rounds the last two to 0
        assert texts(found(temperature=temperature)) == texts(greedy)


@torch.no_grad()
def test_scores_of_confident_tokens_are_as_near_as_torchs(model):
    """A token that is 6 to 14 nats more likely than all others has a tiny score. It keeps its digits in beam search and
    in sampling. Errors are pooled over sentences."""
    source, lengths = torch.randint(EOS_ID + 1, model.config.vocab_size, (40, 3)), torch.full((40,), 3)
    start = torch.full((40, 1), BOS_ID)
    bias, logits_of = torch.zeros(model.config.vocab_size), model.logits
    for margin in (6, 10, 14):
        features = model.step(start, model.begin(source, lengths))
        bias[EOS_ID] = logits_of(features).amax() + margin
        with mock.patch.object(model, "logits", lambda x: logits_of(x) + bias):
            logits = model.logits(features)[:, 0]
            wanted = logits.double().log_softmax(-1)[:, EOS_ID]
            peer = logits.log_softmax(-1)[:, EOS_ID]
            for function, search in ((beam_search, {"beam": 2}), (sample, {"temperature": 1.0, "top_k": 1})):
                found = function(model, source, lengths, Search(length_penalty=0.0, extra_tokens=3, **search))
                assert all(hypotheses[0].tokens == [] for hypotheses in found)
                scores = torch.tensor([hypotheses[0].score for hypotheses in found])
                assert (scores - wanted).norm() <= 1.5 * (peer - wanted).norm()


def test_the_largest_draw_is_a_token(monkeypatch, found):
    """The largest random number, 1 - 2**-53, draws a token, although float32 rounds it to 1."""
    monkeypatch.setattr("random.Random.random", lambda self: 1 - 2.0**-53)
    likeliest, whole = (found(range(2), temperature=1.0, top_k=top_k, extra_tokens=0) for top_k in (2, 0))
    assert all(translations[0].score < 0 for translations in (*likeliest, *whole))
    assert texts(whole) != texts(likeliest)


def test_a_long_sentence_shares_its_batch_with_few(monkeypatch, verses, model):
    """A long sentence is in a batch of few, because padding short ones to its length takes as much memory as long
    ones."""
    sources, _, tokenizer = verses
    lines = [" ".join(sources[:8]), *sources[:5]]
    assert len(tokenizer.encode(lines[:1])[0]) >= 500
    together = translate(model, tokenizer, lines, Search(beam=2, extra_tokens=9))
    monkeypatch.setattr("fastattn.translation.search.MOST_TOKENS", 1000)
    with mock.patch("fastattn.translation.search.beam_search", side_effect=beam_search) as search:
        assert translate(model, tokenizer, lines, Search(beam=2, extra_tokens=9)) == together
    first, *others = (call.args[1].shape for call in search.call_args_list)
    assert first[0] == 1
    assert len(others) < len(lines) - 1
    assert all(rows * 2 * length <= 1000 + 2 * rows * data.LENGTH_MULTIPLE for rows, length in others)


@pytest.mark.parametrize("k", [1, 4, 30])
@pytest.mark.parametrize("size", [3, 40, 159, 160, 799, 8000, 37003])
def test_the_largest_of_long_rows(size, k):
    """Values and indices are those of torch.topk, wherever they stand: in the columns or in the remainder."""
    x = torch.stack([torch.randperm(size, generator=torch.Generator().manual_seed(i)).float() for i in range(20)])
    x = x.view(4, 5, size)
    wanted = x.topk(min(k, size))
    values, index = _largest(x, min(k, size))
    assert torch.equal(values, wanted.values)
    assert torch.equal(index, wanted.indices)


@pytest.mark.parametrize(
    ("precision", "search"),
    [
        ("fp32", {"beam": 4, "n_best": 2}),
        pytest.param("bf16", {"beam": 1}, marks=pytest.mark.slow),
        pytest.param("bf16", {"temperature": 0.8, "top_p": 0.9, "n_best": 2}, marks=pytest.mark.slow),
    ],
    ids=["beam", "greedy", "sampling"],
)
def test_the_bundled_model_translates_a_sentence_alike_in_every_batch(precision, search):
    """Translations are the same in every batch. Scores differ in the last digits, because products of other sizes may
    round differently."""
    model, tokenizer = checkpoint.load(checkpoint.PRETRAINED)
    model = model.to(DTYPES[precision])
    lines = sorted(data.read_lines(data.VERSES / "test.en"), key=len)[20:28]
    together = candidates(model, tokenizer, lines, Search(**search))
    for size, order in ((3, random.Random(2).sample(range(8), 8)), (1, range(8))):
        found = candidates(model, tokenizer, [lines[i] for i in order], Search(batch_size=size, **search))
        wanted = [together[i] for i in order]
        assert texts(found) == texts(wanted)
        scores, exact = ([t.score for translations in side for t in translations] for side in (found, wanted))
        assert scores == pytest.approx(exact, abs=1e-4)


def test_search_refuses_bad_numbers():
    for name, numbers in {
        "beam": [0],
        "batch_size": [-1],
        "length_penalty": [math.inf, 5.1, -5.1],  # the powers of 5.1 overflow
        "n_best": [0, 5],
        "extra_tokens": [-1],
        "top_k": [-1],
        "top_p": [0.0, 1.5],
        "temperature": [0.0, math.nan],
    }.items():
        for number in numbers:
            refused(f"{name} is {number}", Search, **{name: number})
    refused("give a temperature too", Search, top_k=5)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_lines_arrive_one_by_one_or_together(end):
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        lines = data.arriving_lines(stream, "pipe", 3)
        os.write(writing, "\ufeffseñor\n".encode())
        assert next(lines) == ["señor"]
        os.write(writing, b"one\n\nthree" + end)
        os.close(writing)
        assert list(itertools.chain(*lines)) == ["one", "", "three"]


def test_lines_before_a_bad_one_are_not_lost():
    lines, seen = data.arriving_lines(io.BytesIO(b"one\ntwo\n\xff\n"), "pipe", 10), []
    refused("pipe is not UTF-8: byte 0xff in line 3", seen.extend, lines)
    assert list(itertools.chain(*seen)) == ["one", "two"]
    assert list(data.arriving_lines(io.BytesIO(b"one\ntwo\n"), "pipe", 1)) == [["one"], ["two"]]


def test_a_stream_is_read_no_further_than_it_is_used():
    class Endless(io.BytesIO):
        taken = 0

        def __next__(self):
            self.taken += 1
            return b"line\n"

    stream = Endless()
    lines = data.arriving_lines(stream, "pipe", 3)
    for _ in range(10):
        assert 1 <= len(next(lines)) <= 3
    time.sleep(0.05)
    assert stream.taken <= 10 * 3 + 5  # 3 lines in the queue, one on its way into it, one taken out of it


def test_a_stream_that_fails():
    """The error of the thread that reads reaches the caller."""

    class Failing(io.BytesIO):
        def __next__(self):
            raise error

    error = OSError(errno.EIO, "Input/output error")
    refused("cannot read pipe: Input/output error", list, data.arriving_lines(Failing(), "pipe", 10))
    error = MemoryError()
    with pytest.raises(MemoryError):
        list(data.arriving_lines(Failing(), "pipe", 10))


# --- checkpoints ---


@pytest.fixture
def save(tokenizer):
    """Return a function that saves a small model."""

    def save(folder, step, model=None, tokenizer=tokenizer, state=None, options=OPTIONS):
        return checkpoint.save(folder, step, model or small_model(), tokenizer, state or {"step": step}, options)

    return save


def names(paths):
    return [path.name for path in paths]


@pytest.mark.torch_version
def test_a_checkpoint_restores_model_and_training(tmp_path, save, tokenizer, text):
    trainer = Trainer(small_model(), text, OPTIONS)
    for _ in range(3):
        trainer.update()
    saved = save(tmp_path, 3, trainer.model, state=trainer.state())
    assert saved.name == "step-00000003"
    assert sorted(names(saved.iterdir())) == ["config.json", "model.safetensors", "tokenizer.model", "training.pt"]
    model, loaded = checkpoint.load(tmp_path)
    assert (loaded.model, model.training) == (tokenizer.model, False)
    resumed = Trainer(model, text, OPTIONS)
    resumed.load_state(checkpoint.load_training(saved))
    for _ in range(3):
        assert torch.equal(resumed.update(), trainer.update())
    assert all(map(torch.equal, resumed.model.parameters(), trainer.model.parameters()))


def test_an_int8_checkpoint(tmp_path, tokenizer, model):
    """Weights are within half a step of their row, zero rows stay zero, vectors are unchanged. The file has a quarter
    of the size."""
    model.output.weight.data[7] = 0.0
    checkpoint.save_int8(model, tokenizer, 5, tmp_path / "small")
    loaded, same_tokenizer = checkpoint.load(tmp_path / "small")
    assert same_tokenizer.model == tokenizer.model
    assert checkpoint.updates(tmp_path / "small") == 5
    for (name, expected), actual in zip(model.named_parameters(), loaded.parameters(), strict=True):
        step = expected.abs().amax(-1, keepdim=True) / 127 if expected.dim() > 1 else torch.zeros(1)
        assert ((actual - expected).abs() <= step * 0.5000001).all(), name
        assert (actual != expected).any() == (expected.dim() > 1), name
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "small/model.safetensors").stat().st_size < 1.6 * parameters  # short rows: 32 and 64 elements


def test_the_average_of_checkpoints(tmp_path, save):
    """Each weight is the mean over the newest checkpoints. More than there are is refused, and one of no update does
    not count."""
    models = [small_model() for _ in range(3)]
    for step, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 10.0**step
        save(tmp_path / "run", step, model)
    checkpoint.average(tmp_path / "run", 2, tmp_path / "mean")
    mean, _ = checkpoint.load(tmp_path / "mean")
    assert checkpoint.updates(tmp_path / "mean") == 2
    for actual, *parts in zip(*(model.parameters() for model in (mean, *models[1:])), strict=True):
        assert torch.equal(actual, torch.stack(parts).double().mean(0).float())
    for last in (0, 3):
        refused(f"last is {last}, expected 1 to 2", checkpoint.average, tmp_path / "run", last, tmp_path / "other")


def test_checkpoints_of_two_runs_have_no_average(tmp_path, save, verses):
    others = {"shape": {"model": small_model(d_ff=96)}, "vocabulary": {"tokenizer": Tokenizer.train(verses[0], 200)}}
    for name, other in others.items():
        save(tmp_path / name, 1)
        save(tmp_path / name, 2, **other)
        message = "step-00000001 is of another run than step-00000002"
        refused(message, checkpoint.average, tmp_path / name, 2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_which_checkpoints_are_kept_found_and_averaged(tmp_path, save):
    """Pruning keeps the newest and the best. The average takes checkpoints in a row. An older best does not count; one
    more between two, as Ctrl-C writes it, does."""
    run, training = tmp_path / "run", TrainingConfig(save_every=10, keep=3)
    for step in (0, 10, 20, 30, 40, 43, 50):
        saved = save(run, step, options=training)
        if step == 20:
            checkpoint.mark_best(saved)
        checkpoint.prune(run, training.keep)
    assert names(checkpoint.steps(run)) == [f"step-000000{step}" for step in (20, 40, 43, 50)]
    assert checkpoint.find(run).resolve().name == "step-00000020"
    assert checkpoint.newest(run).name == "step-00000050"
    assert checkpoint.find(run / "step-00000040").name == "step-00000040"
    message = "last is 4, expected 1 to 3: as many trained checkpoints in a row as"
    refused(message, checkpoint.average, run, 4, tmp_path / "mean")
    checkpoint.average(run, 3, tmp_path / "mean")


def test_a_copy_without_links_goes_on(tmp_path, save):
    """The best is marked also where `scp -r` has made a folder of the link."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.json").touch()
    checkpoint.mark_best(save(tmp_path, 2))
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    (tmp_path / ".partial-old-best").mkdir()  # left by a killed removal
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(names(tmp_path.iterdir())) == ["best", "step-00000002"]


def test_what_others_keep_in_a_runs_folder_is_left_alone(tmp_path, save):
    """Pruning leaves copies of checkpoints and files that another command is writing."""
    for step in (10**8, 99_999_999, 10**8 + 1):
        save(tmp_path, step)
    others = {"step-00000001-good", "step-mean", ".partial-mean", ".partial-step-mean"}
    for name in (*others, ".partial-step-00000003", ".partial-old-text"):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-loss.png").touch()
    checkpoint.prune(tmp_path, keep=2)
    kept = ["step-100000000", "step-100000001"]
    assert names(checkpoint.steps(tmp_path)) == kept
    assert set(names(tmp_path.iterdir())) == {*kept, *others, ".partial-loss.png"}
    refused("last is 3, expected 1 to 2", checkpoint.average, tmp_path, 3, tmp_path / "mean")


def test_a_folder_of_the_users_is_not_taken_for_an_interrupted_start(tmp_path, tokenizer):
    run, own = tmp_path / "run", tmp_path / "run/text/train.en"
    own.parent.mkdir(parents=True)
    own.write_text("day\n")
    refused("run exists already", checkpoint.expect_new, run)
    message = "text is not what `fastattn train` wrote: name another folder"
    refused(message, data.encode, tokenizer, (own, own), data.digest(own, own), own.parent)
    assert own.read_text() == "day\n"
    (own.parent / "text.json").write_text("{}")  # the mark of an earlier text of fastattn's
    checkpoint.expect_new(run)


def test_an_old_text_is_removed_whole(tmp_path, tokenizer):
    """After a kill during the removal, the next start takes nothing that is left for the user's."""
    file, text = tmp_path / "day", tmp_path / "run/text"
    file.write_text("day\n")
    text.mkdir(parents=True)

    def encode_again():
        (text / "text.json").write_text("{}")
        data.encode(tokenizer, (file, file), data.digest(file, file), text)

    with killed_in("shutil.rmtree"):
        encode_again()
    checkpoint.expect_new(text.parent)
    text.mkdir(exist_ok=True)
    for _ in range(2):  # the second pass removes what the first wrote
        encode_again()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model", "training.pt"])
def test_a_damaged_checkpoint_is_named(tmp_path, save, name):
    saved = save(tmp_path, 1, state={"step": 1, "tensor": torch.ones(1000)})
    path = saved / name
    read = checkpoint.load_training if name == "training.pt" else checkpoint.load
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"junk"):
        path.write_bytes(content)
        refused(r"cannot read the checkpoint .*step-00000001: ", read, saved)
        if name == "model.safetensors":
            refused("the checkpoint .*step-00000001: model.safetensors is damaged", checkpoint.updates, saved)
    path.unlink()
    refused("holds no checkpoint" if name == "model.safetensors" else f"{name}.*: No such", read, saved)


def test_weights_must_fit_the_configuration(tmp_path, save):
    saved = save(tmp_path, 1)
    for d_ff in (65, 2**31 - 1):  # no memory suffices for the second
        (saved / "config.json").write_text(dataclasses.replace(small_model().config, d_ff=d_ff).to_json())
        message = r"model.safetensors does not fit config.json: they differ in decoder.*inner"
        refused(message, checkpoint.load, saved)


@pytest.mark.parametrize("target", ["safetensors.torch.save_file", "torch.save", "os.fsync", "pathlib.Path.rename"])
def test_an_interrupted_write_is_no_checkpoint(tmp_path, save, target):
    """After a kill in any call of a save, the checkpoint that is found is complete, and the next save works."""
    save(tmp_path, 1)
    with killed_in(target):
        save(tmp_path, 2)
    assert names(checkpoint.steps(tmp_path)) == ["step-00000001"]
    checkpoint.load(tmp_path)
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path).name == "step-00000002"


def test_what_an_interrupted_removal_leaves_is_removed(tmp_path, save):
    for step in (1, 2):
        save(tmp_path, step)
    with killed_in("shutil.rmtree"):
        checkpoint.prune(tmp_path, keep=1)
    assert names(checkpoint.steps(tmp_path)) == ["step-00000002"]
    checkpoint.prune(tmp_path, keep=1)
    assert names(tmp_path.iterdir()) == ["step-00000002"]


def test_what_a_file_cannot_be_called_is_said(tmp_path):
    for length in (250, 300):
        path = tmp_path / ("x" * length)
        refused(r"cannot write .*xxx: its name is too long", check_file, path)
        refused(r"cannot write .*xxx: File name too long", write_file, path, b"")


# --- scores and pictures ---


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_quantised_model_is_evaluated_and_translates(text, verses, model):
    """Loss and accuracy are those of the model's own logits. The ``weight`` of a quantised module is a method."""
    sources, targets, tokenizer = verses
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    batch = text.batch(torch.arange(8))
    found = held_out(model, [batch], EXACT)
    with torch.no_grad():
        logits = model.logits(model.packed_features(batch.source, batch.target))
    wanted = F.cross_entropy(logits, batch.labels, ignore_index=PAD_ID)
    correct = ((logits.argmax(-1) == batch.labels) & (batch.labels != PAD_ID)).sum()
    assert found["valid_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["valid_accuracy"] == pytest.approx(correct.item() / batch.tokens)
    assert len(translate(model, tokenizer, sources[:2], Search(beam=2))) == 2
    heads = plots.attention_heads(model, tokenizer, sources[0], targets[0])
    torch.testing.assert_close(heads.weights.sum(-1), torch.ones(heads.weights.shape[:2]))


def test_held_out_loss(text, monkeypatch):
    """The loss is the mean over tokens, each sentence by itself. Batches, which the command keeps on the CPU, are moved
    to the model's device."""
    model, moved = small_model(), []
    monkeypatch.setattr(data.Batch, "to", lambda batch, device: moved.append(device) or batch)
    batches = [text.batch(index) for index in text.batches(2000)]
    of_text = held_out(model, batches, EXACT)
    assert moved == [model.output.weight.device] * len(batches)
    assert model.training
    model.eval()
    nll = tokens = 0
    for i in range(len(text.sources)):
        source, labels = (side.packed(torch.tensor([i])).tokens for side in (text.sources, text.targets))
        source, labels = source[source != PAD_ID], labels[labels != PAD_ID]
        target = torch.cat((torch.tensor([BOS_ID]), labels[:-1]))
        with torch.no_grad():
            nll += F.cross_entropy(model(source[None], target[None])[0], labels, reduction="sum").item()
        tokens += len(labels)
    assert of_text["valid_loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert of_text["valid_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_scores():
    references = ["El perro duerme en la casa grande .", "Y dijo Dios: Sea la luz."]
    same, other = (scores(found, references) for found in (references, ["Dios dijo: luz", "perro"]))
    assert (same.bleu, same.chrf, same.compound_split_bleu) == pytest.approx((100, 100, 100))
    assert max(other.bleu, other.compound_split_bleu, other.chrf / 3) < 10
    assert "tok:13a" in same.bleu_signature
    assert "nc:6" in same.chrf_signature
    refused("1 translations cannot be scored against 2 references", scores, ["a"], references)


def test_compounds_are_split_as_in_the_papers_bleu():
    r"""The score is BLEU of the words after perl -ple 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g' of the tokenised text."""
    found = scores(["the well-known state of the art"], ["the well-known state-of-the-art"])
    words = ["the", "well", "##AT##-##AT##", "known", "state", "of", "the", "art"]
    state = ["state", "##AT##-##AT##", "of", "##AT##-##AT##", "the", "##AT##-##AT##", "art"]
    reference = [*words[:4], *state]
    precisions = []
    for n in range(1, 5):
        grams, wanted = ([tuple(text[i:][:n]) for i in range(len(text) - n + 1)] for text in (words, reference))
        hits = sum(min(grams.count(gram), wanted.count(gram)) for gram in set(grams))
        precisions.append((hits if hits else 0.5) / len(grams))  # sacrebleu smooths a first zero exponentially
    expected = math.exp(1 - len(reference) / len(words)) * math.prod(precisions) ** 0.25
    assert found.compound_split_bleu == pytest.approx(100 * expected)


@pytest.mark.parametrize("kind", plots.KINDS)
def test_attention_heads(verses, kind, model):
    """Weights equal the layer's own probabilities, and rows and columns carry the pieces of text that they stand
    for."""
    sources, targets, tokenizer = verses
    heads = plots.attention_heads(model, tokenizer, sources[0], targets[0], kind)
    ids, begun = tokenizer.encode([sources[0], targets[0]])
    source, target = map(tokenizer.pieces, (ids, begun))
    read, seen, predicted = [*source, "</s>"], ["<s>", *target], [*target, "</s>"]
    named = {"encoder": (read, read), "decoder": (predicted, seen), "cross": (predicted, read)}
    assert (heads.rows, heads.columns) == named[kind]
    weights = AttentionWeights()
    model(torch.tensor([[*ids, EOS_ID]]), torch.tensor([[BOS_ID, *begun]]), weights=weights)
    assert torch.equal(heads.weights, getattr(weights, kind)[0][0])


def test_a_kind_of_attention_that_does_not_exist():
    config = dataclasses.replace(small_model().config, decoder_layers=3)
    assert plots.check_layer(config, "decoder", None) == 3
    message = "unknown kind of attention 'self', expected one of encoder, decoder, cross"
    refused(message, plots.check_layer, config, "self", 1)


@pytest.mark.parametrize("heads", [1, *slow(5, 16)])
@pytest.mark.parametrize("length", [1, 200])
def test_a_heads_size_in_a_picture_does_not_depend_on_its_labels(tmp_path, heads, length):
    pieces = [f"▁piece{n}" for n in range(length)]
    plots.heat_maps(plots.Heads(torch.rand(heads, length, length), pieces, pieces), tmp_path / "map.png", "title")
    png = (tmp_path / "map.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">2I", png[16:24]) == {1: (640, 320), 5: (960, 640), 16: (1280, 1280)}[heads]


def test_pieces_in_a_picture_are_no_mathematics(tmp_path):
    plots.heat_maps(plots.Heads(torch.rand(1, 2, 2), ["$$", "a"], ["$x_$", "b"]), tmp_path / "map.svg", "title")
    assert "$x_$" in (tmp_path / "map.svg").read_text()


def test_the_loss_curve_is_of_one_kind(tmp_path):
    """Training's curve is the cross-entropy without label smoothing, as validation's is."""
    rows = [{"step": 1, "loss": 9.0, "perplexity": math.e**8}, {"step": 2, "loss": 8.0, "perplexity": math.e**7}]
    rows[1]["valid_loss"] = 7.5
    with mock.patch.object(Axes, "plot", autospec=True, side_effect=Axes.plot) as plot:
        plots.loss_curve(rows, tmp_path / "loss.svg")
    drawn = {call.kwargs["label"]: call.args[1:3] for call in plot.call_args_list}
    assert drawn == {"training": ([1, 2], pytest.approx([8, 7])), "validation": ([2], [7.5])}
    assert "<svg" in (tmp_path / "loss.svg").read_text()


@pytest.fixture
def run(pairs, tmp_path):
    """Return a function that trains a small model on the pairs, by a configuration file. A new run gets the changes of
    its fields."""

    def run(name="run", valid=pairs, *, max_steps=1, resume=False, d_model=32, **changes):
        model = {"vocab_size": 200, "d_model": d_model, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
        model |= {name: changes.pop(name) for name in ("positions", "max_positions") if name in changes}
        training = {"precision": "fp32", "batch_tokens": 1000, **changes}
        config = tmp_path / "small.json"
        config.write_text(json.dumps({**model, "training": training}))
        options = {"resume": True} if resume else {"config": config}
        return train(pairs, valid, tmp_path / name, max_steps=max_steps, **options)

    return run


def test_a_run_writes_metrics_and_checkpoints(pairs, run, tmp_path, capsys):
    with mock.patch.object(memory, "keep_freed") as keep_freed:
        best = run(max_steps=2)
    assert best == tmp_path / "run/best"
    keep_freed.assert_called_once_with()
    (row,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert row["step"] == 2
    for name in ("loss", "perplexity", "accuracy", "tokens_per_second", "learning_rate", "valid_loss"):
        assert math.isfinite(row[name])
    model, tokenizer = checkpoint.load(best)
    valid = data.ParallelText.encoded(tokenizer, *map(data.read_lines, pairs), "validation")
    of_text = held_out(model, map(valid.batch, valid.batches(1000)), EXACT)
    assert row["valid_loss"] == pytest.approx(of_text["valid_loss"], rel=1e-6)
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("update 2: loss ")
    assert "\r" not in said


@pytest.mark.parametrize(("name", "saved", "most"), [("due", 1, 9), ("not due", 9, 9), ("last", 9, 1)])
def test_ctrl_c_cuts_bleu_short(run, tmp_path, monkeypatch, name, saved, most):
    """Ctrl-C cuts BLEU short but not validation: the checkpoint is saved at once, and may be the best."""

    def interrupted(model, tokenizer, lines, search, advance):
        signal.raise_signal(signal.SIGINT)
        advance(1)
        raise AssertionError("it goes on")

    monkeypatch.setattr("fastattn.translation.train.translate", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt, match="after update 1, which is saved"):
            run(bleu_every=1, save_every=saved, max_steps=most)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert checkpoint.newest(tmp_path / "run").name == "step-00000001"
    (row,) = read_metrics(tmp_path / "run")
    assert "valid_bleu" not in row
    assert ("valid_loss" in row) == (tmp_path / "run/best").exists() == (name != "not due")


def test_a_run_is_resumed_with_its_validation_text(pairs, run):
    run()
    message = r"the validation text is not the one that .*step-00000001 was scored on"
    refused(message, run, valid=pairs[::-1], resume=True, max_steps=2)


def test_damaged_metrics(run, tmp_path):
    """An incomplete last line is left out, and a resumed run continues behind the line before it."""
    run()
    metrics = tmp_path / "run/metrics.jsonl"
    whole, cut, wrong = metrics.read_bytes(), b'{"step": 2, "lo', b'{"step": "x", "perplexity": 1}'
    metrics.write_bytes(whole + cut)
    run(resume=True, max_steps=2)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    for damage in (cut, b"\0" * 9, b"\xff", b"", b"3", b'{"step": 2}', wrong):
        metrics.write_bytes(whole + damage + b"\n" + whole)
        refused(rf"line 2 of {metrics} is damaged", read_metrics, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message", "saved"),
    [
        ({"rate": 1e38, "warmup": 1}, "the loss is nan at update 1: start again with another seed, a lower rate", 1),
        ({"d_model": 2147483640}, "there is no memory for a model of d_model 2147483640", 0),
    ],
)
def test_a_run_that_cannot_go_on_says_why(run, tmp_path, changes, message, saved):
    refused(message, run, **changes)
    assert names(checkpoint.steps(tmp_path / "run")) == ["step-00000000"][:saved]


@pytest.mark.parametrize("positions", ["sinusoidal", *slow("learned")])
def test_the_same_update_has_the_same_bits(positions):
    """An update has the same bits each time, although torch sums the gradients of indexing this many tokens in several
    threads, in no order."""
    torch.set_num_threads(2)
    model = Transformer(TransformerConfig(50, 64, 64, 4, 1, 1, positions=positions, max_positions=300, dropout=0.1))
    sentences = data.Sentences.of([[4 + (7 * n + k) % 46 for k in range(20 + n % 40)] for n in range(64)])
    batch = data.ParallelText(sentences, sentences).batch(torch.arange(64))
    assert len(batch.labels) * 64 > 2**15
    seeds = dropout_seeds(1, 1, 0, model.dropout_sites)

    def gradients():
        features = model.packed_features(batch.source, batch.target, seeds=seeds)
        loss, *_ = smoothed_loss(*model.projection(features), batch.labels, 0.1, PAD_ID)
        return torch.autograd.grad(loss, list(model.parameters()))

    first = gradients()
    for _ in range(10):
        assert all(map(torch.equal, first, gradients()))


def test_what_a_run_does_not_meet_needs_no_positions(run, tmp_path):
    """A validation pair that the loss leaves out needs no positions, unless BLEU translates it."""
    valid = tmp_path / "en", tmp_path / "es"
    valid[0].write_text("in the beginning\n" + "in the beginning " * 200)
    valid[1].write_text("en el principio\nen")
    learned = {"positions": "learned", "max_positions": 201}
    run("run", valid, **learned)
    message = r"the validation text has a sentence of .* max_positions=201"
    refused(message, run, "other", valid, bleu_every=1, **learned)


def test_learned_positions_must_do_for_every_sentence(pairs, run, tmp_path):
    (tmp_path / "long").write_text("in the beginning " * 30)
    for short, valid, name in ((8, pairs, "training"), (180, [tmp_path / "long"] * 2, "validation")):
        message = rf"the {name} text has a sentence of \d+ pieces, .*max_positions={short}"
        refused(message, run, name, valid, positions="learned", max_positions=short)
    model, tokenizer = checkpoint.load(run(positions="learned", max_positions=200))
    model.output.weight.data[EOS_ID] = 0
    for line in ("in the beginning " * 25 + "in" * more for more in range(3)):  # whatever multiple padding rounds to
        most = 1 + len(tokenizer.encode([line])[0])  # tokens, the end included
        narrow = Transformer(dataclasses.replace(model.config, max_positions=most)).eval()
        assert len(translate(narrow, tokenizer, [line], Search(beam=1))) == 1
    for search in (Search(beam=2), Search(temperature=1.0)):  # hypotheses end at the last position
        assert translate(model, tokenizer, ["in the beginning " * 25], search) != [""]
