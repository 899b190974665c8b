// The tensors of a test of the emulated library, each between inaccessible pages; and what that library asks of a CUDA
// torch.
#include <c10/core/Allocator.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <unordered_map>

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

// Each tensor lies as far up against an inaccessible page as 16-byte alignment allows, behind another one; fresh
// memory, and what is left over beside it, is NaN (all bits set).
struct Guarded {
  char *mapping, *begin;
  size_t mapped, page, size;

  explicit Guarded(size_t bytes) : page((size_t)sysconf(_SC_PAGESIZE)), size(bytes) {
    const size_t used = (size + kAlignment - 1) / kAlignment * kAlignment, pages = (used + page - 1) / page * page;
    mapped = pages + 2 * page;
    mapping = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED || mprotect(mapping + page, pages, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    begin = mapping + page + pages - used;
    memset(mapping + page, 0xff, pages);
  }
  ~Guarded() {
    for (const char* at = mapping + page; at < mapping + mapped - page; ++at)
      if ((at < begin || at >= begin + size) && *at != (char)0xff)
        snprintf(damage, sizeof damage, "emulated kernel: written %td bytes from the beginning of %zu", at - begin,
                 size);
    munmap(mapping, mapped);
  }
};

std::unordered_map<void*, std::unique_ptr<Guarded>> guarded;  // by address, which is the context that torch asks for

void release_guarded(void* begin) { guarded.erase(begin); }

struct GuardedAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
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

// From here on torch's CPU tensors are guarded, or no longer. Returns what was found written beside one since.
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
