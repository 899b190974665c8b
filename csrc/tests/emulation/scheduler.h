// The interface between the scheduler of threads (emulation.cpp) and the asynchronous instructions (asynchronous.h).
#pragma once
#include <memory>

#include "cuda_runtime.h"

namespace emulation {

// The scheduler's functions

// Return a random number below n, the same ones on every run.
uint64_t random_below(uint64_t n);

// End the launch with an error.
[[noreturn]] void stop(const char* format, ...);

// Return the number of the running thread in its block.
int thread();

// Return where the running thread waited last.
Place last_wait();

// Let others run until ready() is true. `what` says in a message what the thread waits for. `keys` are those of the
// pending instructions that it waits for.
struct Keys {
  const void *first = nullptr, *second = nullptr;
};
void wait_until(const std::function<bool()>& ready, const char* what, Place place, Keys keys = {});

// Let others run until ready() is true, or for some time.
void poll(const std::function<bool()>& ready, const char* what, Place place, Keys keys);

// Accesses to memory since the running thread went on. Hardly any thread has so many between two waits.
constexpr uint64_t kMostAccesses = 1 << 28;
extern uint64_t accesses;

// Return whether a thread waits for pending instructions of this key.
bool is_awaited(const void* key);

// Functions of the asynchronous instructions, for the scheduler

struct Asynchronous;                // a block's shared memory, barriers and pending instructions
extern Asynchronous* asynchronous;  // of the running block, null without dynamic shared memory

std::shared_ptr<Asynchronous> begin_block(size_t shared_bytes, int threads);

// Stop if a block whose threads have ended leaves something pending.
void end_block();

// Finish a pending instruction: perhaps one at random if threads can run, else the one that has to. Return false if
// there was none.
bool finish_one(bool can_run);

// Forget the pending instructions of a launch that has failed.
void abandon();
void forget_stores();

}  // namespace emulation
