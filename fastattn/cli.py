"""The commands of `fastattn`. Their options are in `fastattn_command.py`, next to the package."""

import argparse
import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastattn import bench, info
from fastattn.errors import InputError, require
from fastattn.figures import check_path
from fastattn.files import check_file, expect_absent, write_file

BUNDLED = "the bundled English-Spanish model, trained on Bible text"
EVALUATION_TOKENS = 4096  # a side of a batch
CHUNK = 16  # batches of standard input that are translated together, if as much has arrived: like lengths share a batch
LESS_MEMORY = {
    "train": "a lower --batch-tokens or a higher --accumulate needs less",
    "translate": "a lower --beam, --n-best or --batch-size needs less",
    "evaluate": "a lower --beam or --batch-size needs less",
}


def run(options: argparse.Namespace) -> int:
    """Run the command that ``options``, parsed by ``fastattn_command``, hold; returns the exit status."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed by the shell, as `>&-` does
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        status = COMMANDS[options.command](options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read the output has enough, as `head` does
        _discard_output()
        return 128 + signal.SIGPIPE
    except InputError as error:
        return _failed(options, error)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", str(error))):
            raise
        less = LESS_MEMORY.get(options.command, "a smaller model needs less")
        return _failed(options, f"there is not enough memory: {less}")
    except OSError as error:
        _discard_output()
        where = "" if error.filename is None else f"{error.filename}: "
        return _failed(options, f"{where}{error.strerror or error}")


def _failed(options: argparse.Namespace, message: object) -> int:
    print(f"fastattn {options.command}: error: {message}", file=sys.stderr)
    return 1


def _discard_output() -> None:
    """Drop buffered output that cannot be written, or Python tries again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare(options: argparse.Namespace) -> None:
    from fastattn.translation.prepare import prepare

    pairs = prepare(options.corpus, options.archives, options.out)
    numbers = ", ".join(f"{number} pairs for {split}" for split, number in pairs.items())
    print(f"{options.out} holds {numbers}")


def _train(options: argparse.Namespace) -> None:
    from fastattn.translation.train import train

    given = {name: value for name, value in vars(options).items() if name not in ("command", "train", "valid")}
    best = train(options.train, options.valid, **given)
    if os.environ.get("RANK", "0") == "0":
        print(f"the best checkpoint is {best}")


def _translate(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint, plots
    from fastattn.translation.data import arriving_lines, read_lines
    from fastattn.translation.sanity import translation_warnings
    from fastattn.translation.search import candidates

    is_bundled = options.model is None
    if is_bundled:
        options.model = checkpoint.PRETRAINED
    picture, kind = options.attention, options.attention_kind or "cross"
    read = [] if options.input is None else [options.input]
    if picture is not None:
        check_path(picture, read)
        if options.output is not None and options.output.absolute() == picture.absolute():
            raise InputError(f"cannot draw {picture}: the translations go there too: name another file")
    search, dtype = _search(options, read, options.n_best)
    if options.input is None:
        parts, total = arriving_lines(sys.stdin.buffer, "standard input", CHUNK * options.batch_size), None
    else:
        lines = read_lines(options.input)
        parts, total = iter([lines]), sum(bool(line.strip()) for line in lines)
    model, tokenizer = _load(options, dtype)
    layer = plots.check_layer(model.config, kind, options.attention_layer)
    if is_bundled:
        print(f"fastattn translate: {BUNDLED}", file=sys.stderr)
    if options.input is None and sys.stdin.isatty():
        print("fastattn translate: type a sentence a line; Ctrl-D ends", file=sys.stderr)
    text, first = [], 1
    with _sentences_done(total) as advance:
        for lines in parts:
            _warn(options, *translation_warnings(lines, first, tokenizer))
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
        _write_text(options.output, "".join(text))
    if picture is not None:
        raise InputError(f"{picture} is not drawn: every line is blank")


def _best_lines(found: list[list[Any]]) -> str:
    return "".join(f"{translations[0].text if translations else ''}\n" for translations in found)


def _write_text(path: Path, text: str) -> None:
    """Gzipped where the name ends in .gz, as text is read."""
    content = text.encode()
    write_file(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _n_best_lines(found: list[list[Any]], first: int) -> str:
    return "".join(
        f"{number} ||| {translation.text} ||| {translation.score:.4f}\n"
        for number, translations in enumerate(found, first)
        for translation in translations
    )


def _evaluate(options: argparse.Namespace) -> None:
    from fastattn.translation.bleu import choose
    from fastattn.translation.data import ParallelText, read_parallel, training_sources
    from fastattn.translation.evaluate import held_out, scores
    from fastattn.translation.sanity import evaluation_warnings, overlap_warnings
    from fastattn.translation.search import translate

    search, dtype = _search(options, options.test)
    require("sacrebleu")  # before anything is translated
    sources, references = read_parallel(*options.test)
    tokenize, warnings = choose(references, options.tokenize)
    _warn(options, *warnings)
    model, tokenizer = _load(options, dtype)
    trained_on = training_sources(options.model, tokenizer)
    if trained_on is not None:
        _warn(options, *overlap_warnings(sources, tokenizer, trained_on))
    text = ParallelText.encoded(tokenizer, sources, references, "test")
    of_references = held_out(model, map(text.batch, text.batches(EVALUATION_TOKENS)), contextlib.nullcontext())
    with _sentences_done(len(sources)) as advance:
        translations = translate(model, tokenizer, sources, search, advance)
    if options.output is not None:
        _write_text(options.output, "".join(f"{line}\n" for line in translations))
    _warn(options, *evaluation_warnings(sources, translations, references, text))
    found = scores(translations, references, tokenize)
    perplexity, accuracy = of_references["valid_perplexity"], of_references["valid_accuracy"]
    if options.json:
        numbers = {"sentences": len(sources), "perplexity": perplexity, "accuracy": accuracy}
        print(json.dumps({**dataclasses.asdict(found), **numbers}, indent=2))
        return
    print(
        f"BLEU {found.bleu:.2f} on {len(references)} sentences\n{found.bleu_signature}\n"
        f"chrF {found.chrf:.2f}\n{found.chrf_signature}\n"
        f"perplexity {perplexity:.2f}, accuracy {accuracy:.3f} of the references' pieces"
    )
    if found.compound_split_bleu is not None:
        print(f"tokenised, compound-split BLEU {found.compound_split_bleu:.2f}: the kind that the paper reports")


def _plot(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint, plots
    from fastattn.translation.train import METRICS, read_metrics

    picture = options.output or options.folder / "loss.png"
    if options.output is not None:
        check_path(picture)
    rows = read_metrics(options.folder)
    if not rows:
        raise checkpoint.lacking(options.folder, f"{METRICS} yet")
    plots.loss_curve(rows, picture)
    print(picture)


def _average(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint

    folder = options.folder if options.folder.name not in ("", "..") else options.folder.resolve()
    out = options.out or Path(f"{folder}-mean")
    checkpoint.average(options.folder, options.last, out)
    print(f"{out} holds the mean of {options.last} checkpoints")


def _import(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint
    from fastattn.translation.importing import import_model

    expect_absent(options.out)
    source_words, target_words = options.words
    model, tokenizer = import_model(options.model, source_words, target_words, options.heads)
    checkpoint.save_model(model, tokenizer, options.out)
    print(f"{options.out} holds the model; its text is the program's: words between spaces")


def _export(options: argparse.Namespace) -> None:
    from fastattn.translation import checkpoint
    from fastattn.translation.export import to_ctranslate2, to_huggingface

    expect_absent(options.out)
    model, tokenizer = checkpoint.load(options.model)
    if options.to == "int8":
        checkpoint.save_int8(model, tokenizer, checkpoint.updates(options.model), options.out)
    else:
        {"ctranslate2": to_ctranslate2, "huggingface": to_huggingface}[options.to](model, tokenizer, options.out)
    reader = {"ctranslate2": "ctranslate2.Translator", "huggingface": "transformers' MarianMTModel and AutoTokenizer"}
    print(f"{options.out} holds the model and its tokenizer for {reader.get(options.to, 'every command')}")


def _search(options: argparse.Namespace, read: list[Path], n_best: int = 1) -> tuple[Any, Any]:
    """The search and the dtype that the options name, all of which are checked; ``read`` are the files of the text."""
    from fastattn.translation import precision
    from fastattn.translation.search import Search

    search = Search(
        options.beam, options.length_penalty, options.batch_size, n_best,
        options.temperature, options.top_k, options.top_p, options.seed,
    )  # fmt: skip
    if options.output is not None:
        check_file(options.output, read)
    return search, precision.DTYPES[precision.resolve(options.precision)]


def _load(options: argparse.Namespace, dtype: Any) -> tuple[Any, Any]:
    """The model and the tokenizer that the options name."""
    import torch

    from fastattn.translation import checkpoint

    model, tokenizer = checkpoint.load(options.model, "cuda" if torch.cuda.is_available() else "cpu")
    if checkpoint.updates(options.model) == 0:
        _warn(options, f"{options.model} has not been trained yet")
    return model.to(dtype), tokenizer


def _warn(options: argparse.Namespace, *warnings: str) -> None:
    for warning in warnings:
        print(f"fastattn {options.command}: warning: {warning}", file=sys.stderr)


@contextlib.contextmanager
def _sentences_done(total: int | None) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal, of a known number of sentences: what to call with those that are done."""
    if total is None or not sys.stderr.isatty():
        yield lambda sentences: None
        return

    with require("tqdm").tqdm(total=total, unit=" sentences", ncols=80, leave=False) as bar:
        yield bar.update


def _info(options: argparse.Namespace) -> None:
    print(info.report())


def _demo(options: argparse.Namespace) -> int:
    from fastattn import demo

    return min(1, demo.run(options.out))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "prepare": _prepare,
    "train": _train,
    "translate": _translate,
    "evaluate": _evaluate,
    "plot": _plot,
    "average": _average,
    "import": _import,
    "export": _export,
    "bench": bench.main,
    "info": _info,
    "demo": _demo,
}
