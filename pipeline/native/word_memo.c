// Makes and fills memos of words (see word_memo.h).
#define _DEFAULT_SOURCE  // madvise

#include "word_memo.h"

#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define FIRST_ENTRIES (1u << 16)
#define FIRST_POOL (1u << 18)
#define HUGE_PAGE ((size_t)2 << 20)
// Most u32 of a record.
#define WORD_RECORD (2 + (WORD_BYTES + 3) / 4 + WORD_BYTES)

static WordEntry *make_table(u64 entries) {
  size_t bytes = (size_t)entries * sizeof(WordEntry);
  WordEntry *table = aligned_alloc(HUGE_PAGE, bytes);
  if (!table) return NULL;
#ifdef __linux__
  madvise(table, bytes, MADV_HUGEPAGE);  // before the pages exist
#endif
  return memset(table, 0, bytes);
}

// Makes a memo of at most `most_bytes`: two thirds for entries, rounded down to a power of two.
bool word_memo_make(WordMemo *memo, i64 most_bytes, bool wide) {
  memset(memo, 0, sizeof(*memo));
  memo->entries = memo->most_entries = FIRST_ENTRIES;
  while (2 * memo->most_entries * sizeof(WordEntry) <= (u64)most_bytes * 2 / 3)
    memo->most_entries *= 2;
  memo->pool_room = FIRST_POOL;
  memo->most_pool = (u64)most_bytes / 3 / sizeof(u32);
  if (memo->most_pool < FIRST_POOL) memo->most_pool = FIRST_POOL;
  memo->wide = wide;
  memo->table = make_table(memo->entries);
  memo->pool = malloc(FIRST_POOL * sizeof(u32));
  return memo->table && memo->pool;
}

void word_memo_free(WordMemo *memo) {
  free(memo->table);
  free(memo->pool);
}

static bool spells(const WordMemo *memo, const WordEntry *entry, const u8 *text, i64 length) {
  if (length <= SHORT_BYTES) return true;
  u64 place;
  memcpy(&place, entry->ids, 8);
  const u32 *record = memo->pool + place;
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

static WordEntry *free_entry(WordEntry *table, u64 entries, u64 hash) {
  u64 slot = hash & (entries - 2);
  while (table[slot].key.high) slot = (slot + 1) & (entries - 1);
  return table + slot;
}

static void empty(WordMemo *memo) {
  memset(memo->table, 0, (size_t)memo->entries * sizeof(WordEntry));
  memo->filled = memo->pool_used = 0;
}

static bool grow_table(WordMemo *memo) {
  WordEntry *table = make_table(2 * memo->entries);
  if (!table) return false;
  for (u64 slot = 0; slot < memo->entries; slot++)
    if (memo->table[slot].key.high)
      *free_entry(table, 2 * memo->entries, memo_hash(memo->table[slot].key)) = memo->table[slot];
  free(memo->table);
  memo->table = table;
  memo->entries *= 2;
  return true;
}

// Makes room for a word, if need be by emptying the memo.
static bool reserve(WordMemo *memo) {
  if (UNLIKELY(memo->filled >= memo->entries / 8 * 5)) {
    if (memo->entries >= memo->most_entries)
      empty(memo);
    else if (!grow_table(memo))
      return false;
  }
  if (UNLIKELY(memo->pool_used + WORD_RECORD > memo->pool_room)) {
    u64 room = 2 * memo->pool_room < memo->most_pool ? 2 * memo->pool_room : memo->most_pool;
    if (memo->pool_used + WORD_RECORD > room) {
      empty(memo);
      return true;
    }
    u32 *pool = realloc(memo->pool, (size_t)room * sizeof(u32));
    if (!pool) return false;
    memo->pool = pool;
    memo->pool_room = room;
  }
  return true;
}

static void store_record(WordMemo *memo, WordEntry *entry, const u8 *text, i64 length,
                         const i32 *ids, i64 count) {
  u32 *record = memo->pool + memo->pool_used;
  i64 spelt = (length + 3) / 4;
  record[0] = (u32)length;
  record[1] = (u32)count;
  memcpy(record + 2, text, (size_t)length);
  memcpy(record + 2 + spelt, ids, (size_t)count * 4);
  memcpy(entry->ids, &memo->pool_used, 8);
  entry->count = POOLED;
  memo->pool_used += (u64)(2 + spelt + count);
}

bool word_memo_store(WordMemo *memo, Key key, u64 hash, const u8 *text, i64 length,
                     const i32 *ids, i64 count) {
  if (!reserve(memo)) return false;
  WordEntry *entry = free_entry(memo->table, memo->entries, hash);
  entry->key = key;
  memo->filled++;
  const i64 bytes = memo->wide ? 3 : 2, most = memo->wide ? WIDE_IDS : NARROW_IDS;
  if (length > SHORT_BYTES || count > most) {
    store_record(memo, entry, text, length, ids, count);
    return true;
  }
  entry->count = (u8)count;
  for (i64 i = 0; i < count; i++) {
    u32 id = (u32)ids[i];
    memcpy(entry->ids + bytes * i, &id, (size_t)bytes);
  }
  return true;
}
