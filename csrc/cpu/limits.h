// The arithmetic limit of an instruction set: its multiply-adds on registers alone.
#pragma once
#include <stdint.h>

#include "../common/parallel.h"

namespace fastattn {

struct LimitKernels {
  // At least `operations` floating-point operations (a multiply-add is two), split evenly over the threads. Every
  // thread leaves what remains in its element of `sink`, so that nothing can be optimised away.
  void (*float32)(float* sink, int64_t operations, const Parallel&);
  // Dot products of pairs, or products of matrices, where there are instructions for them.
  void (*bfloat16)(float* sink, int64_t operations, const Parallel&);
};

}  // namespace fastattn
