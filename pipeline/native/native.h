// What all files of this folder share.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

// Makes room for `count` elements; returns false, and keeps the array, if memory is short.
#define RESIZE(array, count)                                             \
  ({                                                                     \
    void *resized = realloc(array, (size_t)(count) * sizeof(*(array)));  \
    if (resized) (array) = resized;                                      \
    resized != NULL;                                                     \
  })

#define TEXT_SLACK 64  // bytes beyond a text that can be read

// Instead of an added token's id, for a part that is text or is left to the library.
#define TEXT (-1)
#define REFUSED (-2)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

INLINE u64 load64(const u8 *at) {
  u64 word;
  memcpy(&word, at, 8);
  return word;
}

// Returns the bytes of the UTF-8 character with first byte `byte`. Source: RFC 3629.
INLINE i64 character_bytes(u8 byte) { return 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0); }

// Returns the code point of the character at `at`, which has `width` bytes.
INLINE u32 code_point(const u8 *at, i64 width) {
  switch (width) {
    case 1: return at[0];
    case 2: return (at[0] & 0x1Fu) << 6 | (at[1] & 0x3Fu);
    case 3: return (at[0] & 0x0Fu) << 12 | (at[1] & 0x3Fu) << 6 | (at[2] & 0x3Fu);
    default:
      return (at[0] & 0x07u) << 18 | (at[1] & 0x3Fu) << 12 | (at[2] & 0x3Fu) << 6 | (at[3] & 0x3Fu);
  }
}
