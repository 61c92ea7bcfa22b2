// Encodes documents with the ids of a WordPiece tokenizer.json (see word_pieces.py).
#include "simd.h"
#include "trie.h"
#include "word_memo.h"

// Treatment of a character; 0 or more is the index of a replacement.
enum { KEEP = -1, BREAK = -2, ALONE = -3, REMOVE = -4, REFUSE = -5 };

#define AHEAD 32  // words whose entries are fetched before they are needed

// A tokenizer; `_Rules` in word_pieces.py has the same fields.
typedef struct {
  const i32 *actions;      // [0x110000]
  const u8 *right_sides;   // zero-terminated replacements; spaces separate words
  i64 longest;             // longest replacement, in bytes
  const i64 *initial;      // trie of pieces that begin words
  const i64 *continuing;   // trie of other pieces, without their prefix
  i64 unknown;             // id of a word that cannot be spelt
  i64 most_characters;     // of a word that can
  i64 ids, memo_bytes;
} Rules;

typedef struct {
  Rules rules;
  WordMemo memo;
  AsciiSet kept, upper, alone, spaces;  // by action; `upper` becomes lower case
  u8 *text;                             // normalised document; between words it may hold spaces
  i32 *begins, *ends;  // of its words
  i32 *chunks;         // first words of runs of words without white space between them
  i64 room;            // of these, in bytes of text
} Encoder;

EXPORT void word_piece_free(Encoder *e) {
  word_memo_free(&e->memo);
  free(e->text);
  free(e->begins);
  free(e->ends);
  free(e->chunks);
  free(e);
}

// Returns an encoder; NULL if memory is short. The arrays must outlive it.
EXPORT Encoder *word_piece_new(const Rules *rules) {
  Encoder *e = calloc(1, sizeof(Encoder));
  if (!e) return NULL;
  e->rules = *rules;
  if (!word_memo_make(&e->memo, rules->memo_bytes, rules->ids > 1 << 16, 0)) {
    word_piece_free(e);
    return NULL;
  }
  for (u8 byte = 0; byte < 128; byte++) {
    const i32 action = rules->actions[byte];
    const u8 *side = action >= 0 ? rules->right_sides + action : NULL;
    if (action == KEEP) add_to_set(&e->kept, byte);
    if (action == ALONE) add_to_set(&e->alone, byte);
    if (action == BREAK) add_to_set(&e->spaces, byte);
    if (side && byte >= 'A' && byte <= 'Z' && side[0] == (byte | 0x20) && !side[1])
      add_to_set(&e->upper, byte);
  }
  return e;
}

// Where a document's normalisation stands.
typedef struct {
  const u8 *at, *end;
  u8 *out;
  i64 begun, ended;  // words
  i64 chunks;
  bool inside;       // of a word
  bool after_space;  // or at the beginning
} State;

INLINE void begin_word(Encoder *e, State *s) {
  if (s->after_space) e->chunks[s->chunks++] = (i32)s->begun;
  s->after_space = false;
  e->begins[s->begun++] = (i32)(s->out - e->text);
}

INLINE void end_word(Encoder *e, State *s) { e->ends[s->ended++] = (i32)(s->out - e->text); }

INLINE void end_if_inside(Encoder *e, State *s) {
  if (s->inside) end_word(e, s);
  s->inside = false;
}

INLINE void end_chunk(Encoder *e, State *s) {
  end_if_inside(e, s);
  s->after_space = true;
}

INLINE void put_byte(Encoder *e, State *s, u8 byte) {
  if (!s->inside) begin_word(e, s);
  s->inside = true;
  *s->out++ = byte;
}

// Normalises blocks of ASCII characters, up to one with another action.
INLINE void take_blocks(Encoder *e, State *s, const u8 *readable) {
  for (;;) {
    const i64 left = s->end - s->at;
    Block block = block_load_last(s->at, left, readable), is_upper = block_in(block, &e->upper);
    u64 word = block_mask(block_in(block, &e->kept)) | block_mask(is_upper);
    u64 alone = block_mask(block_in(block, &e->alone));
    u64 bad = ~(word | alone | block_mask(block_in(block, &e->spaces))) | 1ull << BLOCK;
    i64 run = __builtin_ctzll(bad);
    if (run > left) run = left;
    const u64 valid = (1ull << run) - 1;
    word &= valid;
    alone &= valid;
    block_store(s->out, block_select(is_upper, block | block_of(0x20), block));
    const u64 after_word = word << 1 | s->inside;
    const i32 place = (i32)(s->out - e->text);
    const u64 spaces = valid & ~(word | alone), after_space = spaces << 1 | s->after_space;
    for (u64 begins = (word & ~after_word) | alone; begins; begins &= begins - 1) {
      const int bit = __builtin_ctzll(begins);
      e->chunks[s->chunks] = (i32)s->begun;  // kept if it follows a space, which avoids a branch
      s->chunks += after_space >> bit & 1;
      e->begins[s->begun++] = place + bit;
    }
    for (u64 ends = (after_word & ~word & valid) | alone << 1; ends; ends &= ends - 1)
      e->ends[s->ended++] = place + (i32)__builtin_ctzll(ends);
    if (run) s->inside = word >> (run - 1) & 1;
    if (run) s->after_space = spaces >> (run - 1) & 1;
    s->out += run;
    s->at += run;
    if (run < BLOCK || s->at == s->end) return;
  }
}

// Normalises one character; returns false if only the library can.
INLINE bool take_character(Encoder *e, State *s) {
  const i64 width = character_bytes(*s->at);
  if (width > s->end - s->at) return false;
  const i32 action = e->rules.actions[code_point(s->at, width)];
  switch (action) {
    case ALONE:
      end_if_inside(e, s);
      // fall through
    case KEEP:
      for (i64 i = 0; i < width; i++) put_byte(e, s, s->at[i]);
      if (action == ALONE) end_if_inside(e, s);
      break;
    case BREAK: end_chunk(e, s); break;
    case REMOVE: break;
    case REFUSE: return false;
    default:
      for (const u8 *side = e->rules.right_sides + action; *side; side++) {
        if (*side == ' ')
          end_chunk(e, s);
        else
          put_byte(e, s, *side);
      }
  }
  s->at += width;
  return true;
}

static bool reserve(Encoder *e, i64 size) {
  if (LIKELY(size <= e->room)) return true;
  if (!RESIZE(e->text, 2 * size) || !RESIZE(e->begins, 2 * size) || !RESIZE(e->ends, 2 * size) ||
      !RESIZE(e->chunks, 2 * size))
    return false;
  e->room = 2 * size;
  return true;
}

// Normalises data[at:end] into e->text and finds its words; returns DONE, LIBRARY or NO_MEMORY.
static i64 find_words(Encoder *e, const u8 *at, const u8 *end, const u8 *readable, i64 *words,
                      i64 *chunks) {
  State s = {at, end, e->text, 0, 0, 0, false, true};
  while (s.at < s.end) {
    i64 size = s.out - e->text;
    // What is left is copied, blocks at a time, but for one replacement before room is made again.
    if (!reserve(e, size + (s.end - s.at) + e->rules.longest + 2 * BLOCK + READ_AHEAD))
      return NO_MEMORY;
    s.out = e->text + size;
    take_blocks(e, &s, readable);
    if (s.at == s.end) break;
    if (!take_character(e, &s)) return LIBRARY;
  }
  end_if_inside(e, &s);
  *words = s.ended;
  *chunks = s.chunks;
  if (s.chunks) e->chunks[s.chunks] = (i32)s.ended;
  return DONE;
}

// Writes the ids of a word to `ids`, at most one for each byte; returns their number.
// Source: huggingface/tokenizers, `models/wordpiece/mod.rs`, WordPiece::tokenize.
static i64 ids_of_word(const Rules *r, const u8 *word, i64 length, i32 *ids) {
  const u8 *end = word + length;
  i64 characters = 0, count = 0;
  for (i64 i = 0; i < length; i++) characters += (word[i] & 0xC0) != 0x80;
  const i64 *trie = r->initial;
  while (word < end && characters <= r->most_characters) {
    i64 size = trie_longest(trie, word, end, ids + count);
    if (!size) break;
    word += size;
    count++;
    trie = r->continuing;
  }
  if (word == end) return count;
  ids[0] = (i32)r->unknown;
  return 1;
}

// Appends the ids of a word; returns the new end of `out`.
static i32 *encode_word(Encoder *e, const u8 *word, i64 length, i32 *out) {
  if (UNLIKELY(length > WORD_BYTES)) return out + ids_of_word(&e->rules, word, length, out);
  const Key key = memo_key(word, length);
  const u64 hash = memo_hash(key);
  const WordEntry *entry = word_memo_find(&e->memo, key, hash, word, length);
  if (LIKELY(entry)) return out + word_ids(&e->memo, entry, e->memo.wide, out);
  const i64 count = ids_of_word(&e->rules, word, length, out);
  word_memo_store(&e->memo, key, hash, word, length, out, count, e->memo.most);
  return out + count;
}

// Appends the ids of a chunk of words, which the memo keeps if it is short; returns as above.
static i32 *encode_chunk(Encoder *e, i64 first, i64 last, Key key, u64 hash, i32 *out) {
  i32 *const begin = out;
  for (i64 i = first; i < last; i++)
    out = encode_word(e, e->text + e->begins[i], e->ends[i] - e->begins[i], out);
  const i64 length = e->ends[last - 1] - e->begins[first];
  if (last - first > 1 && length <= SHORT_BYTES)
    word_memo_store(&e->memo, key, hash, e->text + e->begins[first], length, begin, out - begin,
                    e->memo.most);
  return out;
}

// Appends the ids of chunks first..last - 1; returns as above.
static i32 *encode_chunks(Encoder *e, i64 first, i64 last, i32 *out) {
  Key keys[AHEAD];
  u64 hashes[AHEAD];
  for (i64 i = first; i < last; i++) {
    const i32 begin = e->begins[e->chunks[i]];
    const i64 length = e->ends[e->chunks[i + 1] - 1] - begin;
    keys[i - first] = LIKELY(length <= SHORT_BYTES) ? memo_key(e->text + begin, length)
                                                   : (Key){0, 0};
    hashes[i - first] = memo_hash(keys[i - first]);
    __builtin_prefetch(word_line(&e->memo, hashes[i - first]));
  }
  for (i64 i = first; i < last; i++) {
    const i64 word = e->chunks[i], next = e->chunks[i + 1];
    const Key key = keys[i - first];
    const u64 hash = hashes[i - first];
    const WordEntry *entry = NULL;
    if (LIKELY(key.high)) {
      const i64 length = e->ends[next - 1] - e->begins[word];
      entry = word_memo_find(&e->memo, key, hash, e->text + e->begins[word], length);
    }
    if (LIKELY(entry))
      out += word_ids(&e->memo, entry, e->memo.wide, out);
    else
      out = encode_chunk(e, word, next, key, hash, out);
  }
  return out;
}

static i64 encode_part(void *encoder, const Call *call, const u8 *at, const u8 *end) {
  Encoder *e = encoder;
  i64 words = 0, chunks = 0;
  const i64 why = find_words(e, at, end, call->data + call->offsets[call->parts], &words, &chunks);
  if (why != DONE) return -why;
  if (!words) return call->used;
  if (call->used + e->ends[words - 1] + ID_SLACK > call->room) return -GROW;
  memset(e->text + e->ends[words - 1], 0, READ_AHEAD);
  i32 *after = call->out + call->used;
  for (i64 chunk = 0; chunk < chunks; chunk += AHEAD)
    after = encode_chunks(e, chunk, chunk + AHEAD < chunks ? chunk + AHEAD : chunks, after);
  return after - call->out;
}

EXPORT i64 word_piece_encode(Encoder *e, Call *call) { return encode_parts(e, call, encode_part); }
