// Emulated loads and stores by TMA, and semaphores (see asynchronous.h).
#include "asynchronous.h"

#include <algorithm>
#include <utility>

namespace emulation {
namespace {

struct Range {
  const char *begin, *end;
};
std::vector<Range> storing;  // global memory that pending stores write

// Clocks by which turns are waited for: all blocks start together and take a unit of time from turn to turn, and a turn
// takes as long. Schedules do not matter.
std::map<const int*, int64_t> taken;  // when the last turn was taken, by semaphore
uint64_t waits = 0;

// The key of stores that have read shared memory; before, it is the address itself.
const void* written_key(const std::vector<char>& stores) { return (const char*)&stores + 1; }

}  // namespace

void forget_stores() { storing.clear(); }

CUtensorMap make_map(const void* data, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                     int swizzle) {
  CUtensorMap map = {(const char*)data, {}, {}, {}, swizzle};
  bool is_valid =
      data && (uintptr_t)data % 16 == 0 && (!swizzle || box[0] * 2 == 256u >> swizzle) && box[0] * 2 % 16 == 0;
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    if (i) map.strides[i - 1] = strides[i - 1];
    is_valid = is_valid && sizes[i] && box[i] && box[i] <= 256 &&
               (!i || (strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40));
  }
  if (!is_valid) throw std::runtime_error("emulated kernel: a tensor map that the driver refuses");
  return map;
}

namespace {

// Call use(offset in shared memory, address in global memory or null outside the tensor) for a box's elements.
template <class Use>
void each_element(const CUtensorMap& map, const int (&at)[4], Use use) {
  const int64_t columns = map.box[0], rows = map.box[1] * map.box[2] * map.box[3];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place[3] = {at[1] + row % map.box[1], at[2] + row / map.box[1] % map.box[2],
                              at[3] + row / map.box[1] / map.box[2]};
    const char* from = map.data;
    bool is_inside = true;
    for (int i = 0; i < 3; ++i) {
      from += place[i] * (int64_t)map.strides[i];
      is_inside = is_inside && place[i] >= 0 && place[i] < (int64_t)map.sizes[i + 1];
    }
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t x = at[0] + column;
      const bool is_there = is_inside && x >= 0 && x < (int64_t)map.sizes[0];
      use((uint32_t)(row * columns + column) * 2, is_there ? from + x * 2 : nullptr);
    }
  }
}

// Start an instruction that writes shared memory by copy().
void start_load(Asynchronous& block, uint32_t to, int64_t size, uint32_t at_barrier, const std::function<void()>& copy,
                Place place) {
  block.each_chunk(to, size, [&](Chunk& chunk) { block.begin_use(chunk, true, place); });
  memset(block.at(to), 0xff, (size_t)size);
  Barrier& barrier = block.barrier(at_barrier, place);
  if (!barrier.is_known)
    stop("%s:%d: no fence_barriers() by the thread that began barrier %u", place.file, place.line, at_barrier);
  barrier.loading += size;
  ++block.pending;
  const auto finish = [=, &block] {
    copy();
    block.each_chunk(to, size, [](Chunk& chunk) { --chunk.writes; });
    --block.pending;
    Barrier& one = block.barrier(at_barrier, place);
    one.loading -= size, one.bytes -= size;
    block.try_end(at_barrier, place);
  };
  tasks.push_back({draw_patience(), &barrier, nullptr, finish});
}

// Start an instruction that reads shared memory, and then writes `range` of global memory by write(contents).
void start_store(Asynchronous& block, uint32_t from, int64_t size, Range range,
                 const std::function<void(const char*)>& write, Place place) {
  block.check(from, size, kChunk, place);
  block.each_chunk(from, size, [&](Chunk& chunk) { block.begin_use(chunk, false, place); });
  for (const Range& other : storing)
    if (range.begin < other.end && other.begin < range.end)
      stop("%s:%d: a pending store writes the same global memory, in no order", place.file, place.line);
  storing.push_back(range);
  ++block.pending;
  const auto stores = block.self().stores;
  const size_t index = stores->size();
  stores->push_back(0);
  const auto finish = [=, &block] {
    const std::string contents(block.at(from), (size_t)size);
    block.each_chunk(from, size, [](Chunk& chunk) { --chunk.reads; });
    --block.pending;
    (*stores)[index] = 1;
    const auto finish_write = [=] {
      write(contents.data());
      (*stores)[index] = 2;
      for (size_t i = 0; i < storing.size(); ++i)
        if (storing[i].begin == range.begin) storing.erase(storing.begin() + (long)i--);
    };
    tasks.push_back({draw_patience(), written_key(*stores), nullptr, finish_write});
  };
  tasks.push_back({draw_patience(), stores.get(), nullptr, finish});
}

int64_t box_bytes(const CUtensorMap& map) { return (int64_t)map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2; }

}  // namespace

void load_tile(uint32_t to, const CUtensorMap& map_, uint32_t barrier, const int (&at)[4], Place place) {
  Asynchronous& block = *asynchronous;
  const CUtensorMap map = map_;
  block.check(to, box_bytes(map), 128, place);
  const int x = at[0], y = at[1], z = at[2], w = at[3];
  const auto copy = [=, &block] {
    each_element(map, {x, y, z, w}, [&](uint32_t offset, const char* from) {
      uint16_t element = 0;
      if (from) memcpy(&element, from, 2);
      memcpy(block.at(swizzled(to + offset, map.swizzle)), &element, 2);
    });
  };
  start_load(block, to, box_bytes(map), barrier, copy, place);
}

void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier, Place place) {
  Asynchronous& block = *asynchronous;
  block.check(to, bytes, kChunk, place);
  if (bytes % 16 || (uintptr_t)from % 16)
    stop("%s:%d: a load of bytes that are no multiple of 16", place.file, place.line);
  start_load(block, to, bytes, barrier, [=, &block] { memcpy(block.at(to), from, (size_t)bytes); }, place);
}

void store_tile(const CUtensorMap& map_, uint32_t from, const int (&at)[4], Place place) {
  const CUtensorMap map = map_;
  const int x = at[0], y = at[1], z = at[2], w = at[3];
  asynchronous->check(from, box_bytes(map), 128, place);
  const auto write = [=](const char* contents) {
    each_element(map, {x, y, z, w}, [&](uint32_t offset, const char* to) {
      if (to) memcpy((char*)to, contents + (swizzled(from + offset, map.swizzle) - from), 2);
    });
  };
  start_store(*asynchronous, from, box_bytes(map), {nullptr, nullptr}, write, place);
}

void store_bytes(void* to, uint32_t from, int bytes, Store store, Place place) {
  if (bytes % 16 || (uintptr_t)to % 16)
    stop("%s:%d: a store of bytes that are no multiple of 16", place.file, place.line);
  const auto write = [=](const char* contents) {
    if (store == Store::copy) {
      memcpy(to, contents, (size_t)bytes);
      return;
    }
    for (int i = 0; i < bytes / 4; ++i) {
      float x;
      memcpy(&x, contents + 4 * i, 4);
      ((float*)to)[i] += x;
    }
  };
  start_store(*asynchronous, from, bytes, {(char*)to, (char*)to + bytes}, write, place);
}

void commit_stores() {
  Thread& self = asynchronous->self();
  self.store_groups.push_back(self.stores->size());
}

void wait_stores(int groups, bool are_read, Place place) {
  const Thread& self = asynchronous->self();
  if ((int)self.store_groups.size() <= groups) return;
  const size_t count = self.store_groups[self.store_groups.size() - 1 - (size_t)groups];
  const auto done = [&] {
    for (size_t i = 0; i < count; ++i)
      if ((*self.stores)[i] < (are_read ? 1 : 2)) return false;
    return true;
  };
  const Keys keys = {self.stores.get(), are_read ? nullptr : written_key(*self.stores)};
  wait_until(done, are_read ? "wait_stores_read" : "wait_stores", place, keys);
}

void wait_turn(const int* turn, int value, Place place) {
  wait_until([&] { return *turn == value; }, "wait_turn", place);
  const int64_t ready = asynchronous->clock + 1, come = value ? taken[turn] + 1 : 0;
  waits += come > ready;
  asynchronous->clock = taken[turn] = std::max(ready, come);
}

// Return how many turns have been waited for since the last call, by these clocks.
extern "C" __attribute__((visibility("default"))) uint64_t turn_waits() { return std::exchange(waits, 0); }

}  // namespace emulation
