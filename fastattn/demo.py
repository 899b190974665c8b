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
SCORED = 100  # sentences of the test text
SHOWN = 5

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
    """The whole demo; what it makes goes into the new folder ``out``. Returns the number of operations that were wrong.

    Raises:
        InputError: ``out`` exists and is not empty, or the ``train`` extra is not installed.
    """
    folder = Path(out or time.strftime("fastattn-demo-%Y%m%d-%H%M%S"))
    for package in ("safetensors.torch", "sentencepiece", "sacrebleu", "tqdm", "matplotlib"):
        require(package)
    checkpoint.expect_new(folder)
    _title("This machine")
    print(info.report())

    sources, references = (read_lines(path)[:SCORED] for path in verses("test"))
    shown = sorted(range(SCORED), key=lambda i: len(sources[i]))[:: SCORED // SHOWN // 2][:SHOWN]

    _title("The bundled translator from English to Spanish, and sentences that it has not seen")
    _show(checkpoint.PRETRAINED, sources, references, shown)

    _title("Each operation against the reference")
    wrong = 0
    for case in CASES:
        errors = contest.check(case)
        wrong += bool(errors)
        print(f"{'WRONG' if errors else 'right':6} {case.name}", *errors, sep="\n       " if errors else "")

    _title("Speed compared with torch's own operations")
    print(report.table(contest.run(case, budget=0.2, rounds=(4, 20), attempts=1) for case in CASES))

    _title(f"One of your own: the preset `tiny`, {UPDATES} updates (two to three minutes on two free cores)")
    best = train(verses("train"), verses("dev"), folder, max_steps=UPDATES, save_every=UPDATES)
    _title("The same sentences")
    model, tokenizer, translations = _show(best, sources, references, shown)
    print(
        "That many updates teach it the language and some of the words: expect a BLEU of about 15. More than\n"
        "ten times as many, with `fastattn train` on the same text, made the bundled one."
    )

    plots.loss_curve(read_metrics(folder), folder / "loss.png")
    heads = plots.attention_heads(model, tokenizer, sources[shown[1]], translations[shown[1]])
    plots.heat_maps(heads, folder / "attention.png", "cross attention of the last layer")
    print(f"\n{folder} holds loss.png, attention.png and the model. Try: fastattn translate {folder} --input FILE")
    return wrong


def _show(
    path: Path, sources: list[str], references: list[str], shown: list[int]
) -> tuple[Transformer, Tokenizer, list[str]]:
    """Translate, and print some of it and how good it is."""
    model, tokenizer = checkpoint.load(path)
    translations = translate(model, tokenizer, sources)
    for i in shown:
        print(f"source       {sources[i]}\ntranslation  {translations[i]}\nreference    {references[i]}\n")
    found = scores(translations, references)
    print(f"BLEU {found.bleu:.1f} on {len(sources)} sentences of the test text ({found.bleu_signature}).")
    return model, tokenizer, translations


def _title(text: str) -> None:
    print(f"\n== {text} ==\n", flush=True)
