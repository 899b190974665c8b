// Starts of Triton's kernels. Triton compiles a kernel in Python, at its first use for these types and settings; the
// other files of this folder lay out its arguments, and start it through CUDA's driver.
//
//   Kernel kernel("layer_norm.forward", place, {settings});  // asks for the kernel's block
//   kernel.start(cdiv(rows, kernel.block_m()), arguments...);  // in the order of the kernel in Python
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "kernels.h"

namespace fastattn::triton {

// A call that Triton's own launcher has to serve.
struct NotServed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A tensor's memory; null for None.
struct Pointer {
  const void* data;
  Dtype dtype;
};

// A tensor's memory of another dtype, by its letter: u is uint8, c int8, w int32.
struct Memory {
  const void* data;
  char letter;
};

// The named tuple of this class in Python.
template <class... Fields>
struct Named {
  const char* name;
  std::tuple<Fields...> fields;
};

template <class... Fields>
Named<Fields...> named(const char* name, const Fields&... fields) {
  return {name, {fields...}};
}

using None = std::nullptr_t;

class Kernel {
 public:
  Kernel(const char* name, Place place, std::initializer_list<int64_t> settings);

  int64_t block_m() const { return plan_->block_m; }
  int64_t block_n() const { return plan_->block_n; }
  int64_t multiprocessors() const { return plan_->multiprocessors; }

  // Start the kernel on a grid (x, y), unless it is empty.
  template <class... Arguments>
  void start(int64_t x, int64_t y, const Arguments&... arguments) {
    if (x == 0 || y == 0) return;
    (add(arguments), ...);
    launch(x, y);
  }

 private:
  // The request: the kernel's name, device and settings, then one letter per argument, and Name(...) per named tuple.
  static constexpr int kText = 768, kValues = 96;
  char text_[kText];
  int length_ = 0, count_ = 0;
  uint64_t values_[kValues];  // an argument's bytes
  const Recipe* plan_;
  Place place_;

  void launch(int64_t x, int64_t y);
  void write(char letter) {
    if (length_ == kText - 1) throw NotServed("fastattn: too many arguments of a kernel");
    text_[length_++] = letter;
  }
  void write(const char* text) {
    for (; *text; ++text) write(*text);
  }
  void write_number(int64_t number);  // not negative, behind a space
  void value(char type, uint64_t bits) {
    if (count_ == kValues) throw NotServed("fastattn: too many arguments of a kernel");
    write(type);
    values_[count_++] = bits;
  }

  void add(None) { write('n'); }
  // An integer has 64 bits only if its value needs them or the kernel says so; the lower half is the value in 32 bits.
  void add(int64_t value_of) { value(value_of == (int32_t)value_of ? 'i' : 'j', (uint64_t)value_of); }
  void add(int value_of) { add((int64_t)value_of); }
  void add(float value_of) {
    uint32_t bits;
    memcpy(&bits, &value_of, sizeof bits);
    value('r', bits);
  }
  void add(const float* data) { add(Pointer{data, Dtype::float32}); }
  void add(float* data) { add(Pointer{data, Dtype::float32}); }
  void add(const int64_t* data) { data ? value('l', (uint64_t)data) : write('n'); }
  void add(const Pointer& pointer) {
    if (!pointer.data) return write('n');
    switch (pointer.dtype) {
      case Dtype::float32: return value('f', (uint64_t)pointer.data);
      case Dtype::bfloat16: return value('b', (uint64_t)pointer.data);
      case Dtype::float16: return value('h', (uint64_t)pointer.data);
      case Dtype::boolean: return value('t', (uint64_t)pointer.data);
    }
  }
  void add(const Memory& memory) { value(memory.letter, (uint64_t)memory.data); }
  template <class Argument>
  void add(const std::optional<Argument>& argument) {
    argument ? add(*argument) : write('n');
  }
  template <class... Fields>
  void add(const Named<Fields...>& tuple) {
    write(tuple.name);
    write('(');
    std::apply([&](const auto&... fields) { (add(fields), ...); }, tuple.fields);
    write(')');
  }
};

namespace {

inline int64_t cdiv(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Columns, rounded up to a power of 2, on which the block of a row kernel depends.
inline int64_t padded(int64_t columns) {
  int64_t size = 1;
  while (size < columns) size *= 2;
  return size;
}

inline bool fits_int32(int64_t rows) { return rows <= INT32_MAX; }

inline int64_t address(const void* data) { return (int64_t)data; }

// Python's Dropout (philox.py), or none.
using Drop = std::optional<Named<const int64_t*, int, float>>;

inline Drop drop_of(const int64_t* seed, int threshold) {
  if (threshold == 0) return std::nullopt;
  return named("Dropout", seed, threshold, threshold < 65536 ? (float)(65536.0 / (65536 - threshold)) : 0.0f);
}

// The number of row slots per matrix; with dropout whole pairs i, i + 8 (rows.py: row_slots).
inline int64_t row_slots(int64_t rows, bool drops) {
  return drops ? 2 * (rows / 16 * 8 + (rows % 16 < 8 ? rows % 16 : 8)) : rows;
}

}  // namespace
}  // namespace fastattn::triton
