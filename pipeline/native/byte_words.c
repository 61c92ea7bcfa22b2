// Cuts text into words, 64 bytes at a time: sets of bytes are bits of words, and whether a word
// begins at a byte follows from the sets of this byte and its neighbours.
#include "byte_words.h"

#include "simd.h"

#define BIT(i) (1ull << (i))

// Sets of ASCII bytes, as bits of LOW[byte & 15] & HIGH[byte >> 4]: letters of rows 4 and 6, and of
// rows 5 and 7, numbers, the blank, line ends, other white space, the apostrophe, and all.
#define LETTER_BITS 0
#define NUMBER_BIT 2
#define BLANK_BIT 3
#define LINE_BIT 4
#define SPACE_BIT 5
#define APOSTROPHE_BIT 6
#define ASCII_BIT 7
static const u8 LOW[16] = {0x8E, 0x87, 0x87, 0x87, 0x87, 0x87, 0x87, 0xC7,
                           0x87, 0xA7, 0x93, 0xA1, 0xA1, 0x91, 0x81, 0x81};
static const u8 HIGH[16] = {0xB0, 0x80, 0xC8, 0x84, 0x81, 0x82, 0x81, 0x82};

INLINE Classes ascii_classes(const u8 *text, u64 *ascii) {
  Classes c = {0};
  *ascii = 0;
  for (int at = 0; at < 64; at += BLOCK) {
    Block block = block_look_up(block_load(text + at), LOW, HIGH);
    c.letters |= (u64)(block_bit(block, LETTER_BITS) | block_bit(block, LETTER_BITS + 1)) << at;
    c.numbers |= (u64)block_bit(block, NUMBER_BIT) << at;
    c.blanks |= (u64)block_bit(block, BLANK_BIT) << at;
    c.lines |= (u64)block_bit(block, LINE_BIT) << at;
    c.spaces |= (u64)block_bit(block, SPACE_BIT) << at;
    c.apostrophes |= (u64)block_bit(block, APOSTROPHE_BIT) << at;
    *ascii |= (u64)block_bit(block, ASCII_BIT) << at;
  }
  c.spaces |= c.blanks | c.lines;
  return c;
}

INLINE void add_bytes(Classes *c, u64 bytes, u64 kind) {
  c->letters |= bytes & -(u64)(kind == LETTER);
  c->numbers |= bytes & -(u64)(kind == NUMBER);
  c->spaces |= bytes & -(u64)(kind == SPACE);
}

// Adds the characters beyond ASCII, whose bytes are `high`; returns the kinds met, as bits. The last
// character of 64 bytes may reach into the next, which receive the `rest` of its bits.
static u64 add_others(const u8 *kinds, const u8 *text, u64 high, Classes *c, Classes *rest) {
  u64 met = 0;
  c->letters |= rest->letters;
  c->numbers |= rest->numbers;
  c->spaces |= rest->spaces;
  c->continues = rest->continues;
  high &= ~rest->continues;
  *rest = (Classes){0};
  while (high) {
    const int at = __builtin_ctzll(high);
    const i64 width = character_bytes(text[at]);
    const u64 all = (1ull << width) - 1;
    const u32 point = code_point(text + at, width);
    const u64 kind = kinds[point < POINTS ? point : POINTS - 1];
    met |= kind;
    add_bytes(c, all << at, kind & ~(u64)CHANGES);
    c->continues |= all << at & ~BIT(at);
    if (UNLIKELY(at + width > 64)) {
      rest->continues = all >> (64 - at);
      add_bytes(rest, rest->continues, kind & ~(u64)CHANGES);
    }
    high &= ~(all << at);
  }
  return met;
}

bool classify(const WordRules *rules, const u8 *text, i64 size, Classes *classes) {
  Classes rest = {0};
  u8 last[64 + 4] = {0};  // zeros, which are of no class, and the last bytes of the text
  u64 met = 0, ascii;
  for (i64 at = 0; at < size; at += 64, text += 64, classes++) {
    if (size - at < 64) text = memcpy(last, text, (size_t)(size - at));
    Classes c = ascii_classes(text, &ascii);
    if (UNLIKELY(~ascii)) met |= add_others(rules->kinds, text, ~ascii, &c, &rest);
    *classes = c;
  }
  return met & CHANGES;
}

// Sets of the bytes before a block of 64, from which shifted sets take their first bits.
typedef struct {
  u64 letters, numbers, others, spaces, lines, eaten, continues;
  u64 other_starts;  // characters that begin a word and are none of these kinds
  u64 ends;          // last bytes of characters of white space that begin words before other text
  u64 blank_ends;    // those that are blanks
} Before;

INLINE u64 shifted(u64 set, u64 before, int by) { return set << by | before >> (64 - by); }

// Returns whether the white space from bit `at` of block `k` on, up to its first line end, has one.
static bool line_follows(const Classes *classes, i64 blocks, i64 k, int at) {
  for (u64 from = ~0ull << at; k < blocks; k++, from = ~0ull) {
    u64 stops = from & ~(classes[k].spaces & ~classes[k].lines);
    if (stops) return classes[k].lines & (stops & -stops);
  }
  return false;
}

// Returns the line ends that belong to the others before them.
INLINE u64 eaten_lines(const Before *b, u64 lines, u64 others) {
  u64 firsts = lines & (shifted(others, b->others, 1) | b->eaten >> 63);
  return lines & ~(lines + firsts);
}

// Where white space ends before other text with a character of several bytes, sets the bit of its
// first byte in `starts` if `last_space`. Returns the last bytes of those that begin a word.
static u64 wide_ends(u64 ends, const Classes *classes, i64 k, bool last_space, u64 *starts) {
  u64 found = 0;
  for (; ends; ends &= ends - 1) {
    int last = __builtin_ctzll(ends), at = last;
    i64 block = k;
    while (classes[block].continues >> at & 1) {
      if (at == 0) block--;
      at = (at - 1) & 63;
    }
    if (last_space) starts[block] |= BIT(at);
    if (starts[block] >> at & 1) found |= BIT(last);
  }
  return found;
}

// Sets the starts of words of white space in starts[k]; sets `ends` and `blank_ends` of `now`.
INLINE void space_words(const WordRules *rules, const Classes *classes, i64 blocks, i64 k,
                        u64 after_last, const Before *b, Before *now, u64 *starts) {
  const Classes *c = classes + k;
  u64 next = k + 1 < blocks ? classes[k + 1].spaces & 1 : 0;
  u64 spaces = now->spaces, lines = now->lines;
  u64 ends = spaces & ~(spaces >> 1 | next << 63 | after_last);
  u64 found = spaces & ~shifted(spaces, b->spaces, 1);
  if (rules->lines) {
    u64 after_line = shifted(lines, b->lines, 1) & spaces & ~lines;
    for (; after_line; after_line &= after_line - 1)
      if (!line_follows(classes, blocks, k, __builtin_ctzll(after_line)))
        found |= after_line & -after_line;
  }
  if (rules->last_space) found |= ends & ~c->continues & ~(rules->lines ? lines : 0);
  starts[k] = found;
  now->ends = ends & ~lines & ~c->continues & found;
  if (UNLIKELY(ends & c->continues))
    now->ends |= wide_ends(ends & c->continues, classes, k, rules->last_space, starts);
  now->blank_ends = now->ends & c->blanks;
}

// Returns the letters that join a single character of another kind, which begins a word.
INLINE u64 joined_letters(const Before *b, const Before *now, u64 firsts) {
  u64 joined = shifted(now->other_starts, b->other_starts, 1);
  if (now->continues | b->continues) {
    u64 inside = ~0ull;
    for (int by = 2; by <= 4; by++) {
      inside &= shifted(now->continues, b->continues, by - 1);
      joined |= inside & shifted(now->other_starts, b->other_starts, by);
    }
  }
  return joined & firsts;
}

// Returns the starts of every third character in runs of numbers. `count` is the number of
// characters since the last start before this block, and then before the next.
static u64 thirds(u64 numbers, u64 continues, u64 before, int *count) {
  u64 found = 0;
  int run = before >> 63 ? *count : 0;
  for (u64 left = numbers; left; left &= left - 1) {
    int at = __builtin_ctzll(left);
    if (at && !(numbers >> (at - 1) & 1)) run = 0;
    if (at == 0 && !(before >> 63)) run = 0;
    if (continues >> at & 1) continue;
    if (run == 3) {
      found |= BIT(at);
      run = 0;
    }
    run++;
  }
  *count = run;
  return found;
}

// Returns the length of a contraction such as 's at an apostrophe, or 0.
static i64 contraction(const u8 *at, const u8 *end, bool any_case) {
  if (at + 1 >= end) return 0;
  // The letter ſ is an s in another case. Source: Unicode's CaseFolding.txt.
  if (any_case && at + 2 < end && at[1] == 0xC5 && at[2] == 0xBF) return 3;
  u8 first = at[1], second = at + 2 < end ? at[2] : 0;
  if (any_case) first |= 0x20, second |= 0x20;
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  return first == 'l' && second == 'l' ? 3 : 0;
}

static void set_contractions(const WordRules *rules, const u8 *text, i64 size,
                             const Classes *classes, u64 *starts) {
  for (i64 k = 0; k < (size + 63) / 64; k++) {
    for (u64 left = classes[k].apostrophes & starts[k]; left; left &= left - 1) {
      i64 at = 64 * k + __builtin_ctzll(left);
      i64 length = contraction(text + at, text + size, rules->contractions == 2);
      if (!length) continue;
      starts[(at + 1) / 64] &= ~BIT((at + 1) & 63);
      if (at + length < size) starts[(at + length) / 64] |= BIT((at + length) & 63);
    }
  }
}

void find_words(const WordRules *rules, const u8 *text, i64 size, const Classes *classes,
                u64 *starts) {
  const i64 blocks = (size + 63) / 64;
  Before b = {0};
  u64 apostrophes = 0;
  int digits = 0;
  for (i64 k = 0; k < blocks; k++) {
    const Classes *c = classes + k;
    const bool is_last = k + 1 == blocks;
    u64 valid = is_last && size & 63 ? BIT(size & 63) - 1 : ~0ull;
    Before now = {0};
    now.letters = c->letters;
    now.numbers = c->numbers;
    now.others = valid & ~(c->letters | c->numbers | c->spaces);
    now.continues = c->continues;
    if (rules->lines_after_others) now.eaten = eaten_lines(&b, c->lines, now.others);
    now.spaces = c->spaces & ~now.eaten;
    now.lines = c->lines & ~now.eaten;
    space_words(rules, classes, blocks, k, is_last ? BIT((size - 1) & 63) : 0, &b, &now, starts);
    u64 after_space = shifted(now.ends, b.ends, 1);
    u64 after_blank = shifted(now.blank_ends, b.blank_ends, 1);
    now.other_starts = now.others & ~shifted(now.others, b.others, 1) & ~after_blank;
    u64 letters = now.letters & ~shifted(now.letters, b.letters, 1);
    if (rules->before_letters == 1) letters &= ~after_blank;
    if (rules->before_letters == 2) {
      letters &= ~after_space;
      letters &= ~joined_letters(&b, &now, letters);
    }
    u64 numbers = now.numbers & ~shifted(now.numbers, b.numbers, 1);
    if (rules->space_before_numbers) numbers &= ~after_blank;
    if (rules->numbers == 1) numbers = now.numbers & ~now.continues;
    if (rules->numbers == 3 && now.numbers)
      numbers |= thirds(now.numbers, now.continues, b.numbers, &digits);
    starts[k] |= now.other_starts | letters | numbers;
    apostrophes |= c->apostrophes;
    b = now;
  }
  if (rules->contractions && apostrophes) set_contractions(rules, text, size, classes, starts);
}
