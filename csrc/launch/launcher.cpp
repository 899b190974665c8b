#include "launcher.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace fastattn::triton {
namespace {

// The functions of other libraries, which no install has to have: those of CUDA's driver, and one of libtorch_cuda.
// dlopen and dlsym were in libdl before glibc 2.34. Their first versions are in every glibc, so wheels load everywhere.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

struct Driver {
  int (*get_context)(void** context);
  int (*set_context)(void* context);
  int (*get_device)(int* device, int ordinal);
  int (*retain_context)(void** context, int device);
  int (*launch)(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                unsigned threads_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);
  int (*error_string)(int error, const char** text);
  int32_t (*current_stream)(int32_t device, void** stream);
};

template <class Function>
void find(Function* function, const char* file, int mode, const char* name) {
  void* library = dlopen(file, mode);
  *function = library ? (Function)dlsym(library, name) : nullptr;
  if (!*function) throw NotServed(std::string("fastattn: ") + file + " has no " + name);
}

Driver load(const char* cuda, const char* torch) {
  Driver found;
  find(&found.get_context, cuda, RTLD_LAZY, "cuCtxGetCurrent");
  find(&found.set_context, cuda, RTLD_LAZY, "cuCtxSetCurrent");
  find(&found.get_device, cuda, RTLD_LAZY, "cuDeviceGet");
  find(&found.retain_context, cuda, RTLD_LAZY, "cuDevicePrimaryCtxRetain");
  find(&found.launch, cuda, RTLD_LAZY, "cuLaunchKernel");
  find(&found.error_string, cuda, RTLD_LAZY, "cuGetErrorString");
  find(&found.current_stream, torch, RTLD_LAZY, "aoti_torch_get_current_cuda_stream");
  return found;
}

std::string fake;

const Driver& driver() {
  static const Driver found =
      fake.empty() ? load("libcuda.so.1", "libtorch_cuda.so") : load(fake.c_str(), fake.c_str());
  return found;
}

void check(int error) {
  if (error == 0) return;
  const char* text = nullptr;
  driver().error_string(error, &text);
  throw std::runtime_error(std::string("fastattn: a kernel does not start: ") + (text ? text : "unknown error"));
}

// The primary context of a device, which torch uses.
void* context_of(int device) {
  constexpr int kDevices = 64;
  static std::atomic<void*> contexts[kDevices];
  if (device < 0 || device >= kDevices) throw NotServed("fastattn: more devices than expected");
  void* context = contexts[device].load(std::memory_order_relaxed);
  if (context) return context;
  int handle;
  check(driver().get_device(&handle, device));
  check(driver().retain_context(&context, handle));
  contexts[device].store(context, std::memory_order_relaxed);
  return context;
}

// Makes the device's context the thread's in this scope. A thread that has none, as autograd's may, keeps it.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    void* context = context_of(device);
    check(driver().get_context(&previous_));
    changed_ = previous_ != context;
    if (changed_) check(driver().set_context(context));
  }
  ~CurrentDevice() {
    if (changed_ && previous_) driver().set_context(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  void* previous_ = nullptr;
  bool changed_;
};

Compile compile;
std::mutex lock;
std::unordered_map<std::string_view, Recipe> recipes;  // by request; the process keeps the requests' text

const Recipe& served(const Recipe& recipe) {
  if (!recipe.is_served) throw NotServed("fastattn: Triton has to start this kernel");
  return recipe;
}

const Recipe& recipe_of(const char* request, int length) {
  {
    const std::lock_guard<std::mutex> hold(lock);
    const auto found = recipes.find(std::string_view(request, (size_t)length));
    if (found != recipes.end()) return served(found->second);
  }
  Recipe answer = {};
  if (!compile) throw NotServed("fastattn: nothing compiles Triton's kernels");
  compile(request, &answer);  // without the lock: it compiles, and runs Python
  const std::lock_guard<std::mutex> hold(lock);
  const std::string* text = new std::string(request, (size_t)length);
  return served(recipes.emplace(*text, answer).first->second);
}

}  // namespace

void set_compile(Compile function) { compile = function; }

void set_driver(const char* file) { fake = file; }

void* current_stream(int device) {
  void* stream;
  if (driver().current_stream(device, &stream)) throw NotServed("fastattn: no current stream");
  return stream;
}

Kernel::Kernel(const char* name, Place place, std::initializer_list<int64_t> settings) : place_(place) {
  write(name);
  write_number(place.device);
  for (const int64_t setting : settings) write_number(setting);
  text_[length_] = 0;
  plan_ = &recipe_of(text_, length_);
  write(':');
}

void Kernel::write_number(int64_t number) {
  char digits[20];
  int count = 0;
  do digits[count++] = (char)('0' + number % 10);
  while (number /= 10);
  write(' ');
  while (count) write(digits[--count]);
}

void Kernel::launch(int64_t x, int64_t y) {
  constexpr int64_t kLargestY = 65535;
  if (x > INT32_MAX || y > kLargestY) throw NotServed("fastattn: a grid is too large");
  text_[length_] = 0;
  const Recipe& recipe = recipe_of(text_, length_);
  void* parameters[kValues + 2];
  for (int i = 0; i < count_; ++i) parameters[i] = &values_[i];
  uint64_t scratch = 0;  // Triton's last two parameters: global and profile scratch memory, which these kernels lack
  parameters[count_] = parameters[count_ + 1] = &scratch;
  const CurrentDevice current(place_.device);
  check(driver().launch((void*)recipe.function, (unsigned)x, (unsigned)y, 1, (unsigned)recipe.threads, 1, 1,
                        (unsigned)recipe.shared_bytes, place_.stream, parameters, nullptr));
}

}  // namespace fastattn::triton
