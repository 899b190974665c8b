"""Beam search (section 6.1 of the paper) and sampling, a batch of sentences at a time."""

import dataclasses
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.errors import InputError
from fastattn.translation.data import Sentences
from fastattn.translation.model import Transformer
from fastattn.translation.tokenizer import Tokenizer

FOLD = 40  # number of rows into which `_largest` folds a vocabulary.
MOST_TOKENS = 2**16  # maximum per batch of its hypotheses times the pieces of its longest source.
STEEPEST = 5.0  # maximum length penalty; steeper ones have no use, and their powers of a length overflow.


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """Translation: its piece ids without begin and end, and log P / ((5 + length) / 6)**alpha, with the end counted."""

    tokens: list[int]
    score: float


@dataclasses.dataclass(frozen=True)
class Translation:
    """Text and score of a hypothesis."""

    text: str
    score: float


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings of the search for translations: beam search or, with a temperature, sampling.

    Args:
        beam: hypotheses per sentence; 1 is greedy decoding.
        length_penalty: alpha, by which hypotheses of different lengths are compared.
        batch_size: sentences at a time, fewer if they are long. It changes the speed, not the output.
        n_best: translations per sentence.
        temperature: draw each token from softmax(logits / temperature).
        top_k: draw only from the k likeliest pieces; 0: from all.
        top_p: draw only from the likeliest pieces that together have this probability (Holtzman et al. 2020,
            section 3.1).
        extra_tokens: maximum number of tokens by which a translation exceeds its source (section 6.1).
        seed: seed of the draws, which depend only on it and the sentence, not on the rest of the batch.

    Raises:
        InputError: a value is outside its range.
    """

    beam: int = 4
    length_penalty: float = 0.6
    batch_size: int = 64
    n_best: int = 1
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    extra_tokens: int = 50

    def __post_init__(self):
        for name, least in (("beam", 1), ("batch_size", 1), ("n_best", 1), ("top_k", 0), ("extra_tokens", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not -STEEPEST <= self.length_penalty <= STEEPEST:
            raise InputError(f"length_penalty is {self.length_penalty}, expected {-STEEPEST:g} to {STEEPEST:g}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, expected a probability above 0 and at most 1")
        if self.temperature is None:
            if self.n_best > self.beam:
                raise InputError(f"n_best is {self.n_best}, expected at most the beam, {self.beam}")
            if (self.top_k, self.top_p) != (0, 1.0):
                raise InputError("top_k and top_p choose what is sampled: give a temperature too")
        elif not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature is {self.temperature}, expected a positive number")


@torch.inference_mode()
def beam_search(model: Transformer, source: Tensor, source_lengths: Tensor, search: Search) -> list[list[Hypothesis]]:
    """Return the ``search.n_best`` best hypotheses of each sentence, best first.

    Each sentence keeps ``search.beam`` hypotheses, ranked by log P / ((5 + length) / 6)**``search.length_penalty``. A
    finished hypothesis keeps its score, and its place until better ones replace it. A sentence ends when all its
    hypotheses are finished, or when they have ``search.extra_tokens`` tokens more than the source. Sentences do not
    influence one another.

    Args:
        model: the model, in evaluation mode.
        source: int64 (B, S), padded on the right.
        source_lengths: int64 (B,), at least 1.
    """
    config, device, beam = model.config, source.device, search.beam
    limits = (source_lengths + search.extra_tokens).clamp(max=config.most_positions)
    batch, longest = len(source), int(limits.max())
    results: list[list[Hypothesis]] = [[] for _ in range(batch)]

    # One hypothesis per sentence before the first step, up to ``beam`` after it.
    state = model.begin(source, source_lengths)
    sentence = torch.arange(batch, device=device)
    tokens = torch.full((batch, 1, 1), config.bos_id, device=device)
    log_p = torch.zeros(batch, 1, device=device)
    length = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    finished = torch.zeros(batch, 1, dtype=torch.bool, device=device)

    for step in range(1, longest + 1):
        logits = model.logits(model.step(tokens[:, :, -1], state)).float()
        highest, log_p_highest = logits.amax(-1, keepdim=True), logits.softmax(-1).amax(-1, keepdim=True).log()
        logits[..., [config.pad_id, config.bos_id]] = -torch.inf
        choice, token = _largest(logits, min(beam, config.vocab_size - 2))
        choice = (choice - highest) + log_p_highest  # in this order, a confident choice keeps its digits
        # The only continuation of a finished hypothesis is the hypothesis itself.
        choice[finished] = -torch.inf
        choice[..., 0].masked_fill_(finished, 0.0)
        token[finished] = config.pad_id

        new_length = length + ~finished
        new_log_p = log_p[..., None] + choice
        score = new_log_p / ((5 + new_length[..., None]) / 6) ** search.length_penalty
        score, best = score.flatten(1).topk(min(beam, score[0].numel()), dim=-1)
        parent = best // choice.shape[-1]
        log_p = new_log_p.flatten(1).gather(1, best)
        length = new_length.gather(1, parent)
        token = token.flatten(1).gather(1, best)
        finished = finished.gather(1, parent) | (token == config.eos_id)
        history = tokens.gather(1, parent[..., None].expand(-1, -1, step))
        tokens = torch.cat((history, token[..., None]), dim=-1)

        done = finished.all(1) | (limits <= step)
        for row in done.nonzero()[:, 0].tolist():
            results[sentence[row]] = _hypotheses(tokens[row], length[row], finished[row], score[row])[: search.n_best]
        if done.all():
            break
        alive = _fill_gaps(done)
        state.select(alive, parent[alive])
        sentence, limits, tokens = sentence[alive], limits[alive], tokens[alive]
        log_p, length, finished = log_p[alive], length[alive], finished[alive]
    return results


@torch.inference_mode()
def sample(model: Transformer, source: Tensor, source_lengths: Tensor, search: Search) -> list[list[Hypothesis]]:
    """Draw ``search.n_best`` hypotheses of each sentence token by token; return them best first.

    The arguments are those of :func:`beam_search`; ``search`` must have a temperature. Each sentence has its own
    generator.
    """
    if search.temperature is None:
        raise InputError("sampling needs a temperature")
    config, device, width = model.config, source.device, search.n_best
    limits = (source_lengths + search.extra_tokens).clamp(max=config.most_positions)
    results: list[list[Hypothesis]] = [[] for _ in source]
    draws = [
        random.Random(f"{search.seed} {ids[:length]}")  # a string is the same seed in every process
        for ids, length in zip(source.tolist(), source_lengths.tolist(), strict=True)
    ]
    state = model.begin(source, source_lengths)
    sentence = torch.arange(len(source), device=device)
    state.select(sentence, torch.zeros(len(source), width, dtype=torch.int64, device=device))
    tokens = torch.full((len(source), width, 1), config.bos_id, device=device)
    log_p = torch.zeros(len(source), width, device=device)
    finished = torch.zeros(len(source), width, dtype=torch.bool, device=device)
    for step in range(1, int(limits.max()) + 1):
        logits = model.logits(model.step(tokens[:, :, -1], state)).float()
        logits = logits - logits.amax(-1, keepdim=True)  # the log-sum-exp of a confident row keeps its digits
        log_sum = logits.logsumexp(-1)
        logits[..., [config.pad_id, config.bos_id]] = -torch.inf
        uniform = torch.tensor(  # float64, because a float32 could round to 1
            [[draws[i].random() for _ in range(width)] for i in sentence.tolist()], dtype=torch.float64, device=device
        )
        scaled = (logits - logits.amax(-1, keepdim=True)).double() / search.temperature  # tiny temperatures too
        token = _draw(scaled, uniform, search.top_k, search.top_p)
        gained = logits.gather(-1, token[..., None])[..., 0] - log_sum
        log_p = log_p + gained.masked_fill(finished, 0.0)
        tokens = torch.cat((tokens, token.masked_fill(finished, config.pad_id)[..., None]), dim=-1)
        finished = finished | (token == config.eos_id)

        done = finished.all(1) | (limits <= step)
        length = (tokens[..., 1:] != config.pad_id).sum(-1)
        score = log_p / ((5 + length) / 6) ** search.length_penalty
        for row in done.nonzero()[:, 0].tolist():
            found = _hypotheses(tokens[row], length[row], finished[row], score[row])
            results[sentence[row]] = sorted(found, key=lambda hypothesis: hypothesis.score, reverse=True)
        if done.all():
            break
        alive = _fill_gaps(done)
        state.select(alive, torch.arange(width, device=device).expand(len(alive), -1))
        sentence, limits, tokens = sentence[alive], limits[alive], tokens[alive]
        log_p, finished = log_p[alive], finished[alive]
    return results


def _draw(logits: Tensor, uniform: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return, per row of logits (..., V), the token at which the cumulated probability exceeds ``uniform`` (...)."""
    logits, token = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # likeliest first
    p = logits.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    cumulated = p.cumsum(-1)
    place = (cumulated <= uniform[..., None] * cumulated[..., -1:]).sum(-1)
    return token.gather(-1, place[..., None])[..., 0]


def _hypotheses(tokens: Tensor, length: Tensor, finished: Tensor, score: Tensor) -> list[Hypothesis]:
    """Return a sentence's hypotheses.

    Args:
        tokens: (W, 1 + T), from the begin token on.
        length: (W,), without begin; it counts the end token of a finished hypothesis.
        finished: bool (W,).
        score: (W,).
    """
    ends = (1 + length - finished.long()).tolist()
    return [
        Hypothesis(ids[1:end], value) for ids, end, value in zip(tokens.tolist(), ends, score.tolist(), strict=True)
    ]


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ``x.topk(k)`` of long rows after one fast pass over them.

    A row is folded into a matrix of ``FOLD`` rows. The k largest elements are in the k columns with the largest maxima.
    These columns and the elements beyond the matrix are the candidates of a small topk.
    """
    columns = x.shape[-1] // FOLD
    if columns < 4 * k:
        return x.topk(k)
    matrix = x[..., : FOLD * columns].unflatten(-1, (FOLD, columns))
    found = matrix.amax(-2).topk(k).indices
    rows = torch.arange(FOLD, device=x.device)
    index = (rows[:, None] * columns + found[..., None, :]).flatten(-2)
    rest = torch.arange(FOLD * columns, x.shape[-1], device=x.device)
    index = torch.cat((index, rest.expand(*index.shape[:-1], -1)), -1)
    values, place = x.gather(-1, index).topk(k)
    return values, index.gather(-1, place)


def _fill_gaps(done: Tensor) -> Tensor:
    """Return the indices of the sentences that are not done; the last of them fill the places of finished ones.

    The others keep their places, so that few rows of the caches move.
    """
    alive = (~done).nonzero()[:, 0]
    order = torch.arange(len(alive), device=done.device)
    gaps = done[: len(alive)]
    order[gaps] = alive[alive >= len(alive)]
    return order


def candidates(
    model: Transformer,
    tokenizer: Tokenizer,
    lines: list[str],
    search: Search = Search(),
    advance: Callable[[int], object] = lambda sentences: None,
) -> list[list[Translation]]:
    """Return the ``search.n_best`` translations of each line, best first, in the order of the lines.

    A blank line has none. Sentences of similar length share a batch. ``advance`` is called after each batch with its
    number of sentences.
    """
    ids = tokenizer.encode(lines)
    sentences = Sentences.of(ids)
    order = sorted((i for i, sentence in enumerate(ids) if sentence), key=lambda i: len(ids[i]), reverse=True)
    device, most = model.device, model.config.most_positions
    found: list[list[Translation]] = [[] for _ in lines]
    hypotheses = search.beam if search.temperature is None else search.n_best
    first = 0
    while first < len(order):
        longest = min(len(ids[order[first]]), most)
        index = order[first : first + max(1, min(search.batch_size, MOST_TOKENS // (longest * hypotheses)))]
        first += len(index)
        source, lengths = (tensor.to(device) for tensor in sentences.padded(torch.tensor(index, device="cpu"), most))
        results = (beam_search if search.temperature is None else sample)(model, source, lengths, search)
        for i, best in zip(index, results, strict=True):
            texts = tokenizer.decode([hypothesis.tokens for hypothesis in best])
            scores = [hypothesis.score for hypothesis in best]
            found[i] = [Translation(*pair) for pair in zip(texts, scores, strict=True)]
        advance(len(index))
    return found


def translate(
    model: Transformer,
    tokenizer: Tokenizer,
    lines: list[str],
    search: Search = Search(),
    advance: Callable[[int], object] = lambda sentences: None,
) -> list[str]:
    """Return the best of each line's :func:`candidates`, empty for a blank line."""
    found = candidates(model, tokenizer, lines, search, advance)
    return [translations[0].text if translations else "" for translations in found]
