"""The encoder-decoder of "Attention Is All You Need" (Vaswani et al., 2017), on fastattn's operations.

Every sub-layer is followed by one fused dropout + residual + LayerNorm. Two tensors run through a stack: ``x``, the
normalised input of the next sub-layer, and ``residual``, the stream that the sub-layers add to. In the paper's
post-norm they are the same tensor. With ``norm_first`` the stream is the plain sum, and the norm after a sub-layer is
the first step of the next sub-layer. So a stack begins with a norm and ends with its final norm.

Training and validation pack their sentences one after the other. For translation, sentences are padded on the right.
Only lengths describe the padding: no mask is built, and no kernel reads beyond them.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn._torch_private import is_plain_linear
from fastattn.errors import InputError
from fastattn.nn import Dropout, DropoutAddLayerNorm, KeyValueCache, LayerNorm, MultiHeadAttention
from fastattn.translation.config import TransformerConfig


@dataclasses.dataclass
class AttentionWeights:
    """Attention probabilities of one forward pass, one (B, H, Lq, Lk) tensor per layer.

    Examples:
        >>> config = fastattn.TransformerConfig(vocab_size=100, d_model=64, num_heads=4, d_ff=128)
        >>> model = fastattn.Transformer(config).eval()
        >>> weights = fastattn.translation.model.AttentionWeights()
        >>> source, target = torch.randint(4, 100, (2, 9)), torch.randint(4, 100, (2, 7))
        >>> logits = model(source, target, weights=weights)
        >>> len(weights.cross), weights.cross[0].shape
        (6, torch.Size([2, 4, 7, 9]))
    """

    encoder: list[Tensor] = dataclasses.field(default_factory=list)
    decoder: list[Tensor] = dataclasses.field(default_factory=list)
    cross: list[Tensor] = dataclasses.field(default_factory=list)


# Packed sentences are padded to a multiple of this, because the matrix library prepares code per number of rows.
ROW_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sentences one after the other. The last one is padding, shorter than ``ROW_MULTIPLE`` and possibly empty.

    Attributes:
        tokens: int64 (N,).
        places: int64 (N,), the position of each token in its sentence.
        offsets: int64 (sentences + 1,), the start of each sentence, and the end.
        longest: length of the longest sentence, without the padding.
    """

    tokens: Tensor
    places: Tensor
    offsets: Tensor
    longest: int


def _between(queries: Packed, keys: Packed) -> dict[str, Any]:
    """Return the arguments of an attention between packed sentences; the padding may be the longest of them."""
    longest = {"max_q": max(queries.longest, ROW_MULTIPLE), "max_k": max(keys.longest, ROW_MULTIPLE)}
    return {"cu_seq_q": queries.offsets, "cu_seq_k": keys.offsets, **longest}


class DecoderState:
    """State of decoding token by token: keys and values of every layer, of B sentences with W hypotheses each.

    The hypotheses of a sentence share its encoder output and one cache with the keys of all of them. ``ancestry`` marks
    each hypothesis's own keys. So a choice of other parents changes only that mask and moves no key.

    Attributes:
        memory, source_lengths: the encoder's output (B, S, d_model), and int64 (B,).
        position: number of target tokens seen.
        ancestry: bool (B, W, keys), in the order in which the keys were appended.

    Examples:
        >>> config = fastattn.TransformerConfig(vocab_size=100, d_model=64, num_heads=4, d_ff=128)
        >>> model = fastattn.Transformer(config).eval()
        >>> state = model.begin(torch.randint(4, 100, (2, 9)))
        >>> with torch.no_grad():
        ...     logits = model.logits(model.step(torch.full((2, 1), config.bos_id), state))
        >>> state.position
        1
    """

    def __init__(self, memory: Tensor, source_lengths: Tensor, layers: int):
        self.memory, self.source_lengths = memory, source_lengths
        self.position = 0
        self.ancestry = torch.ones(len(memory), 1, 0, dtype=torch.bool, device=memory.device)
        self._key_positions = source_lengths.new_empty(0)
        self.self_attention = [KeyValueCache() for _ in range(layers)]
        self.cross_attention = [KeyValueCache(static=True) for _ in range(layers)]

    def advance(self, hypotheses: int) -> None:
        """Count the next token of each of the ``hypotheses``; the layers append its keys afterwards."""
        own = torch.eye(hypotheses, dtype=torch.bool, device=self.ancestry.device)
        self.ancestry = torch.cat((self.ancestry, own.expand(len(self.ancestry), -1, -1)), -1)
        self._key_positions = torch.cat(
            (self._key_positions, self._key_positions.new_full((hypotheses,), self.position))
        )
        self.position += 1

    def blocked(self, window: int) -> Tensor | None:
        """Return the keys that a hypothesis's newest token must not attend to: bool (B, 1, W, keys), or None.

        Args:
            window: number of visible positions before its own; -1: all.
        """
        if self.ancestry.shape[1] == 1 and window == -1:
            return None
        visible = self.ancestry
        if window != -1:
            visible = visible & (self._key_positions >= self.position - 1 - window)
        return ~visible[:, None]

    def select(self, sentences: Tensor, parents: Tensor) -> None:
        """Keep ``sentences``, int64 (B',), with new hypotheses that continue the old ``parents``, int64 (B', W')."""
        kept = self.ancestry[sentences]
        self.ancestry = kept.gather(1, parents[..., None].expand(-1, -1, kept.shape[2]))
        everyone = torch.arange(len(self.memory), device=sentences.device)
        if not torch.equal(sentences, everyone):
            self.memory, self.source_lengths = self.memory[sentences], self.source_lengths[sentences]
            for cache in (*self.self_attention, *self.cross_attention):
                cache.reorder(sentences)


class Transformer(nn.Module):
    """The paper's encoder-decoder: token ids in, logits out.

    Args:
        config: shape of the model.
        device, dtype: device and dtype of the parameters; use ``torch.autocast`` to compute in bfloat16.

    Examples:
        >>> model = fastattn.Transformer(fastattn.TransformerConfig(vocab_size=100, d_model=64, num_heads=4, d_ff=128))
        >>> source, target = torch.randint(4, 100, (2, 9)), torch.randint(4, 100, (2, 7))
        >>> model(source, target).shape
        torch.Size([2, 7, 100])
    """

    def __init__(self, config: TransformerConfig, device=None, dtype=None):
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise TypeError(
                f"config must be a TransformerConfig, got {type(config).__name__}: see TransformerConfig.preset"
            )
        self.config = config
        factory = {"device": device, "dtype": dtype}

        def embedding():
            return nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_id, **factory)

        self.target_embedding = embedding()
        self.source_embedding = self.target_embedding if config.tying == "all" else embedding()
        self.source_positions = _positions(config, factory)
        self.target_positions = _positions(config, factory)
        self.embedding_dropout = Dropout(config.dropout)
        self.encoder = _Stack(config, config.encoder_layers, EncoderLayer, factory)
        self.decoder = _Stack(config, config.decoder_layers, DecoderLayer, factory)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias, **factory)
        if config.tying != "none":
            self.output.weight = self.target_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters: Xavier-uniform matrices, zero biases, gains of 1.

        Embeddings are normal, scaled so that logits begin with variance 1; that of padding is zero.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        deviation = 1.0 if self.config.scale_logits else self.config.d_model**-0.5
        with torch.no_grad():
            for embedding in (self.source_embedding, self.target_embedding):
                nn.init.normal_(embedding.weight, std=deviation)
                embedding.weight[self.config.pad_id].zero_()

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dropout_sites(self) -> int:
        """Number of places where a forward pass drops elements, which is the number of rows of ``seeds``."""
        encoder, decoder = self.config.encoder_layers, self.config.decoder_layers
        return 2 + EncoderLayer.SITES * encoder + DecoderLayer.SITES * decoder

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        seeds: Tensor | None = None,
        weights: AttentionWeights | None = None,
    ) -> Tensor:
        """Compute the logits of the token after each target position.

        Args:
            source: int64 (B, S), padded on the right with ``pad_id``.
            target: int64 (B, T), beginning with ``bos_id``, padded on the right.
            source_lengths, target_lengths: int64 (B,); if not given, counted from the padding.
            seeds: int64 (``dropout_sites``, 2), one dropout seed per site, for training; if not given, drawn in one
                call from torch's default generator.
            weights: receives the attention probabilities.

        Returns:
            (B, T, vocab_size); rows at padding are not meaningful.
        """
        return self.logits(self.features(source, target, source_lengths, target_lengths, seeds=seeds, weights=weights))

    if TYPE_CHECKING:  # torch types the call of a module as Any
        __call__ = forward

    def features(self, source, target, source_lengths=None, target_lengths=None, *, seeds=None, weights=None) -> Tensor:
        """Compute the input (B, T, d_model) of the last product, for :meth:`logits` or :meth:`projection`."""
        source_lengths = self.lengths(source) if source_lengths is None else source_lengths
        target_lengths = self.lengths(target) if target_lengths is None else target_lengths
        if source.shape[0] != target.shape[0]:
            raise ValueError(f"source has {source.shape[0]} sentences but target {target.shape[0]}: they must pair up")
        sites = self._sites(seeds, source.device)
        self._check_tokens(source)
        self._check_tokens(target)
        of_source, of_target = self._rows(source, target)
        memory = self._encode(of_source, source_lengths, sites, weights)
        positions = self.target_positions(0, target.shape[1], target.device)
        x = self._embed(of_target, positions, next(sites))
        within, across = {"key_lengths": target_lengths}, {"key_lengths": source_lengths}
        return self.decoder(x, within, memory, across, sites, weights)

    def packed_features(self, source: Packed, target: Packed, *, seeds: Tensor | None = None) -> Tensor:
        """Compute :meth:`features` of packed sentences, made by ``ParallelText.batch``: (target tokens, d_model).

        ``seeds`` has the same meaning as in :meth:`forward`. A seed drops the same attention weights as for padded
        sentences. At the other sites it uses the packed row, so it drops other elements.
        """
        sites = self._sites(seeds, source.tokens.device)

        def embed(side: Packed, rows: Tensor, positions: nn.Module) -> Tensor:
            # The gradient of an embedding has the same bits on every run; the gradient of indexing has not.
            of_place = F.embedding(side.places, positions(0, side.longest, side.places.device))
            return self._embed(rows, of_place, next(sites))

        of_source, of_target = self._rows(source.tokens, target.tokens)
        x = embed(source, of_source, self.source_positions)
        memory = self.encoder(x, _between(source, source), sites, None)
        x = embed(target, of_target, self.target_positions)
        return self.decoder(x, _between(target, target), memory, _between(target, source), sites, None)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """Return the encoder's output (B, S, d_model) for source (B, S)."""
        source_lengths = self.lengths(source) if source_lengths is None else source_lengths
        self._check_tokens(source)
        rows = self.source_embedding(source)
        return self._encode(rows, source_lengths, self._sites(None, source.device), None)

    def begin(self, source: Tensor, source_lengths: Tensor | None = None) -> DecoderState:
        """Encode source (B, S) and return the state for decoding token by token with :meth:`step`."""
        source_lengths = self.lengths(source) if source_lengths is None else source_lengths
        return DecoderState(self.encode(source, source_lengths), source_lengths, self.config.decoder_layers)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Append a token to each hypothesis of ``state`` and compute its features.

        There is one hypothesis per sentence (W = 1) until :meth:`DecoderState.select` makes more.

        Args:
            tokens: int64 (B, W).
            state: receives the keys and values of the tokens.

        Returns:
            (B, W, d_model), from which :meth:`logits` computes the scores of the following token.

        Raises:
            TypeError, ValueError: ``tokens`` are not integers of this shape.
        """
        self._check_tokens(tokens)
        if tokens.shape != state.ancestry.shape[:2]:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}, expected one for each sentence and hypothesis, "
                f"{tuple(state.ancestry.shape[:2])}: DecoderState.select makes more"
            )
        positions = self.target_positions(state.position, 1, tokens.device)
        x = self._embed(self.target_embedding(tokens), positions, None)
        state.advance(tokens.shape[1])
        # The hypotheses of a sentence are the queries of one attention.
        within = {"is_causal": False, "window_size": (-1, -1), "attn_mask": state.blocked(self.config.window_size[0])}
        across = {"key_lengths": state.source_lengths}
        caches = list(zip(state.self_attention, state.cross_attention, strict=True))
        return self.decoder(x, within, state.memory, across, itertools.repeat(None), None, caches=caches)

    def logits(self, features: Tensor) -> Tensor:
        """Compute scores (..., vocab_size) of features (..., d_model).

        ``output`` is called as a module: its hooks run, and a module that replaces it computes the scores. If it is a
        linear module of torch without hooks and with torch's own ``forward``, its weight and bias are read instead.
        """
        projection = self.projection(features)
        if projection is not None:
            features, weight, bias = projection
            return F.linear(features, self._without_fixed_row(weight), bias)
        features, matrices = self._scaled(features), {}  # matrices that replace parameters during the call
        if self.fixed_id is not None and torch.is_grad_enabled():
            shared = set(self.target_embedding.parameters())
            matrices = {
                f"{path}.{name}".lstrip("."): self._without_fixed_row(parameter)
                for path, module in self.output.named_modules()  # wrappers hide their names in named_parameters()
                for name, parameter in module.named_parameters(recurse=False)
                if parameter in shared
            }
        return torch.func.functional_call(self.output, matrices, (features,)) if matrices else self.output(features)

    @property
    def fixed_id(self) -> int | None:
        """Piece whose row of the output matrix is not trained: padding if the embedding is shared, else None."""
        return None if self.config.tying == "none" else self.config.pad_id

    def projection(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return the arguments of the product that gives :meth:`logits`: input, weight and bias of ``linear``.

        Returns:
            The three tensors, or None if ``output`` must be called. It must if it is not a linear module of torch, or
            has hooks or another ``forward``.
        """
        if not is_plain_linear(self.output):
            return None
        return self._scaled(features), self.output.weight, self.output.bias

    def _scaled(self, features: Tensor) -> Tensor:
        return features * self.config.d_model**-0.5 if self.config.scale_logits else features

    def _without_fixed_row(self, matrix: Tensor) -> Tensor:
        """Return ``matrix``, (vocab_size, d_model), such that its row ``fixed_id`` receives no gradient."""
        if self.fixed_id is None or not torch.is_grad_enabled():
            return matrix
        return matrix.select_scatter(matrix[self.fixed_id].detach(), 0, self.fixed_id)

    def lengths(self, tokens: Tensor) -> Tensor:
        """Return the number of tokens before the padding in each row of (B, L): int64 (B,)."""
        self._check_tokens(tokens)
        return (tokens != self.config.pad_id).sum(1)

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens must be an int64 tensor (sentences, length), got {given}")

    def _sites(self, seeds: Tensor | None, device):
        """Return an iterator over one seed per dropout site, in the order of the forward pass."""
        rates = (self.config.dropout, self.config.attention_dropout, self.config.ffn_dropout)
        if not self.training or not any(rates):
            return itertools.repeat(None)
        if seeds is None:
            seeds = torch.randint(-(2**63), 2**63 - 1, (self.dropout_sites, 2), device=device)
        elif not isinstance(seeds, Tensor) or seeds.shape != (self.dropout_sites, 2):
            given = f"shape {tuple(seeds.shape)}" if isinstance(seeds, Tensor) else f"type {type(seeds).__name__}"
            raise ValueError(f"seeds has {given}, expected a tensor of shape {(self.dropout_sites, 2)}")
        return iter(seeds.unbind())

    def _rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the embeddings of source and target tokens, of shape (*tokens, d_model).

        If both have one embedding, it is called once, with all tokens in one dimension: each call has a gradient of the
        embedding's size.
        """
        if self.source_embedding is not self.target_embedding:
            return self.source_embedding(source), self.target_embedding(target)
        rows = self.source_embedding(torch.cat((source.flatten(), target.flatten())))
        of_source, of_target = rows.split((source.numel(), target.numel()))
        return of_source.unflatten(0, source.shape), of_target.unflatten(0, target.shape)

    def _embed(self, rows: Tensor, positions: Tensor, seed: Tensor | None) -> Tensor:
        """Return scaled rows of an embedding, with positions and dropout."""
        if self.config.scale_embeddings:
            rows = rows * self.config.d_model**0.5
        return self.embedding_dropout(rows + positions.to(rows.dtype), seed)

    def _encode(self, rows: Tensor, lengths: Tensor, sites, weights) -> Tensor:
        positions = self.source_positions(0, rows.shape[1], rows.device)
        return self.encoder(self._embed(rows, positions, next(sites)), {"key_lengths": lengths}, sites, weights)


class _Stack(nn.Module):
    """Layers, and with ``norm_first`` the norm before the first layer.

    It takes the embedded tokens and the further arguments of its layers, and returns the last layer's output.
    ``caches`` holds the caches of each layer's attentions.
    """

    def __init__(self, config: TransformerConfig, count: int, layer: type[nn.Module], factory: dict):
        super().__init__()
        self.norm = LayerNorm(config.d_model, eps=config.norm_eps, **factory) if config.norm_first else nn.Identity()
        self.layers = nn.ModuleList(layer(config, factory, is_last=number == count - 1) for number in range(count))

    def forward(self, x: Tensor, *arguments: Any, caches: list[tuple[KeyValueCache, ...]] | None = None) -> Tensor:
        x, residual = self.norm(x), x
        for number, layer in enumerate(self.layers):
            of_layer = {} if caches is None else {"caches": caches[number]}
            x, residual = layer(x, residual, *arguments, **of_layer)
        return x


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward network.

    ``within`` and, in the decoder, ``across`` are the arguments of attention that describe the ends of sentences:
    lengths if padded, offsets if packed.
    """

    SITES = 4

    def __init__(self, config: TransformerConfig, factory: dict, *, is_last: bool):
        super().__init__()
        self.is_last = is_last
        self.window_size = config.window_size
        self.self_attention = _attention(config, factory)
        self.self_attention_norm = _norm(config, factory)
        self.feed_forward = FeedForward(config, factory)
        self.feed_forward_norm = _norm(config, factory)

    def forward(self, x, residual, within, sites, weights):
        y, attention = self.self_attention(
            x, x, x, need_weights=weights is not None, average_attn_weights=False, window_size=self.window_size,
            seed=next(sites), **within,
        )  # fmt: skip
        x, residual = _add_norm(self.self_attention_norm, y, residual, next(sites))
        if weights is not None:
            weights.encoder.append(attention)
        y = self.feed_forward(x, next(sites))
        return _add_norm(self.feed_forward_norm, y, residual, next(sites), self.is_last)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, and feed-forward network.

    ``caches`` of self-attention and of the attention to the encoder's output are for decoding token by token. In that
    case, ``within`` masks the cached keys that a query must not see.
    """

    SITES = 6

    def __init__(self, config: TransformerConfig, factory: dict, *, is_last: bool):
        super().__init__()
        self.is_last = is_last
        self.window_size = (config.window_size[0], 0)
        self.self_attention = _attention(config, factory)
        self.self_attention_norm = _norm(config, factory)
        self.cross_attention = _attention(config, factory)
        self.cross_attention_norm = _norm(config, factory)
        self.feed_forward = FeedForward(config, factory)
        self.feed_forward_norm = _norm(config, factory)

    def forward(self, x, residual, within, memory, across, sites, weights, caches=(None, None)):
        need = {"need_weights": weights is not None, "average_attn_weights": False}
        own = {"is_causal": True, "window_size": self.window_size, "cache": caches[0], **within, **need}
        y, self_weights = self.self_attention(x, x, x, seed=next(sites), **own)
        x, residual = _add_norm(self.self_attention_norm, y, residual, next(sites))
        y, cross_weights = self.cross_attention(x, memory, memory, seed=next(sites), cache=caches[1], **across, **need)
        x, residual = _add_norm(self.cross_attention_norm, y, residual, next(sites))
        if weights is not None:
            weights.decoder.append(self_weights)
            weights.cross.append(cross_weights)
        y = self.feed_forward(x, next(sites))
        return _add_norm(self.feed_forward_norm, y, residual, next(sites), self.is_last)


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (section 3.3)."""

    def __init__(self, config: TransformerConfig, factory: dict):
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff, **factory)
        self.dropout = Dropout(config.ffn_dropout)
        self.outer = nn.Linear(config.d_ff, config.d_model, **factory)

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        return self.outer(self.dropout(F.relu(self.inner(x)), seed))


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle (section 3.5), of any length.

    The table is float32, computed in float64. It is made on the device of its first use, and grows by doubling.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model
        self.table = torch.empty(0, d_model)

    def sinusoids(self, length: int, device=None) -> Tensor:
        """Return the first ``length`` rows: float32 (length, d_model)."""
        position = torch.arange(length, device=device, dtype=torch.float64)
        frequency = 10000.0 ** (-torch.arange(0, self.d_model, 2, device=device, dtype=torch.float64) / self.d_model)
        angle = torch.outer(position, frequency)
        return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()

    def forward(self, start: int, length: int, device: torch.device) -> Tensor:
        """Return rows ``start`` to ``start + length``: (length, d_model)."""
        end = start + length
        if end > self.table.shape[0] or device != self.table.device:
            self.table = self.sinusoids(max(512, 2 * end), device)
        return self.table[start:end]


class LearnedPositions(nn.Module):
    """One trained vector per position, for at most ``max_positions`` positions."""

    def __init__(self, max_positions: int, d_model: int, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, d_model, device=device, dtype=dtype))

    def forward(self, start: int, length: int, device: torch.device) -> Tensor:
        """Return rows ``start`` to ``start + length``: (length, d_model), on the device of the parameter."""
        weight = self.weight
        if start + length > weight.shape[0]:
            raise InputError(
                f"a sequence of {start + length} tokens is longer than max_positions={weight.shape[0]}: "
                "shorten it, or use sinusoidal positions"
            )
        return weight[start : start + length]


def _positions(config: TransformerConfig, factory: dict) -> nn.Module:
    if config.positions == "learned":
        return LearnedPositions(config.max_positions, config.d_model, **factory)
    return SinusoidalPositions(config.d_model)


def _attention(config: TransformerConfig, factory: dict) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model, config.num_heads, dropout=config.attention_dropout, bias=config.attention_bias,
        batch_first=True, head_dim=config.head_dim, value_head_dim=config.value_head_dim, **factory,
    )  # fmt: skip


def _norm(config: TransformerConfig, factory: dict) -> DropoutAddLayerNorm:
    return DropoutAddLayerNorm(
        config.d_model, p=config.dropout, eps=config.norm_eps, prenorm=config.norm_first, **factory
    )


def _add_norm(
    norm: DropoutAddLayerNorm, output: Tensor, residual: Tensor, seed, is_last: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (input of the next sub-layer, residual stream) after a sub-layer's ``output``.

    With ``norm_first``, the input of the next sub-layer has the dtype of ``output``, because only matrix products read
    it. After the last sub-layer it is the stack's output and has the stream's dtype.
    """
    if norm.prenorm:
        return norm(output, residual, seed, out_dtype=None if is_last else output.dtype)
    x = norm(output, residual, seed)
    return x, x
