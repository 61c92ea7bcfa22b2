// Encodes documents with the ids of a byte-level BPE tokenizer.json (see byte_pairs.py).
#include "byte_words.h"
#include "trie.h"
#include "word_memo.h"

#define AHEAD 64  // words whose entries are fetched before they are needed, at least a block's
#define NONE 0xFFFFFFFFu         // rank of a pair that is not merged
#define SHORT_LENGTH WORD_BYTES  // of words whose pairs are searched one after the other

// A tokenizer; `_Rules` in byte_pairs.py has the same fields.
typedef struct {
  WordRules words;
  i64 prefix;            // whether to add a missing leading space
  const i64 *tokens;     // trie of added tokens that need the library
  const u8 *begins;      // [256] their first bytes
  const i32 *byte_ids;   // [256]
  const i32 *left, *right, *merged;  // [merges] ids, by rank
  i64 merges;
  const i64 *whole;      // trie of pieces that need no merges, each byte as two halves plus 1, or NULL
  i64 ids, memo_bytes;
} Rules;

typedef struct {
  u32 rank;
  i32 id;
} Merge;

typedef struct {
  u64 pair;  // ids, left << 32 | right; ~0 if empty
  Merge merge;
} Pair;

typedef struct {
  Rules rules;
  WordMemo memo;
  bool refuses;     // whether there are tokens that need the library
  Merge *of_bytes;  // [256 * 256] merges of single bytes
  Pair *pairs;      // hash table of all merges
  u64 pair_mask;
  u64 *filter;      // bits by hash: pairs that may be in `pairs`
  u64 filter_mask;
  Classes *classes;
  u64 *starts;
  u8 *text;         // a document with a space before it, or at the end of the caller's bytes
  i64 room;         // of these, in bytes of text
  // Of a word: ids, and for a long word ends of symbols (0 if merged), starts of those before, and
  // pending merges.
  i32 *ids, *ends, *before;
  u64 *heap;
  i64 word_room;
} Encoder;

EXPORT void byte_bpe_free(Encoder *e) {
  word_memo_free(&e->memo);
  free(e->of_bytes);
  free(e->pairs);
  free(e->filter);
  free(e->classes);
  free(e->starts);
  free(e->text);
  free(e->ids);
  free(e->ends);
  free(e->before);
  free(e->heap);
  free(e);
}

INLINE u64 pair_of(i32 left, i32 right) { return (u64)(u32)left << 32 | (u32)right; }

INLINE u64 pair_hash(u64 pair) {
  u64 mixed = (pair ^ pair >> 29) * 0x9E3779B97F4A7C15ull;
  return mixed ^ mixed >> 32;
}

INLINE Pair *pair_slot(const Encoder *e, u64 pair, u64 hash) {
  u64 slot = hash & e->pair_mask;
  while (e->pairs[slot].pair != pair && e->pairs[slot].pair != ~0ull)
    slot = (slot + 1) & e->pair_mask;
  return e->pairs + slot;
}

// Returns the merge of two adjacent ids; most pairs have none, which the filter tells from less
// memory.
INLINE Merge find_merge(const Encoder *e, i32 left, i32 right) {
  u64 pair = pair_of(left, right), hash = pair_hash(pair), bit = hash >> 24 & e->filter_mask;
  if (!(e->filter[bit / 64] >> (bit & 63) & 1)) return (Merge){NONE, 0};
  return pair_slot(e, pair, hash)->merge;
}

static bool make_pairs(Encoder *e) {
  const Rules *r = &e->rules;
  u64 size = 64;
  while (size < 2 * (u64)r->merges) size *= 2;
  e->pair_mask = size - 1;
  e->filter_mask = 16 * size - 1;
  e->pairs = malloc(size * sizeof(Pair));
  e->filter = calloc(size / 4, sizeof(u64));
  e->of_bytes = malloc(65536 * sizeof(Merge));
  if (!e->pairs || !e->filter || !e->of_bytes) return false;
  for (u64 slot = 0; slot < size; slot++) e->pairs[slot] = (Pair){~0ull, {NONE, 0}};
  for (i64 rank = 0; rank < r->merges; rank++) {  // the last of equal pairs counts
    u64 pair = pair_of(r->left[rank], r->right[rank]), hash = pair_hash(pair);
    u64 bit = hash >> 24 & e->filter_mask;
    e->filter[bit / 64] |= 1ull << (bit & 63);
    *pair_slot(e, pair, hash) = (Pair){pair, {(u32)rank, r->merged[rank]}};
  }
  for (int left = 0; left < 256; left++)
    for (int right = 0; right < 256; right++)
      e->of_bytes[left << 8 | right] = find_merge(e, r->byte_ids[left], r->byte_ids[right]);
  return true;
}

static bool reserve_word(Encoder *e, i64 size) {
  if (size <= e->word_room) return true;
  const i64 room = 2 * size;
  if (!RESIZE(e->ids, room) || !RESIZE(e->ends, room) || !RESIZE(e->before, room) ||
      !RESIZE(e->heap, 3 * room))
    return false;
  e->word_room = room;
  return true;
}

static bool reserve_text(Encoder *e, i64 size) {
  if (LIKELY(size <= e->room)) return true;
  i64 room = (size + size / 2 + 127) & ~63ll;
  if (!RESIZE(e->classes, room / 64) || !RESIZE(e->starts, room / 64) ||
      !RESIZE(e->text, room + TEXT_SLACK))
    return false;
  e->room = room;
  return true;
}

// Returns an encoder; NULL if memory is short. The kinds, the tries and the ids of bytes must outlive
// it.
EXPORT Encoder *byte_bpe_new(const Rules *rules) {
  Encoder *e = calloc(1, sizeof(Encoder));
  if (!e) return NULL;
  e->rules = *rules;
  for (int byte = 0; byte < 256; byte++) e->refuses |= rules->begins[byte];
  bool wide = rules->ids > 1 << 16;
  if (word_memo_make(&e->memo, rules->memo_bytes, wide, 0) && make_pairs(e) &&
      reserve_word(e, WORD_BYTES) && reserve_text(e, 1 << 16))
    return e;
  byte_bpe_free(e);
  return NULL;
}

// ---- Merges. Source: huggingface/tokenizers, `models/bpe/word.rs`, Word::merge_all: the adjacent
// pair of lowest rank is merged, and the leftmost of several.

INLINE u32 least(const u32 *keys, i64 padded) {
  u32 found[8];
  memcpy(found, keys, sizeof(found));
  for (i64 at = 8; at < padded; at += 8)
    for (int i = 0; i < 8; i++) found[i] = keys[at + i] < found[i] ? keys[at + i] : found[i];
  for (int i = 0; i < 4; i++) found[i] = found[i + 4] < found[i] ? found[i + 4] : found[i];
  for (int i = 0; i < 2; i++) found[i] = found[i + 2] < found[i] ? found[i + 2] : found[i];
  return found[1] < found[0] ? found[1] : found[0];
}

INLINE void set_pair(u32 *keys, i32 *merged, i64 at, Merge merge) {
  keys[at] = merge.rank == NONE ? NONE : merge.rank << 8 | (u32)at;
  merged[at] = merge.id;
}

// Writes the ids of a word of 1 to SHORT_LENGTH bytes to `ids`; returns their number.
static i64 merge_short(const Encoder *e, const u8 *word, i64 length, i32 *ids) {
  u32 keys[256];  // of the pair that begins at a symbol: rank << 8 | place
  i32 merged[256];
  u8 next[256], before[256];
  const i64 padded = (length + 7) & ~7ll;
  for (i64 at = 0; at < length; at++) {
    ids[at] = e->rules.byte_ids[word[at]];
    next[at] = (u8)(at + 1);
    before[at] = (u8)(at - 1);
  }
  for (i64 at = 0; at + 1 < length; at++)
    set_pair(keys, merged, at, e->of_bytes[word[at] << 8 | word[at + 1]]);
  for (i64 at = length - 1; at < padded; at++) keys[at] = NONE;
  for (u32 top; (top = least(keys, padded)) != NONE;) {
    i64 at = top & 0xFF, gone = next[at], after = next[gone];
    ids[at] = merged[at];
    keys[gone] = keys[at] = NONE;
    next[at] = (u8)after;
    if (after < length) {
      before[after] = (u8)at;
      set_pair(keys, merged, at, find_merge(e, ids[at], ids[after]));
    }
    if (at) set_pair(keys, merged, before[at], find_merge(e, ids[before[at]], ids[at]));
  }
  i64 count = 0;
  for (i64 at = 0; at < length; at = next[at]) ids[count++] = ids[at];
  return count;
}

static void push(u64 *heap, i64 *size, u64 value) {
  i64 at = (*size)++;
  for (i64 above; at > 0 && heap[above = (at - 1) / 2] > value; at = above) heap[at] = heap[above];
  heap[at] = value;
}

static u64 pop(u64 *heap, i64 *size) {
  u64 top = heap[0], value = heap[--*size];
  i64 at = 0;
  for (i64 below; (below = 2 * at + 1) < *size; at = below) {
    if (below + 1 < *size && heap[below + 1] < heap[below]) below++;
    if (value <= heap[below]) break;
    heap[at] = heap[below];
  }
  heap[at] = value;
  return top;
}

static void push_pair(Encoder *e, i64 *size, i32 left, i32 right, i64 at) {
  Merge merge = find_merge(e, left, right);
  if (merge.rank != NONE) push(e->heap, size, (u64)merge.rank << 32 | (u64)at);
}

// Like merge_short, for any length, with a heap of pairs. An entry of the heap counts only if the
// pair that begins there still has that rank.
static i64 merge_long(Encoder *e, const u8 *word, i64 length, i32 *ids) {
  i32 *ends = e->ends, *before = e->before;
  i64 size = 0;
  for (i64 at = 0; at < length; at++) {
    ids[at] = e->rules.byte_ids[word[at]];
    ends[at] = (i32)at + 1;
    before[at] = (i32)at - 1;
  }
  for (i64 at = 0; at + 1 < length; at++) push_pair(e, &size, ids[at], ids[at + 1], at);
  while (size) {
    u64 top = pop(e->heap, &size);
    i64 at = (i64)(top & 0xFFFFFFFF), middle = ends[at];
    if (!middle || middle == length) continue;
    Merge merge = find_merge(e, ids[at], ids[middle]);
    if (merge.rank != (u32)(top >> 32)) continue;
    i64 end = ends[middle];
    ids[at] = merge.id;
    ends[at] = (i32)end;
    ends[middle] = 0;
    if (end < length) {
      before[end] = (i32)at;
      push_pair(e, &size, ids[at], ids[end], at);
    }
    if (before[at] >= 0) push_pair(e, &size, ids[before[at]], ids[at], before[at]);
  }
  i64 count = 0;
  for (i64 at = 0; at < length; at = ends[at]) ids[count++] = ids[at];
  return count;
}

// Returns the id of the piece equal to the word, or -1. Tries cannot hold byte 0, so each byte is
// spelt as its high and low half, each plus 1.
static i32 whole_piece(const i64 *trie, const u8 *word, i64 length) {
  i64 node = trie[0];
  for (i64 at = 0; at < 2 * length; at++) {
    u8 half = (u8)((at & 1 ? word[at / 2] & 15 : word[at / 2] >> 4) + 1);
    node = trie_child(trie, node, half);
    if (!trie_has(node, half)) return -1;
  }
  return trie_value(node);
}

// Writes the ids of a word to e->ids; returns their number, -1 if memory is short.
static i64 ids_of_word(Encoder *e, const u8 *word, i64 length) {
  if (e->rules.whole) {
    i32 piece = whole_piece(e->rules.whole, word, length);
    if (piece >= 0) {
      e->ids[0] = piece;
      return 1;
    }
  }
  if (length <= SHORT_LENGTH) return merge_short(e, word, length, e->ids);
  if (!reserve_word(e, length)) return -1;
  return merge_long(e, word, length, e->ids);
}

// Appends the ids of a word that is not in its line of the memo, or has its ids in the pool; returns
// the new end of `out`, NULL if memory is short.
static __attribute__((noinline)) i32 *encode_other(Encoder *e, const u8 *word, i64 length, Key key,
                                                   i32 *out) {
  const u64 hash = memo_hash(key);
  if (length <= WORD_BYTES) {
    const WordEntry *entry = word_memo_find(&e->memo, key, hash, word, length);
    if (entry) return out + word_ids(&e->memo, entry, e->memo.wide, out);
  }
  i64 count = ids_of_word(e, word, length);
  if (count < 0) return NULL;
  memcpy(out, e->ids, (size_t)count * sizeof(i32));
  if (length <= WORD_BYTES)
    word_memo_store(&e->memo, key, hash, word, length, e->ids, count, e->memo.most);
  return out + count;
}

INLINE i32 *encode_some(Encoder *e, const u8 *text, const u32 *places, i64 count, bool wide,
                         i32 *out) {
  Key keys[AHEAD];
  const WordEntry *lines[AHEAD];
  const WordMemo memo = e->memo;
  for (i64 i = 0; i < count; i++) {
    const i64 length = places[i + 1] - places[i];
    // A longer word has a key that no word in the memo has.
    keys[i] = LIKELY(length <= WORD_BYTES) ? memo_key(text + places[i], length) : (Key){0, ~0ull};
    lines[i] = word_line(&memo, memo_hash(keys[i]));
    __builtin_prefetch(lines[i]);
  }
  for (i64 i = 0; i < count; i++) {
    const WordEntry *entry = lines[i] + key_equal(lines[i][1].key, keys[i]);
    // Lines of a memo that has grown since are in its first half, and hold other words at worst.
    if (LIKELY(key_equal(entry->key, keys[i]) && entry->count != POOLED)) {
      out += inline_ids(entry, wide, out);
      continue;
    }
    out = encode_other(e, text + places[i], places[i + 1] - places[i], keys[i], out);
    if (UNLIKELY(!out)) return NULL;
  }
  return out;
}

// Appends the ids of the words between places[0], places[1] … places[count].
static i32 *encode_words(Encoder *e, const u8 *text, const u32 *places, i64 count, i32 *out) {
  return e->memo.wide ? encode_some(e, text, places, count, true, out)
                      : encode_some(e, text, places, count, false, out);
}

// Appends the ids of text whose words begin at the bits of e->starts.
static i32 *encode_text(Encoder *e, const u8 *text, i64 size, i32 *out) {
  u32 places[AHEAD + 64 + 8];
  i64 count = 0;
  for (i64 block = 0; block < (size + 63) / 64 && out; block++) {
    count += write_places(e->starts[block], (u32)(64 * block), places + count);
    if (count > AHEAD) {
      out = encode_words(e, text, places, AHEAD, out);
      count -= AHEAD;
      memmove(places, places + AHEAD, (size_t)count * sizeof(*places));
    }
  }
  places[count] = (u32)size;
  return out ? encode_words(e, text, places, count, out) : NULL;
}

static i64 encode_part(void *encoder, const Call *call, const u8 *text, const u8 *end) {
  Encoder *e = encoder;
  const Rules *r = &e->rules;
  i64 size = end - text;
  if (!size) return call->used;
  if (call->used + size + 1 + ID_SLACK > call->room) return -GROW;
  if (size > INT32_MAX || (e->refuses && trie_occurs(r->tokens, r->begins, text, end)))
    return -LIBRARY;
  const bool prefix = r->prefix && *text != ' ';
  if (!reserve_text(e, size + 1)) return -NO_MEMORY;
  if (prefix || end + TEXT_SLACK > call->data + call->offsets[call->parts]) {
    e->text[0] = ' ';
    memcpy(e->text + prefix, text, (size_t)size);
    memset(e->text + prefix + size, 0, TEXT_SLACK);
    text = e->text;
    size += prefix;
  }
  if (classify(&r->words, text, size, e->classes) && !call->normal) return -NORMALISE;
  find_words(&r->words, text, size, e->classes, e->starts);
  const i32 *after = encode_text(e, text, size, call->out + call->used);
  return after ? after - call->out : -NO_MEMORY;
}

EXPORT i64 byte_bpe_encode(Encoder *e, Call *call) { return encode_parts(e, call, encode_part); }
