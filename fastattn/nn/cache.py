"""The cache of keys and values of earlier positions, for decoding."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from fastattn.ops import check


class KeyValueCache:
    """The keys and values that one attention layer has seen, for decoding token by token. It holds no gradients.

    Args:
        max_length: maximum positions; without it, the cache grows as needed.
        static: keep the keys and values of the first call and ignore later ones, for cross-attention to a fixed memory.

    Raises:
        ValueError: ``max_length`` is not an integer of at least 1.

    Examples:
        >>> attention = fastattn.MultiHeadAttention(64, 4, batch_first=True).eval()
        >>> cache = fastattn.KeyValueCache()
        >>> with torch.no_grad():
        ...     for token in torch.randn(5, 1, 1, 64):
        ...         out, _ = attention(token, token, token, need_weights=False, cache=cache)
        >>> cache.length
        5
    """

    def __init__(self, max_length: int | None = None, *, static: bool = False) -> None:
        if max_length is not None and (not isinstance(max_length, numbers.Integral) or max_length < 1):
            raise ValueError(f"KeyValueCache: max_length must be an integer of at least 1, got {max_length!r}")
        self.max_length = max_length
        self.static = static
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H, L, E) keys and (B, H, L, Ev) values; return all so far, as views.

        Raises:
            TypeError: not floating-point tensors.
            ValueError: other sizes, dtype or device than before, more positions than ``max_length``, or a gradient
                wanted.
        """
        keys, values = self._stored(key, value)
        self.length = keys.size(2)
        return keys, values

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`append`. The new positions count only after ``length`` is raised."""
        if self.static and self.length:
            return self.contents()
        for label, tensor in (("key", key), ("value", value)):
            check.float_tensor("KeyValueCache", label, tensor)
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "KeyValueCache: key and value must be (B, H, L, E) and (B, H, L, Ev), "
                f"got {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("KeyValueCache: it holds no gradients; decode under torch.no_grad() or inference_mode()")
        if self.length == 0:  # drop storage that a refused call has left
            self._keys = self._values = None
        if self._keys is not None and self._values is not None:
            for label, new, old in (("key", key, self._keys), ("value", value, self._values)):
                kinds = [(*t.shape[:2], "L", t.size(3)) for t in (old, new)]
                if kinds[0] != kinds[1] or new.dtype != old.dtype or new.device != old.device:
                    raise ValueError(
                        f"KeyValueCache: {label} must be {kinds[0]} of {old.dtype} on {old.device} as before, got "
                        f"{tuple(new.shape)} of {new.dtype} on {new.device}; use reset() for a new batch"
                    )
        needed = self.length + key.size(2)
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(f"KeyValueCache: max_length is {self.max_length}, {needed} positions are needed")
        self._keys = self._reserve(self._keys, key, needed)
        self._values = self._reserve(self._values, value, needed)
        self._keys[:, :, self.length : needed] = key
        self._values[:, :, self.length : needed] = value
        return self._keys[:, :, :needed], self._values[:, :, :needed]

    def _reserve(self, store: Tensor | None, like: Tensor, needed: int) -> Tensor:
        capacity = 0 if store is None else store.size(2)
        if store is not None and needed <= capacity and not _is_frozen(store):
            return store
        size = needed if self.static else max(needed, self.max_length or max(2 * capacity, 64))
        grown = like.new_empty(*like.shape[:2], size, like.size(3))
        if store is not None:
            grown[:, :, : self.length] = store[:, :, : self.length]
        return grown

    def contents(self) -> tuple[Tensor, Tensor]:
        """The (B, H, length, E) keys and (B, H, length, Ev) values, as views.

        Raises:
            ValueError: nothing was appended yet.
        """
        if self.length == 0 or self._keys is None or self._values is None:
            raise ValueError("KeyValueCache: it is empty; append keys and values first")
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def reorder(self, index: Tensor) -> None:
        """Keep the batch entries ``index``, (B',) integers, in that order.

        Entries that keep their place are copied only if B' exceeds the batch or the storage cannot be written to.

        Raises:
            TypeError, ValueError: ``index`` is not such a tensor, or names an entry that the cache does not have.
        """
        if not isinstance(index, Tensor) or index.dtype not in check.INTEGERS:
            kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"KeyValueCache: index must be a Tensor of integers, got {kind}")
        if index.dim() != 1:
            raise ValueError(f"KeyValueCache: index must have one dimension, got shape {tuple(index.shape)}")
        if self.length == 0 or self._keys is None or self._values is None:
            return
        batch = len(self._keys)
        if check.is_readable(index) and len(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise ValueError(f"KeyValueCache: index must be within [0, {batch}), got {index.tolist()}")
        index = index.to(torch.int64)
        moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
        self._keys = self._moved(self._keys, index, moved)
        self._values = self._moved(self._values, index, moved)

    def _moved(self, store: Tensor, index: Tensor, moved: Tensor) -> Tensor:
        if len(index) > len(store) or _is_frozen(store):
            return store.index_select(0, index)
        if len(moved):
            used = store[:, :, : self.length]
            used[moved] = used[index[moved]]
        return store[: len(index)]

    def reset(self) -> None:
        """Forget everything."""
        self.length, self._keys, self._values = 0, None, None


def _is_frozen(store: Tensor) -> bool:
    """Return whether writing to the storage is forbidden: it was made under ``inference_mode``, which has ended.

    False in compiled code.
    """
    return not torch.compiler.is_compiling() and store.is_inference() and not torch.is_inference_mode_enabled()
