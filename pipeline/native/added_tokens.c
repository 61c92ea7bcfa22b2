// Cuts documents at added tokens (see added_tokens.py).
#include "simd.h"
#include "trie.h"

// Tokens of one search; `Added` in added_tokens.py has the same fields.
typedef struct {
  const i64 *tokens;  // trie from token to id
  const u8 *begins;   // [256] their first bytes
  const i64 *odd;     // the same for tokens whose texts the library encodes
  const u8 *begins_odd;
} Added;

// First bytes of tokens, a set if all are ASCII, and bytes that may follow one of them.
typedef struct {
  const u8 *begins;
  AsciiSet set;
  bool ascii;
  bool follows[256];
} First;

static First first_of(const i64 *tokens, const u8 *begins) {
  First first = {begins, {{0}}, true, {false}};
  for (int byte = 0; byte < 256; byte++) {
    if (!begins[byte]) continue;
    if (byte < 128)
      add_to_set(&first.set, (u8)byte);
    else
      first.ascii = false;
    i64 node = trie_child(tokens, tokens[0], (u8)byte);
    for (int next = 0; next < 256; next++)
      first.follows[next] |=
          trie_value(node) >= 0 || trie_has(trie_child(tokens, node, (u8)next), (u8)next);
  }
  return first;
}

// Returns the next byte that may begin a token, or `end`.
INLINE const u8 *next_first(const First *first, const u8 *at, const u8 *end) {
  for (; first->ascii && at + BLOCK < end; at += BLOCK) {
    u32 found = block_mask(block_in(block_load(at), &first->set));
    for (; found; found &= found - 1)
      if (first->follows[at[__builtin_ctz(found) + 1]]) return at + __builtin_ctz(found);
  }
  while (at < end && !(first->begins[*at] && (at + 1 == end || first->follows[at[1]]))) at++;
  return at;
}

static bool has_any(const i64 *tokens, const First *first, const u8 *at, const u8 *end) {
  i32 value;
  for (at = next_first(first, at, end); at < end; at = next_first(first, at + 1, end))
    if (trie_longest(tokens, at, end, &value)) return true;
  return false;
}

// Parts of documents; `Parts` in added_tokens.py.
typedef struct {
  i64 *ends;
  i32 *given;
  i64 *owners;
  i64 count, room;
} Parts;

INLINE void add_part(Parts *parts, i64 end, i32 given, i64 owner) {
  if (parts->count < parts->room) {
    parts->ends[parts->count] = end;
    parts->given[parts->count] = given;
    parts->owners[parts->count] = owner;
  }
  parts->count++;
}

// Cuts parts data[offsets[i]:offsets[i + 1]], of `count`, whose `given` is TEXT at tokens of `added`:
// the leftmost match, then the longest. `owners` are their documents. Returns the number of new
// parts, of which no more than `room` are written.
// Source: Hugging Face's tokenizers, `AddedVocabulary::find_matches`, MatchKind::LeftmostLongest.
EXPORT i64 cut_at_tokens(const Added *added, const u8 *data, const i64 *offsets, const i32 *given,
                         const i64 *owners, i64 count, i64 *of_ends, i32 *of_given, i64 *of_owners,
                         i64 room) {
  const First tokens = first_of(added->tokens, added->begins);
  const First odd = first_of(added->odd, added->begins_odd);
  Parts parts = {of_ends, of_given, of_owners, 0, room};
  for (i64 part = 0; part < count; part++) {
    const u8 *begin = data + offsets[part], *end = data + offsets[part + 1], *at = begin;
    i64 owner = owners[part], before = parts.count;
    i32 kind = given[part];
    if (kind == TEXT && has_any(added->odd, &odd, at, end)) kind = REFUSED;
    while (kind == TEXT && (at = next_first(&tokens, at, end)) < end) {
      i32 id;
      i64 length = trie_longest(added->tokens, at, end, &id);
      if (!length) {
        at++;
        continue;
      }
      if (at > begin) add_part(&parts, at - data, TEXT, owner);
      at += length;
      add_part(&parts, at - data, id, owner);
      begin = at;
    }
    if (begin < end || parts.count == before) add_part(&parts, end - data, kind, owner);
  }
  return parts.count;
}
