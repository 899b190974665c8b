// The tensors of a test of the emulated library, each between inaccessible pages. It also has stubs of the functions
// that the library calls in a CUDA build of torch.
#include <c10/core/Allocator.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <mutex>
#include <unordered_map>
#include <vector>

extern "C" {

int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

int32_t aoti_torch_create_device_guard(int32_t, void** guard) {
  *guard = nullptr;
  return 0;
}

int32_t aoti_torch_delete_device_guard(void*) { return 0; }
}

namespace {

constexpr size_t kAlignment = 16;
char damage[200];

// Mappings of so many bytes between inaccessible pages. They are kept, because making new ones takes the time.
struct Mappings {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  std::unordered_map<size_t, std::vector<char*>> unused;  // by size

  char* take(size_t bytes) {
    std::vector<char*>& some = unused[bytes];
    if (!some.empty()) {
      char* begin = some.back();
      some.pop_back();
      return begin;
    }
    char* mapping = (char*)mmap(nullptr, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED || mprotect(mapping + page, bytes, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    return mapping + page;
  }
  void give_back(char* begin, size_t bytes) {
    constexpr size_t kKept = 64 << 10;
    if (bytes <= kKept)
      unused[bytes].push_back(begin);
    else
      munmap(begin - page, bytes + 2 * page);
  }
} mappings;

bool is_fresh(const char* begin, const char* end) {
  char all = (char)0xff;
  for (; begin < end; ++begin) all = (char)(all & *begin);
  return all == (char)0xff;
}

// The memory of a tensor between two inaccessible pages. It ends at the upper one, as closely as 16-byte alignment
// allows. Fresh memory, and the rest around it, is NaN (all bits set).
struct Guarded {
  char *first, *begin;
  size_t mapped, size;

  explicit Guarded(size_t bytes) : size(bytes) {
    const size_t used = (size + kAlignment - 1) / kAlignment * kAlignment;
    mapped = (used + mappings.page - 1) / mappings.page * mappings.page;
    first = mappings.take(mapped);
    begin = first + mapped - used;
    memset(first, 0xff, mapped);
  }
  ~Guarded() {
    if (!is_fresh(first, begin) || !is_fresh(begin + size, first + mapped))
      snprintf(damage, sizeof damage, "emulated kernel: written beside a tensor of %zu bytes", size);
    mappings.give_back(first, mapped);
  }
};

std::mutex lock;
std::unordered_map<void*, std::unique_ptr<Guarded>> guarded;  // by address, which is torch's context for the deleter

void release_guarded(void* begin) {
  const std::lock_guard<std::mutex> hold(lock);
  guarded.erase(begin);
}

struct GuardedAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    const std::lock_guard<std::mutex> hold(lock);
    auto fresh = std::make_unique<Guarded>(bytes);
    char* begin = fresh->begin;
    guarded.emplace(begin, std::move(fresh));
    return {begin, begin, &release_guarded, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_guarded; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} guarded_allocator;

c10::Allocator* usual_allocator;

}  // namespace

// Switch the guarding of torch's new CPU tensors on or off. Return a message if a write outside a tensor was found
// since the last call, else an empty string.
extern "C" __attribute__((visibility("default"))) const char* guard_operands(int on) {
  if (on && !usual_allocator) {
    usual_allocator = c10::GetAllocator(c10::DeviceType::CPU);
    c10::SetAllocator(c10::DeviceType::CPU, &guarded_allocator);
  } else if (!on && usual_allocator) {
    c10::SetAllocator(c10::DeviceType::CPU, usual_allocator);
    usual_allocator = nullptr;
  }
  static char found[sizeof damage];
  memcpy(found, damage, sizeof found);
  damage[0] = 0;
  return found;
}
