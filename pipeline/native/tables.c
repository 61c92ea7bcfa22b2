// Makes the tables of a SentencePiece model that the encoder reads.
#include "cuts.h"
#include "normalise.h"

// Fills `ascii` [128] and `points` [65536] of a normaliser with `rules` and `right_sides`. `others`
// are the characters beyond ASCII up to U+FFFF.
EXPORT void normaliser_tables(Normaliser *of, const u8 *others, i64 size, i16 *ascii, u8 *points) {
  u8 text[4];
  u32 place = 0;
  i64 reached, width;
  for (u32 byte = 0; byte < 128; byte++) {
    text[0] = (u8)byte;
    const u8 *side = of->right_sides;
    if (!longest_rule(of, text, text + 1, &place, &reached))
      ascii[byte] = (i16)byte;
    else if (side[place] == 0)
      ascii[byte] = REMOVED;
    else
      ascii[byte] = side[place + 1] == 0 && side[place] < 0x80 ? side[place] : NO_RULE;
    bool begins_more = reached == 1;
    for (u32 after = 0; begins_more && after < 128; after++) {
      text[1] = (u8)after;
      longest_rule(of, text, text + 2, &place, &reached);
      if (reached == 2) ascii[byte] = NO_RULE;
    }
    for (i64 at = 0; begins_more && at < size; at += width) {
      width = character_bytes(others[at]);
      memcpy(text + 1, others + at, (size_t)width);
      longest_rule(of, text, text + 1 + width, &place, &reached);
      if (reached == 1 + width) points[code_point(others + at, width)] |= JOINS;
    }
  }
  for (i64 at = 0; at < size; at += width) {
    width = character_bytes(others[at]);
    const u32 point = code_point(others + at, width);
    longest_rule(of, others + at, others + at + width, &place, &reached);
    // The space symbol is written as a space.
    if (reached == width || point == 0x2581) points[point] |= BEGINS;
  }
}

// Marks pairs of adjacent characters, `count` code points left[i] and right[i]: those of ASCII in
// `ascii_pairs` [128 * 128], others in the hashed set `pairs` of `words` words, a power of two.
EXPORT void pair_sets(const u32 *left, const u32 *right, i64 count, u8 *ascii_pairs, u64 *pairs,
                      i64 words) {
  for (i64 i = 0; i < count; i++) {
    if (left[i] < 128 && right[i] < 128) {
      ascii_pairs[left[i] << 7 | right[i]] = 1;
    } else {
      u64 bit = pair_bit(left[i], right[i]);
      pairs[bit >> 6 & (u64)(words - 1)] |= 1ull << (bit & 63);
    }
  }
}
