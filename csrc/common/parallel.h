// A thread pool as the kernels see it. Workers, known by their index, take tasks from atomic counters.
#pragma once
#include "arithmetic.h"

namespace fastattn {

// run(workers, body, argument) calls body(argument, worker) once for every worker in [0, workers), workers <= threads.
// The calls may come in any order and from any thread. run returns after all of them.
struct Parallel {
  int threads;
  void (*run)(int workers, void (*body)(void* argument, int worker), void* argument);
};

namespace {

constexpr int kMaxWorkers = 1024;

// A loop's tasks, task(index, worker). Their type is erased, so that each is compiled once.
struct TaskRanges {
  const void* task;
  void (*call)(const void* task, int64_t index, int worker);
  int64_t count;
  int workers;
  struct alignas(64) {
    int64_t next;
  } range[kMaxWorkers];

  static void work(void* argument, int worker) {
    TaskRanges* all = (TaskRanges*)argument;
    for (int k = 0; k < all->workers; ++k) {
      const int own = (worker + k) % all->workers;
      const int64_t end = all->count * (own + 1) / all->workers;
      for (;;) {
        const int64_t index = __atomic_fetch_add(&all->range[own].next, 1, __ATOMIC_RELAXED);
        if (index >= end) break;
        all->call(all->task, index, worker);
      }
    }
  }
};

inline void parallel_for(const Parallel& parallel, int workers, int64_t count, const void* task,
                         void (*call)(const void* task, int64_t index, int worker)) {
  workers = (int)min(min(workers, min(parallel.threads, kMaxWorkers)), count);
  if (workers <= 1) {
    for (int64_t index = 0; index < count; ++index) call(task, index, 0);
    return;
  }
  TaskRanges all;
  all.task = task, all.call = call, all.count = count, all.workers = workers;
  for (int k = 0; k < workers; ++k) all.range[k].next = count * k / workers;
  parallel.run(workers, &TaskRanges::work, &all);
}

// Call task(index, worker) once for every index in [0, count), with worker < workers. Each worker first takes its own
// range of indices, so that two workers do not fault in the same fresh page. Then it steals from the others. Results
// must not depend on which worker takes which index.
template <class Task>
void parallel_for(const Parallel& parallel, int workers, int64_t count, const Task& task) {
  parallel_for(parallel, workers, count, &task,
               [](const void* task, int64_t index, int worker) { (*(const Task*)task)(index, worker); });
}

}  // namespace
}  // namespace fastattn
