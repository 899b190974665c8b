"""How good a model is: loss on held-out text, BLEU and chrF."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.translation.data import Batch
from fastattn.translation.errors import InputError, require
from fastattn.translation.model import Transformer

# Bytes of logits made at a time. For each such part the weight's gradient is read and written once more.
LOGIT_BYTES = 2**27
# Elements of them that a CPU takes through the softmax at a time: float32 that its cache holds over the passes.
CACHED = 2**19
COMPOUND = re.compile(r"(\S)-(\S)")


def smoothed_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    pad_id: int,
    fixed_id: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Label-smoothed cross-entropy (section 5.4) of the logits ``linear(features, weight, bias)``.

    The target distribution is 1 - smoothing on the label plus smoothing / V on every piece, as in
    ``torch.nn.functional.cross_entropy``. The logits exist a few rows at a time, in the dtype that autocast gives them;
    their softmax is float32.

    Args:
        features: (N, d_model).
        weight: (V, d_model).
        bias: (V,) or None.
        labels: int64 (N,).
        fixed_id: the piece whose row of ``weight`` receives no gradient.

    Returns:
        Summed over the labels other than ``pad_id``: the loss, and without gradient the plain cross-entropy, both in
        nats, and the number of labels above whose logit there is none.
    """
    return _SmoothedLoss.apply(features, weight, bias, labels, smoothing, pad_id, fixed_id, torch.is_grad_enabled())


class _SmoothedLoss(torch.autograd.Function):
    """The gradients are made with the loss, rows by rows: (softmax - target distribution) times what the rows met."""

    @staticmethod
    def forward(ctx, features, weight, bias, labels, smoothing, pad_id, fixed_id, recorded):
        device, pieces = features.device.type, weight.shape[0]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        is_padding = labels == pad_id
        # Rows of padding are 0: they add nothing to the weight's gradient.
        x, w = features.to(dtype).masked_fill(is_padding[:, None], 0.0), weight.to(dtype)
        wanted = recorded and any(ctx.needs_input_grad)
        grad_features, grad_weight = torch.empty_like(x) if wanted else None, None
        grad_bias = torch.zeros_like(bias) if wanted and bias is not None else None
        rows = max(512, LOGIT_BYTES // (pieces * dtype.itemsize))
        at_once = max(1, CACHED // pieces) if device == "cpu" else 512
        found = [torch.zeros(4, 0, device=features.device)]
        with torch.autocast(device, enabled=False):
            for first in range(0, max(1, len(labels)), rows):
                part = slice(first, first + rows)
                logits = F.linear(x[part], w, None if bias is None else bias.to(dtype))
                blocks = (tensor.split(at_once) for tensor in (logits, labels[part, None], is_padding[part]))
                for block, label, skipped in zip(*blocks, strict=True):
                    scores = block.float()
                    p = scores.softmax(-1)
                    of_label = scores.gather(1, label)[:, 0]
                    found.append(torch.stack((scores.amax(-1), p.amax(-1), scores.mean(-1), of_label)))
                    if wanted:  # the logits' own takes their place
                        p.sub_(smoothing / pieces).scatter_add_(1, label, p.new_full(label.shape, smoothing - 1))
                        block.copy_(p)
                        if grad_bias is not None:
                            grad_bias += (~skipped).to(p.dtype) @ p
                if wanted:
                    torch.mm(logits, w, out=grad_features[part])
                    of_part = (logits.t() @ x[part]).to(weight.dtype)
                    grad_weight = of_part if grad_weight is None else grad_weight.add_(of_part)
        if wanted:
            if fixed_id is not None:
                grad_weight[fixed_id] = 0.0
            grad_features = grad_features.masked_fill_(is_padding[:, None], 0.0).to(features.dtype)
            ctx.save_for_backward(grad_features, grad_weight, grad_bias)
        highest, most, mean, of_label = torch.cat(found, 1)
        log_sum = highest - most.log()
        nll = log_sum - of_label
        loss = (1 - smoothing) * nll + smoothing * (log_sum - mean)
        of_rows = torch.stack((loss, nll, of_label >= highest))
        loss, nll, correct = of_rows.masked_fill(is_padding, 0.0).double().sum(1)
        ctx.mark_non_differentiable(nll, correct)
        return loss, nll, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 5


@torch.no_grad()
def held_out(
    model: Transformer, batches: Iterable[Batch], autocast, total: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, float]:
    """``valid_loss`` (nats a token, unsmoothed), ``valid_perplexity`` and ``valid_accuracy`` of batches, on any device.

    ``autocast`` is the context manager to compute in, ``total`` adds what other processes found in theirs. The model is
    left in training mode if it was.
    """
    was_training, device = model.training, model.output.weight.device
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    with autocast:
        for batch in batches:
            batch = batch.to(device)
            projection = model.projection(model.packed_features(batch.source, batch.target))
            sums[:3] += torch.stack(smoothed_loss(*projection, batch.labels, 0.0, model.config.pad_id)).cpu()
            sums[3] += batch.tokens
    _, nll, correct, tokens = total(sums).tolist()
    model.train(was_training)
    return {
        "valid_loss": nll / tokens,
        "valid_perplexity": perplexity(nll / tokens),
        "valid_accuracy": correct / tokens,
    }


def perplexity(loss: float) -> float:
    """exp(loss), at most exp(700): a finite number, which JSON can hold."""
    return math.exp(min(loss, 700.0))


@dataclasses.dataclass(frozen=True)
class Scores:
    """How near translations are to their references, 0 to 100, and sacrebleu's signatures of the metrics.

    BLEU and chrF compare detokenised translations with raw references. ``compound_split_bleu`` is of the kind that the
    paper reports: of tokenised text whose hyphenated compounds are split at the hyphens. It is higher, and comparable
    with nothing else.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    compound_split_bleu: float


def scores(translations: list[str], references: list[str]) -> Scores:
    """The :class:`Scores` of translations, each with one reference.

    Raises:
        InputError: they differ in number, or sacrebleu is not installed.
    """
    if len(translations) != len(references):
        raise InputError(f"{len(translations)} translations cannot be scored against {len(references)} references")
    metrics = require("sacrebleu.metrics")
    tokenize = require("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    bleu, chrf, tokenised_bleu = metrics.BLEU(), metrics.CHRF(), metrics.BLEU(tokenize="none", force=True)
    split_translations, split_references = (
        [COMPOUND.sub(r"\1 ##AT##-##AT## \2", tokenize(line)) for line in lines] for lines in (translations, references)
    )
    return Scores(
        bleu.corpus_score(translations, [references]).score,
        str(bleu.get_signature()),
        chrf.corpus_score(translations, [references]).score,
        str(chrf.get_signature()),
        tokenised_bleu.corpus_score(split_translations, [split_references]).score,
    )
