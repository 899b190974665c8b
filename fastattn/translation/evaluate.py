"""Quality of a model: loss on held-out text, BLEU and chrF."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastattn.backends.schema import SoftmaxDropoutArgs
from fastattn.errors import InputError, require
from fastattn.ops.softmax_dropout import softmax_dropout_op
from fastattn.translation.bleu import choose, metric
from fastattn.translation.data import Batch
from fastattn.translation.model import Transformer

# Maximum bytes of logits at a time, and of their softmax. Each further part reads and writes the weight's gradient once
# more, so logits of up to FEW_LOGIT_BYTES are one part.
LOGIT_BYTES, FEW_LOGIT_BYTES = 2**26, 2**23
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
    """Compute the label-smoothed cross-entropy (section 5.4) of the logits ``linear(features, weight, bias)``.

    The target distribution is 1 - smoothing on the label plus smoothing / V on every piece, as in
    ``torch.nn.functional.cross_entropy``. Logits of more than 8 MB and their softmax exist for at most half of the rows
    at a time. They have the dtype that autocast gives them. The softmax is computed in float32.

    Args:
        features: (N, d_model).
        weight: (V, d_model).
        bias: (V,) or None.
        labels: int64 (N,).
        fixed_id: the piece whose row of ``weight`` receives no gradient.

    Returns:
        Three sums over the labels other than ``pad_id``: the loss in nats, the plain cross-entropy in nats, and the
        number of labels whose logit is the row's maximum. Only the loss has a gradient.
    """
    return _SmoothedLoss.apply(features, weight, bias, labels, smoothing, pad_id, fixed_id, torch.is_grad_enabled())


def loss_of(model: Transformer, features: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`smoothed_loss` of the model's features.

    If ``model.output`` must be called, it is called once, with all rows. Then all logits exist at once.

    Args:
        features: (N, d_model).
        labels: int64 (N,).

    Returns:
        The values of :func:`smoothed_loss`.
    """
    projection, pad_id = model.projection(features), model.config.pad_id
    if projection is not None:
        return smoothed_loss(*projection, labels, smoothing, pad_id, model.fixed_id)
    logits = model.logits(features)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_rows = functools.partial(F.cross_entropy, target=labels, ignore_index=pad_id, reduction="none")
    loss = of_rows(logits, label_smoothing=smoothing).double().sum()
    with torch.no_grad():
        of_label = logits.gather(1, labels[:, None])[:, 0]
        correct = (of_label >= logits.amax(1)) & (labels != pad_id)
        return loss, of_rows(logits).double().sum(), correct.double().sum()


class _SmoothedLoss(torch.autograd.Function):
    """Smoothed loss whose forward pass also computes the gradients, part by part.

    The gradient of the logits, softmax - target distribution, is multiplied by ``weight`` for the features' gradient,
    and by ``features`` for the weight's. It leaves out the uniform part of the target, smoothing / V on every piece.
    The products subtract this part instead. In the features' gradient it is a sum over the rows of ``weight``, in the
    weight's gradient a sum over the rows of ``features``.
    """

    @staticmethod
    def forward(ctx, features, weight, bias, labels, smoothing, pad_id, fixed_id, recorded):
        device, pieces = features.device.type, weight.shape[0]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        sums, uniform = torch.promote_types(dtype, torch.float32), smoothing / pieces
        is_padding = labels == pad_id
        # Rows of padding are 0, so that they add nothing to the weight's gradient.
        x, w = features.to(dtype).masked_fill(is_padding[:, None], 0.0), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        wanted = recorded and any(ctx.needs_input_grad)
        grad_features, grad_weight, grad_bias = torch.empty_like(x) if wanted else None, None, None
        # Logits and softmax of half of the rows take no more memory than the logits of all rows. Few are not divided.
        most, few = (size // (pieces * dtype.itemsize) for size in (LOGIT_BYTES, FEW_LOGIT_BYTES))
        rows = max(1, min(most, len(labels) if len(labels) <= few else (len(labels) + 1) // 2))
        found = []
        with torch.autocast(device, enabled=False):
            for first in range(0, max(1, len(labels)), rows):
                part = slice(first, first + rows)
                logits = F.linear(x[part], w, b)
                of_label = logits.gather(1, labels[part, None])[:, 0].to(sums)
                p, (row_max, row_sum) = _softmax(logits)
                found.append(torch.stack((row_max, row_sum, of_label)))
                if wanted:  # the softmax becomes the logits' gradient
                    missing = (of_label - row_max).exp() / row_sum - (1 - smoothing)
                    p[torch.arange(len(p), device=p.device), labels[part]] = missing.to(dtype)
                    torch.mm(p, w, out=grad_features[part])
                    of_part = (p.t() @ x[part]).to(weight.dtype)
                    grad_weight = of_part if grad_weight is None else grad_weight.add_(of_part)
                    if b is not None:
                        of_part = ((~is_padding[part]).to(dtype) @ p).to(bias.dtype)
                        grad_bias = of_part if grad_bias is None else grad_bias.add_(of_part)
                del logits, p  # frees them before those of the next part are allocated
            of_pieces = w.sum(0, dtype=sums)
            mean = x.to(sums) @ of_pieces / pieces
            if b is not None:
                mean += b.mean(dtype=sums)
        if wanted:
            grad_features = grad_features.to(features.dtype).sub_(of_pieces, alpha=uniform)
            grad_features.masked_fill_(is_padding[:, None], 0.0)
            grad_weight.sub_(x.sum(0, dtype=sums), alpha=uniform)
            if fixed_id is not None:
                grad_weight[fixed_id] = 0.0
            if grad_bias is not None:
                grad_bias.sub_((~is_padding).sum(), alpha=uniform)
            ctx.save_for_backward(grad_features, grad_weight, grad_bias)
        row_max, row_sum, of_label = torch.cat(found, 1)
        # The logarithm of a confident row's sum is tiny: row_max + log_sum would round it away.
        log_sum = row_sum.log()
        nll = (row_max - of_label) + log_sum
        loss = (1 - smoothing) * nll + smoothing * ((row_max - mean) + log_sum)
        of_rows = torch.stack((loss, nll, of_label >= row_max))
        loss, nll, correct = of_rows.masked_fill(is_padding, 0.0).double().sum(1)
        ctx.mark_non_differentiable(nll, correct)
        return loss, nll, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 5


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of each row, and each row's maximum and sum of exponentials, (2, rows)."""
    rows, columns = logits.shape
    args = SoftmaxDropoutArgs(
        input=logits[None, None], attn_mask=None, key_lengths=None, seed=None, scale=1.0, window_left=rows,
        window_right=columns, lower_right=False, threshold=0,
    )  # fmt: skip
    p, statistics = softmax_dropout_op(args)
    return p[0, 0], statistics[:, 0, 0]


@torch.no_grad()
def held_out(
    model: Transformer, batches: Iterable[Batch], autocast, total: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, float]:
    """Compute ``valid_loss`` (nats per token, unsmoothed), ``valid_perplexity`` and ``valid_accuracy`` of batches.

    The batches may be on any device. The model's training mode is restored afterwards.

    Args:
        autocast: the context manager to compute in.
        total: adds the sums of other processes, which have other batches.
    """
    was_training, device = model.training, model.device
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device="cpu")
    with autocast:
        for batch in batches:
            batch = batch.to(device)
            features = model.packed_features(batch.source, batch.target)
            sums[:3] += torch.stack(loss_of(model, features, batch.labels, 0.0)).cpu()
            sums[3] += batch.tokens
    _, nll, correct, tokens = total(sums).tolist()
    model.train(was_training)
    return {
        "valid_loss": nll / tokens,
        "valid_perplexity": perplexity(nll / tokens),
        "valid_accuracy": correct / tokens,
    }


def perplexity(loss: float) -> float:
    """Return exp(loss), at most exp(700), because JSON needs a finite number."""
    return math.exp(min(loss, 700.0))


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of translations against their references, 0 to 100, and sacrebleu's signatures of the metrics.

    BLEU and chrF compare detokenised translations with raw references. ``compound_split_bleu`` is the kind of BLEU that
    the paper reports: tokenised text with hyphenated compounds split at the hyphens. It is higher, and comparable only
    with scores of the same kind. It is None unless BLEU's tokenizer is 13a.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    compound_split_bleu: float | None


def scores(translations: list[str], references: list[str], tokenize: str | None = None) -> Scores:
    """Compute the :class:`Scores` of translations, each with one reference.

    Args:
        tokenize: sacrebleu's name of BLEU's tokenizer; None: :func:`~fastattn.translation.bleu.choose` chooses it by
            the script of the references.

    Raises:
        InputError: the lists differ in length, sacrebleu is not installed, or the tokenizer cannot be used.
    """
    if len(translations) != len(references):
        raise InputError(f"{len(translations)} translations cannot be scored against {len(references)} references")
    metrics = require("sacrebleu.metrics")
    tokenize, _ = choose(references, tokenize)
    bleu, chrf = metric(tokenize), metrics.CHRF()
    return Scores(
        bleu.corpus_score(translations, [references]).score,
        str(bleu.get_signature()),
        chrf.corpus_score(translations, [references]).score,
        str(chrf.get_signature()),
        _compound_split_bleu(translations, references) if tokenize == "13a" else None,
    )


def _compound_split_bleu(translations: list[str], references: list[str]) -> float:
    words = require("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    bleu = require("sacrebleu.metrics").BLEU(tokenize="none", force=True)
    split_translations, split_references = (
        [COMPOUND.sub(r"\1 ##AT##-##AT## \2", words(line)) for line in lines] for lines in (translations, references)
    )
    return bleu.corpus_score(split_translations, [split_references]).score
