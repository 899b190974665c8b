"""`fastattn demo`: the bundled translator; that the operations are right, and how fast; a translator trained here."""

import time
from pathlib import Path

import torch

from fastattn import info
from fastattn.bench import contest, report
from fastattn.bench.cases import Case
from fastattn.errors import require
from fastattn.files import StrPath
from fastattn.translation import checkpoint, plots
from fastattn.translation.data import read_lines, verses
from fastattn.translation.evaluate import scores
from fastattn.translation.model import Transformer
from fastattn.translation.search import translate
from fastattn.translation.tokenizer import Tokenizer
from fastattn.translation.train import read_metrics, train

UPDATES = 500
SCORED, CHUNK = 100, 20  # sentences of the test text in all, and at a time
SCORING = 20.0  # seconds, after which no further sentences are translated
SHOWN = (66, 4, 17, 49, 42)  # lines of the test text that the bundled model translates well, the shortest first
BUDGET = 180.0  # seconds for everything, also where the cores are busy
BESIDE_UPDATES = 35.0  # seconds of these for the vocabulary, the validation, the translations and the pictures
LEAST = 20.0  # seconds of updates, whatever the budget

CASES = [
    Case("attention", (1, 8, 1024, 64)),
    Case("attention", (1, 8, 1024, 64), torch.bfloat16),
    Case("attention", (2, 8, 512, 64), backward=True, padding="lengths", causal=True, dropout=0.1),
    Case("attention", (2, 8, 512, 64), torch.bfloat16, backward=True, padding="mask", dropout=0.1),
    Case("softmax_dropout", (4096, 512), backward=True, dropout=0.1),
    Case("layer_norm", (4096, 512), backward=True),
    Case("dropout_add_layer_norm", (4096, 512), torch.bfloat16, backward=True, dropout=0.1),
    Case("dropout", (4096, 512), backward=True, dropout=0.1),
]


def run(out: StrPath | None = None) -> int:
    """Run the whole demo, in about ``BUDGET`` seconds; return the number of operations that were wrong.

    What it makes goes into the new folder ``out``.

    Raises:
        InputError: ``out`` exists and is not empty, or the ``train`` extra is not installed.
        KeyboardInterrupt: Ctrl-C; if the training has begun, the message names what it has made.
    """
    start = time.monotonic()
    folder = Path(out or time.strftime("fastattn-demo-%Y%m%d-%H%M%S"))
    for package in ("safetensors.torch", "sentencepiece", "sacrebleu", "tqdm", "matplotlib"):
        require(package)
    checkpoint.expect_new(folder)
    _title("This machine")
    print(info.report())

    sources, references = (read_lines(path)[:SCORED] for path in verses("test"))

    _title("The bundled translator from English to Spanish, and sentences that it has not seen")
    _show(checkpoint.PRETRAINED, sources, references)

    _title("Each operation against the reference")
    wrong = 0
    for case in CASES:
        errors = contest.check(case)
        wrong += bool(errors)
        print(f"{'WRONG' if errors else 'right':6} {case.name}", *errors, sep="\n       " if errors else "", flush=True)

    _title("Speed compared with torch's own operations")
    for case in CASES:
        print(report.sentence(contest.run(case, budget=0.2, rounds=(4, 20), attempts=1)), flush=True)

    seconds = max(LEAST, BUDGET - BESIDE_UPDATES - (time.monotonic() - start))
    _title(f"One of your own: the preset `tiny`, {UPDATES} updates or {seconds:.0f} seconds")
    best = _trained(folder, seconds)
    _title("The same sentences")
    model, tokenizer, translation = _show(best, sources, references)
    rows = read_metrics(folder)
    print(
        f"It has had {rows[-1]['step']} updates. {UPDATES} teach it the language and some of the words, for a BLEU of\n"
        "about 15. More than ten times as many, with `fastattn train` on the same text, made the bundled one."
    )

    plots.loss_curve(rows, folder / "loss.png")
    heads = plots.attention_heads(model, tokenizer, sources[SHOWN[0]], translation)
    plots.heat_maps(heads, folder / "attention.png", "cross attention of the last layer")
    print(f"\n{folder} holds loss.png, attention.png and the model. Try: fastattn translate {folder} --input FILE")
    return wrong


def _trained(folder: Path, seconds: float) -> Path:
    """Train for so many seconds at most, and return the best checkpoint."""
    text = verses("train"), verses("dev")
    try:
        return train(*text, folder, max_steps=UPDATES, max_minutes=seconds / 60, save_every=UPDATES)
    except KeyboardInterrupt:
        saved = checkpoint.steps(folder)
        raise KeyboardInterrupt(f"in its training; {saved[-1]} holds the model so far" if saved else "") from None


def _show(path: Path, sources: list[str], references: list[str]) -> tuple[Transformer, Tokenizer, str]:
    """Translate; print some of it and how good it is. Return the model and the first translation that it shows."""
    model, tokenizer = checkpoint.load(path)
    order = [*SHOWN, *(i for i in range(SCORED) if i not in SHOWN)]
    translations: list[str] = []
    end = time.monotonic() + SCORING
    while len(translations) < SCORED and (not translations or time.monotonic() < end):
        chunk = order[len(translations) :][:CHUNK]
        translations += translate(model, tokenizer, [sources[i] for i in chunk])
    for i, translation in zip(SHOWN, translations, strict=False):
        print(f"source       {sources[i]}\ntranslation  {translation}\nreference    {references[i]}\n")
    found = scores(translations, [references[i] for i in order[: len(translations)]])
    print(
        f"BLEU {found.bleu:.1f} on {len(translations)} sentences of the test text ({found.bleu_signature}).", flush=True
    )
    return model, tokenizer, translations[0]


def _title(text: str) -> None:
    print(f"\n== {text} ==\n", flush=True)
