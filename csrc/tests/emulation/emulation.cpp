// The emulation that cuda_runtime.h describes. csrc/tests/build.py compiles it and csrc/cuda into a library for tests.
#include "cuda_runtime.h"

#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kWarp = 32;

// The operation at which a fiber waits.
struct Operation {
  Collective kind;
  unsigned mask, source;
  uint64_t value;
  const char* file;
  int line;
};

struct Fiber : Operation {
  jmp_buf at;  // the place where it goes on
  ucontext_t entry;
  std::unique_ptr<char[]> stack;
  bool started = false;   // Its stack is in use, so it goes on by longjmp, which is faster than a context switch.
  bool finished = false;  // It has finished its thread of the present block.
  bool waiting = false;
};

std::vector<std::unique_ptr<Fiber>> fibers;  // kept from launch to launch
const std::function<void()>* body;
int threads, current;
jmp_buf scheduler;
char error[400];
uint64_t random_state = 0, launched = 0;

// Return a random number below n by splitmix64, the same ones on every run.
uint64_t random_below(uint64_t n) {
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (z ^ z >> 31) % n;
}

// End the launch from within a fiber. The fibers are abandoned.
[[noreturn]] void stop(const char* format, ...) {
  char what[240];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  snprintf(error, sizeof error, "emulated kernel: %s (thread %u,%u of block %u,%u,%u)", what, threadIdx.x, threadIdx.y,
           blockIdx.x, blockIdx.y, blockIdx.z);
  _longjmp(scheduler, 1);
}

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
    Fiber& fiber = *fibers[(size_t)current];
    (*body)();
    fiber.finished = true;
    to_scheduler(fiber);
  }
}

[[noreturn]] void enter(int index) {
  Fiber& fiber = *fibers[(size_t)index];
  current = index;
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
  const Fiber& newest = *fibers[(size_t)index];
  const Party party(newest, index);
  for (int i = party.first; i < party.last; ++i) {
    if (!party.has(i)) continue;
    const Fiber& other = *fibers[(size_t)i];
    if (other.finished) {
      stop("%s at %s:%d waits for thread %d, which has ended", name_of(newest.kind), newest.file, newest.line, i);
    }
    // The other thread has not come yet, or waits elsewhere for others.
    if (!other.waiting || !Party(other, i).has(index)) return;
    if ((other.kind == Collective::barrier) != (newest.kind == Collective::barrier)) return;
    if (other.kind != newest.kind || other.line != newest.line || strcmp(other.file, newest.file) != 0)
      stop("threads that belong together wait at different places: %s at %s:%d and, thread %d, %s at %s:%d",
           name_of(newest.kind), newest.file, newest.line, i, name_of(other.kind), other.file, other.line);
    if (other.mask != newest.mask)
      stop("the lanes of %s at %s:%d came with different masks: %#x and, thread %d, %#x", name_of(newest.kind),
           newest.file, newest.line, newest.mask, i, other.mask);
  }
  uint64_t results[kWarp] = {};
  for (int i = party.first; i < party.last && newest.kind == Collective::shuffle; ++i) {
    if (!party.has(i)) continue;
    const Fiber& fiber = *fibers[(size_t)i];
    if (!(fiber.mask >> fiber.source & 1))
      stop("a shuffle at %s:%d reads lane %u, which its mask %#x does not name", fiber.file, fiber.line, fiber.source,
           fiber.mask);
    results[i % kWarp] = fibers[(size_t)(party.first + (int)fiber.source)]->value;
  }
  for (int i = party.first; i < party.last; ++i) {
    if (!party.has(i)) continue;
    fibers[(size_t)i]->value = results[i % kWarp];
    fibers[(size_t)i]->waiting = false;
  }
}

// Run each ready thread of all warps (warp < 0) or of one, in random order, until it waits or ends. Return false if
// none is ready or the launch has ended.
bool run_ready(std::vector<int>& ready, int warp) {
  ready.clear();
  const int first = warp < 0 ? 0 : warp * kWarp, last = warp < 0 || first + kWarp > threads ? threads : first + kWarp;
  for (int i = first; i < last; ++i)
    if (!fibers[(size_t)i]->finished && !fibers[(size_t)i]->waiting) ready.push_back(i);
  for (size_t n = ready.size(); n > 0; --n) {
    std::swap(ready[random_below(n)], ready[n - 1]);
    if (!go_on(ready[n - 1])) return false;
  }
  return !ready.empty();
}

void run_block() {
  std::vector<int> ready;
  for (int i = 0; i < threads; ++i) fibers[(size_t)i]->finished = fibers[(size_t)i]->waiting = false;
  // Advance every warp by one step. Then, at random, advance one warp as far as possible while the others stand.
  const int warps = (threads + kWarp - 1) / kWarp;
  while (run_ready(ready, -1)) {
    const int alone = (int)random_below(2 * (uint64_t)warps);
    while (alone < warps && run_ready(ready, alone)) {
    }
  }
  if (error[0]) return;
  for (int i = 0; i < threads; ++i) {
    const Fiber& fiber = *fibers[(size_t)i];
    if (fiber.waiting)
      snprintf(error, sizeof error, "emulated kernel: %s at %s:%d waits for threads that wait elsewhere or have ended",
               name_of(fiber.kind), fiber.file, fiber.line);
  }
}

}  // namespace

unsigned lane() { return (unsigned)current % kWarp; }

uint64_t meet(Collective kind, unsigned mask, uint64_t value, unsigned source, const char* file, int line) {
  Fiber& fiber = *fibers[(size_t)current];
  if (kind != Collective::barrier) {
    const int first = current / kWarp * kWarp, present = threads - first < kWarp ? threads - first : kWarp;
    if (!(mask >> lane() & 1)) stop("%s at %s:%d: mask %#x lacks the lane itself", name_of(kind), file, line, mask);
    if (present < kWarp && mask >> present)
      stop("%s at %s:%d: mask %#x names lanes that the block does not have", name_of(kind), file, line, mask);
  }
  (Operation&)fiber = {kind, mask, source, value, file, line};
  fiber.waiting = true;
  release(current);
  if (fiber.waiting) to_scheduler(fiber);
  return fiber.value;
}

void run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  constexpr unsigned kMaxThreads = 1024, kMaxYZ = 65535;
  threads = (int)(block.x * block.y * block.z);
  if (threads < 1 || threads > (int)kMaxThreads || grid.x > 0x7fffffffu || grid.y > kMaxYZ || grid.z > kMaxYZ ||
      grid.x * grid.y * grid.z == 0)
    throw std::runtime_error("emulated kernel: a grid or block that CUDA does not launch");
  ++launched;
  const Handlers handlers;
  const Shared shared;
  while ((int)fibers.size() < threads) fibers.emplace_back(new Fiber);
  blockDim = block, gridDim = grid, body = &kernel;
  const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = i;
  error[0] = 0;
  for (uint64_t n = blocks; n > 0 && !error[0]; --n) {
    std::swap(order[random_below(n)], order[n - 1]);
    const uint64_t index = order[n - 1], rest = index / grid.x;
    blockIdx = {(unsigned)(index % grid.x), (unsigned)(rest % grid.y), (unsigned)(rest / grid.y)};
    shared.forget();
    run_block();
  }
  if (!error[0]) return;
  for (const auto& fiber : fibers) fiber->started = false;
  throw std::runtime_error(error);
}

int multiprocessors = 132;

extern "C" __attribute__((visibility("default"))) void set_multiprocessors(int count) { multiprocessors = count; }

// Return the number of launches so far.
extern "C" __attribute__((visibility("default"))) uint64_t launches() { return launched; }

// Seed the order of threads and blocks for the launches that follow.
extern "C" __attribute__((visibility("default"))) void seed_order(uint64_t seed) { random_state = seed; }

}  // namespace emulation
