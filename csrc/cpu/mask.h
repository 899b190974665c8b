// The mask: the tiles and keys that it excludes, and reads of its rows.
#pragma once
#include "sequence.h"

namespace fastattn {
namespace {

// Coverage of a tile: no pair is visible, some pairs are, all pairs are.
enum class Coverage : uint8_t { empty, partial, full };

// The coverage of every tile by the mask, and the keys that no query of a head sees. It is computed once, before the
// kernel. A tile ends with the last key that the mask shows to any of its queries.
struct BlockMask {
  int64_t panels, blocks, keys;
  Coverage* coverage;  // (mask.batches * mask.heads, panels, blocks).
  uint8_t* count;      // (mask.batches * mask.heads, panels, blocks): keys of the tile.
  uint8_t* visible;    // (mask.batches * mask.heads, keys): 1 if some query sees the key.
  uint8_t* hidden;     // (mask.batches * mask.heads, blocks): 1 if the block has a key that no query sees.

  BlockMask(const Attention& a, Arena* arena) {
    const bool none = a.mask.data == nullptr;
    const int64_t masks = none ? 0 : a.mask.batches * a.mask.heads;
    panels = none || a.mask.rows == 1 ? 1 : ceil_div(a.seqlen_q, kBlockM);
    keys = a.seqlen_k;
    blocks = ceil_div(keys, kBlockN);
    arena->take(masks * panels * blocks, &coverage, &count);
    arena->take(masks * keys, &visible);
    arena->take(masks * blocks, &hidden);
  }

  static int64_t index(const Mask& m, int64_t batch, int64_t head) {
    return (m.batches == 1 ? 0 : batch) * m.heads + (m.heads == 1 ? 0 : head);
  }

  int64_t tile(const Mask& m, int64_t batch, int64_t head, int64_t query, int64_t key) const {
    return (index(m, batch, head) * panels + (panels == 1 ? 0 : query / kBlockM)) * blocks + key / kBlockN;
  }

  // Return which keys of a block are seen, as 1 or 0 in `buffer` (kBlockN), or null if all are. Some query must see the
  // key through the window, and some query of the heads through the mask. Unseen keys may hold NaN.
  const uint8_t* visible_keys(const Attention& a, const Sequence& s, int64_t first_head, int64_t end_head, int64_t key,
                              int count, uint8_t* buffer) const {
    const int64_t begin = s.begin(0) - key, end = s.end(s.seqlen_q - 1) - key;
    bool all = begin <= 0 && count <= end;
    if (a.mask.data) {
      bool hides_any = true;
      for (int64_t head = first_head; head < end_head; ++head)
        hides_any &= hidden[index(a.mask, s.index, head) * blocks + key / kBlockN];
      all &= !hides_any;
    }
    if (all) return nullptr;
    for (int j = 0; j < count; ++j) {
      buffer[j] = a.mask.data == nullptr;
      for (int64_t head = first_head; a.mask.data && head < end_head; ++head)
        buffer[j] |= visible[index(a.mask, s.index, head) * keys + key + j];
      if (j < begin || j >= end) buffer[j] = 0;
    }
    return buffer;
  }

  void read(const Attention& a, const Parallel& parallel, int workers) const;
};

// Load n values of a row of a float mask as float32. It is not inline, because it has a loop per dtype.
__attribute__((noinline)) inline void load_mask_row(const Mask& m, int64_t offset, int n, float* to) {
  with_type(m.dtype, [&](auto type) {
    const decltype(type)* from = (const decltype(type)*)m.data + offset;
    if (m.column != 1) {
      for (int i = 0; i < n; ++i) to[i] = load(from + i * m.column, 1)[0];
      return;
    }
    for_each_vector(n, [&](int64_t i, int lanes) { store(to + i, load(from + i, lanes), lanes); });
  });
}

// Return n values of a row of any mask as bytes, in place or in `buffer` (kBlockN). A visible key's byte is not 0.
FASTATTN_INLINE const uint8_t* visible_row(const Mask& m, int64_t offset, int n, uint8_t* buffer) {
  if (m.dtype == Dtype::boolean) {
    const uint8_t* from = (const uint8_t*)m.data + offset;
    if (m.column == 1) return from;
    for (int i = 0; i < n; ++i) buffer[i] = from[i * m.column];
    return buffer;
  }
  float value[kBlockN];
  load_mask_row(m, offset, n, value);
  for (int i = 0; i < n; ++i) buffer[i] = value[i] != -kInfinity;
  return buffer;
}

// Add the mask and write -inf to the scores, scaled already, of one query and the keys [key, key + keys).
inline void mask_row(const Attention& a, const Sequence& s, int64_t head, int64_t query, int64_t key, int keys,
                     float* score) {
  const Mask& m = a.mask;
  const int64_t offset = mask_offset(m, s.index, head, query, key);
  if (m.data && m.dtype == Dtype::boolean) {
    uint8_t buffer[kBlockN];
    const uint8_t* visible = visible_row(m, offset, keys, buffer);
    for (int j = 0; j < keys; ++j) score[j] = visible[j] ? score[j] : -kInfinity;
  } else if (m.data) {
    float value[kBlockN];
    load_mask_row(m, offset, keys, value);
    for (int j = 0; j < keys; ++j)
      score[j] = value[j] == -kInfinity ? -kInfinity : kLowest > score[j] + value[j] ? kLowest : score[j] + value[j];
  }
  const int first = (int)max(min(s.begin(query) - key, keys), 0);
  const int last = (int)max(min(s.end(query) - key, keys), 0);
  for (int j = 0; j < first; ++j) score[j] = -kInfinity;
  for (int j = last; j < keys; ++j) score[j] = -kInfinity;
}

void BlockMask::read(const Attention& a, const Parallel& parallel, int workers) const {
  const Mask& m = a.mask;
  if (!m.data) return;
  parallel_for(parallel, workers, m.batches * m.heads, [&](int64_t index, int) {
    memset(visible + index * keys, 0, (size_t)keys);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t key = block * kBlockN;
      const int n = (int)min(kBlockN, keys - key);
      uint8_t* columns = visible + index * keys + key;
      for (int64_t panel = 0; panel < panels; ++panel) {
        uint8_t some[kBlockN] = {}, every[kBlockN];
        memset(every, 1, sizeof every);
        const int64_t end = min(m.rows, (panel + 1) * kBlockM);
        for (int64_t row = panel * kBlockM; row < end; ++row) {
          uint8_t buffer[kBlockN];
          const uint8_t* bytes = visible_row(m, mask_offset(m, index / m.heads, index % m.heads, row, key), n, buffer);
          for (int i = 0; i < n; ++i) {
            const bool shown = bytes[i] != 0;
            some[i] |= shown;
            every[i] &= shown;
          }
        }
        for (int i = 0; i < n; ++i) columns[i] |= some[i];
        int last = n;
        while (last > 0 && !some[last - 1]) --last;
        const bool all = memchr(every, 0, (size_t)last) == nullptr;
        const int64_t tile = (index * panels + panel) * blocks + block;
        count[tile] = (uint8_t)last;
        coverage[tile] = last == 0 ? Coverage::empty : all ? Coverage::full : Coverage::partial;
      }
      hidden[index * blocks + block] = memchr(columns, 0, (size_t)n) != nullptr;
    }
  });
}

}  // namespace
}  // namespace fastattn
