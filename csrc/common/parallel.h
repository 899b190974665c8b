// Threads, as the kernels see them: tasks taken from a counter by workers that know their index.
#pragma once
#include <stdint.h>

namespace fastattn {

// How many workers there are at most, and how to run them: run(workers, body, argument) calls body(argument, worker)
// once for every worker in [0, workers), in any order, from any thread, and returns when all have returned.
struct Parallel {
  int threads;
  void (*run)(int workers, void (*body)(void* argument, int worker), void* argument);
};

namespace {

template <class Task>
struct TaskQueue {
  const Task* task;
  int64_t count;
  int64_t next;

  static void work(void* argument, int worker) {
    TaskQueue* queue = (TaskQueue*)argument;
    for (;;) {
      const int64_t index = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
      if (index >= queue->count) return;
      (*queue->task)(index, worker);
    }
  }
};

// Calls task(index, worker) once for every index in [0, count), with worker < workers. Which worker takes which index
// is not defined: results must not depend on it.
template <class Task>
void parallel_for(const Parallel& parallel, int workers, int64_t count, const Task& task) {
  if (workers > parallel.threads) workers = parallel.threads;
  if (workers > count) workers = (int)count;
  if (workers <= 1) {
    for (int64_t index = 0; index < count; ++index) task(index, 0);
    return;
  }
  TaskQueue<Task> queue = {&task, count, 0};
  parallel.run(workers, &TaskQueue<Task>::work, &queue);
}

constexpr int kMaxRanges = 256;

template <class Task>
struct TaskRanges {
  const Task* task;
  int64_t count;
  int ranges;
  struct alignas(64) {
    int64_t next;
  } range[kMaxRanges];

  static void work(void* argument, int worker) {
    TaskRanges* all = (TaskRanges*)argument;
    for (int k = 0; k < all->ranges; ++k) {
      const int own = (worker + k) % all->ranges;
      const int64_t end = all->count * (own + 1) / all->ranges;
      for (;;) {
        const int64_t index = __atomic_fetch_add(&all->range[own].next, 1, __ATOMIC_RELAXED);
        if (index >= end) break;
        (*all->task)(index, worker);
      }
    }
  }
};

// As parallel_for, for tasks that go through memory in order: each worker begins with a range of indices of its own and
// then helps with the others', so that two workers do not touch a fresh page at once.
template <class Task>
void parallel_for_ranges(const Parallel& parallel, int workers, int64_t count, const Task& task) {
  if (workers > parallel.threads) workers = parallel.threads;
  if (workers > count) workers = (int)count;
  if (workers > kMaxRanges) workers = kMaxRanges;
  if (workers <= 1) {
    for (int64_t index = 0; index < count; ++index) task(index, 0);
    return;
  }
  TaskRanges<Task> all;
  all.task = &task, all.count = count, all.ranges = workers;
  for (int k = 0; k < workers; ++k) all.range[k].next = count * k / workers;
  parallel.run(workers, &TaskRanges<Task>::work, &all);
}

}  // namespace
}  // namespace fastattn
