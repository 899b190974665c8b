// Shared memory, pending instructions and barriers (see asynchronous.h).
#include "asynchronous.h"

#include <sys/mman.h>

#include <algorithm>

namespace emulation {

Asynchronous* asynchronous;
std::vector<Task> tasks;

namespace {

constexpr size_t kWindow = 256 << 10;
constexpr int kBarrierBytes = 8;
std::vector<char*> unused;  // windows of memory

// Return memory that an inaccessible page follows.
char* map_window() {
  char* memory = (char*)mmap(nullptr, 2 * kWindow, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kWindow, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
  return memory;
}

}  // namespace

Asynchronous::Asynchronous(size_t shared_bytes, int thread_count)
    : bytes((uint32_t)(shared_bytes + kChunk - 1) / kChunk * kChunk) {
  constexpr uint32_t kFirst = 1024;  // The system has the bytes before.
  constexpr int kRegisters = 65536, kMost = 256;
  mapping = unused.empty() ? map_window() : unused.back();
  if (!unused.empty()) unused.pop_back();
  begin = mapping + kWindow - bytes;
  memset(begin, 0xff, bytes);
  first = kFirst + kChunk * (uint32_t)random_below(kFirst / kChunk);
  chunks.resize(bytes / kChunk);
  threads.resize((size_t)thread_count);
  groups.resize((size_t)(thread_count + kGroup - 1) / kGroup);
  const int each = kRegisters / (int)groups.size() / kGroup / 8 * 8;
  for (Warpgroup& group : groups) group.registers = each < kMost ? each : kMost;
}

Asynchronous::~Asynchronous() { unused.push_back(mapping); }

void Asynchronous::check(uint32_t address, int64_t size, uint32_t alignment, Place place) const {
  if (address < first || address + size > (int64_t)first + bytes)
    stop("%s:%d: %lld bytes at shared address %u are outside the block's", place.file, place.line, (long long)size,
         address);
  if (address % alignment)
    stop("%s:%d: shared address %u is no multiple of %u", place.file, place.line, address, alignment);
}

void Asynchronous::begin_use(Chunk& chunk, bool writes, Place place) {
  const uint32_t address = first + kChunk * (uint32_t)(&chunk - chunks.data());
  if (!chunk.writers.empty())
    stop("%s:%d: thread %d wrote shared address %u and has not called fence_async() since", place.file, place.line,
         chunk.writers[0], address);
  if (writes && chunk.has_barrier)
    stop("%s:%d: a load writes the barrier at shared address %u", place.file, place.line, address);
  if (chunk.writes || (writes && chunk.reads))
    stop("%s:%d: a pending %s shared address %u", place.file, place.line,
         chunk.writes ? "load writes" : "instruction reads", address);
  ++(writes ? chunk.writes : chunk.reads);
}

void Asynchronous::access(uint32_t offset, size_t size, bool writes) {
  for (uint32_t i = offset / kChunk; i * kChunk < offset + size && i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    if (chunk.writes || (writes && chunk.reads))
      stop("a thread that last waited at %s:%d %s shared address %u, which a pending instruction %s", last_wait().file,
           last_wait().line, writes ? "writes" : "reads", first + i * kChunk, chunk.writes ? "writes" : "reads");
    if (!writes) continue;
    if (chunk.has_barrier && has_barrier(first + offset, size))
      stop("a thread that last waited at %s:%d writes the barrier at shared address %u", last_wait().file,
           last_wait().line, first + offset);
    if (std::find(chunk.writers.begin(), chunk.writers.end(), thread()) != chunk.writers.end()) continue;
    chunk.writers.push_back(thread());
    self().written.push_back(i);
  }
}

bool Asynchronous::has_barrier(uint32_t address, size_t size) const {
  const auto next = barriers.lower_bound(address + (uint32_t)size);
  return next != barriers.begin() && std::prev(next)->first + kBarrierBytes > address;
}

Barrier& Asynchronous::barrier(uint32_t address, Place place) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) stop("%s:%d: no barrier at shared address %u", place.file, place.line, address);
  return found->second;
}

void Asynchronous::try_end(uint32_t address, Place place) {
  Barrier& one = barrier(address, place);
  if (one.missing < 0) stop("%s:%d: more arrivals than barrier %u expects", place.file, place.line, address);
  if (one.missing) return;
  if (one.bytes < 0) stop("%s:%d: more bytes than barrier %u expects", place.file, place.line, address);
  if (one.bytes) return;
  if (one.loading)
    stop("%s:%d: %lld bytes more are on the way than barrier %u expects", place.file, place.line,
         (long long)one.loading, address);
  one.missing = one.arrivals;
  ++one.phase;
}

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
  forget_stores();
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
  Thread& self = asynchronous->self();
  for (const uint32_t i : self.written) {
    std::vector<int>& writers = asynchronous->chunks[i].writers;
    writers.erase(std::find(writers.begin(), writers.end(), thread()));
  }
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
  asynchronous->check(address, kBarrierBytes, kBarrierBytes, place);
  if (arrivals < 1) stop("%s:%d: a barrier for %d arrivals", place.file, place.line, arrivals);
  if (asynchronous->has_barrier(address, kBarrierBytes))
    stop("%s:%d: a barrier at shared address %u, where one has begun", place.file, place.line, address);
  asynchronous->access(address - asynchronous->first, kBarrierBytes, false);
  asynchronous->each_chunk(address, kBarrierBytes, [](Chunk& chunk) { chunk.has_barrier = true; });
  Barrier& fresh = asynchronous->barriers[address];
  fresh.arrivals = fresh.missing = arrivals, fresh.owner = thread();
}

void fence_barriers() {
  for (auto& [address, barrier] : asynchronous->barriers) barrier.is_known |= barrier.owner == thread();
}

void arrive(uint32_t address, int bytes, Place place) {
  Barrier& barrier = asynchronous->barrier(address, place);
  barrier.bytes += bytes;
  --barrier.missing;
  asynchronous->try_end(address, place);
}

// The instruction may wait for some time.
bool has_ended(uint32_t address, uint32_t parity, Place place) {
  const Barrier& barrier = asynchronous->barrier(address, place);
  const auto ended = [&] { return (barrier.phase & 1) != parity; };
  if (ended() || random_below(2)) return ended();
  char what[60];
  snprintf(what, sizeof what, "has_ended(barrier %u, parity %u)", address, parity);
  poll(ended, what, place, {&barrier});
  return ended();
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

namespace {

// Count the running thread at a named barrier, to which its warp comes as a whole. Return the number of the phase.
uint64_t come(int id, int threads, Place place) {
  if (id < 1 || id > 15 || threads % 32 || threads < 32)
    stop("%s:%d: no named barrier %d for %d threads", place.file, place.line, id, threads);
  const int first = shuffle(0xffffffff, id, 0, place);
  if (first != id)
    stop("%s:%d: lanes of a warp come to the named barriers %d and %d", place.file, place.line, first, id);
  Named& barrier = asynchronous->named[id];
  const uint64_t phase = barrier.phase;
  if (!barrier.missing) barrier.threads = barrier.missing = threads;
  if (barrier.threads != threads)
    stop("%s:%d: named barrier %d for %d threads, which others use for %d", place.file, place.line, id, threads,
         barrier.threads);
  if (!--barrier.missing) ++barrier.phase;
  return phase;
}

}  // namespace

void arrive_named(int id, int threads, Place place) { come(id, threads, place); }

void sync_named(int id, int threads, Place place) {
  const uint64_t phase = come(id, threads, place);
  const Named& barrier = asynchronous->named[id];
  char what[40];
  snprintf(what, sizeof what, "sync_named(%d, %d)", id, threads);
  wait_until([&] { return barrier.phase != phase; }, what, place);
}

void set_registers(int count, bool more, Place place) {
  Asynchronous& block = *asynchronous;
  Warpgroup& group = block.group();
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

}  // namespace emulation

// Accesses to memory, which the compiler reports to these functions (-fsanitize=thread)

#define FASTATTN_ACCESS(kind, bytes, writes)                                 \
  void __tsan_##kind##bytes(void* address) { note(address, bytes, writes); } \
  void __tsan_unaligned_##kind##bytes(void* address) { note(address, bytes, writes); }
#define FASTATTN_ACCESSES(bytes)      \
  FASTATTN_ACCESS(read, bytes, false) \
  FASTATTN_ACCESS(write, bytes, true)

namespace {
inline void note(void* address, size_t bytes, bool writes) {
  if (++emulation::accesses == emulation::kMostAccesses)
    emulation::stop("a thread that last waited at %s:%d goes on without end", emulation::last_wait().file,
                    emulation::last_wait().line);
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
