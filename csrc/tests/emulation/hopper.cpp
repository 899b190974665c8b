// Emulated instructions of Hopper, as csrc/cuda/hopper.h describes them: what is pending, and the rules of its use.
//
// An instruction that is pending finishes at a random time, or only once no thread can go on and one waits for it.
// Until then its destination is NaN, and the launch ends with an error if
// - a thread reads or writes bytes of shared memory that it writes, or writes bytes that it reads (the compiler calls
//   the functions at the end of this file for every access of a kernel to memory);
// - it reads or overwrites bytes that a thread has written without fence_async();
// - registers of a product change, or were not fenced, or another instruction writes the same bytes.
//
// A barrier counts arrivals and bytes, and reports more of either than it expects. Blocks must end with nothing
// pending in their shared memory. setmaxnreg takes registers from those that the block was launched with.
#include <cuda_runtime.h>

#include "../../cuda/hopper.h"
#include "emulated_mma.h"
#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace emulation {

Asynchronous* asynchronous;

namespace {

constexpr int kGroup = 128;      // threads of a warpgroup
constexpr uint32_t kChunk = 16;  // bytes of shared memory whose state is known
constexpr uint32_t kPoison = 0x7fc0dead;
constexpr size_t kWindow = 256 << 10;

// Sixteen bytes of shared memory.
struct Chunk {
  int writer = -1;            // the thread that wrote last and has not fenced since
  int reads = 0, writes = 0;  // pending
};

struct Barrier {
  int arrivals = 0, missing = 0;  // of a phase, to come in this one
  int64_t bytes = 0;              // expected less those that have come
  int64_t loading = 0;            // of pending loads
  uint64_t phase = 0;
};

struct Named {
  int threads = 0, missing = 0;
  uint64_t phase = 0;
};

// An array of registers when it was fenced.
struct Fenced {
  const char* registers;
  std::string contents;
};

struct Thread {
  std::vector<uint32_t> written;         // chunks, since the last fence
  std::vector<Fenced> fenced;            // since the last wait for products
  std::vector<uint64_t> product_groups;  // how many products each group and those before it have
  std::vector<size_t> store_groups;      // stores, likewise
  uint64_t products = 0;
  // Progress of each store: 1 once it has read shared memory, 2 once it has written. It outlives the block.
  std::shared_ptr<std::vector<char>> stores = std::make_shared<std::vector<char>>();
};

// One thread's part of a product.
struct Part {
  float* sums = nullptr;
  const uint32_t* words = nullptr;
  uint32_t copy[4];
  std::vector<float> values;  // the sums before
};

struct Pending : Product {
  Place place;
  int started = 0;  // threads
  Part parts[kGroup];
};

struct Warpgroup {
  std::deque<Pending> products;  // references stay valid
  uint64_t finished = 0;
  size_t group = 0;  // the newest group of products
  int patience = 0;  // of that group
  int registers, wanted = 0, missing = kGroup;
  uint64_t phase = 0;  // of setmaxnreg
};

// A pending instruction.
struct Task {
  int patience;     // 0: it finishes at any time; else only once no thread can go on, the least patience first
  const void* key;  // what a thread waits for that needs it
  std::function<bool()> can_finish;
  std::function<void()> finish;
};

std::vector<Task> tasks;  // of all blocks

int draw_patience() { return (int)random_below(4); }

// The key of stores that have read shared memory; before, it is the address itself.
const void* written_key(const std::vector<char>& stores) { return (const char*)&stores + 1; }

struct Range {
  const char *begin, *end;
};
std::vector<Range> storing;  // global memory that pending stores write

}  // namespace

struct Asynchronous {
  char *mapping, *begin;
  uint32_t first, bytes;  // shared address of `begin`
  int pool = 0;           // registers that no warpgroup has
  int pending = 0;        // instructions that use this block's shared memory
  std::vector<Chunk> chunks;
  std::vector<Thread> threads;
  std::vector<Warpgroup> groups;
  std::map<uint32_t, Barrier> barriers;
  Named named[16];

  Asynchronous(size_t bytes_, int count) : bytes((uint32_t)(bytes_ + kChunk - 1) / kChunk * kChunk) {
    constexpr uint32_t kFirst = 1024;  // The system has the bytes before.
    constexpr int kRegisters = 65536, kMost = 256;
    mapping = unused.empty() ? map_window() : unused.back();
    if (!unused.empty()) unused.pop_back();
    begin = mapping + kWindow - bytes;
    memset(begin, 0xff, bytes);
    first = kFirst + kChunk * (uint32_t)random_below(kFirst / kChunk);
    chunks.resize(bytes / kChunk);
    threads.resize((size_t)count);
    groups.resize((size_t)(count + kGroup - 1) / kGroup);
    const int each = kRegisters / (int)groups.size() / kGroup / 8 * 8;
    for (Warpgroup& group : groups) group.registers = each < kMost ? each : kMost;
  }
  Asynchronous(const Asynchronous&) = delete;
  ~Asynchronous() { unused.push_back(mapping); }

  static inline std::vector<char*> unused;

  // Return memory that an inaccessible page follows.
  static char* map_window() {
    char* memory = (char*)mmap(nullptr, 2 * kWindow, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kWindow, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    return memory;
  }

  char* at(uint32_t address) const { return begin + (address - first); }

  void check(uint32_t address, int64_t size, uint32_t alignment, Place place) const {
    if (address < first || address + size > (int64_t)first + bytes)
      stop("%s:%d: %lld bytes at shared address %u are outside the block's", place.file, place.line, (long long)size,
           address);
    if (address % alignment)
      stop("%s:%d: shared address %u is no multiple of %u", place.file, place.line, address, alignment);
  }

  // Call use(chunk) for the chunks of these bytes.
  template <class Use>
  void each_chunk(uint32_t address, int64_t size, Use use) {
    for (int64_t i = (address - first) / kChunk; i * kChunk < address - first + size; ++i) use(chunks[(size_t)i]);
  }

  // Note that a pending instruction reads or writes a chunk.
  void begin_use(Chunk& chunk, bool writes, Place place) {
    const uint32_t address = first + kChunk * (uint32_t)(&chunk - chunks.data());
    if (chunk.writer >= 0)
      stop("%s:%d: thread %d wrote shared address %u and has not called fence_async() since", place.file, place.line,
           chunk.writer, address);
    if (chunk.writes || (writes && chunk.reads))
      stop("%s:%d: a pending %s shared address %u", place.file, place.line,
           chunk.writes ? "load writes" : "instruction reads", address);
    ++(writes ? chunk.writes : chunk.reads);
  }

  void access(uint32_t offset, size_t size, bool writes) {
    Thread& self = threads[(size_t)thread()];
    for (uint32_t i = offset / kChunk; i * kChunk < offset + size && i < chunks.size(); ++i) {
      Chunk& chunk = chunks[i];
      if (chunk.writes || (writes && chunk.reads))
        stop("a thread %s shared address %u, which a pending instruction %s", writes ? "writes" : "reads",
             first + i * kChunk, chunk.writes ? "writes" : "reads");
      if (!writes || chunk.writer == thread()) continue;
      chunk.writer = thread();
      self.written.push_back(i);
    }
  }

  Barrier& barrier(uint32_t address, Place place) {
    const auto found = barriers.find(address);
    if (found == barriers.end()) stop("%s:%d: no barrier at shared address %u", place.file, place.line, address);
    return found->second;
  }

  // End the phase if all arrivals and bytes have come.
  void try_end(uint32_t address, Place place) {
    Barrier& one = barrier(address, place);
    if (one.missing) return;
    if (one.bytes < 0) stop("%s:%d: more bytes than barrier %u expects", place.file, place.line, address);
    if (one.bytes) return;
    if (one.loading)
      stop("%s:%d: %lld bytes more are on the way than barrier %u expects", place.file, place.line,
           (long long)one.loading, address);
    one.missing = one.arrivals;
    ++one.phase;
  }

  // Start an instruction that writes shared memory by copy().
  void load(uint32_t to, int64_t size, uint32_t at_barrier, const std::function<void()>& copy, Place place) {
    each_chunk(to, size, [&](Chunk& chunk) { begin_use(chunk, true, place); });
    memset(at(to), 0xff, (size_t)size);
    barrier(at_barrier, place).loading += size;
    ++pending;
    const auto finish = [=, this_ = this] {
      copy();
      this_->each_chunk(to, size, [](Chunk& chunk) { --chunk.writes; });
      --this_->pending;
      Barrier& one = this_->barrier(at_barrier, place);
      one.loading -= size, one.bytes -= size;
      this_->try_end(at_barrier, place);
    };
    tasks.push_back({draw_patience(), &barrier(at_barrier, place), nullptr, finish});
  }

  // Start an instruction that reads shared memory, and then writes `range` of global memory by write(contents).
  void store(uint32_t from, int64_t size, Range range, const std::function<void(const char*)>& write, Place place) {
    check(from, size, kChunk, place);
    each_chunk(from, size, [&](Chunk& chunk) { begin_use(chunk, false, place); });
    for (const Range& other : storing)
      if (range.begin < other.end && other.begin < range.end)
        stop("%s:%d: a pending store writes the same global memory, in no order", place.file, place.line);
    storing.push_back(range);
    ++pending;
    const auto stores = threads[(size_t)thread()].stores;
    const size_t index = stores->size();
    stores->push_back(0);
    const auto finish = [=, this_ = this] {
      const std::string contents(this_->at(from), (size_t)size);
      this_->each_chunk(from, size, [](Chunk& chunk) { --chunk.reads; });
      --this_->pending;
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
};

std::shared_ptr<Asynchronous> begin_block(size_t shared_bytes, int threads) {
  return std::make_shared<Asynchronous>(shared_bytes, threads);
}

void end_block() {
  if (!asynchronous) return;
  if (asynchronous->pending) stop("the block ends before instructions that use its shared memory");
  for (const Warpgroup& group : asynchronous->groups)
    if (!group.products.empty())
      stop("the block ends before the product of %s:%d", group.products[0].place.file, group.products[0].place.line);
  for (const auto& [address, barrier] : asynchronous->barriers)
    if (barrier.bytes) stop("the block ends while barrier %u expects %lld bytes", address, (long long)barrier.bytes);
}

bool finish_one(bool can_run) {
  std::vector<size_t> able;
  size_t awaited = 0;  // the first so many of the able ones, if any
  for (size_t i = 0; i < tasks.size(); ++i) {
    if ((tasks[i].can_finish && !tasks[i].can_finish()) || (can_run && (tasks[i].patience || random_below(4))))
      continue;
    able.push_back(i);
    if (!can_run && is_awaited(tasks[i].key)) std::swap(able[awaited++], able.back());
  }
  if (able.empty()) return false;
  if (awaited) able.resize(awaited);
  size_t chosen = able[random_below(able.size())];
  for (const size_t i : able)
    if (tasks[i].patience < tasks[chosen].patience) chosen = i;
  const Task task = std::move(tasks[chosen]);
  tasks.erase(tasks.begin() + (long)chosen);
  task.finish();
  return true;
}

void abandon() {
  tasks.clear();
  storing.clear();
}

// Shared memory

uint32_t shared_address(const void* pointer) {
  const size_t offset = (size_t)((const char*)pointer - asynchronous->begin);
  if (offset >= asynchronous->bytes) stop("a shared address of memory that is not the block's dynamic shared memory");
  return asynchronous->first + (uint32_t)offset;
}

void* dynamic_shared() {
  if (!asynchronous) stop("the launch has no dynamic shared memory");
  constexpr uint32_t kAlignment = fastattn::cuda::kSharedAlignment;
  return asynchronous->at((asynchronous->first + kAlignment - 1) / kAlignment * kAlignment);
}

void fence_async() {
  Thread& self = asynchronous->threads[(size_t)thread()];
  for (const uint32_t i : self.written)
    if (asynchronous->chunks[i].writer == thread()) asynchronous->chunks[i].writer = -1;
  self.written.clear();
}

void store_matrices(uint32_t to, const uint32_t* words, Place place) {
  asynchronous->check(to, kChunk, kChunk, place);
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const uint32_t row = shuffle(0xffffffff, to, 8 * matrix + lane() / 4, place), at = row + 4 * (lane() % 4);
    asynchronous->access(at - asynchronous->first, 4, true);
    memcpy(asynchronous->at(at), &words[matrix], 4);
  }
}

// Barriers

void init_barrier(uint32_t address, int arrivals, Place place) {
  asynchronous->check(address, 8, 8, place);
  if (arrivals < 1) stop("%s:%d: a barrier for %d arrivals", place.file, place.line, arrivals);
  Barrier& fresh = asynchronous->barriers[address] = Barrier();
  fresh.arrivals = fresh.missing = arrivals;
}

void arrive(uint32_t address, int bytes, Place place) {
  Barrier& barrier = asynchronous->barrier(address, place);
  barrier.bytes += bytes;
  --barrier.missing;
  asynchronous->try_end(address, place);
}

bool has_ended(uint32_t address, uint32_t parity, Place place) {
  return (asynchronous->barrier(address, place).phase & 1) != parity;
}

void wait(uint32_t address, uint32_t parity, Place place) {
  const Barrier& barrier = asynchronous->barrier(address, place);
  const uint64_t phase = barrier.phase;
  char what[60];
  snprintf(what, sizeof what, "wait(barrier %u, parity %u)", address, parity);
  wait_until([&] { return (barrier.phase & 1) != parity; }, what, place, {&barrier});
  if (barrier.phase > phase + 1)
    stop("%s:%d: barrier %u has ended several phases while a thread waited for one", place.file, place.line, address);
}

void arrive_named(int id, int threads, Place place) {
  if (id < 1 || id > 15 || threads % 32 || threads < 32)
    stop("%s:%d: no named barrier %d for %d threads", place.file, place.line, id, threads);
  Named& barrier = asynchronous->named[id];
  if (!barrier.missing) barrier.threads = barrier.missing = threads;
  if (barrier.threads != threads)
    stop("%s:%d: named barrier %d for %d threads, which others use for %d", place.file, place.line, id, threads,
         barrier.threads);
  if (!--barrier.missing) ++barrier.phase;
}

void sync_named(int id, int threads, Place place) {
  const uint64_t phase = asynchronous->named[id & 15].phase;
  arrive_named(id, threads, place);
  const Named& barrier = asynchronous->named[id];
  char what[40];
  snprintf(what, sizeof what, "sync_named(%d, %d)", id, threads);
  wait_until([&] { return barrier.phase != phase; }, what, place);
}

void set_registers(int count, bool more, Place place) {
  Asynchronous& block = *asynchronous;
  Warpgroup& group = block.groups[(size_t)(thread() / kGroup)];
  if (count < 24 || count > 256 || count % 8 || (more ? count < group.registers : count > group.registers))
    stop("%s:%d: setmaxnreg from %d to %d registers", place.file, place.line, group.registers, count);
  if (group.missing < kGroup && group.wanted != count)
    stop("%s:%d: setmaxnreg to %d and %d registers in one warpgroup", place.file, place.line, count, group.wanted);
  group.wanted = count;
  --group.missing;
  const uint64_t phase = group.phase;
  const auto done = [&] {
    if (group.phase != phase) return true;
    if (group.missing || group.wanted - group.registers > block.pool) return false;
    block.pool -= group.wanted - group.registers;
    group.registers = group.wanted, group.missing = kGroup, ++group.phase;
    return true;
  };
  wait_until(done, more ? "take_registers" : "give_registers", place);
}

// Loads and stores

CUtensorMap make_map(const void* data, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                     int swizzle) {
  CUtensorMap map = {(const char*)data, {}, {}, {}, swizzle};
  bool is_valid = (uintptr_t)data % 16 == 0 && (!swizzle || box[0] * 2 == 256u >> swizzle) && box[0] * 2 % 16 == 0;
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = sizes[i], map.box[i] = box[i];
    if (i) map.strides[i - 1] = strides[i - 1];
    is_valid = is_valid && sizes[i] && box[i] && box[i] <= 256 && (!i || strides[i - 1] % 16 == 0);
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

int64_t box_bytes(const CUtensorMap& map) { return (int64_t)map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2; }

uint32_t swizzled(uint32_t address, int swizzle) {
  const uint32_t bits = swizzle ? 8u >> swizzle << 1 : 1;
  return address ^ (address >> 7 & (bits - 1)) << 4;
}

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
  block.load(to, box_bytes(map), barrier, copy, place);
}

void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier, Place place) {
  Asynchronous& block = *asynchronous;
  block.check(to, bytes, kChunk, place);
  if (bytes % 16 || (uintptr_t)from % 16)
    stop("%s:%d: a load of bytes that are no multiple of 16", place.file, place.line);
  block.load(to, bytes, barrier, [=, &block] { memcpy(block.at(to), from, (size_t)bytes); }, place);
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
  asynchronous->store(from, box_bytes(map), {nullptr, nullptr}, write, place);
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
  asynchronous->store(from, bytes, {(char*)to, (char*)to + bytes}, write, place);
}

void commit_stores() {
  Thread& self = asynchronous->threads[(size_t)thread()];
  self.store_groups.push_back(self.stores->size());
}

void wait_stores(int groups, bool are_read, Place place) {
  const Thread& self = asynchronous->threads[(size_t)thread()];
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
}

// Products

namespace {

// An operand in shared memory.
struct Operand {
  uint64_t descriptor;
  bool is_outer;

  // Return the shared address of an element, by its place along rows or columns and along the depth.
  uint32_t address(uint32_t outer, uint32_t depth) const {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    const int swizzle = (int)(descriptor >> 62);
    const uint32_t width = swizzle ? 256u >> swizzle : 16, row = width / 2;
    uint32_t at = start;
    if (!is_outer)
      at += outer / 8 * stride + outer % 8 * width + (swizzle ? depth * 2 : depth % 8 * 2 + depth / 8 * leading);
    else
      at += outer % row * 2 + depth % 8 * width +
            (swizzle ? outer / row * leading + depth / 8 * stride : outer / row * stride + depth / 8 * leading);
    return swizzled(at, swizzle);
  }

  // Call use(shared address) for the chunks of the operand.
  template <class Use>
  void each_chunk(int size, Use use) const {
    for (uint32_t outer = 0; outer < (uint32_t)size; outer += is_outer ? 8 : 1)
      for (uint32_t depth = 0; depth < 16; depth += is_outer ? 1 : 8) use(address(outer, depth));
  }
};

template <class Use>
void each_operand_chunk(Asynchronous& block, const Pending& product, Use use) {
  const auto chunk = [&](uint32_t address) {
    block.check(address, kChunk, kChunk, product.place);
    use(block.chunks[(address - block.first) / kChunk]);
  };
  if (!product.words) Operand{product.a, product.is_a_outer}.each_chunk(64, chunk);
  Operand{product.b, product.is_b_outer}.each_chunk(product.columns, chunk);
}

float element(const Asynchronous& block, const Pending& product, const Operand& operand, uint32_t outer,
              uint32_t depth) {
  uint16_t bits;
  memcpy(&bits, block.at(operand.address(outer, depth)), 2);
  return number(bits, product.is_bfloat16);
}

// The element of A(row, depth) in the registers of the threads.
float element(const Pending& product, int row, int depth) {
  const Part& part = product.parts[row / 16 * 32 + row % 8 * 4 + depth % 8 / 2];
  return number(part.copy[row % 16 / 8 + depth / 8 * 2] >> depth % 2 * 16, product.is_bfloat16);
}

// Return the thread's record of fenced registers that contains these, or null.
Fenced* find_fenced(Thread& self, const void* registers, size_t bytes) {
  const char* begin = (const char*)registers;
  for (Fenced& one : self.fenced)
    if (one.registers <= begin && begin + bytes <= one.registers + one.contents.size()) return &one;
  return nullptr;
}

// Stop unless a thread's registers are as they were fenced.
void check_fenced(Thread& self, const void* registers, size_t bytes, Place place) {
  const Fenced* one = find_fenced(self, registers, bytes);
  if (one && !memcmp(registers, one->contents.data() + ((const char*)registers - one->registers), bytes)) return;
  stop("%s:%d: no fence_products() since the registers of a product were used", place.file, place.line);
}

// Multiply, and return the sums by thread and register.
std::vector<float> compute(const Asynchronous& block, const Pending& product) {
  const Operand of_a = {product.a, product.is_a_outer}, of_b = {product.b, product.is_b_outer};
  const int columns = product.columns, registers = columns / 2;
  std::vector<float> a(64 * 16), b((size_t)(16 * columns)), sums((size_t)(64 * columns)), result(sums.size());
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row)
      a[(size_t)(row * 16 + k)] =
          product.words ? element(product, row, k) : element(block, product, of_a, (uint32_t)row, (uint32_t)k);
    for (int column = 0; column < columns; ++column)
      b[(size_t)(k * columns + column)] = element(block, product, of_b, (uint32_t)column, (uint32_t)k);
  }
  const auto place = [&](int thread, int i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    return (size_t)(row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2);
  };
  for (int thread = 0; thread < kGroup && product.accumulates; ++thread)
    for (int i = 0; i < registers; ++i) sums[place(thread, i)] = product.parts[thread].values[(size_t)i];
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < columns; ++column)
        sums[(size_t)(row * columns + column)] += a[(size_t)(row * 16 + k)] * b[(size_t)(k * columns + column)];
  for (int thread = 0; thread < kGroup; ++thread)
    for (int i = 0; i < registers; ++i) result[(size_t)(thread * registers + i)] = sums[place(thread, i)];
  return result;
}

// Give a thread its sums: to the next product of the same registers that it has started, or to the registers.
void deliver(Asynchronous& block, Warpgroup& group, const Pending& product, int lane, std::vector<float> sums) {
  const Part& part = product.parts[lane];
  if (part.words && memcmp(part.words, part.copy, sizeof part.copy))
    stop("%s:%d: registers of A changed before the product had finished", product.place.file, product.place.line);
  for (Pending& next : group.products) {
    if (next.parts[lane].sums != part.sums) continue;
    next.parts[lane].values = std::move(sums);
    return;
  }
  for (size_t i = 0; i < sums.size(); ++i)
    if (memcmp(&part.sums[i], &kPoison, 4))
      stop("%s:%d: sums were written before the product had finished", product.place.file, product.place.line);
  memcpy(part.sums, sums.data(), sums.size() * 4);
  Thread& owner = block.threads[(size_t)((&group - block.groups.data()) * kGroup + lane)];
  if (Fenced* one = find_fenced(owner, part.sums, sums.size() * 4))
    memcpy(&one->contents[(size_t)((char*)part.sums - one->registers)], sums.data(), sums.size() * 4);
}

void finish_product(Asynchronous& block, Warpgroup& group) {
  const Pending product = std::move(group.products.front());
  group.products.pop_front();
  ++group.finished;
  each_operand_chunk(block, product, [](Chunk& chunk) { --chunk.reads; });
  const std::vector<float> all = compute(block, product);
  const long registers = product.columns / 2;
  for (int lane = 0; lane < kGroup; ++lane)
    deliver(block, group, product, lane, {all.begin() + lane * registers, all.begin() + (lane + 1) * registers});
}

// Return the warpgroup's product that the running thread starts, which other threads may have started before.
Pending& started(Warpgroup& group, Thread& self, const Product& product, Place place) {
  const size_t index = (size_t)(self.products++ - group.finished);
  if (index == group.products.size()) {
    group.products.emplace_back();
    (Product&)group.products[index] = product;
    group.products[index].place = place;
  }
  Pending& one = group.products[index];
  if (one.columns != product.columns || one.a != product.a || one.b != product.b ||
      one.accumulates != product.accumulates || one.is_a_outer != product.is_a_outer ||
      one.is_b_outer != product.is_b_outer || !one.words != !product.words)
    stop("threads of a warpgroup start different products at %s:%d and %s:%d", place.file, place.line, one.place.file,
         one.place.line);
  ++one.started;
  return one;
}

}  // namespace

void fence_registers(const void* registers, size_t bytes) {
  Thread& self = asynchronous->threads[(size_t)thread()];
  for (size_t i = 0; i < self.fenced.size(); ++i)
    if (self.fenced[i].registers == registers) self.fenced.erase(self.fenced.begin() + (long)i--);
  self.fenced.push_back({(const char*)registers, std::string((const char*)registers, bytes)});
}

void multiply(float* sums, const Product& product, Place place) {
  Asynchronous& block = *asynchronous;
  Thread& self = block.threads[(size_t)thread()];
  Warpgroup& group = block.groups[(size_t)(thread() / kGroup)];
  const size_t bytes = (size_t)product.columns / 2 * 4;
  const int lane = thread() % kGroup;
  bool is_pending = false;
  for (const Pending& other : group.products) is_pending |= other.parts[lane].sums == sums;
  Pending& one = started(group, self, product, place);
  Part& part = one.parts[lane];
  part.sums = sums, part.words = product.words;
  if (part.words) {
    check_fenced(self, part.words, sizeof part.copy, place);
    memcpy(part.copy, part.words, sizeof part.copy);
  }
  if (!is_pending) {
    if (product.accumulates) check_fenced(self, sums, bytes, place);
    if (!find_fenced(self, sums, bytes)) check_fenced(self, sums, bytes, place);
    part.values.assign(sums, sums + product.columns / 2);
    for (int i = 0; i < product.columns / 2; ++i) memcpy(&sums[i], &kPoison, 4);
  }
  if (one.started < kGroup) return;
  if (group.group != self.product_groups.size() + 1) {
    group.group = self.product_groups.size() + 1;
    group.patience = draw_patience();
  }
  each_operand_chunk(block, one, [&](Chunk& chunk) { block.begin_use(chunk, false, place); });
  ++block.pending;
  const auto is_first = [&group, &one] { return &group.products.front() == &one; };
  const auto finish = [&block, &group] {
    --block.pending;
    finish_product(block, group);
  };
  tasks.push_back({group.patience, &group, is_first, finish});
}

void commit_products() {
  Thread& self = asynchronous->threads[(size_t)thread()];
  self.product_groups.push_back(self.products);
}

// The lanes of a warp wait together.
void wait_products(int groups, Place place) {
  Thread& self = asynchronous->threads[(size_t)thread()];
  const Warpgroup& group = asynchronous->groups[(size_t)(thread() / kGroup)];
  meet(Collective::warp_barrier, 0xffffffff, 0, 0, place);
  self.fenced.clear();
  const size_t committed = self.product_groups.size();
  if (committed <= (size_t)groups) return;
  const uint64_t count = self.product_groups[committed - 1 - (size_t)groups];
  wait_until([&] { return group.finished >= count; }, "wait_products", place, {&group});
}

}  // namespace emulation

// Accesses to memory, of which the compiler tells (-fsanitize=thread)

#define FASTATTN_ACCESS(kind, bytes, writes)                                 \
  void __tsan_##kind##bytes(void* address) { note(address, bytes, writes); } \
  void __tsan_unaligned_##kind##bytes(void* address) { note(address, bytes, writes); }
#define FASTATTN_ACCESSES(bytes)      \
  FASTATTN_ACCESS(read, bytes, false) \
  FASTATTN_ACCESS(write, bytes, true)

namespace {
inline void note(void* address, size_t bytes, bool writes) {
  emulation::Asynchronous* block = emulation::asynchronous;
  if (block && (size_t)((char*)address - block->begin) < block->bytes)
    block->access((uint32_t)((char*)address - block->begin), bytes, writes);
}
}  // namespace

extern "C" {
FASTATTN_ACCESSES(1)
FASTATTN_ACCESSES(2)
FASTATTN_ACCESSES(4)
FASTATTN_ACCESSES(8)
FASTATTN_ACCESSES(16)
void __tsan_read_range(void* address, size_t bytes) { note(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { note(address, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
