// Cuts text into words as the regular expressions of GPT-2 and its relatives do.
#pragma once

#include "native.h"

// Kinds of characters.
enum { OTHER, LETTER, NUMBER, SPACE, NEWLINE };
#define CHANGES 0x80  // added to a kind: a normaliser may change texts with this character
#define POINTS 0x110000

// The places in which the expressions differ, see byte_level.py.
typedef struct {
  const u8 *kinds;  // [POINTS]
  i64 contractions, before_letters, space_before_numbers, numbers, lines_after_others, lines,
      last_space;
} WordRules;

// Sets of the bytes of 64 bytes of text, one bit each. Every byte of a character is in its sets.
typedef struct {
  u64 letters, numbers, spaces, lines;  // lines are spaces too
  u64 blanks, apostrophes;              // the characters themselves
  u64 continues;                        // bytes after a character's first
} Classes;

// Fills classes[0 : (size + 63) / 64]; returns whether a normaliser may change the text.
EXPORT bool classify(const WordRules *rules, const u8 *text, i64 size, Classes *classes);
// Sets a bit of starts[0 : (size + 63) / 64] for each byte that begins a word.
EXPORT void find_words(const WordRules *rules, const u8 *text, i64 size, const Classes *classes,
                       u64 *starts);
