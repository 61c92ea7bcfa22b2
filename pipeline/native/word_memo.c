// Makes and fills memos of words (see word_memo.h).
#include "word_memo.h"

#define FIRST_ENTRIES (1u << 16)
// Most u32 of a record.
#define WORD_RECORD (2 + (WORD_BYTES + 3) / 4 + WORD_BYTES)

// Makes a memo of at most `most_bytes`: two thirds for entries, rounded down to a power of two.
bool word_memo_make(WordMemo *memo, i64 most_bytes, bool wide, i64 note_bytes) {
  memset(memo, 0, sizeof(*memo));
  memo->entries = memo->most_entries = FIRST_ENTRIES;
  while (2 * memo->most_entries * sizeof(WordEntry) <= (u64)most_bytes * 2 / 3)
    memo->most_entries *= 2;
  memo->pool_room = (u64)most_bytes / 3 / sizeof(u32);
  memo->wide = wide;
  memo->most = ((i64)sizeof(memo->table->ids) - note_bytes) / (wide ? 3 : 2);
  memo->table = huge_zeros((size_t)memo->most_entries * sizeof(WordEntry), &memo->memory);
  memo->pool = malloc((size_t)memo->pool_room * sizeof(u32));
  return memo->memory && memo->pool;
}

void word_memo_free(WordMemo *memo) {
  free(memo->memory);
  free(memo->pool);
}

static bool spells(const WordMemo *memo, const WordEntry *entry, const u8 *text, i64 length) {
  if (length <= SHORT_BYTES) return true;
  const u32 *record = word_record(memo, entry);
  return record[0] == (u32)length && !memcmp(record + 2, text, (size_t)length);
}

const WordEntry *word_memo_search(const WordMemo *memo, Key key, u64 hash, const u8 *text,
                                  i64 length) {
  for (u64 slot = hash & (memo->entries - 2);; slot = (slot + 1) & (memo->entries - 1)) {
    const WordEntry *entry = memo->table + slot;
    if (!entry->key.high) return NULL;
    if (key_equal(entry->key, key) && spells(memo, entry, text, length)) return entry;
  }
}

static WordEntry *free_entry(const WordMemo *memo, u64 hash) {
  u64 slot = hash & (memo->entries - 2);
  while (memo->table[slot].key.high) slot = (slot + 1) & (memo->entries - 1);
  return memo->table + slot;
}

static void empty(WordMemo *memo) {
  memset(memo->table, 0, (size_t)memo->entries * sizeof(WordEntry));
  memo->filled = memo->pool_used = 0;
}

// Doubles the table where it is, since new memory costs more than the moves. A few entries at its
// ends may be lost.
static void grow_table(WordMemo *memo) {
  u64 before = memo->entries;
  memo->entries *= 2;
  for (u64 slot = 0; slot < before; slot++) {
    WordEntry entry = memo->table[slot];
    if (!entry.key.high) continue;
    memo->table[slot].key.high = 0;
    *free_entry(memo, memo_hash(entry.key)) = entry;
  }
}

// Makes room for a word, if need be by emptying the memo.
static void reserve(WordMemo *memo) {
  bool full = memo->filled >= memo->entries / 8 * 5;
  if (memo->pool_used + WORD_RECORD > memo->pool_room ||
      (full && memo->entries >= memo->most_entries))
    empty(memo);
  else if (full)
    grow_table(memo);
}

WordEntry *word_memo_store(WordMemo *memo, Key key, u64 hash, const u8 *text, i64 length,
                           const i32 *ids, i64 count, i64 most) {
  reserve(memo);
  WordEntry *entry = free_entry(memo, hash);
  entry->key = key;
  memo->filled++;
  if (length <= SHORT_BYTES && count <= most) {
    const i64 bytes = memo->wide ? 3 : 2;
    entry->count = (u8)count;
    for (i64 i = 0; i < count; i++) {
      u32 id = (u32)ids[i];
      memcpy(entry->ids + bytes * i, &id, (size_t)bytes);
    }
    return entry;
  }
  u32 *record = memo->pool + memo->pool_used;
  i64 spelt = (length + 3) / 4;
  record[0] = (u32)length;
  record[1] = (u32)count;
  memcpy(record + 2, text, (size_t)length);
  memcpy(record + 2 + spelt, ids, (size_t)count * 4);
  memcpy(entry->ids, &memo->pool_used, 8);
  entry->count = POOLED;
  memo->pool_used += (u64)(2 + spelt + count);
  return entry;
}
