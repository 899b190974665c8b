// Facts that both libraries report. Python defines the schemas of their operations (fastattn/backends/schema.py).
#include FASTATTN_BACKEND

namespace fastattn {
namespace {

// Return a hash of the schemas that the library is built for.
std::string contract() { return FASTATTN_CONTRACT; }

// Return the names of the library's operations, separated by commas.
std::string operations() { return operation_names(); }

STABLE_TORCH_LIBRARY(FASTATTN_LIBRARY, m) {
  m.def("contract() -> str");
  m.def("operations() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(FASTATTN_LIBRARY, CompositeExplicitAutograd, m) {
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("operations", TORCH_BOX(&operations));
}

}  // namespace
}  // namespace fastattn
