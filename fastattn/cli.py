"""The `fastattn` command: train, translate, evaluate, plot, average, import, export, bench, info, demo."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from fastattn import bench, info
from fastattn.translation.errors import InputError

DOMAIN = "the enclosed model, of Bible text, English to Spanish"
EVALUATION_TOKENS = 4096  # a side of a batch
CHUNK = 16  # batches of standard input that are translated together, if as much has arrived: like lengths share a batch


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read the output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at exit
        return 128 + signal.SIGPIPE
    except (InputError, OSError) as error:
        print(f"fastattn {options.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"fastattn {options.command}: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130


def _parser() -> _Parser:
    parser = _Parser(prog="fastattn", description="Fused Transformer kernels, and a translator built on them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train a translator on parallel text")
    command.set_defaults(run=_train)
    command.add_argument(
        "--train", nargs=2, required=True, metavar=("SRC", "TGT"), help="text or .gz, a sentence a line"
    )
    command.add_argument(
        "--valid", nargs=2, required=True, metavar=("SRC", "TGT"), help="held-out text, never trained on"
    )
    command.add_argument("--out", required=True, metavar="DIR", help="a new folder for checkpoints and metrics.jsonl")
    command.add_argument(
        "--preset", help="tiny (default: for two CPU cores), base, big, or a row of the paper's Table 3"
    )
    command.add_argument("--config", metavar="FILE", help="in place of a preset: the config.json of a checkpoint")
    for name, kind, text in (
        ("--vocab-size", int, "pieces shared by both languages (default: the preset's)"),
        ("--max-steps", int, "updates (default: the preset's)"),
        ("--max-minutes", float, "stop after so many minutes of training"),
        ("--batch-tokens", int, "tokens a side of an update, all processes together (default: the preset's)"),
        ("--accumulate", int, "parts in which a process computes its share of an update, to need less memory"),
        ("--label-smoothing", float, "probability spread over all pieces (default: the preset's)"),
        ("--clip-norm", float, "scale longer gradients down to this norm (default: none is)"),
        ("--precision", str, "bf16, fp32, or auto (default): bf16 where the hardware multiplies it"),
        ("--seed", int, "of parameters, order and dropout (default 1)"),
        ("--save-every", int, "updates between checkpoints (default: the preset's)"),
        ("--bleu-every", int, "updates between BLEU scores on the validation text (default: never)"),
        ("--keep", int, "newest checkpoints that are kept, beside the best (default: the preset's)"),
    ):
        command.add_argument(name, type=kind, default=argparse.SUPPRESS, help=text)
    command.add_argument("--resume", action="store_true", help="continue the run in DIR from its newest checkpoint")

    command = commands.add_parser("translate", help="translate text with a trained model")
    command.set_defaults(run=_translate)
    command.add_argument(
        "model", metavar="DIR", nargs="?", help=f"the folder of a run, or one of its checkpoints (default: {DOMAIN})"
    )
    command.add_argument("--input", metavar="FILE", help="text or .gz, a sentence a line (default: standard input)")
    command.add_argument("--output", metavar="FILE", help="where to write (default: standard output)")
    command.add_argument(
        "--n-best", type=int, default=1, metavar="N", help="translations a line, as `line ||| translation ||| score`"
    )
    command.add_argument("--attention", metavar="FILE", help="draw the heads for the first sentence: .png or .svg")
    command.add_argument("--attention-kind", default="cross", help="encoder, decoder or cross (default)")
    command.add_argument("--attention-layer", type=int, metavar="N", help="counted from 1 (default: the last)")
    _add_search(command)

    command = commands.add_parser("evaluate", help="score a trained model: BLEU, chrF, perplexity, accuracy")
    command.set_defaults(run=_evaluate)
    command.add_argument("model", metavar="DIR", help="the folder of a run, or one of its checkpoints")
    command.add_argument(
        "--test", nargs=2, required=True, metavar=("SRC", "REF"), help="text or .gz, a sentence a line"
    )
    command.add_argument("--output", metavar="FILE", help="also write the translations there")
    command.add_argument("--json", action="store_true", help="print the scores as JSON")
    _add_search(command)

    command = commands.add_parser("plot", help="draw the loss of a run, training and validation")
    command.set_defaults(run=_plot)
    command.add_argument("folder", metavar="DIR", help="the folder of a run")
    command.add_argument("--output", metavar="FILE", help=".png or .svg (default: DIR/loss.png)")

    command = commands.add_parser("average", help="write the mean of a run's newest checkpoints, as the paper does")
    command.set_defaults(run=_average)
    command.add_argument("folder", metavar="DIR", help="the folder of a run")
    command.add_argument("out", metavar="OUT", help="a new folder")
    command.add_argument("--last", type=int, default=5, metavar="N", help="checkpoints (default 5)")

    command = commands.add_parser("import", help="turn a checkpoint of two public programs into one of ours")
    command.set_defaults(run=_import)
    command.add_argument(
        "model", metavar="FILE", help="of jadore801120/attention-is-all-you-need-pytorch or The Annotated Transformer"
    )
    command.add_argument("out", metavar="OUT", help="a new folder")
    command.add_argument(
        "--words", nargs=2, required=True, metavar=("SRC", "TGT"), help="text, a word a line in the order of its ids"
    )
    command.add_argument("--heads", type=int, help="of The Annotated Transformer, whose file does not say (default 8)")

    command = commands.add_parser("export", help="write a trained model in another program's format")
    command.set_defaults(run=_export)
    command.add_argument("model", metavar="DIR", help="the folder of a run, or one of its checkpoints")
    command.add_argument(
        "--to",
        required=True,
        choices=["ctranslate2", "huggingface", "int8"],
        help="CTranslate2, transformers (as a Marian model), or a checkpoint of ours of a quarter of the size",
    )
    command.add_argument("out", metavar="OUT", help="a new folder")

    command = commands.add_parser("bench", help="speed beside what a user would pick instead, and the machine's limits")
    command.set_defaults(run=_bench)
    bench.add_arguments(command)

    command = commands.add_parser(
        "info", help="versions, devices, compiled libraries, and why what is missing is missing"
    )
    command.set_defaults(run=_info)

    command = commands.add_parser("demo", help="check and time every operation, then train and use a small translator")
    command.set_defaults(run=_demo)
    command.add_argument("--out", metavar="DIR", help="a new folder for what it makes (default: one named by the time)")
    return parser


def _add_search(command: argparse.ArgumentParser) -> None:
    command.add_argument("--beam", type=int, default=4, help="hypotheses a sentence; 1 is greedy (default 4)")
    command.add_argument(
        "--length-penalty", type=float, default=0.6, help="exponent of ((5 + length) / 6) (default 0.6)"
    )
    command.add_argument("--batch-size", type=int, default=64, help="sentences at a time (default 64)")
    command.add_argument("--temperature", type=float, help="sample, from softmax(logits / temperature)")
    command.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest pieces (default: all)")
    command.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest of this probability")
    command.add_argument("--seed", type=int, default=1, help="of what is sampled (default 1)")
    command.add_argument(
        "--precision", default="auto", help="bf16, fp32, or auto (default): bf16 where the hardware multiplies it"
    )


def _train(options: argparse.Namespace) -> None:
    from fastattn.translation.train import train

    given = {name: value for name, value in vars(options).items() if name not in ("command", "run", "train", "valid")}
    best = train(options.train, options.valid, **given)
    if os.environ.get("RANK", "0") == "0":
        print(f"the best checkpoint is {best}")


def _translate(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint, plots
    from fastattn.translation.data import arriving_lines, read_lines
    from fastattn.translation.search import candidates

    is_enclosed = options.model is None
    if is_enclosed:
        options.model = checkpoint.PRETRAINED
    picture, kind = options.attention, options.attention_kind
    if picture is not None:
        plots.check_path(picture)
    if options.input is None:
        parts, total = arriving_lines(sys.stdin.buffer, "standard input", CHUNK * options.batch_size), None
    else:
        lines = read_lines(options.input)
        parts, total = iter([lines]), sum(bool(line.strip()) for line in lines)
    model, tokenizer, search = _load(options, options.n_best)
    layer = plots.check_layer(model.config, kind, options.attention_layer)
    if is_enclosed:
        print(f"fastattn translate: {DOMAIN}", file=sys.stderr)
    text, first = [], 1
    with _sentences_done(total) as advance:
        for lines in parts:
            found = candidates(model, tokenizer, lines, search, advance)
            part = _n_best_lines(found, first) if options.n_best > 1 else _best_lines(found)
            first += len(lines)
            if options.output is None:
                sys.stdout.buffer.write(part.encode())
                sys.stdout.flush()
            else:
                text.append(part)
            pairs = [(line, best[0].text) for line, best in zip(lines, found, strict=True) if best]
            if picture is not None and pairs:
                heads = plots.attention_heads(model, tokenizer, *pairs[0], kind, layer)
                plots.heat_maps(heads, picture, f"{kind} attention, layer {layer}")
                picture = None
    if first == 1:
        raise InputError("standard input is empty: expected one sentence a line")
    if options.output is not None:
        checkpoint.write_text(Path(options.output), "".join(text))


def _best_lines(found: list[list[Any]]) -> str:
    return "".join(f"{translations[0].text if translations else ''}\n" for translations in found)


def _n_best_lines(found: list[list[Any]], first: int) -> str:
    return "".join(
        f"{number} ||| {translation.text} ||| {translation.score:.4f}\n"
        for number, translations in enumerate(found, first)
        for translation in translations
    )


def _evaluate(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint
    from fastattn.translation.data import ParallelText, read_parallel
    from fastattn.translation.evaluate import held_out, scores
    from fastattn.translation.sanity import evaluation_warnings
    from fastattn.translation.search import translate

    model, tokenizer, search = _load(options)
    sources, references = read_parallel(*options.test)
    with _sentences_done(len(sources)) as advance:
        translations = translate(model, tokenizer, sources, search, advance)
    if options.output is not None:
        checkpoint.write_text(Path(options.output), "".join(f"{line}\n" for line in translations))
    _warn(options, *evaluation_warnings(sources, translations, references))
    text = ParallelText(tokenizer, sources, references)
    of_references = held_out(model, map(text.batch, text.buckets(EVALUATION_TOKENS)), contextlib.nullcontext())
    found = scores(translations, references)
    perplexity, accuracy = of_references["valid_perplexity"], of_references["valid_accuracy"]
    if options.json:
        numbers = {"sentences": len(sources), "perplexity": perplexity, "accuracy": accuracy}
        print(json.dumps({**dataclasses.asdict(found), **numbers}, indent=2))
        return
    print(
        f"BLEU {found.bleu:.2f} on {len(references)} sentences\n{found.bleu_signature}\n"
        f"chrF {found.chrf:.2f}\n{found.chrf_signature}\n"
        f"perplexity {perplexity:.2f}, accuracy {accuracy:.3f} of the references' pieces\n"
        f"tokenised, compound-split BLEU {found.compound_split_bleu:.2f}: the kind that the paper reports"
    )


def _plot(options: argparse.Namespace) -> None:
    from fastattn.translation import plots
    from fastattn.translation.train import METRICS, read_metrics

    picture = Path(options.folder) / "loss.png" if options.output is None else Path(options.output)
    rows = read_metrics(options.folder)
    if not rows:
        raise InputError(f"{options.folder} holds no {METRICS} yet: expected the folder of a run of `fastattn train`")
    plots.check_path(picture)
    plots.loss_curve(rows, picture)
    print(picture)


def _average(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint

    checkpoint.average(Path(options.folder), options.last, Path(options.out))
    print(f"{options.out} holds the mean of {options.last} checkpoints")


def _import(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint
    from fastattn.translation.importing import import_model

    source_words, target_words = options.words
    model, tokenizer = import_model(options.model, source_words, target_words, options.heads)
    checkpoint.save_model(model, tokenizer, Path(options.out))
    print(f"{options.out} holds the model; its text is the program's: words between spaces")


def _export(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint
    from fastattn.translation.export import to_ctranslate2, to_huggingface

    model, tokenizer = checkpoint.load(options.model)
    if options.to == "int8":
        checkpoint.save_int8(model, tokenizer, checkpoint.updates(options.model), options.out)
    else:
        {"ctranslate2": to_ctranslate2, "huggingface": to_huggingface}[options.to](model, tokenizer, options.out)
    reader = {"ctranslate2": "ctranslate2.Translator", "huggingface": "transformers' MarianMTModel and MarianTokenizer"}
    print(f"{options.out} holds the model and its tokenizer for {reader.get(options.to, 'every command')}")


def _load(options: argparse.Namespace, n_best: int = 1) -> tuple[Any, Any, Any]:
    """The model, the tokenizer and the search that the options name; the options are checked first."""
    import torch

    from fastattn.translation import checkpoint, precision
    from fastattn.translation.search import Search

    search = Search(
        options.beam, options.length_penalty, options.batch_size, n_best,
        options.temperature, options.top_k, options.top_p, options.seed,
    )  # fmt: skip
    dtype = precision.DTYPES[precision.resolve(options.precision)]
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise InputError(f"cannot write {options.output}: its folder does not exist")
    if options.output is not None and Path(options.output).is_dir():
        raise InputError(f"cannot write {options.output}: it is a folder")
    model, tokenizer = checkpoint.load(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    if checkpoint.updates(options.model) == 0:
        _warn(options, f"{options.model} has not been trained yet")
    return model.to(dtype), tokenizer, search


def _warn(options: argparse.Namespace, *warnings: str) -> None:
    for warning in warnings:
        print(f"fastattn {options.command}: warning: {warning}", file=sys.stderr)


@contextlib.contextmanager
def _sentences_done(total: int | None) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal, of a known number of sentences: what to call with those that are done."""
    if total is None or not sys.stderr.isatty():
        yield lambda sentences: None
        return
    from fastattn.translation.errors import require

    with require("tqdm").tqdm(total=total, unit=" sentences", ncols=80, leave=False) as bar:
        yield bar.update


def _bench(options: argparse.Namespace) -> int:
    return bench.main(options)


def _info(options: argparse.Namespace) -> None:
    print(info.report())


def _demo(options: argparse.Namespace) -> int:
    from fastattn import demo

    return min(1, demo.run(options.out))


if __name__ == "__main__":
    sys.exit(main())
