// Chooses the instruction set at run time. Compiled for the baseline, as everything that all machines run.
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace fastattn {
namespace {

struct Available {
  InstructionSet sets[5];
  int count = 0;
  const InstructionSet* current = nullptr;

  Available() {
#define FASTATTN_ADD(isa)                                                                                              \
  sets[count++] = {#isa,          &attention_##isa,      &attention_backward_##isa, &dropout_##isa, &layer_norm_##isa, \
                   &limits_##isa, &softmax_dropout_##isa}
    const char* name = getenv("FASTATTN_CPU_ISA");
#if defined(__x86_64__)
    // __builtin_cpu_supports covers the operating system's support of the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() && has_lzcnt() &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("popcnt");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    const bool avx512_bf16 = avx512 && has_avx512_bf16();
    const bool unwanted = name && *name && strcmp(name, "amx_bf16") != 0;
    if (avx512_bf16 && !unwanted && has_amx_bf16() && may_use_tiles()) FASTATTN_ADD(amx_bf16);
    if (avx512_bf16) FASTATTN_ADD(avx512_bf16);
    if (avx512) FASTATTN_ADD(avx512);
    if (avx2) FASTATTN_ADD(avx2);
#endif
    FASTATTN_ADD(generic);
    if (!name || !*name)
      current = sets;
    else
      use(name);
  }

  bool use(const char* name) {
    for (int i = 0; i < count; ++i)
      if (strcmp(sets[i].name, name) == 0) {
        __atomic_store_n(&current, sets + i, __ATOMIC_RELEASE);
        return true;
      }
    return false;
  }

 private:
#if defined(__x86_64__)
  // Read from cpuid, since not every supported compiler's __builtin_cpu_supports knows these names.
  static bool has_f16c() { return cpuid(1, 0, 2) >> 29 & 1; }
  static bool has_lzcnt() { return cpuid(0x80000001, 0, 2) >> 5 & 1; }
  static bool has_avx512_bf16() { return cpuid(7, 0, 0) >= 1 && cpuid(7, 1, 0) >> 5 & 1; }

  static bool has_amx_bf16() { return (cpuid(7, 0, 3) >> 22 & 5) == 5; }  // its instructions and the tiles

  // Linux grants the tiles' 8 KiB of state to processes that ask. Signal stacks then have to hold some 12 KiB; where
  // one is smaller already, it refuses.
  static bool may_use_tiles() {
    constexpr long kArchReqXcompPerm = 0x1023, kXtiledata = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtiledata) == 0;
  }

  static unsigned cpuid(unsigned leaf, unsigned subleaf, int which) {
    unsigned out[4];
    __asm__("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(subleaf));
    return out[which];
  }
#endif
};

Available& available() {
  static Available instance;
  return instance;
}

}  // namespace

const InstructionSet* instruction_sets(int* count) {
  *count = available().count;
  return available().sets;
}

const InstructionSet* kernels() { return __atomic_load_n(&available().current, __ATOMIC_ACQUIRE); }

bool use_instruction_set(const char* name) { return available().use(name); }

}  // namespace fastattn
