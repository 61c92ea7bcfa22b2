// Counts the words of normalised text (see word_counts.py).
#include "blake2b.h"
#include "normalise.h"
#include "memo.h"

// Why `words_add` returns.
#define DONE 0
#define FULL 1  // `limit` is reached
#define NO_MEMORY 2

// In Words.classes. A letter and a sign side by side are in different words.
#define LETTER 1
#define SIGN 2
#define SPACE 4

#define AHEAD 8  // words whose entries are fetched before they are needed
#define FIRST_WORDS (1u << 16)
#define FIRST_LONG (1u << 20)

// How words are cut; `Words` in word_counts.py has the same fields.
typedef struct {
  Normaliser normaliser;
  const i64 *marks;       // trie of strings that are in no word; a NUL is not, either
  const u8 *begins_mark;  // [256] their first bytes
  const u8 *classes;      // [65536] of characters
  i64 space_runs;         // whether spaces belong to the word after them; else each begins a word
  i64 longest;            // characters of a word; a longer one is cut
  i64 passage;            // characters that are normalised at a time
} Words;

typedef struct {
  Key key;  // it spells a word of up to SHORT_BYTES bytes
  u64 count;
  u64 place;  // of a longer word in `longer`: its length as u32, and its bytes
} Counted;

typedef struct {
  Words by;
  AsciiSet letters, signs, marks;  // of `by`; marks: their first bytes
  NormalText text;
  Counted *table;
  u64 entries, filled;  // `entries` is a power of two
  u8 *longer;
  u64 room, used;
  i64 bytes;  // of text since the words were taken
  i64 spelt;  // of all words, as words_take spells them
} Counter;

EXPORT void words_free(Counter *c) {
  free(c->text.bytes);
  free(c->table);
  free(c->longer);
  free(c);
}

// Returns a counter, whose tables must outlive it; NULL if memory is short.
EXPORT Counter *words_new(const Words *by) {
  Counter *c = calloc(1, sizeof(Counter));
  if (!c) return NULL;
  c->by = *by;
  normal_text_begin(&c->text, &c->by.normaliser);
  for (int byte = 0; byte < 128; byte++) {
    if (by->begins_mark[byte]) add_to_set(&c->marks, (u8)byte);
    if (by->classes[byte] == LETTER) add_to_set(&c->letters, (u8)byte);
    if (by->classes[byte] == SIGN) add_to_set(&c->signs, (u8)byte);
  }
  c->entries = FIRST_WORDS;
  c->room = FIRST_LONG;
  c->table = calloc(c->entries, sizeof(Counted));
  c->longer = malloc(c->room);
  if (c->table && c->longer) return c;
  words_free(c);
  return NULL;
}

// ---- The table.

static bool grow_table(Counter *c) {
  Counted *table = calloc(2 * c->entries, sizeof(Counted));
  if (!table) return false;
  const u64 mask = 2 * c->entries - 1;
  for (u64 i = 0; i < c->entries; i++) {
    if (!c->table[i].key.high) continue;
    u64 slot = memo_hash(c->table[i].key) & mask;
    while (table[slot].key.high) slot = (slot + 1) & mask;
    table[slot] = c->table[i];
  }
  free(c->table);
  c->table = table;
  c->entries *= 2;
  return true;
}

static bool store_long(Counter *c, const u8 *word, i64 length) {
  u32 size = (u32)length;
  if (c->used + sizeof(size) + size > c->room) {
    if (!RESIZE(c->longer, 2 * c->room + size)) return false;
    c->room = 2 * c->room + size;
  }
  memcpy(c->longer + c->used, &size, sizeof(size));
  memcpy(c->longer + c->used + sizeof(size), word, size);
  c->used += sizeof(size) + size;
  return true;
}

static bool spells(const Counter *c, const Counted *entry, const u8 *word, i64 length) {
  u32 size;
  memcpy(&size, c->longer + entry->place, sizeof(size));
  return size == (u32)length && !memcmp(c->longer + entry->place + sizeof(size), word, size);
}

// Counts a word of at least one byte; returns false if memory is short.
INLINE bool add(Counter *c, const u8 *word, i64 length, Key key, u64 hash) {
  const u64 mask = c->entries - 1;
  u64 slot = hash & mask;
  for (; c->table[slot].key.high; slot = (slot + 1) & mask) {
    Counted *entry = c->table + slot;
    if (key_equal(entry->key, key) && (length <= SHORT_BYTES || spells(c, entry, word, length))) {
      entry->count++;
      return true;
    }
  }
  c->table[slot] = (Counted){key, 1, c->used};
  c->spelt += length;
  for (i64 i = 0; i < length; i++) c->spelt += 2 * (word[i] == ' ');
  if (length > SHORT_BYTES && !store_long(c, word, length)) return false;
  return ++c->filled <= c->entries / 2 || grow_table(c);
}

// ---- Words.

// A word whose entry is being fetched.
typedef struct {
  i64 begin, length;
  Key key;
  u64 hash;
} Ahead;

// Text whose words are counted, some of them after their entries have been fetched.
typedef struct {
  const u8 *text;
  i64 begin;  // of the current word
  u8 left;    // class of the character before
  u64 found;  // words
  Ahead ahead[AHEAD];
} Cut;

static bool add_ahead(Counter *c, const Cut *cut, u64 number) {
  const Ahead *of = cut->ahead + number % AHEAD;
  return add(c, cut->text + of->begin, of->length, of->key, of->hash);
}

// Puts a word of at least one byte, of which 16 can be read, in place of an earlier one.
INLINE bool put(Counter *c, Cut *cut, i64 begin, i64 length) {
  if (cut->found >= AHEAD && !add_ahead(c, cut, cut->found)) return false;
  Key key = memo_key(cut->text + begin, length);
  const u64 hash = memo_hash(key);
  __builtin_prefetch(c->table + (hash & (c->entries - 1)));
  cut->ahead[cut->found++ % AHEAD] = (Ahead){begin, length, key, hash};
  return true;
}

static bool put_parts(Counter *c, Cut *cut, i64 end) {
  i64 begin = cut->begin, characters = 0;
  for (i64 at = begin; at < end; at += character_bytes(cut->text[at])) {
    if (characters++ < c->by.longest) continue;
    if (!put(c, cut, begin, at - begin)) return false;
    begin = at;
    characters = 1;
  }
  return put(c, cut, begin, end - begin);
}

// Ends the current word, if it has begun, before text[end]; cuts a long one into parts.
INLINE bool end_word(Counter *c, Cut *cut, i64 end) {
  i64 length = end - cut->begin;
  bool done = !length || (LIKELY(length <= c->by.longest) ? put(c, cut, cut->begin, length)
                                                          : put_parts(c, cut, end));
  cut->begin = end;
  return done;
}

// Ends words in text[at:size] up to a byte that is not ASCII or may begin a mark, at most a block.
// Returns its position, -1 if memory is short.
INLINE i64 cut_block(Counter *c, Cut *cut, i64 at, i64 size) {
  Block block = block_load(cut->text + at);
  u64 other = block_mask(block) | block_mask(block_in(block, &c->marks)) | 1ull << BLOCK;
  if (size - at < BLOCK) other |= 1ull << (size - at);
  i64 run = __builtin_ctzll(other);
  if (!run) return at;
  u64 spaces = block_mask((Block)(block == ' '));
  u64 letters = block_mask(block_in(block, &c->letters));
  u64 signs = block_mask(block_in(block, &c->signs));
  u64 ends = (letters & (signs << 1 | (cut->left == SIGN))) |
             (signs & (letters << 1 | (cut->left == LETTER)));
  ends |= c->by.space_runs ? spaces & ~(spaces << 1 | (cut->left == SPACE)) : spaces;
  for (ends &= (1ull << run) - 1; ends; ends &= ends - 1)
    if (!end_word(c, cut, at + __builtin_ctzll(ends))) return -1;
  cut->left = c->by.classes[cut->text[at + run - 1]];
  return at + run;
}

// Counts the words of normalised text.
static bool add_words(Counter *c, const u8 *text, i64 size) {
  const Words *by = &c->by;
  Cut cut = {.text = text};
  for (i64 at = 0, width; at < size; at += width) {
    if (text[at] < 0x80) at = cut_block(c, &cut, at, size);
    if (at < 0) return false;
    if (at == size) break;
    u8 byte = text[at];
    if (by->begins_mark[byte]) {
      i32 value;
      width = byte ? trie_longest(by->marks, text + at, text + size, &value) : 1;
      if (width) {
        if (!end_word(c, &cut, at)) return false;
        cut.begin = at + width;
        cut.left = 0;
        continue;
      }
    }
    width = character_bytes(byte);
    u8 class = width < 4 ? by->classes[code_point(text + at, width)] : 0;
    bool ends = class == SPACE ? !(by->space_runs && cut.left == SPACE)
                               : (cut.left | class) == (LETTER | SIGN);
    if (ends && !end_word(c, &cut, at)) return false;
    cut.left = class;
  }
  if (!end_word(c, &cut, size)) return false;
  for (u64 number = cut.found < AHEAD ? 0 : cut.found - AHEAD; number < cut.found; number++)
    if (!add_ahead(c, &cut, number)) return false;
  return true;
}

// ---- Passages.

// Returns the position `characters` further, at most `end`.
static const u8 *forward(const u8 *at, const u8 *end, i64 characters) {
  while (end - at >= 64 && characters >= 64) {
    i64 begun = 0;
    for (int i = 0; i < 64; i++) begun += (at[i] & 0xC0) != 0x80;
    characters -= begun;
    at += 64;
  }
  // `at` may be inside a character that was counted.
  while (at < end && ((*at & 0xC0) == 0x80 || characters-- > 0)) at++;
  return at;
}

// Returns the end of the passage that begins at `at`: the last line end in its second half, failing
// that the last end of a sentence, failing that the last space.
static const u8 *passage_end(const Words *by, const u8 *at, const u8 *end) {
  if (end - at <= by->passage) return end;
  const u8 *last = forward(at, end, by->passage), *half = forward(at, end, by->passage / 2);
  if (last == end) return end;
  for (const u8 *p = last - 1; p >= half; p--)
    if (*p == '\n') return p + 1;
  for (const u8 *p = last - 2; p >= half - 1; p--)
    if (p[0] == '.' && p[1] == ' ') return p + 2;
  for (const u8 *p = last - 1; p >= half; p--)
    if (*p == ' ') return p + 1;
  return last;
}

// Counts the words of data[offsets[i]:offsets[i + 1]] from byte `*at` of text `*text` on, until
// `limit` bytes have been read since the words were taken. Returns why it stops.
EXPORT i64 words_add(Counter *c, const u8 *data, const i64 *offsets, i64 texts, i64 *text, i64 *at,
                     i64 limit) {
  const u8 *readable = data + offsets[texts];
  for (; *text < texts; ++*text, *at = 0) {
    const u8 *begin = data + offsets[*text], *end = data + offsets[*text + 1];
    while (begin + *at < end) {
      const u8 *from = begin + *at, *to = passage_end(&c->by, from, end);
      i64 size = normalise(&c->text, from, to, readable);
      if (size < 0 || !add_words(c, c->text.bytes, size)) return NO_MEMORY;
      *at += to - from;
      c->bytes += to - from;
      if (c->bytes >= limit) return FULL;
    }
  }
  return DONE;
}

// Sets the number of words, of their bytes and of the bytes of text since the words were taken.
EXPORT void words_sizes(const Counter *c, i64 *words, i64 *spelt, i64 *bytes) {
  *words = (i64)c->filled;
  *spelt = c->spelt;
  *bytes = c->bytes;
}

// Writes the words, with U+2581 for a space, to data[offsets[i]:offsets[i + 1]], their counts and
// hashes, in no order. The counter is empty then.
EXPORT void words_take(Counter *c, u8 *data, i64 *offsets, i64 *counts, u64 *hashes) {
  u8 *out = data;
  *offsets++ = 0;
  for (u64 slot = 0; slot < c->entries; slot++) {
    const Counted *entry = c->table + slot;
    if (!entry->key.high) continue;
    const u8 *word = (const u8 *)&entry->key;
    u32 length = (u32)(entry->key.high >> 56);
    if (length > SHORT_BYTES) {
      word = c->longer + entry->place + sizeof(length);
      memcpy(&length, word - sizeof(length), sizeof(length));
    }
    for (u32 i = 0; i < length; i++) {
      if (word[i] == ' ') {
        memcpy(out, "\xE2\x96\x81", 3);
        out += 3;
      } else {
        *out++ = word[i];
      }
    }
    *counts++ = (i64)entry->count;
    *hashes++ = blake2b_64(data + offsets[-1], (u64)(out - data - offsets[-1]));
    *offsets++ = out - data;
  }
  memset(c->table, 0, c->entries * sizeof(Counted));
  c->filled = c->used = 0;
  c->bytes = c->spelt = 0;
}
