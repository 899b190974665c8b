"""Writes the table of docs/reproduce.md that predicts how long the paper's runs take on eight GPUs: `make hours`.

An update takes what its matrix products take a GPU, or what its operations take the host to start, whichever is longer:
6 operations a parameter and token, at a share of the published peak; and the operations that an update dispatches,
counted here. Neither share nor cost of an operation is measured; that gradients are summed meanwhile is assumed.
"""

from pathlib import Path
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import Transformer, TransformerConfig
from fastattn.bench import report
from fastattn.ops import check
from fastattn.translation.config import TrainingConfig
from fastattn.translation.data import ParallelText, read_parallel
from fastattn.translation.tokenizer import Tokenizer
from fastattn.translation.train import Trainer
from presets import parameters
from sass import rates

PAGE = Path(__file__).resolve().parent.parent / "docs/reproduce.md"
VERSES = Path(fastattn.__file__).parent / "verses"
GPUS = 8
VOCABULARY = 37_000
SHARE = 0.35  # of the peak that a whole update reaches where products bound it
OPERATION = 10e-6  # seconds for the host to dispatch one


class _Count(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def operations() -> int:
    """That a process dispatches in one update of `base`, or of `big`, which is as deep: those of a narrow model of as
    many layers on as many tokens."""
    text = tuple(lines[:150] for lines in read_parallel(VERSES / "dev.en", VERSES / "dev.es"))
    tokenizer = Tokenizer.train(text[0] + text[1], 1000)
    model = Transformer(TransformerConfig.preset("base", 1000, d_model=32, d_ff=32, num_heads=4))
    config = TrainingConfig(batch_tokens=TrainingConfig().batch_tokens // GPUS, precision="bf16")
    trainer = Trainer(model, ParallelText.encoded(tokenizer, *text), config)
    trainer.update()  # Adam's state is there from the second on
    with _Count() as count, mock.patch.object(check, "is_readable", return_value=False):  # as of a GPU's tensors
        trainer.update()
    return count.number


def table(number: int) -> str:
    """A line a model and GPU, for so many :func:`operations`."""
    lines = [f"| {GPUS} GPUs | an update's products | its {number} operations | hours |", "| --- | --- | --- | --- |"]
    for preset in ("base", "big"):
        training = TrainingConfig.of_preset(preset)
        work = 6 * parameters(preset, VOCABULARY) * training.batch_tokens / GPUS
        for machine in rates.MACHINES.values():
            products, host = work / (SHARE * machine.peak * 1e12), number * OPERATION
            hours = training.max_steps * max(products, host) / 3600
            lines.append(
                f"| `{preset}`, {machine.name} | predicted {1e3 * products:.0f} ms | predicted {1e3 * host:.0f} ms "
                f"| predicted {hours:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    report.insert(PAGE, "hours", table(operations()))
