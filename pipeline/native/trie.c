// Builds double-array tries (see trie.h).
#include "trie.h"

#include <stdlib.h>

#define LEAF_BLOCK 256
#define NO_BYTE 0xFF  // never occurs in UTF-8

// A range of sorted keys that share their first `depth` bytes, which lead to `node`.
typedef struct {
  i64 low, high, depth, node;
} Range;

typedef struct {
  i64 *units;
  u8 *used;   // a node is stored or reserved here
  u8 *taken;  // some node has this offset
  i64 size;
} Build;

static bool grow(Build *build, i64 least) {
  i64 size = build->size;
  while (size <= least) size *= 2;
  i64 *units = realloc(build->units, (size_t)size * sizeof(i64));
  if (units) build->units = units;
  u8 *used = realloc(build->used, (size_t)size);
  if (used) build->used = used;
  u8 *taken = realloc(build->taken, (size_t)size);
  if (taken) build->taken = taken;
  if (!units || !used || !taken) return false;
  memset(units + build->size, 0, (size_t)(size - build->size) * sizeof(i64));
  memset(used + build->size, 0, (size_t)(size - build->size));
  memset(taken + build->size, 0, (size_t)(size - build->size));
  build->size = size;
  return true;
}

static bool fits(const Build *build, i64 offset, const u8 *labels, int count) {
  if (build->used[offset ^ labels[0]] || build->taken[offset]) return false;
  for (int child = 1; child < count; child++)
    if (build->used[offset ^ labels[child]]) return false;
  return true;
}

// Builds the trie of `count` sorted, distinct keys data[ends[i]:ends[i+1]] in memory of its own.
// Returns its nodes, a multiple of 256 in `size`, or NULL if memory is short.
EXPORT i64 *trie_build(const u8 *data, const i64 *ends, const i64 *values, i64 count, i64 *size) {
  Build build = {0};
  build.size = LEAF_BLOCK;
  i64 capacity = 1024, head = 0, tail = 1, first_free = 1, front = 1;
  Range *queue = malloc((size_t)capacity * sizeof(Range));
  build.units = calloc(LEAF_BLOCK, sizeof(i64));
  build.used = calloc(LEAF_BLOCK, 1);
  build.taken = calloc(LEAF_BLOCK, 1);
  if (!queue || !build.units || !build.used || !build.taken || !grow(&build, LEAF_BLOCK)) goto fail;
  build.units[0] = NO_BYTE;
  build.used[0] = build.taken[0] = 1;
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
    while (first_free < build.size && build.used[first_free]) first_free++;
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
    build.taken[offset] = 1;
    build.units[range.node] |= offset << 32;
    if (tail + children > capacity) {
      capacity = 2 * (capacity + children);
      Range *longer = realloc(queue, (size_t)capacity * sizeof(Range));
      if (!longer) goto fail;
      queue = longer;
    }
    for (int child = 0; child < children; child++) {
      i64 at = offset ^ labels[child];
      build.used[at] = 1;
      build.units[at] |= labels[child];
      queue[tail++] = (Range){begins[child], begins[child + 1], range.depth + 1, at};
    }
  }
  // Whole blocks, so that offset ^ byte never leaves the array.
  i64 last = build.size - 1;
  while (!build.used[last]) last--;
  *size = (last / LEAF_BLOCK + 1) * LEAF_BLOCK;
  for (i64 node = 0; node < *size; node++)
    if (!build.used[node]) build.units[node] = -1;  // carries NO_BYTE
  free(queue);
  free(build.used);
  free(build.taken);
  return build.units;
fail:
  free(queue);
  free(build.units);
  free(build.used);
  free(build.taken);
  return NULL;
}

EXPORT void trie_free(i64 *units) { free(units); }
