"""Beam search over cached decoding, a batch of sentences at a time (section 6.1 of the paper)."""

import dataclasses
import math

import torch
from torch import Tensor

from fastattn.translation.data import Sentences
from fastattn.translation.errors import InputError
from fastattn.translation.model import Transformer
from fastattn.translation.tokenizer import Tokenizer

# A translation has at most this many tokens more than its source.
EXTRA_TOKENS = 50
FOLD = 40  # rows into which `_largest` folds a vocabulary


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A translation: its piece ids without begin and end, and log P / ((5 + length) / 6)**alpha, end counted."""

    tokens: list[int]
    score: float


@dataclasses.dataclass(frozen=True)
class Search:
    """How translations are searched for.

    Args:
        beam: hypotheses a sentence; 1 is greedy decoding.
        length_penalty: alpha, by which hypotheses of different lengths are compared.
        batch_size: sentences at a time: it changes the speed, not the output.

    Raises:
        InputError: a value outside its range.
    """

    beam: int = 4
    length_penalty: float = 0.6
    batch_size: int = 64

    def __post_init__(self):
        for name in ("beam", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not math.isfinite(self.length_penalty):
            raise InputError(f"length_penalty is {self.length_penalty}, expected a finite number")


@torch.inference_mode()
def beam_search(
    model: Transformer, source: Tensor, source_lengths: Tensor, search: Search = Search()
) -> list[Hypothesis]:
    """The best hypothesis of each sentence.

    Each sentence keeps ``search.beam`` hypotheses, ranked by log P / ((5 + length) / 6)**``search.length_penalty``. A
    finished one is frozen: it keeps its score and its place until better ones push it out. A sentence ends when all its
    hypotheses are finished or have as many tokens as its source and ``EXTRA_TOKENS`` more. Sentences do not influence
    one another.

    Args:
        model: in evaluation mode.
        source: int64 (B, S), padded on the right.
        source_lengths: int64 (B,), at least 1.
    """
    config, device, beam = model.config, source.device, search.beam
    limits = source_lengths + EXTRA_TOKENS
    batch, longest = len(source), int(limits.max())
    results = [Hypothesis([], -torch.inf)] * batch

    # One hypothesis a sentence before the first step, ``width`` of them after it.
    state = model.begin(source, source_lengths)
    sentence = torch.arange(batch, device=device)
    tokens = torch.full((batch, 1, 1), config.bos_id, device=device)
    log_p = torch.zeros(batch, 1, device=device)
    length = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    finished = torch.zeros(batch, 1, dtype=torch.bool, device=device)

    for step in range(1, longest + 1):
        logits = model.logits(model.step(tokens[:, :, -1], state)).float()
        log_sum = logits.amax(-1, keepdim=True) - logits.softmax(-1).amax(-1, keepdim=True).log()
        logits[..., [config.pad_id, config.bos_id]] = -torch.inf
        choice, token = _largest(logits, min(beam, config.vocab_size - 2))
        choice = choice - log_sum
        # A finished hypothesis has one continuation: itself.
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
            # topk has sorted the hypotheses: the first is the best.
            end = 1 + int(length[row, 0]) - int(finished[row, 0])
            results[sentence[row]] = Hypothesis(tokens[row, 0, 1:end].tolist(), score[row, 0].item())
        if done.all():
            break
        alive = _fill_gaps(done)
        state.select(alive, parent[alive])
        sentence, limits, tokens = sentence[alive], limits[alive], tokens[alive]
        log_p, length, finished = log_p[alive], length[alive], finished[alive]
    return results


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``x.topk(k)`` of long rows, by one fast pass over them: the k largest are in the k columns of largest maximum.

    A row is read as a matrix of ``FOLD`` rows; what is left over is looked at with the columns found.
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
    """The sentences that are not done: the last of them in the places of those that are, the others in their own."""
    alive = (~done).nonzero()[:, 0]
    order = torch.arange(len(alive), device=done.device)
    gaps = done[: len(alive)]
    order[gaps] = alive[alive >= len(alive)]
    return order


def translate(model: Transformer, tokenizer: Tokenizer, lines: list[str], search: Search = Search()) -> list[str]:
    """The translation of each line, in the order given; that of a blank line is empty.

    Sentences of like length share a batch.
    """
    ids = tokenizer.encode(lines)
    sentences = Sentences(ids)
    order = sorted((i for i, sentence in enumerate(ids) if sentence), key=lambda i: len(ids[i]), reverse=True)
    device = model.output.weight.device
    found: list[list[int]] = [[] for _ in lines]
    for first in range(0, len(order), search.batch_size):
        index = order[first : first + search.batch_size]
        source, lengths = (tensor.to(device) for tensor in sentences.padded(torch.tensor(index)))
        hypotheses = beam_search(model, source, lengths, search)
        for i, hypothesis in zip(index, hypotheses, strict=True):
            found[i] = hypothesis.tokens
    return tokenizer.decode(found)
