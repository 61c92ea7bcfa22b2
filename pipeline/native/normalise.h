// SentencePiece's normalisation. In normalised text, byte 0x20 represents the space symbol U+2581.
#pragma once

#include "simd.h"
#include "trie.h"

// In Normaliser.ascii, instead of a replacement: search the rules; remove the byte.
#define NO_RULE (-2)
#define REMOVED (-1)
// In Normaliser.points: some rule begins with this character; one of an ASCII character and this one.
#define BEGINS 1
#define JOINS 2
// If rules replace graphemes, JOINS are characters that continue one; none continues after LONE, and
// only the library knows the graphemes or words of a text with HARD.
#define LONE 4
#define HARD 8
#define WHOLE_BYTES 6  // of the shortest grapheme whose characters are replaced one by one

// In Normaliser.prefix: add a space at the start always, or if there is none.
#define ALWAYS 1
#define IF_MISSING 2

// A model's normalisation; `Normaliser` in fast_tokenizer.py has the same fields.
typedef struct {
  const u32 *rules;         // Darts-clone double array of the rules' left sides
  i64 rules_size;           // its units
  const u8 *right_sides;    // zero-terminated
  const i16 *ascii;         // [128] replacement of an ASCII byte before another, REMOVED or NO_RULE
  const u8 *points;         // [65536] flags of a character, [0x110000] if `graphemes`
  const i64 *symbols;       // trie of user-defined symbols as spelt in raw text
  const u8 *begins_symbol;  // [256] their first bytes
  i64 longest;              // longest right side, in bytes
  i64 collapse;             // whether to remove repeated spaces,
  i64 strip_left;           // leading ones,
  i64 strip_right;          // and trailing ones
  i64 prefix, suffix;       // whether to add a space at the start or at the end
  i64 graphemes;            // whether rules replace graphemes, as in Hugging Face's tokenizers
} Normaliser;

// The normalised text of one document after another.
typedef struct {
  const Normaliser *normaliser;
  AsciiSet kept, spaces;  // ASCII that is copied, or becomes a space if it is not one; spaces
  u8 *bytes;              // the caller frees them
  i64 room;
} NormalText;

// Where a document's normalisation stands.
typedef struct {
  const u8 *begin, *at, *end;
  u8 *out;
  bool begun;        // a leading space is added only once other text follows the leading spaces
  bool after_space;  // and spaces that follow are removed
  bool hard;         // only the library can normalise the document
} Progress;

void normal_text_begin(NormalText *t, const Normaliser *by);
bool reserve_text(NormalText *t, i64 size);
// Normalises a document from `s->at` on into t->bytes, followed by TEXT_SLACK bytes that can be read,
// 16 of them zeros; returns its length, -1 if memory is short or `s->hard`. Bytes before `readable`
// can be read. If `pauses`, it may stop early: before the first of the spaces after a word, amid text
// of t->kept.
i64 normalise_on(NormalText *t, Progress *s, const u8 *readable, bool pauses);
// Normalises a whole document.
i64 normalise(NormalText *t, const u8 *at, const u8 *end, const u8 *readable);

// Returns the bytes of the longest rule at `at`, or of the `shortest`, 0 if none, and its right side's
// index in `place`; in `reached` how many bytes begin some rule.
// Source: darts.h of Darts-clone, DoubleArrayUnit and commonPrefixSearch.
INLINE i64 find_rule(const Normaliser *of, const u8 *at, const u8 *end, bool shortest, u32 *place,
                     i64 *reached) {
  const u32 *rules = of->rules;
  i64 length = 0;
  u32 unit = rules[0], node = (unit >> 10) << ((unit & 512) >> 6);
  const u8 *p = at;
  for (; p < end; p++) {
    node ^= *p;
    if (node >= of->rules_size) break;
    unit = rules[node];
    if ((unit & 0x800000FF) != *p) break;
    node ^= (unit >> 10) << ((unit & 512) >> 6);
    if (unit & 256) {
      length = p + 1 - at;
      *place = rules[node] & 0x7FFFFFFF;
      if (shortest) break;
    }
  }
  *reached = p - at;
  return length;
}

static inline i64 longest_rule(const Normaliser *of, const u8 *at, const u8 *end, u32 *place,
                               i64 *reached) {
  return find_rule(of, at, end, false, place, reached);
}
