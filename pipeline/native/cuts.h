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
static inline i64 cut_pairs(const Pairs *pairs, const u8 *text, i64 begin, i64 end, u32 *ends) {
  i64 count = 0, width = character_bytes(text[begin]), at = begin + width;
  u32 left = code_point(text + begin, width);
  while (at < end) {
    u8 byte = text[at];
    ends[count] = (u32)at;  // kept if `count` grows, which avoids a branch
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
  ends[count++] = (u32)end;
  return count;
}

// Sets of ASCII bytes that words are cut by: no piece has a space after another character, or a letter
// and a sign side by side. All other bytes join their neighbours.
typedef struct {
  AsciiSet spaces, letters, signs;
  AsciiSet plain;  // bytes that normalisation keeps, or reads as a space
} WordSets;

// Which of 64 bytes are in the sets, one bit each.
typedef struct {
  u64 spaces, letters, signs, plain;
} WordKinds;

INLINE WordKinds word_kinds(const WordSets *sets, const u8 *text) {
  WordKinds k = {0};
  for (int at = 0; at < 64; at += BLOCK) {
    Block block = block_load(text + at);
    k.spaces |= (u64)block_mask(block_in(block, &sets->spaces)) << at;
    k.letters |= (u64)block_mask(block_in(block, &sets->letters)) << at;
    k.signs |= (u64)block_mask(block_in(block, &sets->signs)) << at;
    k.plain |= (u64)block_mask(block_in(block, &sets->plain)) << at;
  }
  k.letters &= ~k.spaces;
  k.signs &= ~k.spaces;
  return k;
}

// Returns where a letter meets a sign; `before` are the kinds of the 64 bytes before, or zeros.
INLINE u64 meetings(WordKinds k, WordKinds before) {
  return (k.letters & (k.signs << 1 | before.signs >> 63)) |
         (k.signs & (k.letters << 1 | before.letters >> 63));
}

// Returns the first space of each run.
INLINE u64 first_spaces(WordKinds k, WordKinds before) {
  return k.spaces & ~(k.spaces << 1 | before.spaces >> 63);
}
