// Functions of rows of attention's operands and results (attention_rows.h), for every dtype.
//
//   for each row; for each vector of columns: load elements of type T as float32, or round float32 to T and store.
//
// pack.h and few_queries.h have the rest of the loops.
#include "attention_rows.h"

namespace fastattn {
namespace {

// Return out * factor, or 0 for a row that sees nothing, whose sums may be NaN.
FASTATTN_INLINE vf normalised(vf out, vf row_sum, vf factor) { return select(row_sum == vf{}, vf{}, out * factor); }

// Return what rounding to T takes away from a result, 0 where it is not finite.
template <class T>
FASTATTN_INLINE vf rest_of(vf x, T type) {
  const vf rest = x - rounded_to(x, type);
  return select(rest - rest == vf{}, rest, vf{});
}

template <class T>
void write_output(const float* out, float row_sum, float factor, int length, Rows to, Rows residual) {
  const vf sums = splat(row_sum), factors = splat(factor);
  for_each_vector(
      length, [&](int64_t d, int lanes) { store((T*)to.data + d, normalised(load(out + d), sums, factors), lanes); });
  if (!residual.data) return;
  for_each_vector(length, [&](int64_t d, int lanes) {
    store((T*)residual.data + d, rest_of(normalised(load(out + d), sums, factors), T{}), lanes);
  });
}

template <class T>
void write_panel(const float* out, int stride, const float* row_sum, const float* factor, int count, int length,
                 Rows to, Rows residual) {
  for (int first = 0; first < count; first += kLanes) {
    const vf sums = load(row_sum + first), factors = load(factor + first);
    T* to_row = (T*)to.data + first * to.stride;
    T* residual_row = residual.data ? (T*)residual.data + first * residual.stride : nullptr;
    for (int d = 0; d < length; d += kLanes, to_row += kLanes, residual_row += residual_row ? kLanes : 0) {
      vf x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) x[i] = normalised(load(out + (d + i) * stride + first), sums, factors);
      transpose(x);
      const auto write = [&](int i, int n) {
        store(to_row + i * to.stride, x[i], n);
        if (residual_row) store(residual_row + i * residual.stride, rest_of(x[i], T{}), n);
      };
      if (first + kLanes <= count && d + kLanes <= length) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) write(i, kLanes);
        continue;
      }
      for (int i = 0; i < min(kLanes, count - first); ++i) write(i, min(kLanes, length - d));
    }
  }
}

template <class T>
void write_gradient(const float* sum, const float* mean, float missing, float factor, int length, void* to) {
  for_each_vector(length, [&](int64_t d, int lanes) {
    const vf x = mean ? fma(load(mean + d), splat(missing), load(sum + d)) : load(sum + d);
    store((T*)to + d, x * factor, lanes);
  });
}

template <class T>
float delta(const void* grad, const void* out, const void* residual, int length) {
  vf total = {};
  for_each_vector(length, [&](int64_t d, int lanes) {
    const vf rest = residual ? load((const T*)residual + d, lanes) : vf{};
    total = fma(load((const T*)grad + d, lanes), load((const T*)out + d, lanes) + rest, total);
  });
  return sum(total);
}

template <class T>
void mean_of(const char* const* row, int count, int length, float* mean) {
  for_each_vector(length, [&](int64_t d, int lanes) {
    vf total = {};
    for (int j = 0; j < count; ++j) total += load((const T*)row[j] + d, lanes);
    const vf x = total * (1.0f / (float)max(count, 1));
    store(mean + d, select(x - x == vf{}, x, vf{}));
  });
}

template <class T>
constexpr RowFunctions functions() {
  RowFunctions f = {};
  f.pack = [](Rows from, int count, int length, float* to, int64_t width, const uint8_t* visible) {
    pack_rows((const T*)from.data, from.stride, count, length, to, width, visible);
  };
  f.row_products = [](int rows, const float* row, int64_t width, Rows from, int count, int length, float scale,
                      int block, int ahead, float* product) {
    row_products(rows, row, width, (const T*)from.data, from.stride, count, length, scale, block, ahead, product);
  };
  f.add_rows = [](int rows, const float* weight, Rows from, int count, int length, const float* factor, int block,
                  int ahead, float* sum, int64_t width) {
    add_rows(rows, weight, (const T*)from.data, from.stride, count, length, factor, block, ahead, sum, width);
  };
  f.write_keys = [](int rows, const float* weight, const float* row, int64_t width, float factor, int block, int count,
                    int length, Rows to) {
    write_keys(rows, weight, row, width, factor, block, count, length, (T*)to.data, to.stride);
  };
  f.write_output = &write_output<T>;
  f.write_panel = &write_panel<T>;
  f.write_gradient = &write_gradient<T>;
  f.delta = &delta<T>;
  f.mean = &mean_of<T>;
  return f;
}

}  // namespace

FASTATTN_EXPORT(RowTable, attention_rows) = {{functions<float>(), functions<bfloat16>(), functions<float16>()}};

}  // namespace fastattn
