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

// For each kind of processor: block_look_up returns low[byte & 15] & high[byte >> 4] for each byte, if
// the upper half of `high` is 0; block_bit returns the mask of one bit of the bytes.

#if defined(__AVX2__)
#include <immintrin.h>
#define BLOCK 32
typedef __m256i Block;
INLINE Block block_load(const u8 *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE void block_store(u8 *at, Block block) { _mm256_storeu_si256((__m256i *)at, block); }
INLINE Block block_of(u8 byte) { return _mm256_set1_epi8((char)byte); }
INLINE Block block_equal(Block a, Block b) { return _mm256_cmpeq_epi8(a, b); }
INLINE Block block_or(Block a, Block b) { return _mm256_or_si256(a, b); }
INLINE Block block_select(Block where, Block yes, Block no) {
  return _mm256_blendv_epi8(no, yes, where);
}
INLINE u32 block_mask(Block block) { return (u32)_mm256_movemask_epi8(block); }
INLINE Block block_in(Block block, const AsciiSet *set) {
  const Block low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)set->low));
  const Block bits = _mm256_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4,
                                      8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
  const Block nibble = _mm256_set1_epi8(15);
  Block high = _mm256_shuffle_epi8(bits, _mm256_and_si256(_mm256_srli_epi16(block, 4), nibble));
  Block found = _mm256_and_si256(_mm256_shuffle_epi8(low, block), high);  // 0 from 0x80 on
  return _mm256_cmpeq_epi8(found, high) & ~_mm256_cmpeq_epi8(high, _mm256_setzero_si256());
}
INLINE u32 block_bit(Block block, int bit) { return block_mask(_mm256_slli_epi16(block, 7 - bit)); }
INLINE Block block_look_up(Block block, const u8 low[16], const u8 high[16]) {
  const Block lows = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
  const Block highs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
  Block nibble = _mm256_and_si256(_mm256_srli_epi16(block, 4), _mm256_set1_epi8(15));
  return _mm256_and_si256(_mm256_shuffle_epi8(lows, block), _mm256_shuffle_epi8(highs, nibble));
}
#elif defined(__SSSE3__)
#include <immintrin.h>
#define BLOCK 16
typedef __m128i Block;
INLINE Block block_load(const u8 *at) { return _mm_loadu_si128((const __m128i *)at); }
INLINE void block_store(u8 *at, Block block) { _mm_storeu_si128((__m128i *)at, block); }
INLINE Block block_of(u8 byte) { return _mm_set1_epi8((char)byte); }
INLINE Block block_equal(Block a, Block b) { return _mm_cmpeq_epi8(a, b); }
INLINE Block block_or(Block a, Block b) { return _mm_or_si128(a, b); }
INLINE Block block_select(Block where, Block yes, Block no) {
  return _mm_or_si128(_mm_and_si128(where, yes), _mm_andnot_si128(where, no));
}
INLINE u32 block_mask(Block block) { return (u32)_mm_movemask_epi8(block); }
INLINE Block block_in(Block block, const AsciiSet *set) {
  const Block bits = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
  const Block low = _mm_loadu_si128((const __m128i *)set->low), nibble = _mm_set1_epi8(15);
  Block high = _mm_shuffle_epi8(bits, _mm_and_si128(_mm_srli_epi16(block, 4), nibble));
  Block found = _mm_and_si128(_mm_shuffle_epi8(low, block), high);
  return _mm_andnot_si128(_mm_cmpeq_epi8(high, _mm_setzero_si128()), _mm_cmpeq_epi8(found, high));
}
INLINE u32 block_bit(Block block, int bit) { return block_mask(_mm_slli_epi16(block, 7 - bit)); }
INLINE Block block_look_up(Block block, const u8 low[16], const u8 high[16]) {
  const Block lows = _mm_loadu_si128((const __m128i *)low);
  const Block highs = _mm_loadu_si128((const __m128i *)high);
  Block nibble = _mm_and_si128(_mm_srli_epi16(block, 4), _mm_set1_epi8(15));
  return _mm_and_si128(_mm_shuffle_epi8(lows, block), _mm_shuffle_epi8(highs, nibble));
}
#elif defined(__aarch64__)
#include <arm_neon.h>
#define BLOCK 16
typedef uint8x16_t Block;
INLINE Block block_load(const u8 *at) { return vld1q_u8(at); }
INLINE void block_store(u8 *at, Block block) { vst1q_u8(at, block); }
INLINE Block block_of(u8 byte) { return vdupq_n_u8(byte); }
INLINE Block block_equal(Block a, Block b) { return vceqq_u8(a, b); }
INLINE Block block_or(Block a, Block b) { return vorrq_u8(a, b); }
INLINE Block block_select(Block where, Block yes, Block no) { return vbslq_u8(where, yes, no); }
INLINE u32 block_mask(Block block) {
  const Block bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  Block set = vandq_u8(block, bits);
  return (u32)vaddv_u8(vget_low_u8(set)) | (u32)vaddv_u8(vget_high_u8(set)) << 8;
}
INLINE Block block_in(Block block, const AsciiSet *set) {
  const Block bits = {1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0, 0, 0, 0};
  Block low = vqtbl1q_u8(vld1q_u8(set->low), vandq_u8(block, vdupq_n_u8(15)));
  return vtstq_u8(low, vqtbl1q_u8(bits, vshrq_n_u8(block, 4)));
}
INLINE u32 block_bit(Block block, int bit) {
  return block_mask(vtstq_u8(block, vdupq_n_u8((u8)(1u << bit))));
}
INLINE Block block_look_up(Block block, const u8 low[16], const u8 high[16]) {
  Block lows = vqtbl1q_u8(vld1q_u8(low), vandq_u8(block, vdupq_n_u8(15)));
  return vandq_u8(lows, vqtbl1q_u8(vld1q_u8(high), vshrq_n_u8(block, 4)));
}
#else
#define BLOCK 8
typedef struct {
  u8 bytes[BLOCK];
} Block;
INLINE Block block_load(const u8 *at) {
  Block block;
  memcpy(&block, at, BLOCK);
  return block;
}
INLINE void block_store(u8 *at, Block block) { memcpy(at, &block, BLOCK); }
INLINE Block block_of(u8 byte) {
  Block block;
  memset(&block, byte, BLOCK);
  return block;
}
INLINE Block block_equal(Block a, Block b) {
  for (int i = 0; i < BLOCK; i++) a.bytes[i] = a.bytes[i] == b.bytes[i] ? 0xFF : 0;
  return a;
}
INLINE Block block_or(Block a, Block b) {
  for (int i = 0; i < BLOCK; i++) a.bytes[i] |= b.bytes[i];
  return a;
}
INLINE Block block_select(Block where, Block yes, Block no) {
  for (int i = 0; i < BLOCK; i++) no.bytes[i] = where.bytes[i] ? yes.bytes[i] : no.bytes[i];
  return no;
}
INLINE u32 block_mask(Block block) {
  u32 mask = 0;
  for (int i = 0; i < BLOCK; i++) mask |= (u32)(block.bytes[i] >> 7) << i;
  return mask;
}
INLINE Block block_in(Block block, const AsciiSet *set) {
  for (int i = 0; i < BLOCK; i++) {
    u8 byte = block.bytes[i];
    block.bytes[i] = byte < 0x80 && set->low[byte & 15] >> (byte >> 4) & 1 ? 0xFF : 0;
  }
  return block;
}
INLINE u32 block_bit(Block block, int bit) {
  for (int i = 0; i < BLOCK; i++) block.bytes[i] = (u8)(block.bytes[i] << (7 - bit));
  return block_mask(block);
}
INLINE Block block_look_up(Block block, const u8 low[16], const u8 high[16]) {
  for (int i = 0; i < BLOCK; i++)
    block.bytes[i] = low[block.bytes[i] & 15] & high[block.bytes[i] >> 4];
  return block;
}
#endif

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
