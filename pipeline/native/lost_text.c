// What pipeline/building/lost_text.py counts in tokens.
#include "native.h"

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
