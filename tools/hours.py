"""Writes the table of docs/reproduce.md that predicts how long the paper's runs take on eight GPUs: `make hours`.

An update takes what its matrix products take a GPU, or what starting its operations takes the host, whichever is
longer: 6 operations a parameter and token, at a share of the published peak, which is assumed; and an update of `base`
as measured on one H100, where the host bounded it. That gradients are summed meanwhile is assumed.
"""

import json
from pathlib import Path

from fastattn.bench import report
from fastattn.translation.config import TrainingConfig
from presets import parameters
from sass import rates

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reproduce.md"
MEASURED = ROOT / "benchmarks/results/gpu/training.json"
GPUS = 8
VOCABULARY = 37_000
SHARE = 0.35  # of the peak that a whole update reaches where products bound it


def host() -> float:
    """Seconds of an update where the host bounds it: of the quickest run that was measured, without the first updates,
    which compile, and the last, which are validated. `big` is as deep as `base` and has as many operations."""
    runs = (run["metrics"] for run in json.loads(MEASURED.read_text())["runs"])
    return min((rows[-2]["seconds"] - rows[0]["seconds"]) / (rows[-2]["step"] - rows[0]["step"]) for rows in runs)


def table() -> str:
    """A line a model and GPU."""
    rows = [[f"{GPUS} GPUs", "an update's products", "the host, as measured", "hours"]]
    for preset in ("base", "big"):
        training = TrainingConfig.of_preset(preset)
        work = 6 * parameters(preset, VOCABULARY) * training.batch_tokens / GPUS
        for machine in rates.MACHINES.values():
            products = work / (SHARE * machine.peak * 1e12)
            hours = training.max_steps * max(products, host()) / 3600
            times = f"predicted {1e3 * products:.0f} ms", f"{1e3 * host():.0f} ms", f"predicted {hours:.1f}"
            rows.append([f"`{preset}`, {machine.name}", *times])
    return report.markdown(rows)


if __name__ == "__main__":
    report.insert(PAGE, "hours", table())
