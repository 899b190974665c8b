// What the parts of the emulation that are not compiled with kernels share: the scheduler of threads (emulation.cpp)
// and the asynchronous instructions (hopper.cpp).
#pragma once
#include <memory>

#include "cuda_runtime.h"

namespace emulation {

// The scheduler's functions, for hopper.cpp

// Return a random number below n, the same ones on every run.
uint64_t random_below(uint64_t n);

// End the launch with an error.
[[noreturn]] void stop(const char* format, ...);

// Return the number of the running thread in its block.
int thread();

// Let others run until ready() is true. `what` says in a message what the thread waits for.
void wait_until(const std::function<bool()>& ready, const char* what, Place place);

// The functions of hopper.cpp, for the scheduler

struct Asynchronous;                // a block's shared memory, barriers and pending instructions
extern Asynchronous* asynchronous;  // of the running block, null without dynamic shared memory

std::shared_ptr<Asynchronous> begin_block(size_t shared_bytes, int threads);

// Stop if a block whose threads have ended leaves something pending.
void end_block();

// Finish some pending instructions at random: at least one if nothing else `can_run`. Return false if there was none.
bool finish_some(bool can_run);

// Forget the pending instructions of a launch that has failed.
void abandon();

}  // namespace emulation
