// Blocks of bytes: loads, sets of ASCII characters and masks with one bit a byte.
#pragma once

#include "native.h"

// A set of ASCII bytes: bit h of low[l] is set if it contains the byte 16 h + l.
typedef struct {
  u8 low[16];
} AsciiSet;

INLINE void add_to_set(AsciiSet *set, u8 byte) { set->low[byte & 15] |= (u8)(1u << (byte >> 4)); }

INLINE bool in_set(const AsciiSet *set, u8 byte) {
  return byte < 0x80 && set->low[byte & 15] >> (byte >> 4) & 1;
}

#if defined(__AVX2__)
#include <immintrin.h>
#define BLOCK 32
#elif defined(__SSSE3__)
#include <immintrin.h>
#define BLOCK 16
#elif defined(__aarch64__)
#include <arm_neon.h>
#define BLOCK 16
#else
#define BLOCK 8
#endif

typedef u8 Block __attribute__((vector_size(BLOCK)));
typedef u16 Pairwise __attribute__((vector_size(BLOCK)));

// For each kind of processor: block_pick returns table[byte] for bytes below 16, block_mask the highest
// bits of the bytes.
#if defined(__AVX2__)
INLINE Block block_pick(const u8 table[16], Block bytes) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return (Block)_mm256_shuffle_epi8(twice, (__m256i)bytes);
}
INLINE u32 block_mask(Block block) { return (u32)_mm256_movemask_epi8((__m256i)block); }
#elif defined(__SSSE3__)
INLINE Block block_pick(const u8 table[16], Block bytes) {
  return (Block)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table), (__m128i)bytes);
}
INLINE u32 block_mask(Block block) { return (u32)_mm_movemask_epi8((__m128i)block); }
#elif defined(__aarch64__)
INLINE Block block_pick(const u8 table[16], Block bytes) {
  return (Block)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)bytes);
}
INLINE u32 block_mask(Block block) {
  const Block bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t set = (uint8x16_t)((Block)(block > 0x7F) & bits);
  return (u32)vaddv_u8(vget_low_u8(set)) | (u32)vaddv_u8(vget_high_u8(set)) << 8;
}
#else
INLINE Block block_pick(const u8 table[16], Block bytes) {
  for (int i = 0; i < BLOCK; i++) bytes[i] = table[bytes[i]];
  return bytes;
}
INLINE u32 block_mask(Block block) {
  u32 mask = 0;
  for (int i = 0; i < BLOCK; i++) mask |= (u32)(block[i] >> 7) << i;
  return mask;
}
#endif

INLINE Block block_load(const u8 *at) {
  Block block;
  memcpy(&block, at, BLOCK);
  return block;
}

// Returns the block at `at` of a text of `left` bytes, zeros after it where no more can be read.
INLINE Block block_load_last(const u8 *at, i64 left, const u8 *readable) {
  u8 last[BLOCK] = {0};
  if (LIKELY(readable - at >= BLOCK)) return block_load(at);
  return block_load(memcpy(last, at, (size_t)left));
}

INLINE void block_store(u8 *at, Block block) { memcpy(at, &block, BLOCK); }

INLINE Block block_of(u8 byte) { return (Block){0} + byte; }

INLINE Block block_select(Block where, Block yes, Block no) { return (where & yes) | (~where & no); }

// Returns the mask of one bit of the bytes.
INLINE u32 block_bit(Block block, int bit) {
  return block_mask((Block)((Pairwise)block << (7 - bit)));  // no processor shifts single bytes
}

// Returns low[byte & 15] & high[byte >> 4] for each byte.
INLINE Block block_look_up(Block block, const u8 low[16], const u8 high[16]) {
  return block_pick(low, block & 15) & block_pick(high, block >> 4);
}

INLINE Block block_in(Block block, const AsciiSet *set) {
  static const u8 bits[16] = {1, 2, 4, 8, 16, 32, 64, 128};
  return (Block)(block_look_up(block, set->low, bits) != 0);
}

#define BLOCK_ALL (BLOCK == 32 ? 0xFFFFFFFFu : (1u << (BLOCK % 32)) - 1u)

// Writes at + i for each bit i of `bits`, in groups whose number is easier to predict than the
// number of bits; returns the number of bits.
INLINE i64 write_places(u64 bits, u32 at, u32 *places) {
  i64 count = __builtin_popcountll(bits);
  for (i64 first = 0; first < count; first += 8)
    for (int i = 0; i < 8; i++, bits &= bits - 1)
      places[first + i] = at + (u32)__builtin_ctzll(bits | 1ull << 63);
  return count;
}
