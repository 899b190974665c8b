// The functions of csrc/cuda/hopper.h for emulated threads. hopper.h includes this file.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// A tensor map, as its tensor_map() was called.
struct CUtensorMap {
  const char* data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
  int swizzle;
};

namespace emulation {

// A product of a warpgroup, as one of its threads starts it.
struct Product {
  int columns;
  bool is_bfloat16, is_a_outer, is_b_outer, accumulates;
  uint64_t a, b;          // descriptors
  const uint32_t* words;  // elements of A in registers, or null
};

enum class Store { copy, add };

CUtensorMap make_map(const void* data, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                     int swizzle);
uint32_t shared_address(const void* pointer);
void* dynamic_shared();
void fence_async();
void store_matrices(uint32_t to, const uint32_t* words, Place place);
void init_barrier(uint32_t barrier, int arrivals, Place place);
void fence_barriers();
void arrive(uint32_t barrier, int bytes, Place place);
bool has_ended(uint32_t barrier, uint32_t parity, Place place);
void wait(uint32_t barrier, uint32_t parity, Place place);
void arrive_named(int id, int threads, Place place);
void sync_named(int id, int threads, Place place);
void set_registers(int count, bool more, Place place);
void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[4], Place place);
void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier, Place place);
void store_tile(const CUtensorMap& map, uint32_t from, const int (&at)[4], Place place);
void store_bytes(void* to, uint32_t from, int bytes, Store store, Place place);
void commit_stores();
void wait_stores(int groups, bool are_read, Place place);
void wait_turn(const int* turn, int value, Place place);
void fence_registers(const void* registers, size_t bytes);
void multiply(float* sums, const Product& product, Place place);
void commit_products();
void wait_products(int groups, Place place);

}  // namespace emulation

namespace fastattn::cuda {
namespace {

using emulation::Place;
#define FASTATTN_HERE Place place = {__builtin_FILE(), __builtin_LINE()}

inline CUtensorMap tensor_map(const void* data, const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                              const uint32_t (&box)[4], Swizzle swizzle) {
  return emulation::make_map(data, sizes, strides, box, (int)swizzle);
}

inline uint32_t shared_address(const void* pointer) { return emulation::shared_address(pointer); }
inline uint8_t* dynamic_shared() { return (uint8_t*)emulation::dynamic_shared(); }
inline void fence_async() { emulation::fence_async(); }
inline void store_matrices(uint32_t to, const uint32_t* registers, FASTATTN_HERE) {
  emulation::store_matrices(to, registers, place);
}

inline void init_barrier(uint32_t barrier, int arrivals, FASTATTN_HERE) {
  emulation::init_barrier(barrier, arrivals, place);
}
inline void fence_barriers() { emulation::fence_barriers(); }
inline void arrive(uint32_t barrier, FASTATTN_HERE) { emulation::arrive(barrier, 0, place); }
inline void arrive_expecting(uint32_t barrier, int bytes, FASTATTN_HERE) { emulation::arrive(barrier, bytes, place); }
inline bool has_ended(uint32_t barrier, uint32_t parity, FASTATTN_HERE) {
  return emulation::has_ended(barrier, parity, place);
}
inline void wait(uint32_t barrier, uint32_t parity, FASTATTN_HERE) { emulation::wait(barrier, parity, place); }
inline void sync_named(int id, int threads, FASTATTN_HERE) { emulation::sync_named(id, threads, place); }
inline void arrive_named(int id, int threads, FASTATTN_HERE) { emulation::arrive_named(id, threads, place); }
template <int N>
void give_registers(FASTATTN_HERE) {
  emulation::set_registers(N, false, place);
}
template <int N>
void take_registers(FASTATTN_HERE) {
  emulation::set_registers(N, true, place);
}

inline void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier, int x, int y, int z, int w,
                      FASTATTN_HERE) {
  emulation::load_tile(to, map, barrier, {x, y, z, w}, place);
}
inline void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier, FASTATTN_HERE) {
  emulation::load_bytes(to, from, bytes, barrier, place);
}
inline void store_tile(const CUtensorMap& map, uint32_t from, int x, int y, int z, int w, FASTATTN_HERE) {
  emulation::store_tile(map, from, {x, y, z, w}, place);
}
inline void store_bytes(void* to, uint32_t from, int bytes, FASTATTN_HERE) {
  emulation::store_bytes(to, from, bytes, emulation::Store::copy, place);
}
inline void add_floats(float* to, uint32_t from, int bytes, FASTATTN_HERE) {
  emulation::store_bytes(to, from, bytes, emulation::Store::add, place);
}
inline void commit_stores() { emulation::commit_stores(); }
template <int N>
void wait_stores_read(FASTATTN_HERE) {
  emulation::wait_stores(N, true, place);
}
template <int N>
void wait_stores(FASTATTN_HERE) {
  emulation::wait_stores(N, false, place);
}
inline int take_ticket(int* next) { return (*next)++; }
inline void wait_turn(const int* turn, int value, FASTATTN_HERE) { emulation::wait_turn(turn, value, place); }
inline void pass_turn(int* turn, int value) { *turn = value; }

template <class... Arrays>
void fence_products(Arrays&... arrays) {
  (emulation::fence_registers(arrays, sizeof arrays), ...);
}
template <class T, Major A, Major B, int Registers>
void multiply(float (&d)[Registers], uint64_t a, uint64_t b, bool accumulate, FASTATTN_HERE) {
  constexpr bool kIsBfloat16 = std::is_same_v<T, bfloat16>;
  emulation::multiply(d, {2 * Registers, kIsBfloat16, A == Major::outer, B == Major::outer, accumulate, a, b, nullptr},
                      place);
}
template <class T, Major B, int Registers>
void multiply(float (&d)[Registers], const uint32_t* a, uint64_t b, bool accumulate, FASTATTN_HERE) {
  constexpr bool kIsBfloat16 = std::is_same_v<T, bfloat16>;
  emulation::multiply(d, {2 * Registers, kIsBfloat16, false, B == Major::outer, accumulate, 0, b, a}, place);
}
inline void commit_products() { emulation::commit_products(); }
template <int N, int Registers>
void wait_products(float (&)[Registers], FASTATTN_HERE) {
  emulation::wait_products(N, place);
}

inline float exp2_fast(float x) { return x < -126 ? 0.0f : exp2f(x); }
inline uint32_t pack(float low, float high, bfloat16) {
  const __nv_bfloat16_raw first = __float2bfloat16_rn(low), second = __float2bfloat16_rn(high);
  return first.x | (uint32_t)second.x << 16;
}
inline uint32_t pack(float low, float high, float16) {
  const __half_raw first = __float2half_rn(low), second = __float2half_rn(high);
  return first.x | (uint32_t)second.x << 16;
}

}  // namespace
}  // namespace fastattn::cuda
