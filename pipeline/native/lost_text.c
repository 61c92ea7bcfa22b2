// What pipeline/building/lost_text.py counts in texts and in their tokens.
#include "native.h"

enum { SHORTEST = 16 };  // bytes of a run of ASCII

// Returns the bytes other than ASCII's white space. Source: the bytes that Python's `bytes.split`
// splits at.
static i64 solid_bytes(const u8 *at, i64 size) {
  i64 found = size;
  for (i64 done = 0; done < size;) {
    i64 end = size - done < 255 ? size : done + 255;
    u8 spaces = 0;
    for (; done < end; done++) spaces += (u8)((at[done] == ' ') | ((u8)(at[done] - '\t') < 5));
    found -= spaces;
  }
  return found;
}

// Returns whether a byte is printable ASCII or ASCII's white space, whose size normalisers keep.
static bool is_plain(u8 byte) { return (u8)(byte - ' ') < 95 || (u8)(byte - '\t') < 5; }

// Copies a text to `out`, with a space instead of each long run of plain bytes but the run's last.
// Returns the bytes of `out`; `removed` counts those left out, without white space.
EXPORT i64 lost_text_rest(const u8 *text, i64 size, u8 *out, i64 *removed) {
  u8 *to = out;
  *removed = 0;
  for (i64 at = 0, end; at < size; at = end) {
    for (end = at; end < size && is_plain(text[end]);) end++;
    if (end - at >= SHORTEST) {
      *removed += solid_bytes(text + at, end - 1 - at);
      *to++ = ' ';
      at = end - 1;
    }
    while (end < size && !is_plain(text[end])) end++;
    memcpy(to, text + at, (size_t)(end - at));
    to += end - at;
  }
  return to - out;
}

// Sets known[i] to the sum of `sizes` of the tokens of text i if one is `unknown`, otherwise to -1.
EXPORT void lost_text_known(const i32 *tokens, const i64 *lengths, i64 texts, i32 unknown,
                            const i32 *sizes, i64 *known) {
  for (i64 text = 0; text < texts; tokens += lengths[text++]) {
    i64 count = lengths[text], left = count;
    known[text] = -1;
    for (const i32 *at = tokens; left && known[text] < 0;) {
      i64 block = left < 1024 ? left : 1024;
      u32 found = 0;
      for (i64 i = 0; i < block; i++) found |= (u32)(at[i] == unknown);
      if (found) known[text] = 0;
      at += block, left -= block;
    }
    if (known[text] < 0) continue;
    for (i64 i = 0; i < count; i++) known[text] += sizes[tokens[i]];
  }
}
