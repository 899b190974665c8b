// Choice of the instruction set at run time. This file is compiled for the baseline, because all machines run it.
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace fastattn {

FASTATTN_DECLARE(Limits, limits);

namespace {

int index_of(const char* name) {
  for (int i = 0; i < kInstructionSetCount; ++i)
    if (strcmp(kInstructionSets[i], name) == 0) return i;
  return -1;
}

// The instruction set that FASTATTN_CPU_ISA names, or null.
const char* named() {
  const char* name = getenv("FASTATTN_CPU_ISA");
  return name && *name ? name : nullptr;
}

// The instruction sets that this machine can run. It does not know yet whether Linux permits AMX's tiles.
struct Machine {
  bool has[kInstructionSetCount] = {};

  Machine() {
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
    has[--i] = avx2;
    has[--i] = avx512;
    has[--i] = avx512_bf16;
    has[--i] = avx512_bf16 && has_amx_bf16();
#endif
  }

 private:
#if defined(__x86_64__)
  // Features read from cpuid, because __builtin_cpu_supports of some supported compilers does not know their names.
  static bool has_f16c() { return cpuid(1, 0, 2) >> 29 & 1; }
  static bool has_lzcnt() { return cpuid(0x80000001, 0, 2) >> 5 & 1; }
  static bool has_avx512_bf16() { return cpuid(7, 0, 0) >= 1 && cpuid(7, 1, 0) >> 5 & 1; }

  static bool has_amx_bf16() { return (cpuid(7, 0, 3) >> 22 & 5) == 5; }  // the bfloat16 instructions and the tiles

  static unsigned cpuid(unsigned leaf, unsigned subleaf, int which) {
    unsigned out[4];
    __asm__("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(subleaf));
    return out[which];
  }
#endif
};

// Request the tiles' 8 KiB of state from Linux. A signal stack must then hold some 12 KiB. Linux refuses the request
// if a signal stack is already smaller.
bool may_use_tiles() {
#if defined(__x86_64__)
  constexpr long kArchReqXcompPerm = 0x1023, kXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtiledata) == 0;
#else
  return false;
#endif
}

// The instruction sets that this machine can run and the library has, and the one in use.
struct Available {
  bool has[kInstructionSetCount];
  int current = -1;

  Available() {
    Machine machine;
    const char* name = named();
    const int amx = index_of("amx_bf16");
    // Tiles are requested only if they may be used.
    if (amx >= 0 && machine.has[amx] && is_compiled(amx))
      machine.has[amx] = (!name || index_of(name) == amx) && may_use_tiles();
    for (int i = 0; i < kInstructionSetCount; ++i) has[i] = machine.has[i] && is_compiled(i);
    const int wanted = name ? index_of(name) : 0;
    if (wanted < 0 || (name && !machine.has[wanted])) return;
    // A set that is not compiled is replaced by the next one that is. The last one always is.
    for (current = wanted; !has[current];) ++current;
  }

  bool use(const char* name) {
    const int i = index_of(name);
    if (i < 0 || !has[i]) return false;
    __atomic_store_n(&current, i, __ATOMIC_RELEASE);
    return true;
  }
};

Available& available() {
  static Available instance;
  return instance;
}

}  // namespace

bool has_instruction_set(int index) { return available().has[index]; }

bool machine_has_instruction_set(int index) {
  static const Machine machine;
  return machine.has[index];
}

bool is_compiled(int index) {
  static const Limits* const all[] = {FASTATTN_OF_EACH(&, limits)};
  return all[index] != nullptr;
}

int instruction_set() { return __atomic_load_n(&available().current, __ATOMIC_ACQUIRE); }

bool use_instruction_set(const char* name) { return available().use(name); }

}  // namespace fastattn
