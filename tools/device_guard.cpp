// A CUDA device guard that does nothing, for fake CUDA tensors in a torch that is built without CUDA. Autograd's nodes
// and Python's indexing require a guard.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
