// The instruction sets of this machine, and the limits of their arithmetic.
#include "cpu.h"

namespace fastattn {

FASTATTN_IMPORT(Limits, limits, limits())

namespace {

std::string isas() { return instruction_sets_with(&has_instruction_set); }

std::string machine_isas() { return instruction_sets_with(&machine_has_instruction_set); }

std::string compiled_isas() { return instruction_sets_with(&is_compiled); }

std::string isa() {
  check_instruction_set();
  return kInstructionSets[instruction_set()];
}

void set_isa(std::string name) {
  STD_TORCH_CHECK(use_instruction_set(name.c_str()), "isa '", name, "': this machine and this library have ", isas());
}

// Run at least so many floating-point operations on all threads, on bfloat16 operands if `bfloat16`, else in float32.
void multiply_add(int64_t operations, bool bfloat16) {
  const Parallel threads = torch_threads();
  std::vector<float> sink(threads.threads);
  check_instruction_set();
  (bfloat16 ? limits().bfloat16 : limits().float32)(sink.data(), operations, threads);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("machine_isas() -> str");
  m.def("compiled_isas() -> str");
  m.def("set_isa(str name) -> ()");
  m.def("multiply_add(int operations, bool bfloat16) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("isas", TORCH_BOX(&isas));
  m.impl("machine_isas", TORCH_BOX(&machine_isas));
  m.impl("compiled_isas", TORCH_BOX(&compiled_isas));
  m.impl("set_isa", TORCH_BOX(&set_isa));
  m.impl("multiply_add", TORCH_BOX(&multiply_add));
}

}  // namespace
}  // namespace fastattn
