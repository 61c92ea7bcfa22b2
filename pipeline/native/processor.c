// Which of the libraries this processor can run.
#include "native.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

// Returns 1 if the processor has the instructions of x86-64-v3 and the system saves its registers.
EXPORT int has_v3(void) {
#ifdef __x86_64__
  u32 a, b, c, d, low, high;
  const u32 fma = 1u << 12, movbe = 1u << 22, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
  const u32 bmi = 1u << 3, avx2 = 1u << 5, bmi2 = 1u << 8;
  const u32 first = fma | movbe | osxsave | avx | f16c, seventh = bmi | avx2 | bmi2;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & seventh) != seventh) return 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & 6) == 6;
#else
  return 0;
#endif
}
