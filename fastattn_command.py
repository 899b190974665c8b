"""The command `fastattn`: its options, and the settings that must precede the import of torch.

This module is outside the package, because importing any part of `fastattn` imports torch, which takes seconds. So
help, the version and errors in the arguments appear at once. The commands themselves are in `fastattn/cli.py`.
"""

import argparse
import difflib
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

# In GNU's OpenMP, a waiting thread spins for milliseconds before it sleeps. If other processes are busy, a spinning
# thread occupies the processor that the thread it waits for needs. Without any spinning, each parallel region pays for
# waking a thread. A short spin, longer than the gaps between a model's operations, avoids both costs.
SPIN = "1000"  # iterations, about 10 us

MODEL = "the folder of a run, or one of its checkpoints"
PRECISIONS = ("auto", "bf16", "fp32")
CORPORA = ("wmt14-en-de", "wmt14-en-fr")
NORMALIZATIONS = ("nfkc", "nmt_nfkc", "identity")
TOKENIZERS = (  # sacrebleu's names
    "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "flores101", "flores200", "spm", "spBLEU-1K", "none",
)  # fmt: skip
PRESETS = (
    "tiny", "base", "big", "A-h1", "A-h4", "A-h16", "A-h32", "B-dk16", "B-dk32", "C-N2", "C-N4", "C-N8", "C-dmodel256",
    "C-dmodel1024", "C-dff1024", "C-dff4096", "D-Pdrop0.0", "D-Pdrop0.2", "D-eps0.0", "D-eps0.2", "E-learned",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    options = parse(arguments)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN
    try:
        from fastattn import cli

        return cli.run(options)
    except KeyboardInterrupt as interrupt:  # also while torch is imported
        print(f"fastattn {options.command}: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of one command; an error in them ends the process."""
    options, unknown = parser().parse_known_args(arguments)
    error = vars(options).pop("error")  # the error function of the command's parser
    if unknown:
        error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "translate" and options.attention is None:
        for option in ("attention_kind", "attention_layer"):
            if getattr(options, option) is not None:
                error(f"argument --{option.replace('_', '-')}: says what --attention draws, which is not given")
    return options


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in the arguments in one line, and the name that was probably meant."""

    def parse_known_args(self, args=None, namespace=None):
        """Report an unknown option before anything else: argparse would report a missing argument instead."""
        words = sys.argv[1:] if args is None else list(args)
        is_top = self._subparsers is not None
        for word in itertools.takewhile(lambda word: word != "--" and (word[:1] == "-" or not is_top), words):
            option = word.partition("=")[0]
            if self._is_unknown(option):
                meant = _did_you_mean("--" + option.lstrip("-"), self._option_string_actions)
                self.error(f"unrecognized arguments: {option}{meant}")
        return super().parse_known_args(words, namespace)

    def _is_unknown(self, option: str) -> bool:
        if not re.match(r"--?[a-z]", option, re.IGNORECASE) or " " in option:
            return False  # a word, such as a number
        if option.startswith("--"):
            return not any(known.startswith(option) for known in self._option_string_actions)
        return option[:2] not in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
        if choice:
            meant = _did_you_mean(choice[2], re.findall(r"[\w.-]+", choice[3]))
            message = choice[1] + meant if meant else message
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar known name was meant, or "" if none is similar."""
    similar = difflib.get_close_matches(given, known, n=1)
    return f": did you mean {similar[0]}?" if similar else ""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; the parsed options hold the command's name as ``command``."""
    top = _Parser(
        prog="fastattn",
        description="Fused Transformer kernels for PyTorch, and a translator built on them.",
        epilog="`fastattn COMMAND --help` describes a command and shows an example.",
    )
    top.add_argument("--version", action="version", version=f"fastattn {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, more: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(f"{text[0].upper()}{text[1:]}. {more}", 79),
            epilog="\n".join(("example:", *(f"  {example}" for example in examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(error=command.error)
        return command

    command = add(
        "prepare",
        "fetch and unpack WMT14, the text of the paper's experiments",
        "docs/reproduce.md goes on from there to the paper's results.",
        "fastattn prepare wmt14-en-de wmt14 --archives archives",
    )
    command.add_argument("corpus", metavar="CORPUS", choices=CORPORA, help=" or ".join(CORPORA))
    command.add_argument(
        "out", type=Path, metavar="OUT", help="a new folder for train, dev and test, a file a language"
    )
    command.add_argument(
        "--archives",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the archives are; those missing are fetched there",
    )

    _add_train(
        add(
            "train",
            "train a translator on parallel text",
            "Line n of one file translates line n of the other. Ctrl-C saves; --resume goes on from there.",
            "fastattn train --train train.en train.de --valid dev.en dev.de --out run --max-minutes 60",
            "fastattn train --train train.en train.de --valid dev.en dev.de --out run --resume",
        )
    )

    command = add(
        "translate",
        "translate text with a trained model",
        "A pipe is answered line by line.",
        'echo "The king went out." | fastattn translate',
        "fastattn translate run --input test.en --output test.de --beam 4",
    )
    command.add_argument(
        "model",
        type=Path,
        metavar="DIR",
        nargs="?",
        help=f"{MODEL} (default: the bundled English-Spanish model, trained on Bible text)",
    )
    command.add_argument(
        "--input", type=Path, metavar="FILE", help="text or .gz, a sentence a line (default: standard input)"
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write, gzipped where the name ends in .gz (default: standard output)",
    )
    command.add_argument(
        "--n-best",
        type=_positive(int),
        default=1,
        metavar="N",
        help="translations a line, as `line ||| translation ||| score`",
    )
    command.add_argument(
        "--attention", type=Path, metavar="FILE", help="draw the heads for the first sentence: .png or .svg"
    )
    command.add_argument("--attention-kind", choices=("encoder", "decoder", "cross"), help="(default: cross)")
    command.add_argument(
        "--attention-layer", type=_positive(int), metavar="N", help="counted from 1 (default: the last)"
    )
    _add_search(command)

    command = add(
        "evaluate",
        "score a trained model: BLEU, chrF, perplexity, accuracy",
        "",
        "fastattn evaluate run --test test.en test.de --json",
    )
    command.add_argument("model", type=Path, metavar="DIR", help=MODEL)
    command.add_argument(
        "--test", type=Path, nargs=2, required=True, metavar=("SRC", "REF"), help="text or .gz, a sentence a line"
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the translations there, gzipped where the name ends in .gz",
    )
    command.add_argument(
        "--tokenize",
        choices=TOKENIZERS,
        metavar="NAME",
        help=f"sacrebleu's tokenizer for BLEU: {', '.join(TOKENIZERS)} (default: by the script of the references)",
    )
    command.add_argument("--json", action="store_true", help="print the scores as JSON")
    _add_search(command)

    command = add("plot", "draw the loss of a run, training and validation", "", "fastattn plot run --output loss.svg")
    command.add_argument("folder", type=Path, metavar="DIR", help="the folder of a run")
    command.add_argument("--output", type=Path, metavar="FILE", help=".png or .svg (default: DIR/loss.png)")

    command = add(
        "average",
        "write the mean of a run's newest checkpoints, as the paper does",
        "",
        "fastattn average run run-mean --last 5",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="the folder of a run")
    command.add_argument("out", type=Path, metavar="OUT", nargs="?", help="a new folder (default: DIR-mean)")
    command.add_argument(
        "--last", type=_positive(int), default=5, metavar="N", help="checkpoints (default: %(default)s)"
    )

    command = add(
        "import",
        "turn a checkpoint of two public programs into one of ours",
        "",
        "fastattn import trained.chkpt model --words words.de words.en",
    )
    command.add_argument(
        "model",
        type=Path,
        metavar="FILE",
        help="of jadore801120/attention-is-all-you-need-pytorch or The Annotated Transformer",
    )
    command.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    command.add_argument(
        "--words",
        type=Path,
        nargs=2,
        required=True,
        metavar=("SRC", "TGT"),
        help="text, a word a line in the order of its ids",
    )
    command.add_argument(
        "--heads", type=_positive(int), help="of The Annotated Transformer, whose file does not say (default: 8)"
    )

    command = add(
        "export",
        "write a trained model in another program's format",
        "",
        "fastattn export run --to ctranslate2 run-ct2",
    )
    command.add_argument("model", type=Path, metavar="DIR", help=MODEL)
    command.add_argument(
        "--to",
        required=True,
        choices=("ctranslate2", "huggingface", "int8"),
        help="ctranslate2 holds every preset except B-dk16 and B-dk32; huggingface, a Marian model for transformers, "
        "every preset except these, tiny and E-learned; int8 is a checkpoint of ours of a quarter of the size",
    )
    command.add_argument("out", type=Path, metavar="OUT", help="a new folder")

    _add_bench(
        add(
            "bench",
            "speed beside what a user would pick instead, and the machine's limits",
            "",
            "fastattn bench --filter layer_norm",
            "fastattn bench --peers --output results.csv",
        )
    )
    add("info", "versions, devices, compiled libraries, and why what is missing is missing", "", "fastattn info")
    command = add(
        "demo",
        "check and time every operation, then train and use a small translator",
        "It takes at most about three minutes, also on two busy cores.",
        "fastattn demo --out demo",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder for what it makes (default: one named by the time)"
    )
    return top


def _version() -> str:
    """Return the package's version without importing the package."""
    text = Path(__file__).with_name("fastattn").joinpath("__init__.py").read_text()
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def _add_train(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--train", type=Path, nargs=2, required=True, metavar=("SRC", "TGT"), help="text or .gz, a sentence a line"
    )
    command.add_argument(
        "--valid", type=Path, nargs=2, required=True, metavar=("SRC", "TGT"), help="held-out text, never trained on"
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new folder for checkpoints and metrics.jsonl"
    )
    command.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help="tiny (default: for two CPU cores), base, big, or a row of the paper's Table 3",
    )
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="in place of a preset: the config.json of a checkpoint"
    )
    for name, kind, text in (
        ("--vocab-size", _positive(int), "pieces shared by both languages (default: the preset's)"),
        ("--max-steps", _positive(int), "updates (default: the preset's)"),
        ("--max-minutes", _positive(float), "stop after so many minutes of training"),
        (
            "--batch-tokens",
            _positive(int),
            "tokens a side of an update, all processes together (default: the preset's)",
        ),
        (
            "--accumulate",
            _positive(int),
            "micro-batches per process and update (gradient accumulation), to need less memory",
        ),
        ("--label-smoothing", float, "probability spread over all pieces (default: the preset's)"),
        ("--clip-norm", _positive(float), "scale longer gradients down to this norm (default: none is)"),
        ("--seed", int, "of parameters, order and dropout (default 1)"),
        ("--save-every", _positive(int), "updates between checkpoints (default: the preset's)"),
        ("--bleu-every", _positive(int), "updates between BLEU scores on the validation text (default: never)"),
        ("--keep", _positive(int), "newest checkpoints that are kept, beside the best (default: the preset's)"),
    ):
        command.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text)
    for name, text in (
        ("--normalization", "of the source's characters: nfkc, nmt_nfkc (default) or identity, which keeps them"),
        ("--target-normalization", "of the target's characters (default: identity)"),
    ):
        command.add_argument(name, choices=NORMALIZATIONS, metavar="RULE", default=argparse.SUPPRESS, help=text)
    _add_precision(command, argparse.SUPPRESS)
    command.add_argument("--shard", action="store_true", help="divide the model among torchrun's processes (FSDP2)")
    command.add_argument("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--beam", type=_positive(int), default=4, help="hypotheses a sentence, 1 is greedy (default: %(default)s)"
    )
    command.add_argument(
        "--length-penalty", type=float, default=0.6, help="exponent of ((5 + length) / 6) (default: %(default)s)"
    )
    command.add_argument(
        "--batch-size", type=_positive(int), default=64, help="sentences at a time (default: %(default)s)"
    )
    command.add_argument("--temperature", type=_positive(float), help="sample, from softmax(logits / temperature)")
    command.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest pieces (default: all)")
    command.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest of this probability")
    command.add_argument("--seed", type=int, default=1, help="of what is sampled (default: %(default)s)")
    _add_precision(command, "auto")


def _add_precision(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--precision", choices=PRECISIONS, default=default, help="auto (default): bf16 where the hardware multiplies it"
    )


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--filter", default="", metavar="TEXT", help="only cases whose name has TEXT; letters from the start of a word"
    )
    command.add_argument("--sweep", action="store_true", help="the broad sweep instead of the headline cases")
    command.add_argument(
        "--peers",
        action="store_true",
        help="in addition to torch's functions: its math backend, FlexAttention and torch.compile",
    )
    command.add_argument("--threads", type=_positive(int), help="threads (default: torch's)")
    command.add_argument("--seconds", type=_positive(float), help="time per contestant and case (default: 0.5)")
    command.add_argument("--output", type=Path, metavar="FILE", help="add the rows of what was not noisy to a CSV file")


def _positive(kind: type) -> Callable[[str], float]:
    """Return the converter of an argument to a positive number.

    It has the name of ``kind``, because argparse's message about a text that is no number contains the function's name.
    """

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is given, expected a positive number")
        return value

    parse.__name__ = kind.__name__
    return parse
