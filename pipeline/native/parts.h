// Encodes parts of documents one after another: what all encoders share.
#pragma once

#include "native.h"

// Reasons why an encoder stops; see word_tokenizer.py.
#define DONE 0
#define NORMALISE 1  // the normaliser may change the part
#define LIBRARY 2    // the library must encode it
#define NO_MEMORY 3
#define GROW 4  // `out` may be too short for its ids

#define ID_SLACK 8  // ids that may be written beyond the last

// Parts data[offsets[i]:offsets[i + 1]], whose ids are written to out[used:room]; `_Call` in
// word_tokenizer.py has the same fields.
typedef struct {
  const u8 *data;
  const i64 *offsets;
  const i32 *given;     // TEXT, REFUSED or the only id of a part
  i64 parts, first;     // `first` is the next
  i32 *out;
  i64 room, used;
  i64 *lengths;         // receives the number of ids of each
  i64 normal;           // whether parts need no normaliser
} Call;

// Encodes the call's part `first`, which lies from `at` to `end`. Returns the new `used`, or the
// negative of the reason why it stops.
typedef i64 EncodePart(void *encoder, const Call *call, const u8 *at, const u8 *end);

// Encodes parts from `first` on; returns DONE or why it stops at part `first`.
INLINE i64 encode_parts(void *encoder, Call *c, EncodePart *encode) {
  for (; c->first < c->parts; c->first++) {
    const i64 *offsets = c->offsets + c->first;
    const i32 given = c->given[c->first];
    i64 used = c->used;
    if (used + ID_SLACK > c->room) return GROW;
    if (given == REFUSED) return LIBRARY;
    if (given >= 0)
      c->out[used++] = given;
    else
      used = encode(encoder, c, c->data + offsets[0], c->data + offsets[1]);
    if (used < 0) return -used;
    c->lengths[c->first] = used - c->used;
    c->used = used;
  }
  return DONE;
}
