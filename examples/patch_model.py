"""Patch a model: fastattn computes torch's own encoder, with the same parameters and results."""

import torch
from torch import nn

import fastattn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=128, nhead=8, dim_feedforward=512, dropout=0.1, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2).eval()
x = torch.randn(4, 50, 128)
wanted = model(x)

# The model is changed in place. The report names each changed module, and the reason why another one was left.
report = fastattn.patch(model)
print(report)
torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)

# Training needs no further change, because patching keeps the parameters.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for _ in range(3):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")

# The checkpoint has torch's format: a model without fastattn loads it.
state = model.state_dict()
fastattn.unpatch(model)
model.load_state_dict(state)
