// Keys of short strings, and their hashes, for tables of words.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "simd.h"

#define SHORT_BYTES 15  // longest string that a key spells

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct {
  u64 low, high;  // high is 0 in empty entries
} Key;

// Returns zeros in huge pages, which take no memory until used and need fewer look-ups of addresses.
// `memory` receives what has to be freed, NULL if memory is short.
static inline void *huge_zeros(size_t bytes, void **memory) {
  *memory = calloc(bytes + HUGE_PAGE, 1);
  void *zeros = (void *)(((uintptr_t)*memory + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
#ifdef __linux__
  if (*memory) madvise(zeros, bytes, MADV_HUGEPAGE);
#endif
  return zeros;
}

// Returns the key of a string of 1 to 15 bytes, of which 16 can be read.
INLINE Key short_key(const u8 *text, i64 length) {
  static const u64 kept[2 * 16] = {
      0, 0, 0xFF, 0, 0xFFFF, 0, 0xFFFFFF, 0, 0xFFFFFFFF, 0, 0xFFFFFFFFFF, 0, 0xFFFFFFFFFFFF, 0,
      0xFFFFFFFFFFFFFF, 0, ~0ull, 0, ~0ull, 0xFF, ~0ull, 0xFFFF, ~0ull, 0xFFFFFF, ~0ull, 0xFFFFFFFF,
      ~0ull, 0xFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFFFF};
  return (Key){load64(text) & kept[2 * length],
               (load64(text + 8) & kept[2 * length + 1]) | (u64)length << 56};
}

INLINE u64 fold(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}

// Returns the key of a string of more than SHORT_BYTES bytes: a hash.
static inline Key long_key(const u8 *text, i64 length) {
  u64 low = (u64)length, high = 0x9E3779B97F4A7C15ull;
  for (i64 at = 0; at + 8 < length; at += 8) {
    low = fold(low ^ load64(text + at), 0xD6E8FEB86659FD93ull);
    high = (high ^ low) * 0xA0761D6478BD642Full;
  }
  low = fold(low ^ load64(text + length - 8), 0xD6E8FEB86659FD93ull);
  high = (high ^ low) * 0xA0761D6478BD642Full;
  return (Key){low, high >> 8 | 0xFFull << 56};
}

INLINE Key memo_key(const u8 *text, i64 length) {
  return LIKELY(length <= SHORT_BYTES) ? short_key(text, length) : long_key(text, length);
}

INLINE u64 memo_hash(Key key) {
  return fold(key.low ^ 0xE7037ED1A0B428DBull, key.high ^ 0x8EBC6AF09C88C6E3ull);
}

INLINE bool key_equal(Key a, Key b) { return ((a.low ^ b.low) | (a.high ^ b.high)) == 0; }
