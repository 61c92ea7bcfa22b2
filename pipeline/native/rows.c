// Rows as TFRecords, in the format of tasks/cache/records.py.
#include "native.h"

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

enum {
  BEFORE = 12,   // bytes of framing: the length and its checksum
  AFTER = 4,     // bytes of framing: the data's checksum
  BLOCK = 4096,  // values whose counts fit into the lanes of a vector
};

// One of the two lists of a row.
typedef struct {
  const u8 *name;
  u64 name_size;
  const i32 *values;
  i64 count;
  u32 largest;  // at least the largest value, with as many bits
  // Bytes of the values, and of each of the messages around them.
  u64 packed, list, feature, entry;
} Feature;

#if defined(__SSE4_2__)
#define CRC_8(crc, word) ((u32)_mm_crc32_u64(crc, word))
#define CRC_1(crc, byte) _mm_crc32_u8(crc, byte)
#elif defined(__ARM_FEATURE_CRC32)
#define CRC_8(crc, word) __crc32cd(crc, word)
#define CRC_1(crc, byte) __crc32cb(crc, byte)
#else
INLINE u32 CRC_1(u32 crc, u8 byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82F63B78 & -(crc & 1));
  return crc;
}
INLINE u32 CRC_8(u32 crc, u64 word) {
  for (int byte = 0; byte < 8; byte++) crc = CRC_1(crc, (u8)(word >> 8 * byte));
  return crc;
}
#endif

// Returns the CRC-32C, rotated and offset. Source: TensorFlow `core/lib/hash/crc32c.h`, Mask.
static u32 masked_crc(const u8 *data, i64 size) {
  u32 crc = ~0u;
  for (; size >= 8; data += 8, size -= 8) crc = CRC_8(crc, load64(data));
  for (; size; size--) crc = CRC_1(crc, *data++);
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

INLINE u64 width_of(u64 value) {
  u64 width = 1;
  while (value >>= 7) width++;
  return width;
}

INLINE u8 *put(u8 *at, u64 value) {
  for (; value >= 0x80; value >>= 7) *at++ = (u8)(value | 0x80);
  *at++ = (u8)value;
  return at;
}

static void measure(Feature *it) {
  it->packed = (u64)it->count, it->largest = 0;
  for (i64 done = 0; done < it->count;) {
    i64 end = it->count - done < BLOCK ? it->count : done + BLOCK;
    u32 more = 0;
    for (; done < end; done++) {
      i32 value = it->values[done];
      more += (value >= 1 << 7) + (value >= 1 << 14) + (value >= 1 << 21) + (value >= 1 << 28);
      it->largest |= (u32)value;
    }
    it->packed += more;
  }
  it->list = it->packed ? 1 + width_of(it->packed) + it->packed : 0;
  it->feature = 1 + width_of(it->list) + it->list;
  it->entry = 2 + it->name_size + 1 + width_of(it->feature) + it->feature;
}

typedef u32 Eight __attribute__((vector_size(32)));
typedef u64 Four __attribute__((vector_size(32)));

// Writes eight values below 2**21, and up to 7 bytes too many: a branch on the length of a value
// would be mispredicted.
INLINE u8 *put_eight(u8 *at, const i32 *values) {
  Eight value, second, third, bytes, bits;
  memcpy(&value, values, sizeof value);
  second = (Eight)(value >= 1 << 7), third = (Eight)(value >= 1 << 14);
  bytes = (value & 0x7F) | (value & 0x3F80) << 1 | (value & 0x1FC000) << 2;
  bytes |= (second & 0x80) | (third & 0x8000);
  bits = 8 + (second & 8) + (third & 8);
  // Join the varints of two values.
  Four pairs = (Four)bytes, sizes = (Four)bits;
  Four first = sizes & 0xFFFFFFFF;
  pairs = (pairs & 0xFFFFFFFF) | pairs >> 32 << first;
  sizes = (first + (sizes >> 32)) >> 3;
  for (int i = 0; i < 4; i++) {
    u64 word = pairs[i];
    memcpy(at, &word, 8);
    at += sizes[i];
  }
  return at;
}

static u8 *put_values(u8 *at, const Feature *it) {
  i64 i = 0;
  if (it->largest < 1 << 21)
    for (; i + 8 <= it->count; i += 8) at = put_eight(at, it->values + i);
  for (; i < it->count; i++) at = put(at, (u32)it->values[i]);
  return at;
}

// Writes an entry of the map of features: the name and an Int64List.
static u8 *put_feature(u8 *at, const Feature *it) {
  *at++ = 0x0A;
  at = put(at, it->entry);
  *at++ = 0x0A;
  *at++ = (u8)it->name_size;
  memcpy(at, it->name, it->name_size);
  at += it->name_size;
  *at++ = 0x12;
  at = put(at, it->feature);
  *at++ = 0x1A;
  at = put(at, it->list);
  if (!it->packed) return at;
  *at++ = 0x0A;
  at = put(at, it->packed);
  return put_values(at, it);
}

static u8 *put_row(u8 *at, Feature *features) {
  u64 all = 0;
  for (int i = 0; i < 2; i++) {
    measure(features + i);
    all += 1 + width_of(features[i].entry) + features[i].entry;
  }
  u64 length = 1 + width_of(all) + all;
  memcpy(at, &length, 8);
  u32 crc = masked_crc(at, 8);
  memcpy(at + 8, &crc, 4);
  u8 *data = at + BEFORE, *end;
  *data = 0x0A;
  end = put(data + 1, all);
  for (int i = 0; i < 2; i++) end = put_feature(end, features + i);
  crc = masked_crc(data, (i64)length);
  memcpy(end, &crc, 4);
  return end + AFTER;
}

// Writes rows of two features to `out`, and where they end to `ends`. `lengths` and `counts` are
// those of the rows in `targets` and in `others`, whose `name` comes before "targets".
EXPORT void rows_put(const i32 *targets, const i64 *lengths, const i32 *others, const i64 *counts,
                     const u8 *name, i64 name_size, i64 rows, u8 *out, i64 *ends) {
  u8 *at = out;
  for (i64 row = 0; row < rows; row++) {
    Feature features[2] = {
        {.name = name, .name_size = (u64)name_size, .values = others, .count = counts[row]},
        {.name = (const u8 *)"targets", .name_size = 7, .values = targets, .count = lengths[row]},
    };
    at = put_row(at, features);
    ends[row] = at - out;
    targets += lengths[row];
    others += counts[row];
  }
}

// Counts the ids of each row other than `pad` and `eos`.
EXPORT void rows_text(const i32 *ids, const i64 *lengths, i64 rows, i32 pad, i32 eos, i64 *texts) {
  for (i64 row = 0; row < rows; row++) {
    texts[row] = lengths[row];
    for (i64 left = lengths[row]; left;) {
      i64 block = left < BLOCK ? left : BLOCK;
      u32 special = 0;
      for (i64 i = 0; i < block; i++) special += (u32)(ids[i] == pad) | (u32)(ids[i] == eos);
      texts[row] -= special;
      ids += block, left -= block;
    }
  }
}
