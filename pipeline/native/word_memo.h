// A memo of words and their ids that grows up to a limit and is then emptied.
//
// An entry of 32 bytes holds a word of up to 15 bytes itself, and up to seven ids of 16 bits, in large
// vocabularies five of 24; with NOTE_BYTES of the owner's, six and four. Others have a record in the
// pool. Two entries are a line of cache; a word is in the first free entry from its line on.
#pragma once

#include "memo.h"
#include "parts.h"

#define WORD_BYTES 255  // longest word
#define WIDE_IDS 5      // most ids of 24 bits inside an entry
#define NOTE_BYTES 3
#define POOLED 0xFF    // instead of a number of ids
#define READ_AHEAD 16  // bytes that can be read of any word

typedef struct {
  Key key;
  u8 ids[15];  // or eight bytes, the place of a record; the last NOTE_BYTES may be the owner's
  u8 count;
} WordEntry;

typedef struct {
  void *memory;
  WordEntry *table;
  u64 entries, filled;  // `entries` is a power of two
  u32 *pool;            // records: bytes, number of ids, the word, ids
  u64 pool_room, pool_used, most_entries;
  bool wide;  // ids of 24 bits
  i64 most;   // ids inside an entry
} WordMemo;

bool word_memo_make(WordMemo *memo, i64 most_bytes, bool wide, i64 note_bytes);
void word_memo_free(WordMemo *memo);
// Stores a word that is not in the memo, with a record if it has more than `most` ids; returns its
// entry.
WordEntry *word_memo_store(WordMemo *memo, Key key, u64 hash, const u8 *text, i64 length,
                           const i32 *ids, i64 count, i64 most);
const WordEntry *word_memo_search(const WordMemo *memo, Key key, u64 hash, const u8 *text,
                                  i64 length);

INLINE WordEntry *word_line(const WordMemo *memo, u64 hash) {
  return memo->table + (hash & (memo->entries - 2));
}

// Returns the entry of a word, or NULL.
INLINE const WordEntry *word_memo_find(const WordMemo *memo, Key key, u64 hash, const u8 *text,
                                       i64 length) {
  const WordEntry *entry = word_line(memo, hash);
  entry += key_equal(entry[1].key, key);  // which of the two is unpredictable: no branch
  if (LIKELY(key_equal(entry->key, key) && length <= SHORT_BYTES)) return entry;
  return word_memo_search(memo, key, hash, text, length);
}

// Writes the ids of an entry that holds them itself to `out`, of which ID_SLACK more can be written;
// returns their number. `wide` is the memo's.
INLINE i64 inline_ids(const WordEntry *entry, bool wide, i32 *out) {
  const u8 *ids = (const u8 *)entry + sizeof(Key);
  if (!wide) {
    u16 narrow[8];
    memcpy(narrow, ids, 16);
    for (int i = 0; i < 8; i++) out[i] = narrow[i];
    return entry->count;
  }
  for (int i = 0; i < WIDE_IDS; i++) {
    u32 id;
    memcpy(&id, ids + 3 * i, 4);
    out[i] = (i32)(id & 0xFFFFFF);
  }
  return entry->count;
}

INLINE u32 *word_record(const WordMemo *memo, const WordEntry *entry) {
  u64 place;
  memcpy(&place, entry->ids, 8);
  return memo->pool + place;
}

// The same for any entry.
INLINE i64 word_ids(const WordMemo *memo, const WordEntry *entry, bool wide, i32 *out) {
  if (LIKELY(entry->count != POOLED)) return inline_ids(entry, wide, out);
  const u32 *record = word_record(memo, entry);
  const i64 count = record[1];
  memcpy(out, record + 2 + (record[0] + 3) / 4, (size_t)count * 4);
  return count;
}
