"""Tests of translation: data, tokenizer, loss, schedule, training on both backends, search, checkpoints, scores."""

import ctypes
import dataclasses
import errno
import gzip
import io
import itertools
import json
import math
import mmap
import os
import platform
import random
import signal
import struct
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import matplotlib.axes
import pytest
import torch
from conftest import require, slow
from observers import Lora
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import Transformer, TransformerConfig
from fastattn.errors import InputError
from fastattn.files import check_file, write_file
from fastattn.translation import checkpoint, memory, plots
from fastattn.translation import tokenizer as tokenizer_module
from fastattn.translation.config import TrainingConfig
from fastattn.translation.data import (
    LENGTH_MULTIPLE,
    VERSES,
    Batch,
    ParallelText,
    Sentences,
    arriving_lines,
    digest,
    encode,
    read_lines,
    read_parallel,
    sent,
)
from fastattn.translation.evaluate import held_out, loss_of, scores, smoothed_loss
from fastattn.translation.model import ROW_MULTIPLE, AttentionWeights
from fastattn.translation.precision import DTYPES
from fastattn.translation.search import Search, _draw, _largest, beam_search, candidates, translate
from fastattn.translation.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from fastattn.translation.train import Trainer, dropout_seeds, read_metrics, train

OPTIONS = TrainingConfig(batch_tokens=150, warmup=40, precision="fp32", seed=3)


@pytest.fixture(scope="module")
def verses():
    """Return 300 pairs of real sentences, and a tokenizer trained on them."""
    sources, targets = (read_lines(VERSES / f"dev.{language}")[:300] for language in ("en", "es"))
    return sources, targets, Tokenizer.train(sources + targets, 200)


@pytest.fixture(scope="module")
def text(verses):
    sources, targets, tokenizer = verses
    return ParallelText.encoded(tokenizer, sources, targets, "training")


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
    assert read_lines(plain) == read_lines(packed) == ["una línea", "", "la «última»\u2028línea"]
    plain.write_bytes(b"no end")
    assert read_lines(plain) == ["no end"]


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
    ],
)
def test_unreadable_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_lines(tmp_path / name)


@pytest.mark.parametrize("piped", ["training", "validation"])
def test_training_refuses_a_pipe_without_opening_it(tmp_path, piped):
    """Training refuses a pipe before it opens it, because opening one without a writer blocks for ever."""
    (tmp_path / "text").write_text("one\n")
    os.mkfifo(tmp_path / "pipe")
    files = {"training": [tmp_path / "text"] * 2, "validation": [tmp_path / "text"] * 2}
    files[piped] = [tmp_path / "text", tmp_path / "pipe"]
    with pytest.raises(InputError, match="pipe is no regular file"):
        train(files["training"], files["validation"], tmp_path / "run", preset="tiny", max_steps=1)
    assert not (tmp_path / "run").exists()


def test_text_of_a_pipe_is_read_once(tmp_path):
    """A text that is read again, as in training, may not be a pipe; a single read of a pipe works."""
    (tmp_path / "text").write_text("one\n")
    reader, writer = os.pipe()
    try:
        os.write(writer, b"uno\n")
        os.close(writer)
        pipe = Path(f"/dev/fd/{reader}")
        with pytest.raises(InputError, match=f"^{pipe} is no regular file, and training reads its text again and agai"):
            digest(tmp_path / "text", pipe)
        assert read_parallel(tmp_path / "text", pipe) == (["one"], ["uno"])
    finally:
        os.close(reader)


def test_lines_must_pair_up(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("uno\n")
    with pytest.raises(InputError, match=r"a has 2 lines but .*b has 1"):
        read_parallel(tmp_path / "a", tmp_path / "b")


def test_tokenizer(verses):
    sources, targets, tokenizer = verses
    assert tokenizer.vocab_size == 200
    assert tokenizer.decode(tokenizer.encode(targets)) == targets
    assert Tokenizer(tokenizer.model).encode(targets) == tokenizer.encode(targets)
    ids = tokenizer.encode(["God", ""])
    assert ids[1] == []
    assert tokenizer.decode([[BOS_ID, *ids[0], EOS_ID, PAD_ID]]) == ["God"]
    with pytest.raises(InputError, match=r"a vocabulary of 9999999 is larger than this text allows: it has \d+ pieces"):
        Tokenizer.train(sources, 9999999)
    with pytest.raises(
        InputError, match=r"a vocabulary of 30 is too small for this text: its characters alone need \d+"
    ):
        Tokenizer.train(sources, 30)
    with pytest.raises(InputError, match="not a readable sentencepiece model"):
        Tokenizer(tokenizer.model[:1000])
    long = Tokenizer.train([" ".join(sources), " ".join(targets[:50]) + " ж"], 150)  # above sentencepiece's 4192 B
    assert UNK_ID not in long.encode(["ж"])[0]


def test_a_vocabulary_of_many_lines_is_the_same_every_time(verses, monkeypatch):
    """The lines to learn from are drawn from the whole text, and are the same on every run."""
    sources, targets, _ = verses
    monkeypatch.setattr(tokenizer_module, "LEARNED_FROM", 100)
    lines = sources + targets
    drawn = [list(tokenizer_module._drawn(lines)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 100
    assert set(drawn[0]) <= set(lines)
    places = sorted(map(lines.index, drawn[0]))
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
    batch = ParallelText.encoded(tokenizer, sources, targets, "training").batch(torch.tensor([4, 0]))
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
    """Every pair occurs once. Each batch is within the budget, and the next pair would exceed it."""
    indices = list(text.batches(600, seed and torch.Generator().manual_seed(seed)))
    assert sorted(torch.cat(indices).tolist()) == list(range(300))
    assert (torch.cat(indices).tolist() == list(range(300))) == (seed is None)
    sides = text.sources, text.targets
    for index, following in itertools.pairwise(indices):
        assert max(int(side.lengths_of(index).sum()) for side in sides) <= 600
        assert max(int(side.lengths_of(torch.cat((index, following[:1]))).sum()) for side in sides) > 600


def test_the_seed_orders_the_batches(text):
    def order(seed):
        return [index.tolist() for index in text.batches(600, torch.Generator().manual_seed(seed))]

    assert order(1) == order(1) != order(2)


def test_a_sentence_longer_than_a_batch_is_a_batch_of_its_own(text):
    assert [len(index) for index in text.batches(1)] == [1] * 300


def test_epochs_can_be_entered_anywhere(text):
    batches = text.epochs(600, seed=5)
    count = len(list(text.batches(600)))
    first = [next(batches) for _ in range(2 * count)]
    assert [(epoch, place) for epoch, place, _ in first] == [(e, p) for e in range(2) for p in range(count)]
    assert not torch.equal(first[0][2], first[count][2])
    for start in (0, 3, count - 1, count + 2):
        resumed = text.epochs(600, seed=5, epoch=start // count, skip=start % count)
        for wanted in first[start : start + 3]:
            got = next(resumed)
            assert got[:2] == wanted[:2]
            assert torch.equal(got[2], wanted[2])


def test_pairs_without_text_are_left_out(verses):
    _, _, tokenizer = verses
    sides = ["one", "", "three", "God " * 300], ["uno", "dos", " ", "Dios " * 300]
    text = ParallelText.encoded(tokenizer, *sides, "validation")
    assert (len(text.sources), text.left_out, text.first_left_out) == (1, 3, 2)
    with pytest.raises(InputError, match="no sentence pair of the validation text has two sides of 1 to 256 pieces"):
        ParallelText.encoded(tokenizer, [""], ["dos"], "validation")


@pytest.mark.parametrize("chunk", [7, 1000])
def test_encoded_text_is_mapped(verses, text, tmp_path, monkeypatch, chunk):
    """Mapped files, packed or not, give the sentences and batches that memory gives. Pairs left out are counted."""
    sources, targets, tokenizer = verses
    monkeypatch.setattr("fastattn.translation.data.CHUNK", chunk)
    files = tmp_path / "en", tmp_path / "es.gz"
    files[0].write_text("\n".join([sources[0], "", *sources[1:], "God " * 300]))
    files[1].write_bytes(gzip.compress("\n".join([targets[0], "x", *targets[1:], "x"]).encode()))
    encode(tokenizer, files, digest(*files), tmp_path / "text")
    mapped = ParallelText.mapped(tmp_path / "text")
    assert (len(mapped.sources), mapped.left_out, mapped.first_left_out) == (300, 2, 2)
    for wanted, found in zip(text.batches(600), mapped.batches(600), strict=True):
        assert torch.equal(wanted, found)
        torch.testing.assert_close(*(dataclasses.asdict(t.batch(found)) for t in (mapped, text)), rtol=0, atol=0)


def test_mapped_text_is_read_as_it_is_needed(tmp_path):
    """A batch of an 8 GB text, here a sparse file, brings only its own sentences into memory."""
    length, count = 2**16, 2**15
    with open(tmp_path / "source.tokens", "wb") as file:
        file.truncate(4 * length * count)
    (torch.arange(count + 1) * length).numpy().tofile(tmp_path / "source.offsets")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    sentences, before = Sentences.mapped(tmp_path / "source"), resident()
    packed = sentences.packed(torch.tensor([3, count - 1]))
    assert packed.tokens.tolist() == [0] * 2 * length
    assert resident() - before < 2**26


@pytest.mark.parametrize("name", ["source.tokens", "target.offsets"])
def test_damaged_encoded_text(verses, tmp_path, name):
    sources, targets, tokenizer = verses
    files = tmp_path / "en", tmp_path / "es"
    for path, lines in zip(files, (sources, targets), strict=True):
        path.write_text("\n".join(lines))
    encode(tokenizer, files, digest(*files), tmp_path / "text")
    damaged = tmp_path / "text" / name
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(InputError, match=rf"{damaged.stem}.* differ: remove {tmp_path / 'text'}"):
        ParallelText.mapped(tmp_path / "text")


def test_damaged_offsets(verses, tmp_path):
    sources, targets, tokenizer = verses
    files = tmp_path / "en", tmp_path / "es"
    for path, lines in zip(files, (sources, targets), strict=True):
        path.write_text("\n".join(lines))
    encode(tokenizer, files, digest(*files), tmp_path / "text")
    damaged = tmp_path / "text" / "source.offsets"
    whole = damaged.read_bytes()
    for place, value in ((0, 1), (5, 2**40), (5, -1), (5, 0)):
        damaged.write_bytes(whole[: 8 * place] + struct.pack("<q", value) + whole[8 * place + 8 :])
        with pytest.raises(InputError, match=rf"differ: remove {tmp_path / 'text'}"):
            ParallelText.mapped(tmp_path / "text")


def test_text_is_encoded_once_and_whole(verses, tmp_path, monkeypatch):
    sources, targets, tokenizer = verses
    files = tmp_path / "en", tmp_path / "es"
    for path, lines in zip(files, (sources, targets), strict=True):
        path.write_text("\n".join(lines))
    folder, of_text = tmp_path / "text", digest(*files)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", killed)
        with pytest.raises(Killed):
            encode(tokenizer, files, of_text, folder)
    assert not folder.exists()
    encode(tokenizer, files, of_text, folder)
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", killed)
        encode(tokenizer, files, of_text, folder)
        with pytest.raises(Killed):
            encode(Tokenizer.train(sources, 150), files, of_text, folder)
    files[0].write_text("\n".join(sources[::-1]))
    assert digest(*files) != of_text
    encode(tokenizer, files, digest(*files), folder)
    assert (
        ParallelText.mapped(folder).sources.lengths_of(torch.tensor([299])) == len(tokenizer.encode(sources[:1])[0]) + 1
    )


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
    for value, exact in ((loss, wanted), (loss, by_hand), (nll, plain)):
        torch.testing.assert_close(value, exact, rtol=10 * eps, atol=0)
    assert correct == (logits.argmax(-1) == labels)[kept].sum()
    ours = torch.autograd.grad(loss / 700, given)
    for gradient, exact in zip(ours, torch.autograd.grad(wanted / 700, operands), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=10 * eps)
    assert ours[0][~kept].abs().max() == 0


def test_smoothed_loss_under_autocast():
    """Products are bfloat16; gradients have the dtypes of the operands."""
    features, weight = torch.randn(600, 32).bfloat16().requires_grad_(), (torch.randn(50, 32) / 6).requires_grad_()
    labels = torch.randint(0, 50, (600,))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)
    wanted = F.cross_entropy(
        features.float() @ weight.t(), labels, ignore_index=0, label_smoothing=0.1, reduction="sum"
    )
    ours, exact = (torch.autograd.grad(value, (features, weight)) for value in (loss, wanted))
    assert [gradient.dtype for gradient in ours] == [torch.bfloat16, torch.float32]
    # The product is rounded to 8 bits, and its weight is too.
    torch.testing.assert_close(loss.float(), wanted, rtol=2**-8, atol=0)
    for gradient, wanted_gradient in zip(ours, exact, strict=True):
        assert (gradient - wanted_gradient).norm() < 2**-6 * wanted_gradient.norm()


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
    assert not loss.isfinite()
    assert not nll.isfinite()


def test_smoothed_loss_reads_no_row_of_padding():
    labels = torch.tensor([3, PAD_ID, 5, PAD_ID])
    operands = [torch.randn(4, 6), torch.randn(11, 6), torch.randn(11)]

    def found(rows, features):
        leaves = [tensor.clone().requires_grad_() for tensor in (features, *operands[1:])]
        loss, nll, correct = smoothed_loss(leaves[0][rows], *leaves[1:], labels[rows], 0.1, PAD_ID)
        return torch.stack((loss, nll, correct)), *torch.autograd.grad(loss, leaves)

    wanted = found(labels != PAD_ID, operands[0])
    features = operands[0].clone()
    features[labels == PAD_ID] = torch.nan
    torch.testing.assert_close(found(slice(None), features), wanted)
    nothing = found(slice(0), features)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in nothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tying", ["all", "none"])
def test_the_loss_of_a_last_product_with_a_hook(tying, smoothing):
    """The hook sees one call with all rows. Loss and gradients equal those without it, which are computed in parts."""
    config = TransformerConfig(50, 16, 16, 2, 1, 1, tying=tying, output_bias=True, scale_logits=True)
    model, seen = Transformer(config, dtype=torch.float64), []
    with torch.no_grad():
        model.output.weight[PAD_ID].normal_()
        model.output.bias.normal_()
    features, labels = torch.randn(70, 16, dtype=torch.float64, requires_grad=True), torch.arange(70) % 50
    leaves = [features, *model.output.parameters()]

    def found():
        loss, nll, correct = loss_of(model, features, labels, smoothing)
        return torch.stack((loss, nll, correct)), *torch.autograd.grad(loss, leaves)

    wanted = found()
    model.output.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    for value, exact in zip(found(), wanted, strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)
    assert seen == [(70, 50)]
    with torch.no_grad():
        torch.testing.assert_close(torch.stack(loss_of(model, features, labels, smoothing)), wanted[0])


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


@pytest.mark.parametrize("most", [2**24, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_loss_holds_the_logits_of_a_few_rows(dtype, most, monkeypatch):
    """No tensor holds logits of the vocabulary for all tokens: logits and softmax are computed for some rows at a
    time."""
    tokens, pieces = 2400, 8000
    monkeypatch.setattr("fastattn.translation.evaluate.LOGIT_BYTES", most)
    features, weight = torch.randn(tokens, 32, requires_grad=True), torch.randn(pieces, 32, requires_grad=True)
    labels = torch.randint(0, pieces, (tokens,))
    with Made(32 * pieces) as made, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        loss, _, _ = smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)
        loss.backward()
    rows = min(most // (pieces * dtype.itemsize), tokens // 2)
    parts = [min(rows, tokens - first) for first in range(0, tokens, rows)]
    large = [size for size in made.sizes if size > made.large]
    assert made.most == 2 * rows * pieces <= tokens * pieces
    assert large == [part * pieces for part in parts for _ in ("logits", "softmax")]


def test_smoothed_loss_waits_for_no_gpu():
    """The loss needs no value on the host. Fake tensors raise at operations that do, such as selecting the rows without
    padding."""
    with FakeTensorMode():
        features, weight = (torch.empty(rows, 32, requires_grad=True) for rows in (600, 50))
        found = smoothed_loss(features, weight, None, torch.empty(600, dtype=torch.int64), 0.1, PAD_ID)
    assert [value.shape for value in found] == [()] * 3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="not glibc's malloc")
@pytest.mark.slow
def test_freed_memory_serves_the_next_tensor():
    """Freed memory is used again. Otherwise each of these tensors would get fresh pages, which the system clears."""
    program = """
import resource, torch
from fastattn.translation import memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
memory.keep_freed()
for _ in range(4):  # the first few leave gaps between the blocks
    faults()
print(fresh, faults())
"""
    root = Path(fastattn.__file__).parent.parent
    others = ("MALLOC", "GLIBC_TUNABLES", "LD_PRELOAD")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    output = subprocess.check_output([sys.executable, "-c", program], cwd=root, env=environment, text=True)
    fresh, kept = map(int, output.split())
    assert kept < fresh / 10


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


def test_the_schedule_is_the_papers(text):
    """The rate of formula 3, with warm-up 4000 and d_model 512, peaks at 6.99e-4."""
    config = TransformerConfig.preset("base", 200, encoder_layers=1, decoder_layers=1)
    trainer = Trainer(Transformer(config), text, TrainingConfig.of_preset("base"))
    assert trainer.learning_rate(4000) == pytest.approx(6.9877e-4, rel=1e-4)
    assert trainer.learning_rate(1) == pytest.approx(trainer.learning_rate(4000) / 4000)
    assert trainer.learning_rate(16000) == pytest.approx(trainer.learning_rate(4000) / 2)
    group = trainer.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)


def test_dropout_seeds_name_update_and_site():
    seeds = [dropout_seeds(*where, sites=5) for where in ((1, 1, 0), (1, 2, 0), (1, 1, 1), (2, 1, 0))]
    assert all(seed.shape == (5, 2) and seed.dtype == torch.int64 for seed in seeds)
    assert len({tuple(row) for seed in seeds for row in seed.tolist()}) == 20
    assert torch.equal(seeds[0], dropout_seeds(1, 1, 0, sites=5))


# --- training ---


class PretendedGPU(TorchFunctionMode):
    """CPU under the name of a GPU. It records how each tensor is copied there."""

    def __init__(self):
        super().__init__()
        self.pinned, self.sent = [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        assert function is not torch.tensor or kwargs.get("device", "cpu") == "cpu", (
            "a number is copied there, and waits"
        )
        if function is torch.Tensor.pin_memory:
            self.pinned.append(args[0])
            return args[0]
        devices = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.device) and arg.type == "cuda"]
        if devices and function is torch.Tensor.to:
            self.sent.append((args[0], kwargs))
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
    assert len(gpu.sent) == 2 * 9  # per micro-batch: seven tensors, its seeds and its counts
    for tensor, options in gpu.sent:
        assert options == {"non_blocking": True}
        assert any(tensor is pinned for pinned in gpu.pinned)
    assert sent(torch.ones(2), device).tolist() == [1, 1]


def loss_curve(backend, text, updates, *, seed=3, jitter=None):
    """Return a small model's losses per token, in nats, with dropout: (updates,), float64.

    ``jitter`` moves each parameter by up to 64 roundings before every update.
    """
    losses = []
    with fastattn.backend(backend):
        trainer = Trainer(small_model(), text, dataclasses.replace(OPTIONS, seed=seed, warmup=400, rate=0.5))
        for _ in range(updates):
            if jitter is not None:
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        noise = torch.randint(-1, 2, parameter.shape, generator=jitter)
                        parameter.mul_(1 + 64 * noise * torch.finfo(torch.float32).eps)
            loss, _, _, tokens, *_ = trainer.update().tolist()
            losses.append(loss / tokens)
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [50, 200])
def test_backends_train_alike(text, updates):
    """Losses on `reference` and on `cpu`, with dropout, differ by no more than rounding explains.

    Backends round differently, by a few units in the last place, and training amplifies that by chance. If a hidden
    unit of one token crosses zero, Adam moves its row of weights elsewhere. Runs of the reference measure how far this
    carries: every parameter is moved by 64 units before every update. At 1000 units they end no further apart. The
    bound is three times the largest distance so far of two such runs.
    """
    require("cpu")
    reference = loss_curve("reference", text, updates)
    ours = loss_curve("cpu", text, updates)
    jittered = [loss_curve("reference", text, updates, jitter=torch.Generator().manual_seed(i)) for i in range(2)]
    bound = 3 * torch.stack([(curve - reference).abs() for curve in jittered]).amax(0).cummax(0).values
    assert (ours - reference).abs().sub(bound).max() <= 0
    assert reference[-20:].mean() < 0.95 * reference[:20].mean()
    # Another dropout mask exceeds the bound 20 times over within five updates.
    other = loss_curve("cpu", text, 5, seed=4)
    assert bound[-1] < 0.02
    assert (other - reference[:5]).abs().max() > 20 * bound[4]


def test_training_learns_and_search_finds_it():
    """Eight memorised sentences come back word for word in every batch, in either order, with every beam."""
    sources = [f"{word} {tail}" for word in ("one", "two", "three", "four") for tail in ("day", "night and day")]
    targets = [f"{tail} {word}" for word in ("uno", "dos", "tres", "cuatro") for tail in ("dia", "noche y dia")]
    tokenizer = Tokenizer.train(sources + targets, 45)
    text = ParallelText.encoded(tokenizer, sources, targets, "training")
    torch.manual_seed(0)
    config = TransformerConfig(45, d_model=64, d_ff=128, num_heads=4, encoder_layers=1, decoder_layers=1, dropout=0.0)
    trainer = Trainer(Transformer(config), text, OPTIONS)
    for _ in range(120):
        _, _, correct, tokens, *_ = trainer.update().tolist()
    assert correct == tokens == text.targets.lengths.sum()
    model = trainer.model.eval()
    for beam, batch_size in ((1, 8), (4, 8), (4, 1), (2, 3)):
        assert translate(model, tokenizer, sources, Search(beam, batch_size=batch_size)) == targets
    assert translate(model, tokenizer, [*sources[::-1], "", sources[2]]) == [*targets[::-1], "", targets[2]]
    assert translate(model, tokenizer, []) == []
    assert translate(model.to(torch.bfloat16), tokenizer, sources) == targets


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


def test_training_an_adapter_of_the_last_product(text):
    """The adapter learns, and no other parameter changes."""
    model = small_model(dropout=0.0)
    model.requires_grad_(False)
    model.output = Lora(model.output)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = Trainer(model, text, OPTIONS)
    losses = [float(sums[0] / sums[3]) for sums in (trainer.update() for _ in range(60))]
    assert sum(losses[-5:]) < sum(losses[:5])
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"output.down", "output.up"}


# --- search ---


def every_hypothesis(model, source, length_penalty, longest):
    """Yield (score, tokens) of every hypothesis of at most ``longest`` tokens, each scored from scratch."""
    stack = [([], 0.0)]
    with torch.no_grad():
        while stack:
            tokens, log_p = stack.pop()
            if len(tokens) == longest:
                continue
            log_probs = model(source, torch.tensor([[BOS_ID, *tokens]]))[0, -1].log_softmax(-1)
            for token in range(EOS_ID, model.config.vocab_size):
                total = log_p + log_probs[token].item()
                score = total / ((5 + len(tokens) + 1) / 6) ** length_penalty
                if token == EOS_ID or len(tokens) + 1 == longest:
                    yield score, tokens if token == EOS_ID else [*tokens, token]
                if token != EOS_ID:
                    stack.append(([*tokens, token], total))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_hypothesis(length_penalty):
    """A beam as wide as all 4**4 prefixes finds what exhaustive search finds: vocabulary of 6, at most 4 tokens."""
    torch.manual_seed(5)
    config = TransformerConfig(6, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = Transformer(config).eval()
    source = torch.tensor([[3, 4, EOS_ID], [5, 3, EOS_ID]])
    found = beam_search(model, source, torch.tensor([3, 3]), Search(256, length_penalty, extra_tokens=1))
    for row, (hypothesis,) in enumerate(found):
        score, tokens = max(every_hypothesis(model, source[row : row + 1], length_penalty, longest=4))
        assert hypothesis.tokens == tokens
        assert hypothesis.score == pytest.approx(score, abs=1e-4)


def test_the_n_best_are_in_order():
    """The five best hypotheses are those of exhaustive search, in its order."""
    torch.manual_seed(6)
    config = TransformerConfig(6, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model, source = Transformer(config).eval(), torch.tensor([[3, 4, EOS_ID]])
    (found,) = beam_search(model, source, torch.tensor([3]), Search(256, 0.6, n_best=5, extra_tokens=1))
    wanted = sorted(every_hypothesis(model, source, 0.6, longest=4), reverse=True)[:5]
    assert [hypothesis.tokens for hypothesis in found] == [tokens for _, tokens in wanted]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in wanted], abs=1e-4)


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


def test_samples_depend_on_seed_and_sentence_alone(verses):
    sources, _, tokenizer = verses
    model = small_model().eval()
    search = Search(temperature=1.0, n_best=3, seed=5)
    together = candidates(model, tokenizer, sources[:6], search)
    assert all(len({translation.text for translation in found}) == 3 for found in together)
    assert all([t.score for t in found] == sorted((t.score for t in found), reverse=True) for found in together)
    alone = candidates(model, tokenizer, sources[5::-1], dataclasses.replace(search, batch_size=2))[::-1]
    assert [[t.text for t in found] for found in alone] == [[t.text for t in found] for found in together]
    other = candidates(model, tokenizer, sources[:6], dataclasses.replace(search, seed=6))
    assert other != together


def test_a_sample_of_the_likeliest_is_greedy_and_its_score_is_the_models(verses):
    sources, _, tokenizer = verses
    model = small_model().eval()
    sampled = candidates(model, tokenizer, sources[:4], Search(temperature=3.0, top_k=1))
    greedy = candidates(model, tokenizer, sources[:4], Search(beam=1))
    assert [found[0].text for found in sampled] == [found[0].text for found in greedy]
    assert [found[0].score for found in sampled] == pytest.approx([found[0].score for found in greedy], abs=1e-4)
    for temperature in (1e-30, 1e-46, 1e-300):  # float32 rounds the last two to 0
        cold = candidates(model, tokenizer, sources[:4], Search(temperature=temperature))
        assert [found[0].text for found in cold] == [found[0].text for found in greedy]


def test_the_largest_draw_is_a_token(monkeypatch, verses):
    """The largest random number, 1 - 2**-53, draws a token, although float32 rounds it to 1."""
    sources, _, tokenizer = verses
    model = small_model().eval()
    monkeypatch.setattr("random.Random.random", lambda self: 1 - 2.0**-53)
    likeliest = candidates(model, tokenizer, sources[:2], Search(temperature=1.0, top_k=2, extra_tokens=0))
    whole = candidates(model, tokenizer, sources[:2], Search(temperature=1.0, extra_tokens=0))
    assert all(found[0].score < 0 for found in (*likeliest, *whole))
    assert [found[0].text for found in whole] != [found[0].text for found in likeliest]


def test_a_long_sentence_shares_its_batch_with_few(monkeypatch, verses):
    """A long sentence is in a batch of few, because padding short ones to its length takes as much memory as long
    ones."""
    sources, _, tokenizer = verses
    model = small_model().eval()
    lines = [" ".join(sources[:8]), *sources[:5]]
    together = candidates(model, tokenizer, lines, Search(beam=2))
    shapes = []

    def seen(model, source, *rest):
        shapes.append(source.shape)
        return beam_search(model, source, *rest)

    monkeypatch.setattr("fastattn.translation.search.beam_search", seen)
    monkeypatch.setattr("fastattn.translation.search.MOST_TOKENS", 1000)
    assert [found[0].text for found in candidates(model, tokenizer, lines, Search(beam=2))] == [
        found[0].text for found in together
    ]
    assert [len(tokenizer.encode(lines[:1])[0]) < 500, shapes[0][0]] == [False, 1]
    assert len(shapes) < len(lines)
    assert all(rows * 2 * length <= 1000 + 2 * rows * LENGTH_MULTIPLE for rows, length in shapes[1:])


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


def test_greedy_search_takes_the_likeliest_token():
    torch.manual_seed(2)
    model = small_model(dropout=0.0).eval()
    source = torch.randint(3, 200, (3, 6))
    found = beam_search(model, source, torch.tensor([6, 6, 6]), Search(beam=1))
    for row, (hypothesis,) in enumerate(found):
        tokens = []
        with torch.no_grad():
            while len(tokens) < 56 and (not tokens or tokens[-1] != EOS_ID):
                logits = model(source[row : row + 1], torch.tensor([[BOS_ID, *tokens]]))[0, -1]
                logits[[PAD_ID, BOS_ID]] = -math.inf
                tokens.append(int(logits.argmax()))
        assert hypothesis.tokens == [token for token in tokens if token != EOS_ID]
        assert len(tokens) == 56 or tokens[-1] == EOS_ID


def test_sentences_do_not_influence_one_another(verses):
    sources, _, tokenizer = verses
    model = small_model().eval()
    together = translate(model, tokenizer, sources[:6], Search(batch_size=6))
    assert any(together)
    shuffled = random.Random(1).sample(range(6), 6)
    assert translate(model, tokenizer, [sources[i] for i in shuffled], Search(batch_size=4)) == [
        together[i] for i in shuffled
    ]
    assert translate(model, tokenizer, sources[:6], Search(batch_size=1)) == together


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
    lines = sorted(read_lines(VERSES / "test.en"), key=len)[20:28]
    together = candidates(model, tokenizer, lines, Search(**search))
    shuffled = random.Random(2).sample(range(8), 8)
    for size, order in ((3, shuffled), (1, range(8))):
        found = candidates(model, tokenizer, [lines[i] for i in order], Search(batch_size=size, **search))
        for i, translations in zip(order, found, strict=True):
            assert [found.text for found in translations] == [wanted.text for wanted in together[i]]
            assert [found.score for found in translations] == pytest.approx(
                [wanted.score for wanted in together[i]], abs=1e-4
            )


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("beam", 0),
        ("batch_size", -1),
        ("length_penalty", math.inf),
        ("length_penalty", 5.1),  # its powers overflow
        ("length_penalty", -5.1),
        ("n_best", 0),
        ("n_best", 5),
        ("extra_tokens", -1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("temperature", 0.0),
        ("temperature", math.nan),
    ],
)
def test_search_refuses_bad_numbers(name, number):
    with pytest.raises(InputError, match=f"{name} is {number}"):
        Search(**{name: number})


def test_what_is_for_sampling_needs_a_temperature():
    with pytest.raises(InputError, match="give a temperature too"):
        Search(top_k=5)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_lines_arrive_one_by_one_or_together(end):
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        lines = arriving_lines(stream, "pipe", 3)
        os.write(writing, "\ufeffseñor\n".encode())
        assert next(lines) == ["señor"]
        os.write(writing, b"one\n\nthree" + end)
        os.close(writing)
        together = [line for part in lines for line in part]
        assert together == ["one", "", "three"]


def test_lines_before_a_bad_one_are_not_lost():
    lines = arriving_lines(io.BytesIO(b"one\ntwo\n\xff\n"), "pipe", 10)
    seen = []
    with pytest.raises(InputError, match="pipe is not UTF-8: byte 0xff in line 3"):
        seen.extend(line for part in lines for line in part)
    for part in arriving_lines(io.BytesIO(b"one\ntwo\n"), "pipe", 1):
        assert len(part) == 1


def test_a_stream_is_read_no_further_than_it_is_used():
    class Endless:
        read = 0

        def fileno(self):
            raise io.UnsupportedOperation

        def __iter__(self):
            while True:
                self.read += 1
                yield b"line\n"

    stream = Endless()
    lines = arriving_lines(stream, "pipe", 3)
    for _ in range(10):
        assert 1 <= len(next(lines)) <= 3
    time.sleep(0.05)
    assert stream.read <= 10 * 3 + 5  # 3 lines in the queue, one on its way into it, one taken out of it


def test_a_stream_that_fails():
    class Stream(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(InputError, match="cannot read pipe: Input/output error"):
        list(arriving_lines(io.BufferedReader(Stream()), "pipe", 10))


def test_the_error_of_a_thread_that_reads_reaches_the_caller():
    class Stream(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            raise MemoryError

    with pytest.raises(MemoryError):
        list(arriving_lines(io.BufferedReader(Stream()), "pipe", 10))


# --- checkpoints ---


@pytest.mark.torch_version
def test_a_checkpoint_restores_model_and_training(tmp_path, verses, text):
    _, _, tokenizer = verses
    trainer = Trainer(small_model(), text, OPTIONS)
    for _ in range(3):
        trainer.update()
    saved = checkpoint.save(tmp_path, 3, trainer.model, tokenizer, trainer.state(), OPTIONS)
    assert saved.name == "step-00000003"
    assert {path.name for path in saved.iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "training.pt",
    }
    model, loaded = checkpoint.load(tmp_path)
    assert loaded.model == tokenizer.model
    assert not model.training
    resumed = Trainer(model, text, OPTIONS)
    resumed.load_state(checkpoint.load_training(saved))
    for _ in range(3):
        assert torch.equal(resumed.update(), trainer.update())
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_int8_checkpoint(tmp_path, verses):
    """Weights are within half a step of their row, zero rows stay zero, vectors are unchanged. The file has a quarter
    of the size."""
    _, _, tokenizer = verses
    model = small_model()
    with torch.no_grad():
        model.output.weight[7] = 0.0
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
    with pytest.raises(InputError, match="exists already"):
        checkpoint.save_int8(model, tokenizer, 5, tmp_path / "small")


def test_the_average_of_checkpoints(tmp_path, verses):
    """Each weight is the mean over the newest checkpoints. More than there are is refused, and one of no update does
    not count."""
    models = [small_model() for _ in range(3)]
    for step, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 10.0**step)
        checkpoint.save(tmp_path / "run", step, model, verses[2], {}, OPTIONS)
    checkpoint.average(tmp_path / "run", 2, tmp_path / "mean")
    mean, _ = checkpoint.load(tmp_path / "mean")
    assert checkpoint.updates(tmp_path / "mean") == 2
    for actual, *parts in zip(*(model.parameters() for model in (mean, *models[1:])), strict=True):
        torch.testing.assert_close(actual, torch.stack(parts).double().mean(0).float(), rtol=0, atol=0)
    for last in (0, 3):
        with pytest.raises(InputError, match=f"last is {last}, expected 1 to 2"):
            checkpoint.average(tmp_path / "run", last, tmp_path / "other")
    with pytest.raises(InputError, match="missing holds no trained checkpoint"):
        checkpoint.average(tmp_path / "missing", 5, tmp_path / "other")
    with pytest.raises(InputError, match="exists already"):
        checkpoint.average(tmp_path / "run", 1, tmp_path / "mean")


@pytest.mark.parametrize("other", ["shape", "vocabulary"])
def test_checkpoints_of_two_runs_have_no_average(tmp_path, verses, other):
    sources, _, tokenizer = verses
    models = [small_model(), small_model(d_ff=96) if other == "shape" else small_model()]
    tokenizers = [tokenizer, Tokenizer.train(sources, 200) if other == "vocabulary" else tokenizer]
    for step, pair in enumerate(zip(models, tokenizers, strict=True), 1):
        checkpoint.save(tmp_path / "run", step, *pair, {}, OPTIONS)
    with pytest.raises(InputError, match="step-00000001 is of another run than step-00000002"):
        checkpoint.average(tmp_path / "run", 2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_an_older_best_is_not_averaged(tmp_path, verses):
    """The average takes checkpoints in a row. An older best does not count; one more between two, as Ctrl-C writes it,
    does."""
    _, _, tokenizer = verses
    training = TrainingConfig(save_every=10, keep=3)
    for step in (0, 10, 20, 30, 40, 43, 50):
        saved = checkpoint.save(tmp_path / "run", step, small_model(), tokenizer, {}, training)
        if step == 20:
            checkpoint.mark_best(saved)
        checkpoint.prune(tmp_path / "run", training.keep)
    assert [path.name[-2:] for path in checkpoint.steps(tmp_path / "run")] == ["20", "40", "43", "50"]
    with pytest.raises(InputError, match="last is 4, expected 1 to 3: as many trained checkpoints in a row as"):
        checkpoint.average(tmp_path / "run", 4, tmp_path / "mean")
    checkpoint.average(tmp_path / "run", 3, tmp_path / "mean")


def test_which_checkpoints_are_found_and_kept(tmp_path, verses):
    _, _, tokenizer = verses
    model = small_model()
    with pytest.raises(InputError, match="holds no checkpoint: expected a folder that `fastattn train --out` wrote"):
        checkpoint.find(tmp_path)
    for step in range(1, 6):
        saved = checkpoint.save(tmp_path, step, model, tokenizer, {"step": step}, OPTIONS)
        if step == 2:
            checkpoint.mark_best(saved)
        checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in checkpoint.steps(tmp_path)] == [f"step-0000000{step}" for step in (2, 4, 5)]
    assert checkpoint.find(tmp_path).resolve().name == "step-00000002"
    assert checkpoint.newest(tmp_path).name == "step-00000005"
    assert checkpoint.find(tmp_path / "step-00000004").name == "step-00000004"


def test_a_copy_without_links_goes_on(tmp_path, verses):
    """The best is marked also where `scp -r` has made a folder of the link."""
    saved = [checkpoint.save(tmp_path, step, small_model(), verses[2], {}, OPTIONS) for step in (1, 2)]
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.json").touch()
    checkpoint.mark_best(saved[1])
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    assert not list(tmp_path.glob(".partial-*"))
    (tmp_path / ".partial-old-best").mkdir()  # left by a killed removal
    checkpoint.prune(tmp_path, keep=2)
    assert not list(tmp_path.glob(".partial-*"))


def test_what_others_keep_in_a_runs_folder_is_left_alone(tmp_path, verses):
    """Pruning leaves copies of checkpoints and files that another command is writing."""
    for step in (10**8, 99_999_999, 10**8 + 1):
        checkpoint.save(tmp_path, step, small_model(), verses[2], {"step": step}, OPTIONS)
    for name in (
        "step-00000001-good",
        "step-mean",
        ".partial-mean",
        ".partial-step-mean",
        ".partial-step-00000003",
        ".partial-old-text",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / ".partial-loss.png").touch()
    checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-100000000", "step-100000001"]
    others = {"step-00000001-good", "step-mean", ".partial-mean", ".partial-step-mean", ".partial-loss.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"step-100000000", "step-100000001", *others}
    with pytest.raises(InputError, match="last is 3, expected 1 to 2"):
        checkpoint.average(tmp_path, 3, tmp_path / "mean")


def test_a_folder_of_the_users_is_not_taken_for_an_interrupted_start(tmp_path, verses):
    own = tmp_path / "run" / "text" / "train.en"
    own.parent.mkdir(parents=True)
    own.write_text("day\n")
    with pytest.raises(InputError, match="run exists already"):
        checkpoint.expect_new(tmp_path / "run")
    with pytest.raises(InputError, match="text is not what `fastattn train` wrote: name another folder"):
        encode(verses[2], (own, own), digest(own, own), own.parent)
    assert own.read_text() == "day\n"
    (own.parent / "text.json").write_text("{}")  # the mark of an earlier text of fastattn's
    checkpoint.expect_new(tmp_path / "run")


def test_an_old_text_is_removed_whole(tmp_path, verses, monkeypatch):
    """After a kill during the removal, the next start takes nothing that is left for the user's."""
    file, run = tmp_path / "day", tmp_path / "run"
    file.write_text("day\n")
    (run / "text").mkdir(parents=True)
    (run / "text" / "text.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(Killed):
            encode(verses[2], (file, file), digest(file, file), run / "text")
    checkpoint.expect_new(run)
    for _ in range(2):  # the second pass removes what the first wrote
        encode(verses[2], (file, file), digest(file, file), run / "text")
        (run / "text" / "text.json").write_text("{}")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.model", "training.pt"])
def test_a_damaged_checkpoint_is_named(tmp_path, verses, name):
    state = {"step": 1, "tensor": torch.ones(1000)}
    saved = checkpoint.save(tmp_path, 1, small_model(), verses[2], state, OPTIONS)
    path = saved / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    read = checkpoint.load_training if name == "training.pt" else checkpoint.load
    with pytest.raises(InputError, match=r"cannot read the checkpoint .*step-00000001: "):
        read(saved)
    if name == "model.safetensors":
        with pytest.raises(
            InputError, match=r"cannot read the checkpoint .*step-00000001: model.safetensors is damaged"
        ):
            checkpoint.updates(saved)
    path.write_bytes(b"junk")
    with pytest.raises(InputError, match=r"cannot read the checkpoint .*step-00000001: "):
        read(saved)
    path.unlink()
    with pytest.raises(
        InputError, match="holds no checkpoint" if name == "model.safetensors" else f"{name}.*: No such"
    ):
        read(saved)


def test_weights_must_fit_the_configuration(tmp_path, verses):
    saved = checkpoint.save(tmp_path, 1, small_model(), verses[2], {}, OPTIONS)
    for d_ff in (65, 2**31 - 1):  # no memory suffices for the second
        other = dataclasses.replace(small_model().config, d_ff=d_ff)
        (saved / "config.json").write_text(other.to_json())
        with pytest.raises(
            InputError, match=r"model.safetensors does not fit config.json: they differ in decoder.*inner"
        ):
            checkpoint.load(saved)


class Killed(BaseException):
    """Exception that no handler of the program catches."""


def killed(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("target", ["safetensors.torch.save_file", "torch.save", "os.fsync", "pathlib.Path.rename"])
def test_an_interrupted_write_is_no_checkpoint(tmp_path, verses, monkeypatch, target):
    """After a kill in any call of a save, the checkpoint that is found is complete, and the next save works."""
    model, (_, _, tokenizer) = small_model(), verses
    checkpoint.save(tmp_path, 1, model, tokenizer, {"step": 1}, OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(target, killed)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 2, model, tokenizer, {"step": 2}, OPTIONS)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-00000001"]
    checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, 2, model, tokenizer, {"step": 2}, OPTIONS)
    assert checkpoint.newest(tmp_path).name == "step-00000002"


def test_what_an_interrupted_removal_leaves_is_removed(tmp_path, verses, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, small_model(), verses[2], {"step": step}, OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(Killed):
            checkpoint.prune(tmp_path, keep=1)
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-00000002"]
    checkpoint.prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_a_file_cannot_be_called_is_said(tmp_path):
    for length in (250, 300):
        path = tmp_path / ("x" * length)
        with pytest.raises(InputError, match=r"cannot write .*xxx: its name is too long"):
            check_file(path)
        with pytest.raises(InputError, match=r"cannot write .*xxx: File name too long"):
            write_file(path, b"")


def test_a_pipe_is_written_to_directly(tmp_path):
    """A pipe is written to directly, and a link to a missing file is followed, as for /dev/stdout."""
    reading, writing = os.pipe()
    with open(reading, "rb") as stream:
        write_file(Path(f"/dev/fd/{writing}"), b"whole")
        os.close(writing)
        assert stream.read() == b"whole"
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", b"whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"whole"


# --- scores and pictures ---


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_quantised_model_is_evaluated_and_translates(text, verses):
    """Loss and accuracy are those of the model's own logits. The ``weight`` of a quantised module is a method."""
    sources, targets, tokenizer = verses
    model = torch.ao.quantization.quantize_dynamic(small_model().eval(), {nn.Linear})
    batch = text.batch(torch.arange(8))
    found = held_out(model, [batch], torch.autocast("cpu", enabled=False))
    with torch.no_grad():
        logits = model.logits(model.packed_features(batch.source, batch.target))
    wanted = F.cross_entropy(logits, batch.labels, ignore_index=PAD_ID)
    assert found["valid_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found["valid_accuracy"] == pytest.approx(
        ((logits.argmax(-1) == batch.labels) & (batch.labels != PAD_ID)).sum().item() / batch.tokens
    )
    assert len(translate(model, tokenizer, sources[:2], Search(beam=2))) == 2
    heads = plots.attention_heads(model, tokenizer, sources[0], targets[0])
    torch.testing.assert_close(heads.weights.sum(-1), torch.ones(heads.weights.shape[:2]))


def test_held_out_loss(text):
    model = small_model()
    batches = [text.batch(index) for index in text.batches(2000)]
    of_text = held_out(model, batches, torch.autocast("cpu", enabled=False))
    assert model.training
    model.eval()
    nll = tokens = 0
    with torch.no_grad():
        for i in range(len(text.sources)):
            source, target = (side.packed(torch.tensor([i])).tokens for side in (text.sources, text.targets))
            source, labels = source[source != PAD_ID], target[target != PAD_ID]
            target = torch.cat((torch.tensor([BOS_ID]), labels[:-1]))
            nll += F.cross_entropy(model(source[None], target[None])[0], labels, reduction="sum").item()
            tokens += len(labels)
    assert of_text["valid_loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert of_text["valid_perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert 0 <= of_text["valid_accuracy"] <= 1


def test_scores():
    references = ["El perro duerme en la casa grande .", "Y dijo Dios: Sea la luz."]
    same = scores(references, references)
    assert (same.bleu, same.chrf, same.compound_split_bleu) == pytest.approx((100, 100, 100))
    assert "tok:13a" in same.bleu_signature
    assert "nc:6" in same.chrf_signature
    other = scores(["Dios dijo: luz", "perro"], references)
    assert max(other.bleu, other.compound_split_bleu) < 10
    assert other.chrf < 30
    with pytest.raises(InputError, match="1 translations cannot be scored against 2 references"):
        scores(["a"], references)


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
def test_attention_heads(verses, kind):
    """Weights equal the layer's own probabilities, and rows and columns carry the pieces of text that they stand
    for."""
    sources, targets, tokenizer = verses
    model = small_model().eval()
    heads = plots.attention_heads(model, tokenizer, sources[0], targets[0], kind)
    source, target = (tokenizer.pieces(ids) for ids in tokenizer.encode([sources[0], targets[0]]))
    read, seen, predicted = [*source, "</s>"], ["<s>", *target], [*target, "</s>"]
    named = {"encoder": (read, read), "decoder": (predicted, seen), "cross": (predicted, read)}
    assert (heads.rows, heads.columns) == named[kind]
    weights = AttentionWeights()
    ids, begun = tokenizer.encode([sources[0], targets[0]])
    model(torch.tensor([[*ids, EOS_ID]]), torch.tensor([[BOS_ID, *begun]]), weights=weights)
    assert torch.equal(heads.weights, getattr(weights, kind)[0][0])
    torch.testing.assert_close(heads.weights.sum(-1), torch.ones(4, len(heads.rows)))


def test_a_layer_that_does_not_exist():
    config = small_model().config
    assert plots.check_layer(config, "decoder", None) == 1
    with pytest.raises(InputError, match="layer of the cross attention is 2, expected 1 to 1"):
        plots.check_layer(config, "cross", 2)
    with pytest.raises(InputError, match="unknown kind of attention 'self', expected one of encoder, decoder, cross"):
        plots.check_layer(config, "self", 1)


@pytest.mark.parametrize("heads", [1, *slow(5, 16)])
@pytest.mark.parametrize("length", [1, 200])
def test_pictures_fit_a_screen(tmp_path, heads, length):
    pieces = [f"▁piece{n}" for n in range(length)]
    plots.heat_maps(plots.Heads(torch.rand(heads, length, length), pieces, pieces), tmp_path / "map.png", "title")
    png = (tmp_path / "map.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">2I", png[16:24]) == (1280, 720)


def test_pieces_in_a_picture_are_no_mathematics(tmp_path):
    plots.heat_maps(plots.Heads(torch.rand(1, 2, 2), ["$$", "a"], ["$x_$", "b"]), tmp_path / "map.svg", "title")
    assert "$x_$" in (tmp_path / "map.svg").read_text()


def test_the_loss_curve_is_of_one_kind(tmp_path, monkeypatch):
    """Training's curve is the cross-entropy without label smoothing, as validation's is."""
    drawn = {}
    plot = matplotlib.axes.Axes.plot

    def spy(axes, x, y, *args, label, **kwargs):
        drawn[label] = (x, y)
        return plot(axes, x, y, *args, label=label, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", spy)
    rows = [{"step": 1, "loss": 9.0, "perplexity": math.e**8}, {"step": 2, "loss": 8.0, "perplexity": math.e**7}]
    plots.loss_curve([rows[0], {**rows[1], "valid_loss": 7.5}], tmp_path / "loss.svg")
    assert drawn == {"training": ([1, 2], pytest.approx([8, 7])), "validation": ([2], [7.5])}
    assert "<svg" in (tmp_path / "loss.svg").read_text()


@pytest.fixture
def files(tmp_path):
    """Return the files of 100 pairs of lines, and a function that writes a small model's configuration."""
    files = [tmp_path / "some.en", tmp_path / "some.es"]
    for path in files:
        path.write_text("\n".join(read_lines(VERSES / f"dev{path.suffix}")[:100]))

    def config(**changes):
        model = {"vocab_size": 300, "d_model": 32, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
        training = {"precision": "fp32", "batch_tokens": 1000}
        fields = {**model, **{name: changes.pop(name) for name in list(changes) if name not in vars(OPTIONS)}}
        path = tmp_path / "small.json"
        path.write_text(json.dumps({**fields, "training": {**training, **changes}}))
        return path

    return files, config


def test_a_run_writes_metrics_and_checkpoints(files, tmp_path, capsys, monkeypatch):
    (files, config), kept = files, []
    monkeypatch.setattr(memory, "keep_freed", lambda: kept.append(True))
    best = train(files, files, tmp_path / "run", config=config(), max_steps=2, seed=1)
    assert best == tmp_path / "run/best"
    assert kept
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2]
    for name in ("loss", "perplexity", "accuracy", "tokens_per_second", "learning_rate", "valid_loss"):
        assert math.isfinite(rows[0][name])
    model, tokenizer = checkpoint.load(best)
    valid = ParallelText.encoded(tokenizer, *map(read_lines, files), "validation")
    of_text = held_out(model, map(valid.batch, valid.batches(1000)), torch.autocast("cpu", enabled=False))
    assert rows[0]["valid_loss"] == pytest.approx(of_text["valid_loss"], rel=1e-6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("update 2: loss ")
    assert "\r" not in "".join(lines)


def test_ctrl_c_cuts_bleu_short(files, tmp_path, monkeypatch):
    """Ctrl-C cuts BLEU short but not validation: the checkpoint is saved at once, and may be the best."""
    files, config = files

    def interrupted(model, tokenizer, lines, search, advance):
        signal.raise_signal(signal.SIGINT)
        advance(1)
        raise AssertionError("it goes on")

    monkeypatch.setattr("fastattn.translation.train.translate", interrupted)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
    try:
        for name, saved, most in (("due", 1, 9), ("not due", 9, 9), ("last", 9, 1)):
            with pytest.raises(KeyboardInterrupt, match="after update 1, which is saved"):
                train(files, files, tmp_path / name, config=config(bleu_every=1, save_every=saved), max_steps=most)
            assert checkpoint.newest(tmp_path / name).name == "step-00000001"
            (row,) = read_metrics(tmp_path / name)
            assert "valid_bleu" not in row
            assert ("valid_loss" in row) == (tmp_path / name / "best").exists() == (name != "not due")
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_run_is_resumed_with_its_validation_text(files, tmp_path):
    files, config = files
    other, out = [tmp_path / "other.en", tmp_path / "other.es"], tmp_path / "run"
    for path, lines in zip(other, map(read_lines, files), strict=True):
        path.write_text("\n".join(lines[:50]))
    train(files, files, out, config=config(), max_steps=1)
    with pytest.raises(InputError, match=r"the validation text is not the one that .*step-00000001 was scored on"):
        train(files, other, out, resume=True, max_steps=2)


def test_damaged_metrics(files, tmp_path):
    """An incomplete last line is left out, and a resumed run continues behind the line before it."""
    files, config = files
    out = tmp_path / "run"
    train(files, files, out, config=config(), max_steps=1)
    metrics = out / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"step": 2, "lo')
    train(files, files, out, resume=True, max_steps=2)
    assert [row["step"] for row in read_metrics(out)] == [1, 2]
    for damage in (
        b'{"step": 2, "lo',
        b"\0" * 9,
        b"\xff",
        b"",
        b"3",
        b'{"step": 2}',
        b'{"step": "x", "perplexity": 1}',
    ):
        metrics.write_bytes(whole + damage + b"\n" + whole)
        with pytest.raises(InputError, match=rf"line 2 of {metrics} is damaged"):
            read_metrics(out)


def test_weights_that_are_no_numbers_end_a_run(files, tmp_path):
    files, config = files
    with pytest.raises(InputError, match="the loss is nan at update 1: start again with another seed, a lower rate"):
        train(files, files, tmp_path / "run", config=config(rate=1e38, warmup=1), max_steps=1)
    assert [path.name for path in checkpoint.steps(tmp_path / "run")] == ["step-00000000"]


def test_a_model_that_no_memory_holds(files, tmp_path):
    files, config = files
    with pytest.raises(InputError, match="there is no memory for a model of d_model 2147483640"):
        train(files, files, tmp_path / "run", config=config(d_model=2147483640), max_steps=1)
    assert not checkpoint.steps(tmp_path / "run")


def test_held_out_text_is_moved_to_the_model(text, monkeypatch):
    """Held-out batches, which the command keeps on the CPU, are moved to the model's device."""
    model, moved = small_model(), []
    monkeypatch.setattr(Batch, "to", lambda batch, device: moved.append(device) or batch)
    held_out(model, [text.batch(torch.tensor([1, 2]))], torch.autocast("cpu", enabled=False))
    assert moved == [model.output.weight.device]


def test_the_loss_makes_gradients_only_where_they_are_wanted():
    """Validation makes no gradients, which saves a tensor of the weight's size."""
    features, weight = torch.randn(8, 5), torch.randn(30, 5, requires_grad=True)
    labels = torch.arange(8) + 4
    with torch.no_grad(), Made() as made:
        wanted = smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)
    assert weight.numel() not in made.sizes
    with Made() as made:
        found = smoothed_loss(features, weight, None, labels, 0.1, PAD_ID)
    assert weight.numel() in made.sizes
    assert [value.item() for value in found] == [value.item() for value in wanted]


@pytest.mark.parametrize("positions", ["sinusoidal", *slow("learned")])
def test_the_same_update_has_the_same_bits(positions):
    """An update has the same bits each time, although torch sums the gradients of indexing this many tokens in several
    threads, in no order."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = TransformerConfig(50, 64, 64, 4, 1, 1, positions=positions, max_positions=300, dropout=0.1)
    model = Transformer(config)
    sentences = Sentences.of([[4 + (7 * n + k) % 46 for k in range(20 + n % 40)] for n in range(64)])
    batch = ParallelText(sentences, sentences).batch(torch.arange(64))
    assert len(batch.labels) * 64 > 2**15
    seeds = dropout_seeds(1, 1, 0, model.dropout_sites)

    def gradients():
        features = model.packed_features(batch.source, batch.target, seeds=seeds)
        return torch.autograd.grad(smoothed_loss(*model.projection(features), batch.labels, 0.1, PAD_ID)[0], parameters)

    parameters = list(model.parameters())
    first = gradients()
    for _ in range(10):
        assert all(map(torch.equal, first, gradients()))


def test_what_a_run_does_not_meet_needs_no_positions(files, tmp_path):
    """A validation pair that the loss leaves out needs no positions, unless BLEU translates it."""
    files, config = files
    valid = tmp_path / "en", tmp_path / "es"
    valid[0].write_text("in the beginning\n" + "in the beginning " * 200)
    valid[1].write_text("en el principio\nen")
    path = config(positions="learned", max_positions=201)
    train(files, valid, tmp_path / "run", config=path, max_steps=1)
    with pytest.raises(InputError, match=r"the validation text has a sentence of .* max_positions=201"):
        train(files, valid, tmp_path / "other", config=path, max_steps=1, bleu_every=1)


def test_learned_positions_must_do_for_every_sentence(files, tmp_path):
    files, config = files
    for short, valid, name in ((20, files, "training"), (180, [tmp_path / "long"] * 2, "validation")):
        (tmp_path / "long").write_text("in the beginning " * 30)
        path = config(positions="learned", max_positions=short)
        with pytest.raises(InputError, match=rf"the {name} text has a sentence of \d+ pieces, .*max_positions={short}"):
            train(files, valid, tmp_path / name, config=path, max_steps=1)
    best = train(files, files, tmp_path / "run", config=config(positions="learned", max_positions=200), max_steps=1)
    model, tokenizer = checkpoint.load(best)
    with torch.no_grad():
        model.output.weight[EOS_ID] = 0
    for line in ("in the beginning " * 25 + "in" * more for more in range(3)):  # whatever multiple padding rounds to
        most = 1 + len(tokenizer.encode([line])[0])  # tokens, the end included
        narrow = Transformer(dataclasses.replace(model.config, max_positions=most)).eval()
        assert len(translate(narrow, tokenizer, [line], Search(beam=1))) == 1
    for search in (Search(beam=2), Search(temperature=1.0)):  # hypotheses end at the last position
        assert translate(model, tokenizer, ["in the beginning " * 25], search) != [""]
