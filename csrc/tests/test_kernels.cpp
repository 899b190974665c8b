// The kernels' own test program, without torch. It compares every kernel and dtype, on every instruction set that this
// machine has, with plain double-precision code. Build: python csrc/tests/build.py. Usage: test_kernels [cases per
// kernel].
#include <stdio.h>
#include <stdlib.h>

#include "../cpu/kernels.h"
#include "harness.h"

int main(int argc, char** argv) {
  using namespace fastattn;
  const int cases = argc > 1 ? atoi(argv[1]) : 200;
  for (int i = 0; i < kInstructionSetCount; ++i) {
    if (!has_instruction_set(i)) continue;
    use_instruction_set(kInstructionSets[i]);
    testing::test_attention(cases);
    testing::test_dropout(cases);
    testing::test_layer_norm(cases);
    testing::test_softmax_dropout(cases);
    printf("%s: %d random problems for each kernel, %d failures\n", kInstructionSets[i], cases, testing::failures());
    fflush(stdout);
  }
  return testing::failures() != 0;
}
