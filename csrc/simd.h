// Macros with which GCC vectorises the CPU kernels: one clone of a function per instruction set, including everything
// that is inlined into it. The clone is chosen when the library is loaded.
#pragma once
#include "portable.h"

#define STPPO_INLINE inline __attribute__((always_inline))
#if defined(STPPO_CLONES)  // a test builds one instruction set at a time
#elif defined(__x86_64__)
#define STPPO_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define STPPO_CLONES
#endif
