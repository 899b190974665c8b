"""The BLEU on the verses' test text that an hour of training gives: `tiny`, the mean of its last checkpoints, beam 4.

    python benchmarks/hour.py --record

How many checkpoints are averaged is chosen on the validation text. `--record` keeps the result, with its curve and its
recipe, as benchmarks/results/hour-MACHINE.json, or the one that is there if that is better on the validation text, with
what else was tried; `make tables` shows it.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from fastattn import TransformerConfig
from fastattn.bench import contest, report
from fastattn.bench.timer import Neighbours
from fastattn.translation import checkpoint, precision
from fastattn.translation.config import TrainingConfig
from fastattn.translation.data import read_parallel, verses
from fastattn.translation.evaluate import scores
from fastattn.translation.search import Search, translate
from fastattn.translation.train import read_metrics, train

ROOT = Path(__file__).resolve().parent.parent
AVERAGED = (1, 5, 10, 20)


def run(folder: Path, minutes: float, vocab_size: int, dropout: float, recipe: dict[str, Any]) -> dict[str, Any]:
    """Trains and translates in ``folder``."""
    out, config, search = folder / "run", folder / "config.json", Search(beam=4)
    model_config = TransformerConfig.preset("tiny", vocab_size, dropout=dropout)
    config.write_text(model_config.to_json(TrainingConfig.of_preset("tiny")))
    limits = {"max_minutes": minutes, "max_steps": 10**6}  # the minutes end it, on whatever machine
    train(verses("train"), verses("dev"), out, config=config, keep=max(AVERAGED), **limits, **recipe)
    _, training = checkpoint.load_config(checkpoint.newest(out))
    dtype = precision.DTYPES[training.precision]

    def bleu(model: Path, split: str) -> float:
        sources, references = read_parallel(*verses(split))
        loaded, tokenizer = checkpoint.load(model)
        return scores(translate(loaded.to(dtype), tokenizer, sources, search), references).bleu

    trained = [path for path in checkpoint.steps(out) if checkpoint.updates(path)][-max(AVERAGED) :]
    on_dev = {}
    for last in AVERAGED:
        if last <= len(trained):
            checkpoint.average(out, last, folder / f"mean-{last}")
            on_dev[last] = bleu(folder / f"mean-{last}", "dev")
            print(f"mean of {last}: BLEU {on_dev[last]:.2f} on dev", flush=True)
    best = max(on_dev, key=on_dev.__getitem__)
    sources, references = read_parallel(*verses("test"))
    model, tokenizer = checkpoint.load(folder / f"mean-{best}")
    found = scores(translate(model.to(dtype), tokenizer, sources, search), references)
    curve = [row for row in read_metrics(out) if "valid_loss" in row]
    return {
        "minutes": minutes,
        "test": dataclasses.asdict(found),
        "averaged": best,
        "dev_bleu": on_dev,
        "beam": search.beam,
        "length_penalty": search.length_penalty,
        "model": dataclasses.asdict(model.config),
        "training": dataclasses.asdict(training),
        "curve": curve,
    }


def better(kept: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The one that is better on the validation text, of as many minutes, with what was tried in all."""
    if kept["minutes"] != result["minutes"]:
        return result
    tried = [*kept.get("tried", [summary(kept)]), summary(result)]
    return max((kept, result), key=lambda found: max(found["dev_bleu"].values())) | {"tried": tried}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A result's recipe, and its BLEU on the validation text."""
    model, training = result["model"], result["training"]
    recipe = {name: model[name] for name in ("vocab_size", "dropout")}
    recipe |= {name: training[name] for name in ("rate", "batch_tokens", "save_every")}
    return {"minutes": result["minutes"], **recipe, "dev_bleu": max(result["dev_bleu"].values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--record", action="store_true")
    options = vars(parser.parse_args())
    keep_result = options.pop("record")
    minutes, vocab_size, dropout = (options.pop(name) for name in ("minutes", "vocab_size", "dropout"))
    with tempfile.TemporaryDirectory() as folder:
        neighbours = Neighbours()
        result = run(Path(folder), minutes, vocab_size, dropout, options)
    print(json.dumps({name: value for name, value in result.items() if name != "curve"}, indent=1))
    if keep_result:
        folder = ROOT / "benchmarks/results"
        path = folder / f"hour-{report.kind(report.machine())}.json"
        if path.exists():
            result = better(json.loads(path.read_text()), result)
        report.record(folder, "hour", result, contest.disturbed_by(neighbours.share()))


def section(data: dict[str, Any]) -> str:
    """One machine's part of the page: a row for each tenth of the time."""
    curve, found = data["curve"], data["test"]
    model, training = data["model"], data["training"]
    how = (
        f"{training['precision']}, dropout {model['dropout']}, {model['vocab_size']} pieces, batches of "
        f"{training['batch_tokens']} tokens, rate {training['rate']}"
    )
    head = (
        f"{report.origin(data)}: {how}. On the test text, by the mean of the last {data['averaged']} checkpoints, "
        f"{training['save_every']} updates apart, and beam {data['beam']}: BLEU {found['bleu']:.1f}, chrF "
        f"{found['chrf']:.1f}."
    )
    own = summary(data)
    if others := [tried for tried in data.get("tried", []) if tried != own]:
        head += (
            f" On the validation text BLEU {own['dev_bleu']:.1f}; also tried: "
            + ", ".join(
                "".join(f"{name} {tried[name]}, " for name in tried if name != "dev_bleu" and tried[name] != own[name])
                + f"BLEU {tried['dev_bleu']:.1f}"
                for tried in others
            )
            + "."
        )
    rows = [["minutes", "updates", "validation loss", "accuracy"]]
    for tenth in range(1, 11):
        seconds = data["minutes"] * 6 * tenth
        row = min(curve, key=lambda row: abs(row["seconds"] - seconds))
        figures = f"{row['seconds'] / 60:.0f}", str(row["step"]), f"{row['valid_loss']:.3f}"
        rows.append([*figures, f"{row['valid_accuracy']:.3f}"])
    return f"{head}\n\n{report.markdown(rows)}"


if __name__ == "__main__":
    main()
