// The emulation that cuda_runtime.h describes: the scheduler of threads, and what they do together. csrc/tests/build.py
// compiles it and csrc/cuda into a library for tests.
#include "scheduler.h"

#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulated_mma.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kWarp = 32;
constexpr int kMostPolls = 1000;  // Polls in which nothing else happens end the launch.

// The operation at which a fiber waits.
struct Operation {
  Collective kind;
  unsigned mask, source;
  uint64_t value;
  Place place;
};

struct Fiber : Operation {
  jmp_buf at;  // the place where it goes on
  ucontext_t entry;
  std::unique_ptr<char[]> stack;
  bool started = false;   // Its stack is in use, so it goes on by longjmp, which is faster than a context switch.
  bool finished = false;  // It has finished its thread of the present block.
  bool waiting = false;
  const std::function<bool()>* until = nullptr;  // The condition for which it waits instead of other threads.
  const char* what = nullptr;                    // name of that wait, and keys of the instructions that may end it
  Keys keys;
  bool is_polling = false;  // That wait may end without the condition.
};

struct Block {
  uint3 index;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fragment> fragments;  // by thread
  std::shared_ptr<Asynchronous> asynchronous;
};

std::vector<std::unique_ptr<Block>> blocks;  // Kept from launch to launch, because fresh stacks take time.
std::vector<Block*> resident;
Block* block;  // the one that runs
const std::function<void()>* body;
int threads, current;
jmp_buf scheduler;
char error[2000];
uint64_t random_state = 0, launched = 0;

Fiber& fiber_of(int index) { return *block->fibers[(size_t)index]; }

void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGSEGV || number == SIGBUS) stop("an access outside the operands, at address %p", info->si_addr);
  stop("a misaligned access or an index beyond an array, at instruction %p", info->si_addr);
}

// Signal handlers for wrong accesses, in place during the object's life.
struct Handlers {
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction previous[4];

  Handlers() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &previous[i]);
  }
  ~Handlers() {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  }
};

void to_scheduler(Fiber& fiber) {
  if (!_setjmp(fiber.at)) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    Fiber& fiber = fiber_of(current);
    (*body)();
    fiber.finished = true;
    to_scheduler(fiber);
  }
}

[[noreturn]] void enter(int index) {
  Fiber& fiber = fiber_of(index);
  current = index, blockIdx = block->index, accesses = 0;
  const unsigned x = (unsigned)index % blockDim.x, rest = (unsigned)index / blockDim.x;
  threadIdx = {x, rest % blockDim.y, rest / blockDim.y};
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = fiber.stack.get();
  fiber.entry.uc_stack.ss_size = kStackBytes;
  fiber.entry.uc_link = nullptr;
  makecontext(&fiber.entry, fiber_main, 0);
  setcontext(&fiber.entry);
  abort();
}

// The shared memory of all kernels: this library's thread-local variables, which are contiguous.
struct Shared {
  char* begin = nullptr;
  size_t bytes = 0;

  Shared() {
    static thread_local char one_of_them;
    begin = &one_of_them;
    dl_iterate_phdr(find, this);
  }

  static int find(dl_phdr_info* library, size_t, void* argument) {
    Shared& shared = *(Shared*)argument;
    char* data = (char*)library->dlpi_tls_data;
    for (int i = 0; data && i < library->dlpi_phnum; ++i) {
      const size_t bytes = library->dlpi_phdr[i].p_memsz;
      if (library->dlpi_phdr[i].p_type != PT_TLS || shared.begin < data || shared.begin >= data + bytes) continue;
      shared.begin = data, shared.bytes = bytes;
      return 1;
    }
    return 0;
  }

  void forget() const { memset(begin, 0xff, bytes); }

  bool is_fresh() const {
    for (size_t i = 0; i < bytes; ++i)
      if (begin[i] != (char)0xff) return false;
    return true;
  }
};

// Run a thread until it waits or ends. Return false if that ended the launch.
bool go_on(int index) {
  if (!_setjmp(scheduler)) enter(index);
  return !error[0];
}

const char* name_of(Collective kind) {
  static const char* const names[] = {"__syncthreads", "__syncwarp", "a shuffle"};
  return names[(int)kind];
}

// The threads that `fiber`, number `index`, waits for: the threads in [first, last) for which has(thread).
struct Party {
  int first, last;
  unsigned mask;

  Party(const Fiber& fiber, int index) {
    const bool block = fiber.kind == Collective::barrier;
    first = block ? 0 : index / kWarp * kWarp;
    last = block || first + kWarp > threads ? threads : first + kWarp;
    mask = block ? 0xffffffff : fiber.mask;
  }
  bool has(int thread) const { return mask >> thread % kWarp & 1; }
};

// Release the party of thread `index` if all of its threads wait.
void release(int index) {
  const Fiber& newest = fiber_of(index);
  const Party party(newest, index);
  for (int i = party.first; i < party.last; ++i) {
    if (!party.has(i)) continue;
    const Fiber& other = fiber_of(i);
    if (other.finished) {
      stop("%s at %s:%d waits for thread %d, which has ended", name_of(newest.kind), newest.place.file,
           newest.place.line, i);
    }
    // The other thread has not come yet, or waits elsewhere for others.
    if (!other.waiting || other.until || !Party(other, i).has(index)) return;
    if ((other.kind == Collective::barrier) != (newest.kind == Collective::barrier)) return;
    if (other.kind != newest.kind || other.place.line != newest.place.line ||
        strcmp(other.place.file, newest.place.file) != 0)
      stop("threads that belong together wait at different places: %s at %s:%d and, thread %d, %s at %s:%d",
           name_of(newest.kind), newest.place.file, newest.place.line, i, name_of(other.kind), other.place.file,
           other.place.line);
    if (other.mask != newest.mask)
      stop("the lanes of %s at %s:%d came with different masks: %#x and, thread %d, %#x", name_of(newest.kind),
           newest.place.file, newest.place.line, newest.mask, i, other.mask);
  }
  uint64_t results[kWarp] = {};
  for (int i = party.first; i < party.last && newest.kind == Collective::shuffle; ++i) {
    if (!party.has(i)) continue;
    const Fiber& fiber = fiber_of(i);
    if (!(fiber.mask >> fiber.source & 1))
      stop("a shuffle at %s:%d reads lane %u, which its mask %#x does not name", fiber.place.file, fiber.place.line,
           fiber.source, fiber.mask);
    results[i % kWarp] = fiber_of(party.first + (int)fiber.source).value;
  }
  for (int i = party.first; i < party.last; ++i) {
    if (!party.has(i)) continue;
    fiber_of(i).value = results[i % kWarp];
    fiber_of(i).waiting = false;
  }
}

bool is_ready(Fiber& fiber) {
  if (fiber.until && (*fiber.until)()) fiber.until = nullptr, fiber.waiting = false;
  return !fiber.finished && !fiber.waiting;
}

// Run each ready thread of all warps (warp < 0) or of one, in random order, until it waits or ends. Return false if
// none is ready or the launch has ended.
bool run_ready(std::vector<int>& ready, int warp) {
  ready.clear();
  const int first = warp < 0 ? 0 : warp * kWarp, last = warp < 0 || first + kWarp > threads ? threads : first + kWarp;
  for (int i = first; i < last; ++i)
    if (is_ready(fiber_of(i))) ready.push_back(i);
  for (size_t n = ready.size(); n > 0; --n) {
    std::swap(ready[random_below(n)], ready[n - 1]);
    if (!go_on(ready[n - 1])) return false;
  }
  return !ready.empty();
}

// Advance every warp of the block by one step. Then, at random, advance one warp as far as possible while the others
// stand. Return whether any thread was ready.
bool run_block() {
  static std::vector<int> ready;
  const int warps = (threads + kWarp - 1) / kWarp;
  if (!run_ready(ready, -1)) return false;
  const int alone = (int)random_below(2 * (uint64_t)warps);
  while (alone < warps && !error[0] && run_ready(ready, alone)) {
  }
  return true;
}

void start_block(Block& fresh, uint64_t index, size_t shared_bytes) {
  block = &fresh;
  const uint64_t rest = index / gridDim.x;
  fresh.index = {(unsigned)(index % gridDim.x), (unsigned)(rest % gridDim.y), (unsigned)(rest / gridDim.y)};
  while ((int)fresh.fibers.size() < threads) fresh.fibers.emplace_back(new Fiber);
  for (const auto& fiber : fresh.fibers) {
    fiber->finished = fiber->waiting = fiber->is_polling = false, fiber->until = nullptr;
    fiber->place = {"the beginning", 0};
  }
  fresh.fragments.resize(fresh.fibers.size());
  fresh.asynchronous = shared_bytes ? begin_block(shared_bytes, threads) : nullptr;
}

void choose(Block& other) { block = &other, asynchronous = other.asynchronous.get(); }

bool has_ended() {
  for (int i = 0; i < threads; ++i)
    if (!fiber_of(i).finished) return false;
  return true;
}

// Call a function that may stop the launch from outside its threads. Return its result, false if it did.
bool ask(bool (*function)(bool), bool argument) {
  if (_setjmp(scheduler)) return false;
  return function(argument);
}

// End the waits of threads that poll. Return whether there were any.
bool end_polls() {
  bool found = false;
  for (Block* one : resident)
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = *one->fibers[(size_t)i];
      if (!fiber.until || !fiber.is_polling) continue;
      fiber.until = nullptr, fiber.waiting = false, found = true;
    }
  return found;
}

// List the places at which the threads of the resident blocks wait.
void report_deadlock() {
  std::map<std::string, std::pair<int, std::string>> waiting;  // count and first thread by place
  for (Block* one : resident) {
    choose(*one);
    for (int i = 0; i < threads; ++i) {
      const Fiber& fiber = fiber_of(i);
      if (fiber.finished) continue;
      char place[300], first[100];
      snprintf(place, sizeof place, "%s at %s:%d", fiber.until ? fiber.what : name_of(fiber.kind), fiber.place.file,
               fiber.place.line);
      snprintf(first, sizeof first, "thread %d of block %u,%u,%u", i, one->index.x, one->index.y, one->index.z);
      ++waiting.emplace(place, std::make_pair(0, first)).first->second.first;
    }
  }
  std::string all = "emulated kernel: deadlock, every thread waits for others:";
  for (const auto& [place, threads_of] : waiting)
    all += " " + std::to_string(threads_of.first) + " at " + place + ", the first is " + threads_of.second + ";";
  snprintf(error, sizeof error, "%s", all.c_str());
}

// Run the blocks in this order, so many at a time, until all have ended and nothing is pending.
void run_blocks(const std::vector<uint64_t>& order, size_t count, size_t shared_bytes, const Shared& shared) {
  std::vector<Block*> unused;
  resident.clear();
  while (blocks.size() < count) blocks.emplace_back(new Block);
  for (size_t i = 0; i < count; ++i) unused.push_back(blocks[i].get());
  int polls = 0;
  for (size_t next = 0;;) {
    while (next < order.size() && !unused.empty()) {
      if (!shared_bytes) shared.forget();
      resident.push_back(unused.back());
      unused.pop_back();
      start_block(*resident.back(), order[next++], shared_bytes);
    }
    bool moved = false;
    for (size_t n = resident.size(); n > 0; --n) {
      std::swap(resident[random_below(n)], resident[n - 1]);
      choose(*resident[n - 1]);
      moved |= run_block();
      if (error[0]) return;
      if (!has_ended()) continue;
      ask([](bool) { return end_block(), true; }, true);
      if (error[0]) return;
      moved = true, polls = 0;
      unused.push_back(block);
      block->asynchronous = nullptr;
      resident.erase(resident.begin() + (long)n - 1);
    }
    if (ask(finish_one, moved)) moved = true, polls = 0;
    if (error[0] || (resident.empty() && next == order.size() && !moved)) return;
    if (!moved && (++polls > kMostPolls || !end_polls())) return report_deadlock();
  }
}

}  // namespace

uint64_t accesses;

// Return a random number by splitmix64.
uint64_t random_below(uint64_t n) {
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (z ^ z >> 31) % n;
}

// The fibers are abandoned.
[[noreturn]] void stop(const char* format, ...) {
  char what[800];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  snprintf(error, sizeof error, "emulated kernel: %s (thread %u,%u of block %u,%u,%u)", what, threadIdx.x, threadIdx.y,
           blockIdx.x, blockIdx.y, blockIdx.z);
  _longjmp(scheduler, 1);
}

int thread() { return current; }

unsigned lane() { return (unsigned)current % kWarp; }

Fragment* fragments() { return &block->fragments[(size_t)(current / kWarp * kWarp)]; }

Place last_wait() { return fiber_of(current).place; }

bool is_awaited(const void* key) {
  for (const Block* one : resident)
    for (int i = 0; i < threads; ++i) {
      const Fiber& fiber = *one->fibers[(size_t)i];
      if (fiber.until && (fiber.keys.first == key || fiber.keys.second == key)) return true;
    }
  return false;
}

void wait_until(const std::function<bool()>& ready, const char* what, Place place, Keys keys) {
  Fiber& fiber = fiber_of(current);
  fiber.place = place, fiber.keys = keys;
  if (ready()) return;
  fiber.until = &ready, fiber.what = what, fiber.waiting = true;
  to_scheduler(fiber);
}

void poll(const std::function<bool()>& ready, const char* what, Place place, Keys keys) {
  Fiber& fiber = fiber_of(current);
  fiber.is_polling = true;
  wait_until(ready, what, place, keys);
  fiber.is_polling = false;
}

uint64_t meet(Collective kind, unsigned mask, uint64_t value, unsigned source, Place place) {
  Fiber& fiber = fiber_of(current);
  if (kind != Collective::barrier) {
    const int first = current / kWarp * kWarp, present = threads - first < kWarp ? threads - first : kWarp;
    if (!(mask >> lane() & 1))
      stop("%s at %s:%d: mask %#x lacks the lane itself", name_of(kind), place.file, place.line, mask);
    if (present < kWarp && mask >> present)
      stop("%s at %s:%d: mask %#x names lanes that the block does not have", name_of(kind), place.file, place.line,
           mask);
  }
  (Operation&)fiber = {kind, mask, source, value, place};
  fiber.waiting = true;
  release(current);
  if (fiber.waiting) to_scheduler(fiber);
  return fiber.value;
}

void run(dim3 grid, dim3 block_size, size_t shared_bytes, const std::function<void()>& kernel) {
  constexpr unsigned kMaxThreads = 1024, kMaxYZ = 65535;
  constexpr size_t kMaxShared = 227 << 10;
  constexpr uint64_t kMostResident = 4;
  threads = (int)(block_size.x * block_size.y * block_size.z);
  if (threads < 1 || threads > (int)kMaxThreads || grid.x > 0x7fffffffu || grid.y > kMaxYZ || grid.z > kMaxYZ ||
      grid.x * grid.y * grid.z == 0 || shared_bytes > kMaxShared)
    throw std::runtime_error("emulated kernel: a grid or block that CUDA does not launch");
  ++launched;
  const uint64_t seed = random_state, count = (uint64_t)grid.x * grid.y * grid.z;
  const Handlers handlers;
  const Shared shared;
  blockDim = block_size, gridDim = grid, body = &kernel;
  std::vector<uint64_t> order(count);
  for (uint64_t i = 0; i < count; ++i) order[i] = i;
  for (uint64_t n = count; n > 0; --n) std::swap(order[random_below(n)], order[n - 1]);
  const uint64_t together = shared_bytes ? std::min(count, 1 + random_below(kMostResident)) : 1;
  error[0] = 0;
  if (shared_bytes) shared.forget();
  run_blocks(order, together, shared_bytes, shared);
  asynchronous = nullptr;
  if (!error[0] && shared_bytes && !shared.is_fresh())
    snprintf(error, sizeof error, "emulated kernel: static shared memory in a launch with dynamic shared memory;");
  if (!error[0]) return;
  abandon();
  for (const auto& one : blocks)
    for (const auto& fiber : one->fibers) fiber->started = false;
  throw std::runtime_error(error + (" seed " + std::to_string(seed)));
}

int multiprocessors = 132;

extern "C" __attribute__((visibility("default"))) void set_multiprocessors(int count) { multiprocessors = count; }

// Return the number of launches so far.
extern "C" __attribute__((visibility("default"))) uint64_t launches() { return launched; }

// Seed the order of threads, blocks and asynchronous instructions for the launches that follow.
extern "C" __attribute__((visibility("default"))) void seed_order(uint64_t seed) { random_state = seed; }

}  // namespace emulation
