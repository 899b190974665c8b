// Emulated instructions of Hopper, as csrc/cuda/hopper.h describes them: what is pending, and the rules of its use.
//
// An instruction that is pending finishes at a random time, or only once no thread can go on and one waits for it. Its
// destination is NaN until then. These errors end the launch:
// - A thread accesses bytes of shared memory that a pending instruction writes, or writes bytes that one reads. The
//   compiler reports every access of a kernel to memory.
// - An instruction reads or overwrites bytes that a thread has written without fence_async(). Each of several writers
//   needs a fence, even if another thread has written the same bytes since.
// - Registers of a pending product change, or were not fenced before it.
// - Two pending stores write the same bytes of global memory.
// - A barrier gets more arrivals or bytes than it expects. It gets loads before the thread that began it has called
//   fence_barriers().
// - Something else writes a barrier's memory, or begins a barrier there again.
// - Lanes of a warp come to different named barriers. A lane alone waits for the others.
// - A block ends while something is pending in its shared memory.
//
// setmaxnreg takes registers from those that the block was launched with.
#pragma once
#include <cuda_runtime.h>

#include "../../cuda/hopper.h"
#include "scheduler.h"

#include <deque>
#include <map>
#include <string>
#include <vector>

namespace emulation {

constexpr int kGroup = fastattn::cuda::kWarpgroup;
constexpr uint32_t kChunk = 16;  // bytes of shared memory whose state is known

// Sixteen bytes of shared memory.
struct Chunk {
  std::vector<int> writers;   // threads that have written and have not fenced since
  int reads = 0, writes = 0;  // pending
  bool has_barrier = false;
};

struct Barrier {
  int arrivals = 0, missing = 0;  // arrivals per phase; arrivals missing in this phase
  int64_t bytes = 0;              // bytes expected in this phase, less those that have come
  int64_t loading = 0;            // bytes of pending loads
  uint64_t phase = 0;
  int owner = 0;          // thread that began it
  bool is_known = false;  // to asynchronous instructions, after the owner's fence_barriers()
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
  std::vector<uint32_t> written;         // chunks written since the last fence
  std::vector<Fenced> fenced;            // registers fenced since the last wait for products
  std::vector<uint64_t> product_groups;  // number of products in each group and those before it
  std::vector<size_t> store_groups;      // number of stores, likewise
  uint64_t products = 0;
  // Progress of each store: 1 after it has read shared memory, 2 after it has written. It outlives the block.
  std::shared_ptr<std::vector<char>> stores = std::make_shared<std::vector<char>>();
};

// One thread's part of a product.
struct Part {
  float* sums = nullptr;
  const uint32_t* words = nullptr;
  uint32_t copy[4];
  std::vector<float> values;  // sums before the product
};

struct Pending : Product {
  Place place;
  int started = 0;  // number of threads that have started it
  Part parts[kGroup];
};

struct Warpgroup {
  std::deque<Pending> products;  // A deque, because references to pending products stay valid.
  uint64_t finished = 0;
  size_t group = 0;  // the newest group of products
  int patience = 0;  // patience of that group
  int registers, wanted = 0, missing = kGroup;
  uint64_t phase = 0;  // number of changes by setmaxnreg
};

// A pending instruction.
struct Task {
  int patience;     // 0: may finish at any time. Others finish when no thread can go on, the least patience first.
  const void* key;  // identifies the waits that need this instruction
  std::function<bool()> can_finish;
  std::function<void()> finish;
};

extern std::vector<Task> tasks;  // pending instructions of all blocks

inline int draw_patience() { return (int)random_below(4); }

// A block's shared memory and what is pending there.
struct Asynchronous {
  char *mapping, *begin;
  uint32_t first, bytes;  // shared address of `begin`
  int pool = 0;           // registers per thread of a warpgroup that none has
  int pending = 0;        // instructions that use this block's shared memory
  int64_t clock = 0;      // when it took its last turn (transfers.cpp)
  std::vector<Chunk> chunks;
  std::vector<Thread> threads;
  std::vector<Warpgroup> groups;
  std::map<uint32_t, Barrier> barriers;
  Named named[16];

  Asynchronous(size_t shared_bytes, int thread_count);
  Asynchronous(const Asynchronous&) = delete;
  ~Asynchronous();

  char* at(uint32_t address) const { return begin + (address - first); }
  Thread& self() { return threads[(size_t)thread()]; }
  Warpgroup& group() { return groups[(size_t)(thread() / kGroup)]; }

  // Stop unless these bytes are the block's and aligned.
  void check(uint32_t address, int64_t size, uint32_t alignment, Place place) const;

  // Call use(chunk) for the chunks of these bytes.
  template <class Use>
  void each_chunk(uint32_t address, int64_t size, Use use) {
    for (int64_t i = (address - first) / kChunk; i * kChunk < address - first + size; ++i) use(chunks[(size_t)i]);
  }

  // Note that a pending instruction reads or writes a chunk.
  void begin_use(Chunk& chunk, bool writes, Place place);

  // Note that the running thread reads or writes bytes.
  void access(uint32_t offset, size_t size, bool writes);

  Barrier& barrier(uint32_t address, Place place);

  // Return whether any of these bytes belongs to a barrier.
  bool has_barrier(uint32_t address, size_t size) const;

  // End the phase if all arrivals and bytes have come.
  void try_end(uint32_t address, Place place);
};

// Return where an element at a shared address lies. The pattern begins `base` * 128 bytes behind a multiple of its
// size.
inline uint32_t swizzled(uint32_t address, int swizzle, uint32_t base = 0) {
  const uint32_t bits = swizzle ? 8u >> swizzle << 1 : 1;
  return address ^ (((address >> 7) - base) & (bits - 1)) << 4;
}

}  // namespace emulation
