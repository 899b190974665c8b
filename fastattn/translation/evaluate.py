"""How good a model is: loss on held-out text, and BLEU."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.translation.data import Batch
from fastattn.translation.errors import InputError, require
from fastattn.translation.model import Transformer


@torch.no_grad()
def correct_guesses(logits: Tensor, labels: Tensor, pad_id: int) -> Tensor:
    """Number of labels (N,), padding left out, above whose logit of (N, V) there is none: int64 scalar."""
    guessed = logits.gather(1, labels[:, None])[:, 0] >= logits.amax(-1)  # argmax takes ten times as long on a CPU
    return (guessed & (labels != pad_id)).sum()


@torch.no_grad()
def held_out(model: Transformer, batches: Iterable[Batch], autocast) -> dict[str, float]:
    """``valid_loss`` (nats a token, unsmoothed), ``valid_perplexity`` and ``valid_accuracy`` of batches.

    ``autocast`` is the context manager to compute in. The model is left in training mode if it was.
    """
    was_training = model.training
    model.eval()
    nll, correct, tokens = 0.0, 0, 0
    with autocast:
        for batch in batches:
            logits = model(batch.source, batch.target, batch.source_lengths, batch.target_lengths).flatten(0, 1)
            labels = batch.labels.flatten()
            nll += F.cross_entropy(logits.float(), labels, ignore_index=model.config.pad_id, reduction="sum").item()
            correct += int(correct_guesses(logits, labels, model.config.pad_id))
            tokens += batch.tokens
    model.train(was_training)
    return {
        "valid_loss": nll / tokens,
        "valid_perplexity": perplexity(nll / tokens),
        "valid_accuracy": correct / tokens,
    }


def perplexity(loss: float) -> float:
    """exp(loss), where the first updates' losses would overflow: infinity."""
    return math.exp(loss) if loss < 700 else math.inf


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """sacrebleu's corpus BLEU (0 to 100) of detokenised translations against raw references, and its signature."""
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} translations cannot be scored against {len(references)} references")
    metric = require("sacrebleu.metrics").BLEU()
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())
