// Double-array tries of byte strings.
//
// A node is one i64: bits 32-62 hold the offset of its children, bits 8-31 its value plus one (0 for
// none), bits 0-7 the byte leading to it. The child for byte b is at index offset ^ b if the node
// there carries b; one load suffices to check, because offsets are unique. A leaf has offset 0, so
// byte 0 leads to the root, which carries 0xFF. Source: the layout of Darts-clone
// (https://github.com/s-yata/darts-clone), with 64-bit nodes.
#pragma once

#include "native.h"

INLINE i64 trie_child(const i64 *trie, i64 node, u8 byte) { return trie[(node >> 32) ^ byte]; }
INLINE bool trie_has(i64 node, u8 byte) { return (u8)node == byte; }
INLINE i32 trie_value(i64 node) { return (i32)((node >> 8) & 0xFFFFFF) - 1; }  // -1 for none

// Moves `*at` from `*node` on behind the next key; returns its value, -1 if there is none.
INLINE i32 trie_next(const i64 *trie, i64 *node, const u8 **at, const u8 *end) {
  while (*at < end) {
    const u8 byte = *(*at)++;
    *node = trie_child(trie, *node, byte);
    if (!trie_has(*node, byte)) return -1;
    if (trie_value(*node) >= 0) return trie_value(*node);
  }
  return -1;
}

// Returns the bytes of the longest key at `at`, 0 if none, and its value in `value`.
INLINE i64 trie_longest(const i64 *trie, const u8 *at, const u8 *end, i32 *value) {
  i64 node = trie[0], length = 0;
  *value = -1;
  const u8 *p = at;
  for (i32 next; (next = trie_next(trie, &node, &p, end)) >= 0; length = p - at) *value = next;
  return length;
}

// Returns whether a text has a key, whose first bytes are in `begins` [256].
static inline bool trie_occurs(const i64 *trie, const u8 *begins, const u8 *at, const u8 *end) {
  i32 value;
  for (; at < end; at++)
    if (begins[*at] && trie_longest(trie, at, end, &value)) return true;
  return false;
}

// Returns the value of the key text[at:end], -1 if there is none.
INLINE i32 trie_find(const i64 *trie, const u8 *at, const u8 *end) {
  i64 node = trie[0];
  for (; at < end; at++) {
    node = trie_child(trie, node, *at);
    if (!trie_has(node, *at)) return -1;
  }
  return trie_value(node);
}
