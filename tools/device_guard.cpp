// A CUDA device guard that guards nothing, for fake CUDA tensors on a torch that is built without CUDA: autograd's nodes
// and Python's indexing ask for one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace
