// A CUDA driver that starts nothing, with torch's function for the current stream, for the launchers of csrc/launch and
// of Triton. It hands each launch to a function that a test or a tool has set.
#include <stdint.h>

namespace {

using Launch = int (*)(uint64_t function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared_bytes,
                       uint64_t stream, void** parameters);

thread_local uint64_t current;  // the context: a device's is its number plus 1
Launch launched;
uint64_t streams[8];

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void fake_set_launch(Launch function) { launched = function; }
EXPORTED void fake_set_stream(int device, uint64_t stream) { streams[device] = stream; }
EXPORTED uint64_t fake_context() { return current; }
EXPORTED void fake_set_context(uint64_t context) { current = context; }

EXPORTED int cuCtxGetCurrent(uint64_t* context) {
  *context = current;
  return 0;
}
EXPORTED int cuCtxSetCurrent(uint64_t context) {
  current = context;
  return 0;
}
EXPORTED int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORTED int cuDevicePrimaryCtxRetain(uint64_t* context, int device) {
  *context = (uint64_t)device + 1;
  return 0;
}
EXPORTED int cuLaunchKernel(uint64_t function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                            unsigned shared_bytes, uint64_t stream, void** parameters, void**) {
  return launched ? launched(function, x, y, z, threads, shared_bytes, stream, parameters) : 0;
}
struct Configuration {  // the beginning of CUlaunchConfig
  unsigned x, y, z, threads, threads_y, threads_z, shared_bytes;
  uint64_t stream;
  void* attributes;
  unsigned attribute_count;
};

EXPORTED int cuLaunchKernelEx(const Configuration* c, uint64_t function, void** parameters, void**) {
  constexpr int kInvalidValue = 1;  // csrc/launch passes no attributes
  if (c->attribute_count || c->threads_y != 1 || c->threads_z != 1) return kInvalidValue;
  return cuLaunchKernel(function, c->x, c->y, c->z, c->threads, 1, 1, c->shared_bytes, c->stream, parameters, nullptr);
}
EXPORTED int cuPointerGetAttribute(uint64_t* address, int, uint64_t pointer) {
  *address = pointer;
  return 0;
}

// Functions with which Triton's extension is linked.
#define UNUSED(name) \
  EXPORTED int name() { return 0; }
UNUSED(cuCtxGetDevice)
UNUSED(cuCtxGetLimit)
UNUSED(cuCtxSetLimit)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDriverGetVersion)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload)
UNUSED(cuStreamIsCapturing)

EXPORTED int cuGetErrorString(int, const char** text) {
  *text = "a fake error";
  return 0;
}
EXPORTED int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = (void*)streams[device < 0 ? 0 : device];
  return 0;
}
