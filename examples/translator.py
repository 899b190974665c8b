"""Translator in 40 lines: it learns to write numbers backwards, and decodes greedily with a cache."""

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import fastattn

PAD, BOS, EOS, ZERO, UPDATES = 0, 1, 2, 3, 250  # the ten digits are the tokens from ZERO on
torch.manual_seed(0)
config = fastattn.TransformerConfig(
    vocab_size=ZERO + 10, d_model=64, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0
)
model = fastattn.Transformer(config)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, UPDATES)


def numbers(count):
    """Return sources (digits, EOS) and targets (BOS, digits backwards, EOS): (count, length), padded on the right."""
    digits = [torch.randint(ZERO, ZERO + 10, (length,)) for length in torch.randint(3, 7, (count,)).tolist()]
    begin, end = torch.tensor([BOS]), torch.tensor([EOS])
    sources = [torch.cat((number, end)) for number in digits]
    targets = [torch.cat((begin, number.flip(0), end)) for number in digits]
    return (pad_sequence(rows, batch_first=True, padding_value=PAD) for rows in (sources, targets))


for _ in range(UPDATES):
    source, target = numbers(64)
    logits = model(source, target[:, :-1])  # (B, T - 1, vocab_size), logits of the next token
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

model.eval()
source, target = numbers(100)
with torch.no_grad():
    state, tokens, written = model.begin(source), torch.full((100, 1), BOS), []
    for _ in range(target.shape[1] - 1):
        tokens = model.logits(model.step(tokens, state)).argmax(-1)  # (100, 1), one hypothesis per sentence
        written.append(tokens)
is_right = (torch.cat(written, 1) == target[:, 1:]) | (target[:, 1:] == PAD)
print(f"loss {loss.item():.3f}, {int(is_right.all(1).sum())} of 100 new numbers written backwards without a mistake")
