// A tile of scores (kBlockN, kBlockM), float32: its visible part, its mask and its dropout.
#pragma once
#include "dropout_mask.h"
#include "mask.h"
#include "pack.h"

namespace fastattn {
namespace {

// The keys [key, key + keys) and the queries [query, query + queries) of a sequence; `vectors` vectors hold the
// queries.
struct Tile {
  int64_t query, key;
  int queries, keys, vectors;
  Coverage window, mask;  // by the window and by the mask, each by itself; `window` is empty if no pair is left

  Tile(const Attention& a, const Sequence& s, const BlockMask& block_mask, int64_t head, int64_t first_query,
       int64_t first_key)
      : query(first_query), key(first_key) {
    queries = (int)min(kBlockM, s.seqlen_q - query);
    vectors = (queries + kLanes - 1) / kLanes;
    const int64_t last = query + queries - 1, end = key + kBlockN;
    keys = (int)max(min(end, s.end(last)) - key, 0);
    window = Coverage::empty, mask = Coverage::full;
    if (a.mask.data && keys > 0) {
      const int64_t tile = block_mask.tile(a.mask, s.index, head, query, key);
      mask = block_mask.coverage[tile];
      keys = min(keys, block_mask.count[tile]);
    }
    if (keys == 0 || key + keys <= s.begin(query)) return;
    const bool full = s.begin(last) <= key && key + keys <= s.end(query);
    window = full ? Coverage::full : Coverage::partial;
  }

  bool empty() const { return window == Coverage::empty; }

  // Whether every pair is visible and no float mask is added.
  bool full(const Attention& a) const {
    return window == Coverage::full && mask == Coverage::full && (!a.mask.data || a.mask.dtype == Dtype::boolean);
  }
};

// Transpose a 64 x 64 matrix of bits.
FASTATTN_INLINE void transpose_bits(uint64_t word[kWord]) {
  uint64_t low = 0xffffffffu;
  for (int width = kWord / 2; width > 0; width /= 2, low ^= low << width)
    for (int base = 0; base < kWord; base += 2 * width)
      for (int k = base; k < base + width; ++k) {
        const uint64_t swap = (word[k] >> width ^ word[k + width]) & low;
        word[k] ^= swap << width;
        word[k + width] ^= swap;
      }
}

// Return a bit per byte: 1 if the byte is not 0. torch's bool may hold other values than 0 and 1.
FASTATTN_INLINE uint64_t pack_bits(const uint8_t* byte, int n) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kLow = 0x7f * kOnes;
  uint64_t bits = 0;
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    memcpy(&eight, byte + i, 8);
    eight = (((eight & kLow) + kLow) | eight) >> 7 & kOnes;
    bits |= (eight * 0x0102040810204080u >> 56) << i;
  }
  for (; i < n; ++i) bits |= (uint64_t)(byte[i] != 0) << i;
  return bits;
}

// A worker's buffers for the mask and the dropout of a tile.
struct MaskBuffers {
  uint64_t* visible;      // (kBlockN). Bit i of word j: query i of the panel sees key j.
  uint64_t* kept;         // (kBlockN). Bit i of word j: dropout keeps the pair.
  uint8_t* keys;          // (kBlockN). Byte j: some query sees key j.
  uint8_t* queries;       // (kBlockM). Byte i: query i sees some key.
  float *rows, *columns;  // (kBlockM, kBlockN) and (kBlockN, kBlockM): a float mask, and its transpose.

  MaskBuffers() = default;

  MaskBuffers(const Attention& a, Arena* arena) {
    const bool floats = a.mask.data && a.mask.dtype != Dtype::boolean && a.mask.rows > 1;
    arena->take(kBlockN, &visible, &kept, &keys);
    arena->take(kBlockM, &queries);
    arena->take(floats ? kBlockM * kBlockN : 0, &rows);
    arena->take(floats ? kBlockM * kBlockN : kBlockN, &columns);
  }
};

// Turn products into scores in place: scale them, add a float mask, and write -inf for keys that a query does not see.
inline void mask_scores(const Attention& a, const Sequence& s, int64_t head, const Tile& t, const MaskBuffers& buffers,
                        float* score) {
  uint64_t* visible = buffers.visible;
  // Lanes beyond the queries see nothing, because a mask adds arbitrary values to them.
  const uint64_t queries = ~(uint64_t)0 >> (kWord - t.queries);
  for (int j = 0; j < t.keys; ++j) {
    visible[j] = queries;
    if (t.window == Coverage::full) continue;
    const int64_t first = max(s.visibility.first_query(t.key + j) - t.query, 0);
    const int64_t last = min(s.visibility.last_query(t.key + j) - t.query, kWord - 1);
    visible[j] = first > last ? 0 : queries & ~(uint64_t)0 >> (kWord - 1 - last) & ~(uint64_t)0 << first;
  }
  const Mask& m = a.mask;
  const bool masked = m.data && (t.mask == Coverage::partial || m.dtype != Dtype::boolean);
  const bool floats = masked && m.dtype != Dtype::boolean;
  if (masked && m.rows == 1) {
    const int64_t offset = mask_offset(m, s.index, head, 0, t.key);
    uint8_t buffer[kBlockN];
    const uint8_t* bytes = visible_row(m, offset, t.keys, buffer);
    for (int j = 0; j < t.keys; ++j)
      if (!bytes[j]) visible[j] = 0;
    if (floats) load_mask_row(m, offset, t.keys, buffers.columns);
  } else if (floats) {
    for (int i = 0; i < t.queries; ++i)
      load_mask_row(m, mask_offset(m, s.index, head, t.query + i, t.key), t.keys, buffers.rows + i * kBlockN);
    transpose(buffers.rows, kBlockN, t.vectors * kLanes, (int)round_up(t.keys, kLanes), buffers.columns, kBlockM);
  } else if (masked) {
    for (int part = 0; part < t.keys; part += kWord) {
      const int n = min(kWord, t.keys - part);
      uint64_t word[kWord];
      for (int i = 0; i < kWord; ++i) {
        word[i] = 0;
        if (i >= t.queries) continue;
        uint8_t buffer[kBlockN];
        word[i] = pack_bits(visible_row(m, mask_offset(m, s.index, head, t.query + i, t.key + part), n, buffer), n);
      }
      transpose_bits(word);
      for (int j = 0; j < n; ++j) visible[part + j] &= word[j];
    }
  }
  for (int j = 0; j < t.keys; ++j)
    for (int v = 0; v < t.vectors; ++v) {
      float* at = score + j * kBlockM + v * kLanes;
      vf x = rounded(load(at) * a.scale);
      uint32_t bits = (uint32_t)(visible[j] >> (v * kLanes)) & first_lanes(kLanes);
      if (floats) {
        const vf value = m.rows == 1 ? splat(buffers.columns[j]) : load(buffers.columns + j * kBlockM + v * kLanes);
        x = select(value == splat(-kInfinity), value, max(splat(kLowest), x + value));
      }
      store(at, select_bits(bits, x, splat(-kInfinity)));
    }
}

// Compute kept[j], whose bit i says that dropout keeps query i, key j of the tile.
inline void draw_dropout(const Attention& a, const Sequence& s, int64_t head, const Tile& t, uint64_t* kept) {
  const Seed seed = make_seed(a.seed);
  const uint32_t z = (uint32_t)(s.index * a.num_heads + head);
  for (int column = 0; column < t.keys; column += kTileColumns) {
    const int n = min(kTileColumns, t.keys - column);
    for (int j = 0; j < n; ++j) kept[column + j] = 0;
    for (int row = 0; row < t.queries; row += kTileRows) {
      uint32_t keep[kTileColumns];
      keep_tile_columns(seed, a.threshold, z, (t.query + row) / kTileRows, (t.key + column) / kTileColumns, n, keep);
      for (int j = 0; j < n; ++j) kept[column + j] |= (uint64_t)keep[j] << row;
    }
  }
}

}  // namespace
}  // namespace fastattn
