"""Trains `torch.nn.Transformer` of the size of `--preset tiny` on the verses, on the same batches, loss and schedule.

    python benchmarks/peer_translation.py --minutes 20

prints target tokens a second, validation loss and greedy BLEU on the test text, to be read beside those of

    fastattn train --preset tiny --max-minutes 20 ... && fastattn evaluate DIR --beam 1 ...
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastattn
from fastattn import TransformerConfig
from fastattn.translation.data import ParallelText, Sentences, read_parallel
from fastattn.translation.evaluate import bleu, held_out
from fastattn.translation.model import SinusoidalPositions
from fastattn.translation.search import EXTRA_TOKENS
from fastattn.translation.tokenizer import Tokenizer
from fastattn.translation.train import RECIPES, Trainer, TrainingOptions, fastest_precision

VERSES = Path(fastattn.__file__).parent / "verses"


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` between tied embeddings and sinusoidal positions, called as `fastattn.Transformer` is."""

    dropout_sites = 0

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.output.weight, std=config.d_model**-0.5)
        self.positions = SinusoidalPositions(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        sizes = config.d_model, config.num_heads, config.encoder_layers, config.decoder_layers, config.d_ff
        self.transformer = nn.Transformer(*sizes, config.dropout, batch_first=True)
        # In evaluation its fused encoder raises under bfloat16 autocast on the CPU.
        self.transformer.encoder.enable_nested_tensor = False
        torch.backends.mha.set_fastpath_enabled(False)

    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.output.weight, self.config.pad_id) * self.config.d_model**0.5
        return self.dropout(x + self.positions(0, tokens.shape[1]))

    def features(self, source, target, source_lengths, target_lengths, seeds=None) -> Tensor:
        hidden = torch.arange(source.shape[1]) >= source_lengths[:, None]
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.bool)
        return self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )

    def projection(self, features: Tensor) -> tuple[Tensor, Tensor, None]:
        return features, self.output.weight, None


@torch.inference_mode()
def greedy(model: TorchTransformer, tokenizer: Tokenizer, lines: list[str], batch_size: int = 64) -> list[str]:
    sentences, found = Sentences(tokenizer.encode(lines)), []
    for index in torch.arange(len(lines)).split(batch_size):
        source, lengths = sentences.padded(index)
        target = torch.full((len(index), 1), model.config.bos_id)
        finished = torch.zeros(len(index), dtype=torch.bool)
        while not finished.all() and target.shape[1] < source.shape[1] + EXTRA_TOKENS:
            token = model.output(model.features(source, target, lengths, None)[:, -1]).argmax(-1)
            token.masked_fill_(finished, model.config.eos_id)
            target, finished = torch.cat((target, token[:, None]), 1), finished | (token == model.config.eos_id)
        found += tokenizer.decode(target.tolist())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--batch-tokens", type=int, default=RECIPES["tiny"].batch_tokens)
    arguments = parser.parse_args()
    train, dev, test = (
        read_parallel(VERSES / f"{split}.en{suffix}", VERSES / f"{split}.es{suffix}")
        for split, suffix in (("train", ".gz"), ("dev", ""), ("test", ""))
    )
    tokenizer = Tokenizer.train(train[0] + train[1], 8000)
    torch.manual_seed(1)
    model = TorchTransformer(TransformerConfig.preset("tiny", tokenizer.vocab_size))
    recipe = RECIPES["tiny"]
    options = TrainingOptions(
        "tiny", 8000, arguments.batch_tokens, recipe.warmup, recipe.rate, precision=fastest_precision(), seed=1
    )
    trainer = Trainer(model, ParallelText(tokenizer, *train), options)
    start, tokens = time.monotonic(), 0.0
    while (seconds := time.monotonic() - start) < 60 * arguments.minutes:
        tokens += trainer.update()[3].item()
        if trainer.step % 100 == 0:
            print(f"update {trainer.step}: {tokens / seconds:.0f} tokens/s", flush=True)
    text = ParallelText(tokenizer, *dev)
    scores = held_out(model, [text.batch(i) for i in text.buckets(4096)], trainer.autocast())
    score, signature = bleu(greedy(model.eval(), tokenizer, test[0]), test[1])
    print(f"{trainer.step} updates, {tokens / seconds:.0f} tokens/s, {scores}, greedy BLEU {score:.2f} ({signature})")


if __name__ == "__main__":
    main()
