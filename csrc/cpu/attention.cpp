// Attention, forward: panels of queries go over the keys with a running maximum and sum (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
#include <math.h>

#include "attention_tile.h"
#include "kernels.h"

namespace fastattn {
namespace {

constexpr int kTaskPanels = 128 / kPanel;  // at most; they share what is packed of the keys and values

// Of rows (batch, head, query) and one range of keys: the output before it is divided by the sum.
struct Part {
  float *out, *reference, *sum;
};

// The operands and the output of a task to come, brought into the cache a few lines at a time while this one computes:
// short sequences are read once, too little at a time for the processor's own prefetching.
struct Ahead {
  static constexpr int64_t kLine = 64;

  struct Operand {
    const char* data;
    int64_t stride, rows, bytes;  // bytes: of a row
  } operand[4];
  int left = 0;  // operands
  int64_t row = 0, byte = 0;

  void fetch(int64_t lines) {
    while (lines > 0 && left > 0) {
      const Operand& o = operand[left - 1];
      const int64_t count = smaller(lines, divide_up(o.bytes - byte, kLine));
      const char* from = o.data + row * o.stride + byte;
      for (int64_t i = 0; i < count; ++i) __builtin_prefetch(from + i * kLine, 0, 2);
      lines -= count;
      byte += count * kLine;
      if (byte < o.bytes) return;
      byte = 0;
      if (++row < o.rows) continue;
      row = 0;
      --left;
    }
  }
};

template <class T>
struct Forward {
  using Unit = typename UnitOf<T>::Unit;
  static constexpr bool kPairs = kElements<Unit> == 2, kColumns = !kTiles<Unit>;

  const Attention& a;
  MaskSummary mask;
  int64_t task_queries;  // of all panels of a task
  int64_t blocks, tasks, splits;
  int depth, width;  // units of a row of keys that are summed over; rounded up to vectors
  int value_width;   // elements in a row of values, rounded up to vectors
  bool in_place;     // rows of keys are read where they lie
  bool few;          // elements of a row are lanes, not queries
  Part parts;        // (splits, batch, heads, queries); used where splits > 1

  struct Panel {
    Unit* query;                   // (width, kPanel)
    float *out, *reference, *sum;  // (value_width, kPanel), (kPanel), (kPanel)
  };

  struct FewRows {
    int width;                        // of a row of queries
    float *query, *score, *out;       // (rows, width), (rows, kBlock), (rows, value_width)
    float *reference, *factor, *sum;  // (rows)
  };

  struct Scratch {
    Unit *rows, *key, *value, *pairs;
    float *score, *factor, *out;
    MaskBuffers mask;
    Panel panel[kTaskPanels];
    FewRows few;
    Part total;  // of all stretches of keys, for each query of the task; where there are more than one
  };

  Forward(const Attention& problem, Arena* arena) : a(problem), mask(problem, arena) {
    task_queries = kTaskPanels * kPanel;
    while (task_queries > kPanel && a.batch * a.heads * divide_up(a.queries, task_queries) < kTasks) task_queries /= 2;
    blocks = divide_up(a.queries, task_queries);
    const bool fills_tiles = kTiles<Unit> && a.keys >= 2 * kLanes;  // then panels are faster from fewer queries on
    few = a.queries <= (fills_tiles ? kFewQueries / 2 : kFewQueries) && a.threshold == 0;
    tasks = few ? a.batch * a.key_heads : a.batch * a.heads * blocks;
    // Few tasks on many keys: the keys are split, and the parts merged in order.
    splits = smaller(kTasks / greater(tasks, (int64_t)1), a.keys / kSplitKeys);
    splits = greater(splits, (int64_t)1);
    depth = terms_of<Unit>(a.depth);
    width = (int)round_up(depth, kLanes);
    value_width = (int)round_up(a.value_depth, kLanes);
    in_place = UnitOf<T>::in_memory && depth * kElements<Unit> == a.depth;
    const int64_t rows = splits > 1 ? splits * a.batch * a.heads * a.queries : 0;
    parts = take_part(rows, arena);
  }

  Part take_part(int64_t rows, Arena* arena) const {
    return {arena->take<float>(rows * value_width), arena->take<float>(rows), arena->take<float>(rows)};
  }

  Scratch take_scratch(Arena* arena) const {
    Scratch s = {};
    if (few) {
      const int64_t rows = group_of(a) * a.queries, columns = round_up(a.depth, kLanes);
      s.few = {(int)columns,
               arena->take<float>(rows * columns),
               arena->take<float>(rows * kBlock),
               arena->take<float>(rows * value_width),
               arena->take<float>(rows),
               arena->take<float>(rows),
               arena->take<float>(rows)};
      s.total = take_part(a.keys > kStretch ? rows : 0, arena);
      return s;
    }
    s.score = arena->take<float>(kBlock * kPanel);
    s.rows = arena->take<Unit>(kPanel * width);
    s.key = arena->take<Unit>(in_place ? 0 : kBlock * width);
    s.value = arena->take<Unit>(kBlock * value_width);
    s.pairs = arena->take<Unit>(kTiles<Unit> ? kBlock / 2 * value_width : 0);
    s.factor = arena->take<float>(kPanel);
    s.out = arena->take<float>(kPanel * value_width);
    s.mask = MaskBuffers(a, arena);
    for (Panel& p : s.panel)
      p = {arena->take<Unit>(kPanel * width), arena->take<float>(kPanel * value_width), arena->take<float>(kPanel),
           arena->take<float>(kPanel)};
    s.total = take_part(a.keys > kStretch ? kTaskPanels * kPanel : 0, arena);
    return s;
  }

  void start(const Sequence& s, int64_t head, int64_t query, const Scratch& scratch, const Panel& panel) const {
    const int count = (int)smaller((int64_t)kPanel, s.queries - query), padded = (int)round_up(count, kLanes);
    const T* from = row_pointer<T>(a.query, s.index, head, s.first_query + query);
    const int64_t stride = a.query.row * (int64_t)sizeof(T);
    if (in_place && count == padded && depth == width && stride % (int64_t)sizeof(Unit) == 0)
      return transpose((const Unit*)from, stride / (int64_t)sizeof(Unit), padded, width, panel.query, kPanel);
    for (int i = 0; i < padded; ++i) {
      Unit* row = scratch.rows + i * width;
      if (i < count)
        pack_row(from + i * a.query.row, a.depth, row, width);
      else
        clear_row(row, width);
    }
    transpose(scratch.rows, width, padded, width, panel.query, kPanel);
  }

  // The output is not touched: the first tile writes it.
  void clear(const Panel& panel) const {
    clear_row(panel.sum, kPanel);
    for (int i = 0; i < kPanel; ++i) panel.reference[i] = -kInfinity;
  }

  Matrix pack_key(const Sequence& s, int64_t head, int64_t key, int keys, const Scratch& scratch) const {
    const T* from = row_pointer<T>(a.key, s.index, head, s.first_key + key);
    if (in_place) return {(const char*)from, a.key.row * (int64_t)sizeof(T)};
    for (int j = 0; j < keys; ++j) pack_row(from + j * a.key.row, a.depth, scratch.key + j * width, width);
    return {(const char*)scratch.key, width * 4};
  }

  // Keys that are hidden from all queries may hold anything, and 0 times anything is not 0: they become 0.
  Matrix pack_value(const Sequence& s, int64_t head, int64_t key_head, int64_t key, int keys,
                    const Scratch& scratch) const {
    const T* from = row_pointer<T>(a.value, s.index, key_head, s.first_key + key);
    const uint8_t* seen = mask.seen_keys(a, s, head, head + 1, key, keys, scratch.mask.visible);
    if constexpr (kPairs) {
      pack_left(from, a.value.row, keys, a.value_depth, scratch.value, value_width, seen, scratch.pairs);
      if (!kColumns) return {(const char*)scratch.value, kBlock / 2 * sizeof(Unit)};
    } else {
      if (UnitOf<T>::in_memory && !seen) return {(const char*)from, a.value.row * (int64_t)sizeof(T)};
      for (int j = 0; j < keys; ++j) {
        if (!seen || seen[j])
          pack_row(from + j * a.value.row, a.value_depth, scratch.value + j * value_width, value_width);
        else
          clear_row(scratch.value + j * value_width, value_width);
      }
    }
    return {(const char*)scratch.value, value_width * 4};
  }

  // Scores to exp(score - reference), as units, with the new reference; *factor is what the old sums are worth.
  template <bool dropout>
  FASTATTN_INLINE void softmax(const Tile& t, const Scratch& scratch, const Panel& panel) const {
    const uint64_t* kept = scratch.mask.kept;
    for (int v = 0; v < t.vectors; ++v) {
      float* score = scratch.score + v * kLanes;
      const vf before = load(panel.reference + v * kLanes);
      vf top[4] = {before, before, before, before};
      int j = 0;
      for (; j + 4 <= t.keys; j += 4)
        for (int i = 0; i < 4; ++i) top[i] = max(load(score + (j + i) * kPanel), top[i]);
      for (; j < t.keys; ++j) top[0] = max(load(score + j * kPanel), top[0]);
      top[0] = max(max(top[0], top[1]), max(top[2], top[3]));
      store(panel.reference + v * kLanes, top[0]);
      // A query that has seen no key yet is measured from 0.
      const vf reference = select(top[0] == splat(-kInfinity), vf{}, top[0]);
      const vf factor = exp2((before - reference) * kLog2e);
      store(scratch.factor + v * kLanes, factor);
      vf sum[2] = {};
      const auto probability = [&](int key, vf* total) {
        const vf p = exp2((load(score + key * kPanel) - reference) * kLog2e);
        *total += p;
        return dropout ? keep_bits((uint32_t)(kept[key] >> (v * kLanes)) & first_lanes(kLanes), p) : p;
      };
      for (j = 0; j + 2 <= t.keys; j += 2) {
        const vf even = probability(j, &sum[0]), odd = probability(j + 1, &sum[1]);
        if constexpr (kPairs) {
          store(score + j / 2 * kPanel, make_pairs(even, odd, Unit{}));
        } else {
          store(score + j * kPanel, even);
          store(score + (j + 1) * kPanel, odd);
        }
      }
      if (j < t.keys) {
        const vf last = probability(j, &sum[0]);
        if constexpr (kPairs)
          store(score + j / 2 * kPanel, make_pairs(last, vf{}, Unit{}));
        else
          store(score + j * kPanel, last);
      }
      for (int k = units_of<Unit>(t.keys); k < terms_of<Unit>(t.keys); ++k) store(score + k * kPanel, vf{});
      store(panel.sum + v * kLanes, fma(load(panel.sum + v * kLanes), factor, sum[0] + sum[1]));
    }
  }

  // Of the task `index`, where it is one of many short ones.
  Ahead ahead(int64_t index) const {
    Ahead next;
    constexpr int64_t kMost = 128 << 10;
    const int64_t key_row = a.depth * (int64_t)sizeof(T), value_row = a.value_depth * (int64_t)sizeof(T);
    if (index >= tasks || blocks > 1 || splits > 1 || a.keys * (key_row + value_row) > kMost) return next;
    const int64_t head = index % a.heads, key_head = head / group_of(a);
    const Sequence s = find_sequence(a, index / a.heads);
    if (s.queries <= 0 || s.keys <= 0) return next;
    const auto of = [&](const Heads& heads, int64_t h, int64_t first, int64_t rows, int64_t bytes) {
      const char* data = (const char*)row_pointer<T>(heads, s.index, h, first);
      const int64_t stride = heads.row * (int64_t)sizeof(T);
      return stride == bytes ? Ahead::Operand{data, 0, 1, rows * bytes} : Ahead::Operand{data, stride, rows, bytes};
    };
    next.operand[3] = of(a.query, head, s.first_query, s.queries, key_row);
    next.operand[2] = of(a.key, key_head, s.first_key, s.keys, key_row);
    next.operand[1] = of(a.value, key_head, s.first_key, s.keys, value_row);
    next.operand[0] = of(a.out, head, s.first_query, s.queries, value_row);
    next.left = 4;
    return next;
  }

  // product(first row, rows) for all rows, a few at a time while there is something to fetch between them.
  template <class Product>
  FASTATTN_INLINE void fetching(Ahead* next, int rows, const Product& product) const {
    constexpr int kRows = kTiles<Unit> ? 2 * kLanes : 2 * kMicroRows, kLines = 96;
    for (int row = 0, count; row < rows; row += count) {
      next->fetch(kLines);
      count = next->left ? smaller(kRows, rows - row) : rows - row;
      product(row, count);
    }
  }

  void step(const Sequence& s, int64_t head, const Tile& t, Matrix key, Matrix value, const Scratch& scratch,
            const Panel& panel, bool first, Ahead* next) const {
    fetching(next, t.keys, [&](int row, int rows) {
      product<Unit, false, Start::zero>(t.vectors, rows, depth, key.data + row * key.stride, key.stride, panel.query,
                                        kPanel, scratch.score + row * kPanel, kPanel, nullptr, a.scale);
    });
    if (!t.whole(a)) mask_scores(a, s, head, t, scratch.mask, scratch.score);
    if (a.threshold) {
      draw_dropout(a, s, head, t, scratch.mask.kept);
      softmax<true>(t, scratch, panel);
    } else {
      softmax<false>(t, scratch, panel);
    }
    const int terms = terms_of<Unit>(t.keys);
    const Unit* probability = (const Unit*)scratch.score;
    fetching(next, kColumns ? a.value_depth : value_width, [&](int row, int rows) {
      const char* left = value.data + row * (kColumns ? (int64_t)sizeof(Unit) : value.stride);
      float* out = panel.out + row * kPanel;
      if (first)
        product<Unit, kColumns, Start::zero>(t.vectors, rows, terms, left, value.stride, probability, kPanel, out,
                                             kPanel, nullptr, 1.0f);
      else
        product<Unit, kColumns, Start::factor>(t.vectors, rows, terms, left, value.stride, probability, kPanel, out,
                                               kPanel, scratch.factor, 1.0f);
    });
  }

  void write_statistics(int64_t row, float reference, float sum) const {
    if (a.lse) a.lse[row] = sum == 0 ? -kInfinity : reference + logf(sum);
    if (!a.sum) return;
    a.reference[row] = sum == 0 ? 0 : reference;
    a.sum[row] = sum;
  }

  // What the output is multiplied by: it is 0 where there was nothing to see, and hidden keys may have left anything.
  static vf scaled(vf out, vf sum, vf factor) { return select(sum == vf{}, vf{}, out * factor); }

  void write(const Sequence& s, int64_t head, int64_t query, const float* out, float reference, float sum) const {
    T* to = row_pointer<T>(a.out, s.index, head, s.first_query + query);
    const vf factor = splat(dropout_scale(a.threshold) / sum);
    for (int d = 0; d < a.value_depth; d += kLanes) {
      const vf x = scaled(load(out + d), splat(sum), factor);
      if (d + kLanes <= a.value_depth)
        store(to + d, x);
      else
        store(to + d, x, a.value_depth - d);
    }
    write_statistics(row_offset(a, s, head, query), reference, sum);
  }

  void write(const Sequence& s, int64_t head, int64_t query, int count, const Panel& panel) const {
    for (int first = 0; first < count; first += kLanes) {
      const vf sum = load(panel.sum + first), factor = dropout_scale(a.threshold) / sum;
      T* to = row_pointer<T>(a.out, s.index, head, s.first_query + query + first);
      for (int d = 0; d < a.value_depth; d += kLanes, to += kLanes) {
        vf x[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) x[i] = scaled(load(panel.out + (d + i) * kPanel + first), sum, factor);
        transpose(x);
        if (first + kLanes <= count && d + kLanes <= a.value_depth) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) store(to + i * a.out.row, x[i]);
          continue;
        }
        for (int i = 0; i < smaller(kLanes, count - first); ++i)
          store(to + i * a.out.row, x[i], smaller(kLanes, a.value_depth - d));
      }
    }
    for (int i = 0; i < count; ++i)
      write_statistics(row_offset(a, s, head, query + i), panel.reference[i], panel.sum[i]);
  }

  // Adds a part of row `row` to what there is of it; the first is what there is. Rows that have seen nothing, of sum 0,
  // may hold anything.
  void add(const Part& total, int64_t row, bool first, const float* out, float reference, float sum) const {
    float* to = total.out + row * value_width;
    if (first || total.sum[row] == 0) {
      memcpy(to, out, (size_t)value_width * sizeof(float));
      total.reference[row] = reference;
      total.sum[row] = sum;
    } else if (sum != 0) {
      const float after = fmaxf(total.reference[row], reference);
      const float before = expf(total.reference[row] - after), factor = expf(reference - after);
      for (int i = 0; i < value_width; i += kLanes)
        store(to + i, fma(load(to + i), splat(before), load(out + i) * factor));
      total.reference[row] = after;
      total.sum[row] = total.sum[row] * before + sum * factor;
    }
  }

  int64_t part_row(const Sequence& s, int64_t split, int64_t head, int64_t query) const {
    return ((split * a.batch + s.index) * a.heads + head) * a.queries + query;
  }

  // What a stretch of keys gives for the task's row `row`.
  void put(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, const Part& total,
           int64_t row, const float* out, float reference, float sum) const {
    if (!first || !last) {
      add(total, row, first, out, reference, sum);
      out = total.out + row * value_width, reference = total.reference[row], sum = total.sum[row];
    }
    if (!last) return;
    if (splits == 1) return write(s, head, query, out, reference, sum);
    add(parts, part_row(s, split, head, query), true, out, reference, sum);
  }

  void finish(const Sequence& s, int64_t head, int64_t query, int64_t split, bool first, bool last, int64_t row,
              const Scratch& scratch, const Panel& panel) const {
    const int count = (int)smaller((int64_t)kPanel, s.queries - query);
    if (first && last && splits == 1) return write(s, head, query, count, panel);
    transpose(panel.out, kPanel, value_width, (int)round_up(count, kLanes), scratch.out, value_width);
    for (int i = 0; i < count; ++i)
      put(s, head, query + i, split, first, last, scratch.total, row + i, scratch.out + i * value_width,
          panel.reference[i], panel.sum[i]);
  }

  void task(int64_t index, const Scratch& scratch) const {
    Ahead next = ahead(index + 1);
    const int64_t split = index % splits, block = blocks - 1 - index / splits % blocks;  // causal: the longest first
    const int64_t head = index / splits / blocks % a.heads, key_head = head / group_of(a);
    const Sequence s = find_sequence(a, index / splits / blocks / a.heads);
    const int64_t first = block * task_queries;
    const int panels = (int)divide_up(smaller(task_queries, s.queries - first), kPanel);
    if (panels <= 0) return;
    for (int p = 0; p < panels; ++p) start(s, head, first + p * kPanel, scratch, scratch.panel[p]);
    const int64_t last = smaller(s.queries, first + task_queries) - 1;
    const int64_t range = round_up(divide_up(a.keys, splits), kBlock);
    const int64_t begin = greater(begin_of_keys(a, s, first) / kBlock * kBlock, split * range);
    const int64_t end = smaller(end_of_keys(a, s, last), (split + 1) * range);
    bool last_stretch = false;
    for (int64_t stretch = begin; !last_stretch; stretch += kStretch) {
      last_stretch = stretch + kStretch >= end;
      bool started[kTaskPanels] = {};
      for (int p = 0; p < panels; ++p) clear(scratch.panel[p]);
      for (int64_t key = stretch; key < smaller(end, stretch + kStretch); key += kBlock) {
        int keys = 0;
        for (int p = 0; p < panels; ++p) {
          const Tile t(a, s, mask, head, first + p * kPanel, key);
          if (!t.empty()) keys = greater(keys, t.keys);
        }
        if (keys == 0) continue;
        const Matrix packed_key = pack_key(s, key_head, key, keys, scratch);
        const Matrix packed_value = pack_value(s, head, key_head, key, keys, scratch);
        for (int p = 0; p < panels; ++p) {
          const Tile t(a, s, mask, head, first + p * kPanel, key);
          if (t.empty()) continue;
          step(s, head, t, packed_key, packed_value, scratch, scratch.panel[p], !started[p], &next);
          started[p] = true;
        }
      }
      for (int p = 0; p < panels; ++p)
        finish(s, head, first + p * kPanel, split, stretch == begin, last_stretch, p * kPanel, scratch,
               scratch.panel[p]);
    }
  }

  // ---- few queries ----

  // Scores of row r and the keys [key, key + keys) to exp(score - reference), as softmax does.
  void few_softmax(const Sequence& s, int64_t head, int64_t query, int64_t key, int keys, int r,
                   const FewRows& few) const {
    float* score = few.score + r * kBlock;
    mask_row(a, s, head, query, key, keys, score);
    const float before = few.reference[r];
    vf top = splat(before);
    for (int j = 0; j < keys; j += kLanes)
      top = max(select_bits(first_lanes(smaller(kLanes, keys - j)), load(score + j), splat(-kInfinity)), top);
    const float after = max(top), zero = after == -kInfinity ? 0.0f : after;
    vf total = {};
    for (int j = 0; j < keys; j += kLanes) {
      vf p = exp2((load(score + j) - zero) * kLog2e);
      p = keep_bits(first_lanes(smaller(kLanes, keys - j)), p);
      store(score + j, p);
      total += p;
    }
    few.factor[r] = exp2((splat(before) - zero) * kLog2e)[0];
    few.reference[r] = after;
    few.sum[r] = few.sum[r] * few.factor[r] + fastattn::sum(total);
  }

  // All queries of the heads that share a key head; a block of keys serves them all while it is in cache.
  void few_task(int64_t index, const Scratch& scratch) const {
    const int64_t split = index % splits, key_head = index / splits % a.key_heads, group = group_of(a);
    const Sequence s = find_sequence(a, index / splits / a.key_heads);
    const FewRows& few = scratch.few;
    const int rows = (int)(group * s.queries);
    for (int r = 0; r < rows; ++r) {
      const int64_t head = key_head * group + r / s.queries, query = r % s.queries;
      pack_row(row_pointer<T>(a.query, s.index, head, s.first_query + query), a.depth, few.query + r * few.width,
               few.width);
    }
    const int64_t range = round_up(divide_up(a.keys, splits), kBlock);
    const int64_t begin = split * range, end = smaller(begin + range, s.keys);
    const int64_t first = begin_of_keys(a, s, 0), last = smaller(end, end_of_keys(a, s, s.queries - 1));
    bool last_stretch = false;
    for (int64_t stretch = begin; !last_stretch; stretch += kStretch) {
      last_stretch = stretch + kStretch >= end;
      for (int r = 0; r < rows; ++r) {
        clear_row(few.out + r * value_width, value_width);
        few.reference[r] = -kInfinity;
        few.sum[r] = 0;
      }
      for (int64_t block = stretch; block < smaller(last, stretch + kStretch); block += kBlock) {
        if (block + kBlock <= first) continue;
        const int64_t key = greater(block, first);
        const int keys = (int)(smaller(block + kBlock, last) - key), ahead = rows_ahead(key, last);
        row_products(rows, few.query, few.width, row_pointer<T>(a.key, s.index, key_head, s.first_key + key), a.key.row,
                     keys, a.depth, a.scale, ahead, few.score);
        for (int r = 0; r < rows; ++r)
          few_softmax(s, key_head * group + r / s.queries, r % s.queries, key, keys, r, few);
        add_rows(rows, few.score, row_pointer<T>(a.value, s.index, key_head, s.first_key + key), a.value.row, keys,
                 a.value_depth, few.factor, ahead, few.out, value_width);
      }
      for (int r = 0; r < rows; ++r)
        put(s, key_head * group + r / s.queries, r % s.queries, split, stretch == begin, last_stretch, scratch.total, r,
            few.out + r * value_width, few.reference[r], few.sum[r]);
    }
  }

  // ---- parts ----

  // Adds up the parts of a row, into the first.
  void merge(int64_t index) const {
    const Sequence s = find_sequence(a, index / a.queries / a.heads);
    const int64_t head = index / a.queries % a.heads, query = index % a.queries, total = part_row(s, 0, head, query);
    if (query >= s.queries) return;
    for (int64_t split = 1; split < splits; ++split) {
      const int64_t row = part_row(s, split, head, query);
      add(parts, total, false, parts.out + row * value_width, parts.reference[row], parts.sum[row]);
    }
    write(s, head, query, parts.out + total * value_width, parts.reference[total], parts.sum[total]);
  }
};

template <class T>
int64_t measure(const Attention& a, const Parallel& parallel) {
  Arena arena = {0};
  const Forward<T> forward(a, &arena);
  const int64_t workers = smaller((int64_t)useful_workers(a, parallel, 2), forward.tasks * forward.splits);
  for (int64_t worker = 0; worker < workers; ++worker) forward.take_scratch(&arena);
  return (int64_t)arena.at;
}

template <class T>
void run(const Attention& a, const Parallel& parallel, char* workspace) {
  Arena arena = {(uintptr_t)workspace};
  const Forward<T> forward(a, &arena);
  const int workers = useful_workers(a, parallel, 2);
  if (!forward.few) forward.mask.read(a, parallel, workers);
  Arena here = arena;
  forward.take_scratch(&here);
  const uintptr_t size = here.at - arena.at;
  parallel_for_ranges(parallel, workers, forward.tasks * forward.splits, [&](int64_t index, int worker) {
    Arena own = {arena.at + (uintptr_t)worker * size};
    const auto scratch = forward.take_scratch(&own);
    if (forward.few) return forward.few_task(index, scratch);
    with_tiles<kTiles<typename UnitOf<T>::Unit>>([&] { forward.task(index, scratch); });
  });
  if (forward.splits > 1)
    parallel_for_ranges(parallel, forward.few ? 1 : workers, a.batch * a.heads * a.queries,
                        [&](int64_t index, int) { forward.merge(index); });
}

int64_t measure_any(const Attention& a, const Parallel& parallel) {
  switch (a.dtype) {
    case Dtype::float32: return measure<float>(a, parallel);
    case Dtype::bfloat16: return measure<bfloat16>(a, parallel);
    default: return measure<float16>(a, parallel);
  }
}

void run_any(const Attention& a, const Parallel& parallel, char* workspace) {
  switch (a.dtype) {
    case Dtype::float32: return run<float>(a, parallel, workspace);
    case Dtype::bfloat16: return run<bfloat16>(a, parallel, workspace);
    default: return run<float16>(a, parallel, workspace);
  }
}

}  // namespace

extern const AttentionKernels FASTATTN_TABLE(attention);
const AttentionKernels FASTATTN_TABLE(attention) = {&measure_any, &run_any};

}  // namespace fastattn
