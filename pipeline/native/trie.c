// Builds double-array tries (see trie.h).
#include "trie.h"

#define LEAF_BLOCK 256
#define NO_BYTE 0xFF  // never occurs in UTF-8
#define TAKEN INT64_MIN

// A range of sorted keys that share their first `depth` bytes, which lead to `node`.
typedef struct {
  i64 low, high, depth, node;
} Range;

// A node is stored where its byte is not 0. Until the end, TAKEN marks the offsets of nodes.
typedef struct {
  i64 *units;
  i64 size;
} Build;

static bool grow(Build *build, i64 least) {
  i64 size = build->size;
  while (size <= least) size *= 2;
  if (!RESIZE(build->units, size)) return false;
  memset(build->units + build->size, 0, (size_t)(size - build->size) * sizeof(i64));
  build->size = size;
  return true;
}

static bool is_used(const Build *build, i64 at) { return (u8)build->units[at]; }

static bool fits(const Build *build, i64 offset, const u8 *labels, int count) {
  if (is_used(build, offset ^ labels[0]) || build->units[offset] & TAKEN) return false;
  for (int child = 1; child < count; child++)
    if (is_used(build, offset ^ labels[child])) return false;
  return true;
}

// Builds the trie of `count` sorted, distinct keys data[ends[i]:ends[i+1]] in memory of its own.
// Returns its nodes, a multiple of 256 in `size`, or NULL if memory is short.
EXPORT i64 *trie_build(const u8 *data, const i64 *ends, const i64 *values, i64 count, i64 *size) {
  Build build = {calloc(LEAF_BLOCK, sizeof(i64)), LEAF_BLOCK};
  i64 capacity = 1024, head = 0, tail = 1, first_free = 1, front = 1;
  Range *queue = malloc((size_t)capacity * sizeof(Range));
  if (!queue || !build.units || !grow(&build, LEAF_BLOCK)) goto fail;
  build.units[0] = TAKEN | NO_BYTE;
  queue[0] = (Range){0, count, 0, 0};
  while (head < tail) {  // breadth first
    Range range = queue[head++];
    if (range.low < range.high && ends[range.low + 1] - ends[range.low] == range.depth)
      build.units[range.node] |= (values[range.low++] + 1) << 8;
    u8 labels[256];
    i64 begins[257];
    int children = 0;
    for (i64 key = range.low; key < range.high; key++) {
      u8 label = data[ends[key] + range.depth];
      if (!children || labels[children - 1] != label) {
        labels[children] = label;
        begins[children++] = key;
      }
    }
    if (!children) continue;
    begins[children] = range.high;
    while (first_free < build.size && is_used(&build, first_free)) first_free++;
    // A single child fits anywhere and fills gaps; several start where all of them fit.
    i64 start = children == 1 || front < first_free ? first_free : front, place = start;
    for (;; place++) {
      if (build.size <= (place | 0xFF) + LEAF_BLOCK && !grow(&build, (place | 0xFF) + LEAF_BLOCK))
        goto fail;
      if (fits(&build, place ^ labels[0], labels, children)) break;
    }
    // Gaps that did not fit rarely fit others, so skip half of them from now on.
    i64 middle = (start + place) / 2;
    if (children > 1) {
      if (front < middle) front = middle;
    } else if (place - start > 16) {
      first_free = middle;
    }
    i64 offset = place ^ labels[0];
    build.units[offset] |= TAKEN;
    build.units[range.node] |= offset << 32;
    if (tail + children > capacity) {
      capacity = 2 * (capacity + children);
      if (!RESIZE(queue, capacity)) goto fail;
    }
    for (int child = 0; child < children; child++) {
      i64 at = offset ^ labels[child];
      build.units[at] |= labels[child];
      queue[tail++] = (Range){begins[child], begins[child + 1], range.depth + 1, at};
    }
  }
  // Whole blocks, so that offset ^ byte never leaves the array.
  i64 last = build.size - 1;
  while (!is_used(&build, last)) last--;
  *size = (last / LEAF_BLOCK + 1) * LEAF_BLOCK;
  for (i64 node = 0; node < *size; node++)
    build.units[node] = is_used(&build, node) ? build.units[node] & ~TAKEN : -1;  // carries NO_BYTE
  free(queue);
  return build.units;
fail:
  free(queue);
  free(build.units);
  return NULL;
}

EXPORT void trie_free(i64 *units) { free(units); }
