"""Export a model: torch.export keeps fastattn's operations, or replaces them by torch's."""

import torch
from torch import nn

import fastattn


class Encoder(nn.Module):
    """Layer of the Transformer for inputs (B, L, 64)."""

    def __init__(self):
        super().__init__()
        self.attention = fastattn.MultiHeadAttention(64, 4, batch_first=True)
        self.attention_norm = fastattn.DropoutAddLayerNorm(64, p=0.1)
        self.feed_forward = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.feed_forward_norm = fastattn.DropoutAddLayerNorm(64, p=0.1)

    def forward(self, x, key_lengths):
        y, _ = self.attention(x, x, x, need_weights=False, key_lengths=key_lengths)
        x = self.attention_norm(y, x)
        return self.feed_forward_norm(self.feed_forward(x), x)


torch.manual_seed(0)
model = Encoder().eval()
x, key_lengths = torch.randn(2, 10, 64), torch.tensor([10, 7])
wanted = model(x, key_lengths)

# Batch size and length are dynamic. The program calls fastattn's operations, and therefore its kernels.
batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
program = torch.export.export(model, (x, key_lengths), dynamic_shapes=({0: batch, 1: length}, {0: batch}))
print([str(node.target) for node in program.graph.nodes if "fastattn" in str(node.target)])
torch.testing.assert_close(program.module()(x, key_lengths), wanted)

# This program has only torch's operations, so a machine without fastattn runs it.
portable = program.run_decompositions(fastattn.decompositions())
assert not any("fastattn" in str(node.target) for node in portable.graph.nodes)
torch.testing.assert_close(portable.module()(x, key_lengths), wanted, rtol=1e-4, atol=1e-4)
longer = torch.randn(3, 21, 64), torch.tensor([21, 1, 8])
torch.testing.assert_close(portable.module()(*longer), model(*longer), rtol=1e-4, atol=1e-4)
print("without fastattn's operations:", len(list(portable.graph.nodes)), "nodes")
