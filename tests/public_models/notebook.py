"""The Transformer of a notebook.

Each head is a module, and scores are divided by d_k squared. The residual is the value instead of the query. Positions
and dimensions are swapped in the encoding, and there is no padding mask."""

import torch
from torch import nn
from torch.nn import functional as F

from public_models.jadore import get_subsequent_mask


def scaled_dot_product_attention(Q, K, V, temperature, dropout, mask=None):
    scores = Q.bmm(K.transpose(1, 2))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return dropout((scores / temperature).softmax(-1)).bmm(V)


class AttentionHead(nn.Module):
    def __init__(self, d_model, d_k, d_v):
        super().__init__()
        self.W_Q = nn.Linear(d_model, d_k, bias=False)
        self.W_K = nn.Linear(d_model, d_k, bias=False)
        self.W_V = nn.Linear(d_model, d_v, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.temperature = d_k**2

    def forward(self, Q, K, V, mask=None):
        return scaled_dot_product_attention(
            self.W_Q(Q), self.W_K(K), self.W_V(V), self.temperature, self.dropout, mask=mask
        )


class MultiHeadAttention(nn.Module):
    def __init__(self, h, d_model, d_k, d_v):
        super().__init__()
        self.W_O = nn.Linear(h * d_v, d_model, bias=False)
        self.heads = nn.ModuleList(AttentionHead(d_model, d_k, d_v) for _ in range(h))

    def forward(self, Q, K, V, mask=None):
        return self.W_O(torch.cat([head(Q, K, V, mask) for head in self.heads], -1))


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model=512, d_hidden=2048):
        super().__init__()
        self.W1 = nn.Linear(d_model, d_hidden)
        self.W2 = nn.Linear(d_hidden, d_model)

    def forward(self, x):
        return self.W2(F.relu(self.W1(x)))


class Residual(nn.Module):
    def __init__(self, sublayer, d_model):
        super().__init__()
        self.layer_normalization = nn.LayerNorm(d_model)
        self.current_sublayer = sublayer

    def forward(self, *x, mask=None):
        named = {} if mask is None else {"mask": mask}
        return self.layer_normalization(x[-1] + self.current_sublayer(*x, **named))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def forward(self, x):
        dimensions = torch.arange(self.d_model, dtype=torch.float64)[:, None]
        table = torch.arange(x.shape[1], dtype=torch.float64) / 10000 ** (2 * dimensions / self.d_model)
        table[:, 0::2] = table[:, 0::2].sin()  # bug: positions instead of dimensions
        table[:, 1::2] = table[:, 1::2].cos()
        return x + table.T.unsqueeze(0)


class EncoderLayer(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.attention = Residual(MultiHeadAttention(h, d_model, d_model // h, d_model // h), d_model)
        self.feed_forward = Residual(PositionwiseFeedForward(d_model), d_model)

    def forward(self, x, mask=None):
        return self.feed_forward(self.attention(x, x, x, mask=mask))


class DecoderLayer(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        sizes = h, d_model, d_model // h, d_model // h
        self.self_attention = Residual(MultiHeadAttention(*sizes), d_model)
        self.encoder_decoder_attention = Residual(MultiHeadAttention(*sizes), d_model)
        self.feed_forward = Residual(PositionwiseFeedForward(d_model), d_model)

    def forward(self, decoder_input, encoder_output, self_attn_mask=None):
        out = self.self_attention(decoder_input, decoder_input, decoder_input, mask=self_attn_mask)
        return self.feed_forward(self.encoder_decoder_attention(out, encoder_output, encoder_output))


class Stack(nn.Module):
    """The program's Encoder and Decoder, which differ in their layers and in what they pass on."""

    def __init__(self, layer, num_tokens, N, h, d_model, d_word_vec, n_positions):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, d_word_vec)
        self.positional_enc = PositionalEncoding(n_positions)  # bug: d_model is meant
        self.layers = nn.ModuleList(layer(h, d_model) for _ in range(N))

    def forward(self, x, *encoded, **masks):
        x = self.positional_enc(self.token_emb(x)).to(self.token_emb.weight.dtype)  # the program has .float()
        for layer in self.layers:
            x = layer(x, *encoded, **masks)
        return x


class Transformer(nn.Module):
    def __init__(self, num_tokens_src, num_tokens_tgt, d_word_vec=512, N=6, h=8, d_model=512, n_positions=512):
        super().__init__()
        sizes = N, h, d_model, d_word_vec, n_positions
        self.encoder = Stack(EncoderLayer, num_tokens_src, *sizes)
        self.decoder = Stack(DecoderLayer, num_tokens_tgt, *sizes)
        self.linear = nn.Linear(d_model, num_tokens_tgt)

    def forward(self, source, target):
        return self.linear(self.decoder(target, self.encoder(source), self_attn_mask=get_subsequent_mask(target)))
