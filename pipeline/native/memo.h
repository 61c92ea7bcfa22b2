// A memo of strings and their ids: one line of cache for most lookups.
//
// An entry of 32 bytes holds a string of up to 15 bytes itself, and up to six ids of 16 bits, in large
// vocabularies four of 24. Others have a record in the pool, which spells the string and its ids. A bucket is two entries, a line of
// cache; a string whose bucket is full takes the place of one that was not used again. The pool is a
// ring, where new records overwrite the oldest. So memory is bounded, and what is used stays.
#pragma once

#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "simd.h"

#define MEMO_BYTES 64   // longest string
#define MEMO_IDS 192    // most ids of one: a space spelt in bytes has three
#define SHORT_BYTES 15  // longest string inside an entry
#define MOST_INLINE 6
#define ID_SLACK 8  // ids that may be written beyond the last
#define IN_POOL 7  // instead of a number of ids
#define FOUND 8u   // in `meta`: found since it was stored, or since its bucket was full of such
#define WAYS 2     // entries of a bucket, a power of two
// Most u32 of a record, and those that may be read beyond its end.
#define RECORD_WORDS (2 + MEMO_BYTES / 4 + MEMO_IDS + 4)

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct {
  u64 low, high;  // high is 0 in empty entries
} Key;

typedef struct {
  Key key;
  u8 ids[12];  // of 16 or 24 bits, or eight bytes: the words written to the pool before the record
  u32 meta;    // bits 0-2 number of ids or IN_POOL, FOUND, others the owner's
} Entry;

typedef struct {
  void *memory;
  Entry *table;  // at the start of a line of cache
  u64 mask;   // entries - WAYS: the first entry of a bucket
  u32 *pool;  // records: bytes, number of ids, the string, ids
  u64 written, pool_words;  // words ever written to the pool; its length, a power of two
  u64 *seen;  // bits by hash: strings that were met once; emptied when half of them are set
  u64 met;
  bool wide;  // ids of 24 bits
} Memo;

// Returns zeros in huge pages, which take no memory until used and need fewer look-ups of addresses.
// `memory` receives what has to be freed, NULL if memory is short.
static inline void *huge_zeros(size_t bytes, void **memory) {
  *memory = calloc(bytes + HUGE_PAGE, 1);
  void *zeros = (void *)(((uintptr_t)*memory + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
#ifdef __linux__
  if (*memory) madvise(zeros, bytes, MADV_HUGEPAGE);
#endif
  return zeros;
}

static inline bool memo_make(Memo *memo, i64 entries, i64 pool_words, bool wide) {
  memo->table = huge_zeros((size_t)entries * sizeof(Entry), &memo->memory);
  memo->pool = malloc((size_t)pool_words * sizeof(u32));
  memo->seen = calloc((size_t)entries / 64, sizeof(u64));
  if (!memo->memory || !memo->pool || !memo->seen) return false;
  memo->mask = (u64)entries - WAYS;
  memo->pool_words = (u64)pool_words;
  memo->wide = wide;
  return true;
}

static inline void memo_free(Memo *memo) {
  free(memo->memory);
  free(memo->pool);
  free(memo->seen);
}

// Returns the key of a string of 1 to 15 bytes, of which 16 can be read.
INLINE Key short_key(const u8 *text, i64 length) {
  static const u64 kept[2 * 16] = {
      0, 0, 0xFF, 0, 0xFFFF, 0, 0xFFFFFF, 0, 0xFFFFFFFF, 0, 0xFFFFFFFFFF, 0, 0xFFFFFFFFFFFF, 0,
      0xFFFFFFFFFFFFFF, 0, ~0ull, 0, ~0ull, 0xFF, ~0ull, 0xFFFF, ~0ull, 0xFFFFFF, ~0ull, 0xFFFFFFFF,
      ~0ull, 0xFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFF, ~0ull, 0xFFFFFFFFFFFFFF};
  return (Key){load64(text) & kept[2 * length],
               (load64(text + 8) & kept[2 * length + 1]) | (u64)length << 56};
}

INLINE u64 fold(u64 a, u64 b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (u64)product ^ (u64)(product >> 64);
}

// Returns the key of a string of 16 to MEMO_BYTES bytes: a hash.
static inline Key long_key(const u8 *text, i64 length) {
  u64 low = (u64)length, high = 0x9E3779B97F4A7C15ull;
  for (i64 at = 0; at + 8 < length; at += 8) {
    low = fold(low ^ load64(text + at), 0xD6E8FEB86659FD93ull);
    high = (high ^ low) * 0xA0761D6478BD642Full;
  }
  low = fold(low ^ load64(text + length - 8), 0xD6E8FEB86659FD93ull);
  high = (high ^ low) * 0xA0761D6478BD642Full;
  return (Key){low, high >> 8 | 0xFFull << 56};
}

INLINE Key memo_key(const u8 *text, i64 length) {
  return LIKELY(length <= SHORT_BYTES) ? short_key(text, length) : long_key(text, length);
}

INLINE u64 memo_hash(Key key) {
  return fold(key.low ^ 0xE7037ED1A0B428DBull, key.high ^ 0x8EBC6AF09C88C6E3ull);
}

INLINE Entry *memo_bucket(const Memo *memo, u64 hash) { return memo->table + (hash & memo->mask); }

INLINE bool key_equal(Key a, Key b) { return ((a.low ^ b.low) | (a.high ^ b.high)) == 0; }

// Returns the record of an entry; NULL if others overwrote it.
INLINE const u32 *memo_record(const Memo *memo, const Entry *entry) {
  u64 place;
  memcpy(&place, entry->ids, 8);
  if (memo->written - place > memo->pool_words - RECORD_WORDS) return NULL;
  return memo->pool + (place & (memo->pool_words - 1));
}

// Returns the entry of a string, or NULL.
INLINE Entry *memo_find(const Memo *memo, Key key, u64 hash, const u8 *text, i64 length) {
  Entry *entry = memo_bucket(memo, hash);
  entry += key_equal(entry[1].key, key);  // the way is unpredictable: no branch
  if (UNLIKELY(!key_equal(entry->key, key))) return NULL;
  if (LIKELY((entry->meta & 7) != IN_POOL)) return entry;
  const u32 *record = memo_record(memo, entry);
  bool same = record && record[0] == (u32)length && !memcmp(record + 2, text, (size_t)length);
  return same ? entry : NULL;
}

INLINE void memo_mark(Entry *entry) {
  if (!(entry->meta & FOUND)) entry->meta |= FOUND;
}

// Returns whether a string with this hash was probably met before, and remembers it.
INLINE bool memo_seen(Memo *memo, u64 hash) {
  u64 bit = hash >> 20 & (memo->mask + WAYS - 1), *word = memo->seen + bit / 64;
  if (*word >> (bit & 63) & 1) return true;
  if (++memo->met > memo->mask / 2) {
    memset(memo->seen, 0, (size_t)(memo->mask + WAYS) / 8);
    memo->met = 0;
  }
  *word |= 1ull << (bit & 63);
  return false;
}

// Returns the entry that a new string takes: its own with an overwritten record, an empty one, or
// one that was not found since the bucket was last full of such.
static inline Entry *memo_place(const Memo *memo, Key key, u64 hash) {
  Entry *bucket = memo_bucket(memo, hash);
  for (int way = 0; way < WAYS; way++)
    if (key_equal(bucket[way].key, key) || !bucket[way].key.high) return bucket + way;
  for (int way = 0; way < WAYS; way++)
    if (!(bucket[way].meta & FOUND)) return bucket + way;
  for (int way = 0; way < WAYS; way++) bucket[way].meta &= ~FOUND;
  return bucket + (hash >> 60) % WAYS;
}

// Stores a string, which is not in the memo, with its ids and the owner's bits of `meta`; returns
// its entry.
static inline Entry *memo_store(Memo *memo, Key key, u64 hash, const u8 *text, i64 length,
                                const i32 *ids, i64 count, u32 meta) {
  Entry *entry = memo_place(memo, key, hash);
  entry->key = key;
  const i64 bytes = memo->wide ? 3 : 2;
  if (length <= SHORT_BYTES && count * bytes <= (i64)sizeof(entry->ids)) {
    for (i64 i = 0; i < count; i++) {
      u32 id = (u32)ids[i];
      memcpy(entry->ids + bytes * i, &id, (size_t)bytes);
    }
    entry->meta = meta | (u32)count;
    return entry;
  }
  u64 mask = memo->pool_words - 1, left = memo->pool_words - (memo->written & mask);
  if (left < RECORD_WORDS) memo->written += left;
  u32 *record = memo->pool + (memo->written & mask);
  memcpy(entry->ids, &memo->written, 8);
  entry->meta = meta | IN_POOL;
  i64 spelt = (length + 3) / 4;
  record[0] = (u32)length;
  record[1] = (u32)count;
  memcpy(record + 2, text, (size_t)length);
  memcpy(record + 2 + spelt, ids, (size_t)count * 4);
  memo->written += (u64)(2 + spelt + count);
  return entry;
}

// Writes the first ids of an entry without a record, of which some may be none.
INLINE void memo_unpack(const Memo *memo, const Entry *entry, i32 *out) {
#if defined(__AVX2__)
  __m128i packed = _mm_loadu_si128((const __m128i *)entry->ids);
  const __m128i places = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
  if (LIKELY(!memo->wide))
    _mm256_storeu_si256((__m256i *)out, _mm256_cvtepu16_epi32(packed));
  else
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(packed, places));
#else
  for (int i = 0; i < MOST_INLINE; i++) {
    u16 narrow;
    u32 id;
    memcpy(&narrow, entry->ids + 2 * i, 2);
    memcpy(&id, entry->ids + (i < 4 ? 3 * i : 0), 4);  // the last byte of the fourth is of `meta`
    out[i] = (i32)(memo->wide ? id & 0xFFFFFF : narrow);
  }
#endif
}

// Writes the ids of an entry to `out`, of which ID_SLACK more can be written; returns their number.
INLINE i64 memo_ids(const Memo *memo, const Entry *entry, i32 *out) {
  u32 count = entry->meta & 7;
  if (LIKELY(count != IN_POOL)) {
    memo_unpack(memo, entry, out);
    return count;
  }
  const u32 *record = memo_record(memo, entry), *ids = record + 2 + (record[0] + 3) / 4;
  for (u32 i = 0; i < record[1]; i += 4) memcpy(out + i, ids + i, 16);
  return record[1];
}
