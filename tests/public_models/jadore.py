"""The Transformer of github.com/jadore801120/attention-is-all-you-need-pytorch.

It is post-norm and adds the residual in place. Every layer returns its attention weights."""

import torch
from torch import nn
from torch.nn import functional as F


class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        scores = (q / self.temperature) @ k.transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attn = self.dropout(scores.softmax(-1))
        return attn @ v, attn


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head, d_model, d_k, d_v):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5)
        self.dropout = nn.Dropout(0.1)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q, k, v, mask=None):
        batch, residual = q.size(0), q
        q = self.w_qs(q).view(batch, -1, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(batch, -1, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(batch, -1, self.n_head, self.d_v).transpose(1, 2)
        if mask is not None:
            mask = mask.unsqueeze(1)
        out, attn = self.attention(q, k, v, mask=mask)
        out = self.dropout(self.fc(out.transpose(1, 2).reshape(batch, out.size(2), -1)))
        out += residual
        return self.layer_norm(out), attn


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_in, d_hid):
        super().__init__()
        self.w_1 = nn.Linear(d_in, d_hid)
        self.w_2 = nn.Linear(d_hid, d_in)
        self.layer_norm = nn.LayerNorm(d_in, eps=1e-6)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        out = self.dropout(self.w_2(F.relu(self.w_1(x))))
        out += x
        return self.layer_norm(out)


class PositionalEncoding(nn.Module):
    def __init__(self, d_hid, n_position=200):
        super().__init__()
        rates = 10000.0 ** (-2 * (torch.arange(d_hid, dtype=torch.float64) // 2) / d_hid)
        angles = torch.arange(n_position, dtype=torch.float64)[:, None] * rates
        table = torch.where(torch.arange(d_hid) % 2 == 0, angles.sin(), angles.cos())
        self.register_buffer("pos_table", table.float().unsqueeze(0))

    def forward(self, x):
        return x + self.pos_table[:, : x.size(1)].clone().detach()


class EncoderLayer(nn.Module):
    def __init__(self, d_model, d_inner, n_head, d_k, d_v):
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner)

    def forward(self, enc_input, slf_attn_mask=None):
        out, attn = self.slf_attn(enc_input, enc_input, enc_input, mask=slf_attn_mask)
        return self.pos_ffn(out), attn


class DecoderLayer(nn.Module):
    def __init__(self, d_model, d_inner, n_head, d_k, d_v):
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v)
        self.enc_attn = MultiHeadAttention(n_head, d_model, d_k, d_v)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner)

    def forward(self, dec_input, enc_output, slf_attn_mask=None, dec_enc_attn_mask=None):
        out, own = self.slf_attn(dec_input, dec_input, dec_input, mask=slf_attn_mask)
        out, other = self.enc_attn(q=out, k=enc_output, v=enc_output, mask=dec_enc_attn_mask)
        return self.pos_ffn(out), own, other


class Stack(nn.Module):
    """Common parts of the program's Encoder and Decoder, except the name of their embedding."""

    def __init__(self, layer, d_word_vec, n_layers, n_head, d_k, d_v, d_model, d_inner):
        super().__init__()
        self.position_enc = PositionalEncoding(d_word_vec)
        self.dropout = nn.Dropout(p=0.1)
        self.layer_stack = nn.ModuleList(layer(d_model, d_inner, n_head, d_k, d_v) for _ in range(n_layers))
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)  # never called


class Encoder(Stack):
    def __init__(self, vocab, pad_idx, *sizes):
        super().__init__(EncoderLayer, *sizes)
        self.src_word_emb = nn.Embedding(vocab, sizes[0], padding_idx=pad_idx)

    def forward(self, src_seq, src_mask):
        out = self.dropout(self.position_enc(self.src_word_emb(src_seq)))
        for layer in self.layer_stack:
            out, _ = layer(out, slf_attn_mask=src_mask)
        return (out,)


class Decoder(Stack):
    def __init__(self, vocab, pad_idx, *sizes):
        super().__init__(DecoderLayer, *sizes)
        self.trg_word_emb = nn.Embedding(vocab, sizes[0], padding_idx=pad_idx)

    def forward(self, trg_seq, trg_mask, enc_output, src_mask):
        out = self.dropout(self.position_enc(self.trg_word_emb(trg_seq)))
        for layer in self.layer_stack:
            out, *_ = layer(out, enc_output, slf_attn_mask=trg_mask, dec_enc_attn_mask=src_mask)
        return (out,)


def get_pad_mask(seq, pad_idx):
    return (seq != pad_idx).unsqueeze(-2)


def get_subsequent_mask(seq):
    length = seq.size(1)
    return (1 - torch.ones((1, length, length), device=seq.device).triu(diagonal=1)).bool()


class Transformer(nn.Module):
    def __init__(
        self, n_src_vocab, n_trg_vocab, src_pad_idx, trg_pad_idx, d_word_vec=512, d_model=512, d_inner=2048, n_layers=6,
        n_head=8, d_k=64, d_v=64, trg_emb_prj_weight_sharing=True, emb_src_trg_weight_sharing=True,
    ):  # fmt: skip
        super().__init__()
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        sizes = d_word_vec, n_layers, n_head, d_k, d_v, d_model, d_inner
        self.encoder = Encoder(n_src_vocab, src_pad_idx, *sizes)
        self.decoder = Decoder(n_trg_vocab, trg_pad_idx, *sizes)
        self.trg_word_prj = nn.Linear(d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.x_logit_scale = 1.0
        if trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
            self.x_logit_scale = d_model**-0.5
        if emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def forward(self, src_seq, trg_seq):
        src_mask = get_pad_mask(src_seq, self.src_pad_idx)
        trg_mask = get_pad_mask(trg_seq, self.trg_pad_idx) & get_subsequent_mask(trg_seq)
        enc_output, *_ = self.encoder(src_seq, src_mask)
        dec_output, *_ = self.decoder(trg_seq, trg_mask, enc_output, src_mask)
        logits = self.trg_word_prj(dec_output) * self.x_logit_scale
        return logits.view(-1, logits.size(2))
