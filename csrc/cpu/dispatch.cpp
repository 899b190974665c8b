// Choice of the instruction set at run time. This file is compiled for the baseline, because all machines run it.
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
  bool has[kInstructionSetCount] = {};
  int current = -1;

  Available() {
    const char* name = getenv("FASTATTN_CPU_ISA");
    int i = kInstructionSetCount;
    has[--i] = true;
#if defined(__x86_64__)
    // __builtin_cpu_supports also checks the operating system's support of the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() && has_lzcnt() &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("popcnt");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    const bool avx512_bf16 = avx512 && has_avx512_bf16();
    const bool unwanted = name && *name && strcmp(name, "amx_bf16") != 0;
    has[--i] = avx2;
    has[--i] = avx512;
    has[--i] = avx512_bf16;
    has[--i] = avx512_bf16 && !unwanted && has_amx_bf16() && may_use_tiles();
#endif
    if (name && *name) {
      use(name);
    } else {
      for (current = 0; !has[current];) ++current;
    }
  }

  bool use(const char* name) {
    for (int i = 0; i < kInstructionSetCount; ++i)
      if (has[i] && strcmp(kInstructionSets[i], name) == 0) {
        __atomic_store_n(&current, i, __ATOMIC_RELEASE);
        return true;
      }
    return false;
  }

 private:
#if defined(__x86_64__)
  // Features read from cpuid, because __builtin_cpu_supports of some supported compilers does not know their names.
  static bool has_f16c() { return cpuid(1, 0, 2) >> 29 & 1; }
  static bool has_lzcnt() { return cpuid(0x80000001, 0, 2) >> 5 & 1; }
  static bool has_avx512_bf16() { return cpuid(7, 0, 0) >= 1 && cpuid(7, 1, 0) >> 5 & 1; }

  static bool has_amx_bf16() { return (cpuid(7, 0, 3) >> 22 & 5) == 5; }  // the bfloat16 instructions and the tiles

  // Request the tiles' 8 KiB of state from Linux. A signal stack must then hold some 12 KiB. Linux refuses the request
  // if a signal stack is already smaller.
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

bool has_instruction_set(int index) { return available().has[index]; }

int instruction_set() { return __atomic_load_n(&available().current, __ATOMIC_ACQUIRE); }

bool use_instruction_set(const char* name) { return available().use(name); }

}  // namespace fastattn
