// BLAKE2b with a digest of 8 bytes. Source: RFC 7693.
#pragma once

#include "native.h"

#define BLAKE_BLOCK 128

static const u64 blake_begin[8] = {
    0x6A09E667F3BCC908ull, 0xBB67AE8584CAA73Bull, 0x3C6EF372FE94F82Bull, 0xA54FF53A5F1D36F1ull,
    0x510E527FADE682D1ull, 0x9B05688C2B3E6C1Full, 0x1F83D9ABFB41BD6Bull, 0x5BE0CD19137E2179ull};

INLINE u64 rotated(u64 x, int by) { return x >> by | x << (64 - by); }

INLINE void blake_mix(u64 *a, u64 *b, u64 *c, u64 *d, u64 x, u64 y) {
  *a += *b + x;
  *d = rotated(*d ^ *a, 32);
  *c += *d;
  *b = rotated(*b ^ *c, 24);
  *a += *b + y;
  *d = rotated(*d ^ *a, 16);
  *c += *d;
  *b = rotated(*b ^ *c, 63);
}

// Adds a block to the state; `read` bytes of the message end with it.
static void blake_add(u64 *state, const u8 *block, u64 read, bool last) {
  static const u8 order[12][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                   {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                   {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                   {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                   {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                   {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                   {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                   {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                   {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                   {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
                                   {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                   {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};
  u64 v[16], m[16];
  memcpy(m, block, BLAKE_BLOCK);
  memcpy(v, state, 64);
  memcpy(v + 8, blake_begin, 64);
  v[12] ^= read;
  if (last) v[14] = ~v[14];
  for (int round = 0; round < 12; round++) {
    const u8 *of = order[round];
    for (int i = 0; i < 4; i++)
      blake_mix(v + i, v + 4 + i, v + 8 + i, v + 12 + i, m[of[2 * i]], m[of[2 * i + 1]]);
    for (int i = 0; i < 4; i++)
      blake_mix(v + i, v + 4 + (i + 1) % 4, v + 8 + (i + 2) % 4, v + 12 + (i + 3) % 4,
                m[of[8 + 2 * i]], m[of[9 + 2 * i]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[8 + i];
}

// Returns the digest of data[0:size] as a big-endian number.
static u64 blake2b_64(const u8 *data, u64 size) {
  u64 state[8], read = 0;
  u8 last[BLAKE_BLOCK] = {0};
  memcpy(state, blake_begin, 64);
  state[0] ^= 0x01010000 | sizeof(u64);  // neither key nor tree
  for (; size - read > BLAKE_BLOCK; read += BLAKE_BLOCK)
    blake_add(state, data + read, read + BLAKE_BLOCK, false);
  memcpy(last, data + read, size - read);
  blake_add(state, last, size, true);
  return __builtin_bswap64(state[0]);
}
