// A memo of words and their ids that grows up to a limit and is then emptied.
//
// An entry of 32 bytes holds a word of up to 15 bytes itself, and up to seven ids of 16 bits, in large
// vocabularies five of 24. Others have a record in the pool. Two entries are a line of cache; a word
// is in the first free entry from its line on.
#pragma once

#include "native.h"

#define WORD_BYTES 255   // longest word
#define SHORT_WORD 15    // longest word inside an entry
#define NARROW_IDS 7     // most ids inside an entry
#define WIDE_IDS 5
#define POOLED 0xFF      // instead of a number of ids
#define WORD_SLACK 8     // ids that may be written beyond the last
#define READ_AHEAD 16    // bytes that are read of the shortest word

typedef struct {
  u64 low, high;  // high is 0 in empty entries
} WordKey;

typedef struct {
  WordKey key;
  u8 ids[15];  // or eight bytes, the place of a record
  u8 count;
} WordEntry;

typedef struct {
  WordEntry *table;
  u64 entries, filled;  // `entries` is a power of two
  u32 *pool;            // records: bytes, number of ids, the word, ids
  u64 pool_room, pool_used;
  u64 most_entries, most_pool;
  bool wide;  // ids of 24 bits
} WordMemo;

bool word_memo_make(WordMemo *memo, i64 most_bytes, bool wide);
void word_memo_free(WordMemo *memo);
WordKey long_word_key(const u8 *text, i64 length);
// Stores a word that is not in the memo; returns false if memory is short.
bool word_memo_store(WordMemo *memo, WordKey key, u64 hash, const u8 *text, i64 length,
                     const i32 *ids, i64 count);
const WordEntry *word_memo_search(const WordMemo *memo, WordKey key, u64 hash, const u8 *text,
                                  i64 length);

INLINE u64 word_fold(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}

// Returns the key of a word of 1 to WORD_BYTES bytes; READ_AHEAD bytes of `text` can be read.
INLINE WordKey word_key(const u8 *text, i64 length) {
  static const u64 kept[2 * 16] = {
      0, 0, 0xFF, 0, 0xFFFF, 0, 0xFFFFFF, 0, 0xFFFFFFFF, 0, 0xFFFFFFFFFF, 0, 0xFFFFFFFFFFFF, 0,
      0xFFFFFFFFFFFFFF, 0, ~0ull, 0, ~0ull, 0xFF, ~0ull, 0xFFFF, ~0ull, 0xFFFFFF, ~0ull, 0xFFFFFFFF,
      ~0ull, 0xFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFFFF};
  if (UNLIKELY(length > SHORT_WORD)) return long_word_key(text, length);
  return (WordKey){load64(text) & kept[2 * length],
                   (load64(text + 8) & kept[2 * length + 1]) | (u64)length << 56};
}

INLINE u64 word_hash(WordKey key) {
  return word_fold(key.low ^ 0xE7037ED1A0B428DBull, key.high ^ 0x8EBC6AF09C88C6E3ull);
}

INLINE WordEntry *word_line(const WordMemo *memo, u64 hash) {
  return memo->table + (hash & (memo->entries - 2));
}

INLINE bool word_equal(WordKey a, WordKey b) {
  return ((a.low ^ b.low) | (a.high ^ b.high)) == 0;
}

// Returns the entry of a word, or NULL.
INLINE const WordEntry *word_memo_find(const WordMemo *memo, WordKey key, u64 hash, const u8 *text,
                                       i64 length) {
  const WordEntry *entry = word_line(memo, hash);
  entry += word_equal(entry[1].key, key);  // which of the two is unpredictable: no branch
  if (LIKELY(word_equal(entry->key, key) && length <= SHORT_WORD)) return entry;
  return word_memo_search(memo, key, hash, text, length);
}

// Writes the ids of an entry to `out`, of which WORD_SLACK more can be written; returns their number.
INLINE i64 word_ids(const WordMemo *memo, const WordEntry *entry, i32 *out) {
  i64 count = entry->count;
  if (UNLIKELY(count == POOLED)) {
    u64 place;
    memcpy(&place, entry->ids, 8);
    const u32 *record = memo->pool + place;
    count = record[1];
    memcpy(out, record + 2 + (record[0] + 3) / 4, (size_t)count * 4);
    return count;
  }
  if (LIKELY(!memo->wide)) {
    u16 ids[8];
    memcpy(ids, (const u8 *)entry + sizeof(WordKey), 16);
    for (int i = 0; i < 8; i++) out[i] = ids[i];
    return count;
  }
  for (int i = 0; i < WIDE_IDS; i++) {
    u32 id;
    memcpy(&id, (const u8 *)entry + sizeof(WordKey) + 3 * i, 4);
    out[i] = (i32)(id & 0xFFFFFF);
  }
  return count;
}
