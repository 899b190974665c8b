"""Three public programs, rewritten with their class and parameter names and their arithmetic, slips included.

Their code differs from the programs', so it is registered as known to ``fastattn.patch`` here."""

from fastattn.integrations.patching import known
from public_models import annotated, jadore, notebook

KNOWN = {
    "jadore801120": [jadore.ScaledDotProductAttention, jadore.MultiHeadAttention, jadore.PositionwiseFeedForward],
    "the Annotated Transformer": [annotated.attention, annotated.MultiHeadedAttention, annotated.LayerNorm],
    "the notebook": [
        notebook.scaled_dot_product_attention, notebook.AttentionHead, notebook.MultiHeadAttention, notebook.Residual,
    ],
}  # fmt: skip
for program, written in KNOWN.items():
    for made in written:
        digests = known.DIGESTS[f"{made.__name__} of {program}"]
        digests[known.PYTHON] = f"{digests.get(known.PYTHON, '')} {known.digest(getattr(made, 'forward', made))}"
