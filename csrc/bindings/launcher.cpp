// How Python and tests set up the launcher of Triton's kernels.
#include "triton.h"

namespace fastattn {
namespace {

void set_compile(int64_t function) { triton::set_compile((triton::Compile)function); }
void set_driver(std::string file) { triton::set_driver(file.c_str()); }

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_triton, m) {
  m.def("set_compile(int function) -> ()");
  m.def("set_driver(str file) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_triton, CompositeExplicitAutograd, m) {
  m.impl("set_compile", TORCH_BOX(&set_compile));
  m.impl("set_driver", TORCH_BOX(&set_driver));
}

}  // namespace
}  // namespace fastattn
