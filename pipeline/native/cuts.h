// Cuts normalised text where no piece crosses, so that best paths on both sides are independent.
#pragma once

#include "simd.h"

// Returns a pair's bit in a hashed set, before it is reduced to the set's size.
INLINE u64 pair_bit(u32 left, u32 right) {
  u64 mixed = left * 0x9E3779B97F4A7C15ull + right;
  mixed ^= mixed >> 29;
  mixed *= 0xBF58476D1CE4E5B9ull;
  return mixed >> 20;
}

// Adjacent characters of pieces. A hashed pair that is no real one only costs time.
typedef struct {
  const u8 *ascii;    // [128 * 128]
  const u64 *others;  // hashed set
  i64 words;          // its words, a power of two
} Pairs;

// Writes the ends of segments of text[begin:end] to `ends`; returns their number, at least 1.
// Segments end between characters that are no pair.
static inline i64 cut_pairs(const Pairs *pairs, const u8 *text, i64 begin, i64 end, i32 *ends) {
  i64 count = 0, width = character_bytes(text[begin]), at = begin + width;
  u32 left = code_point(text + begin, width);
  while (at < end) {
    u8 byte = text[at];
    ends[count] = (i32)at;  // kept if `count` grows, which avoids a branch
    if (byte < 0x80 && left < 0x80) {
      count += !pairs->ascii[left << 7 | byte];
      left = byte;
      at++;
      continue;
    }
    width = character_bytes(byte);
    u32 right = code_point(text + at, width);
    u64 bit = pair_bit(left, right);
    count += !(pairs->others[bit >> 6 & (u64)(pairs->words - 1)] >> (bit & 63) & 1);
    left = right;
    at += width;
  }
  ends[count++] = (i32)end;
  return count;
}

// Like cut_pairs, for a model in which no piece has a space after another character: segments end
// before spaces that follow other characters. `text` can be read, and `ends` written, by a block
// beyond.
static inline i64 cut_spaces(const u8 *text, i64 size, i32 *ends) {
  const Block space = block_of(' ');
  i64 count = 0;
  u32 after_space = 1;
  for (i64 at = 0; at < size; at += BLOCK) {
    u32 spaces = block_mask(block_equal(block_load(text + at), space));
    u32 found = spaces & ~(spaces << 1 | after_space);
    after_space = spaces >> (BLOCK - 1);
    if (size - at < BLOCK) found &= (1u << (size - at)) - 1u;
    for (; found; found &= found - 1) ends[count++] = (i32)(at + __builtin_ctz(found));
  }
  ends[count++] = (i32)size;
  return count;
}
