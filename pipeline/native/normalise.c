// Normalises text (see normalise.h).
// Source: SentencePiece normalizer.cc, Normalize and NormalizePrefix.
#include "normalise.h"

void normal_text_begin(NormalText *t, const Normaliser *by) {
  *t = (NormalText){.normaliser = by};
  for (int byte = 0; byte < 128; byte++) {
    i16 mapped = by->ascii[byte];
    if (by->begins_symbol[byte]) continue;
    if (mapped == ' ') add_to_set(&t->spaces, (u8)byte);
    if (mapped == ' ' || mapped == byte) add_to_set(&t->kept, (u8)byte);
  }
}

#define PAUSE_BYTES 64   // of kept text after which it may pause
#define MOST_PAUSED 256  // bytes of a rest that is not worth a pause

bool reserve_text(NormalText *t, i64 size) {
  if (LIKELY(size <= t->room)) return true;
  if (!RESIZE(t->bytes, size + size / 2)) return false;
  t->room = size + size / 2;
  return true;
}

INLINE bool joins(const Normaliser *z, const u8 *at) {
  i64 width = character_bytes(*at);
  return width == 4 || z->points[code_point(at, width)] & JOINS;
}

INLINE void begin_text(const Normaliser *z, Progress *s, u8 first) {
  if (s->begun) return;
  s->begun = true;
  if (z->prefix == ALWAYS || (z->prefix == IF_MISSING && first != ' ')) *s->out++ = ' ';
}

// Copies characters that no rule changes, blocks at a time, up to the first other one. Returns
// whether it paused instead.
INLINE bool copy_blocks(const NormalText *t, Progress *s, const u8 *readable, bool pauses) {
  const Normaliser *z = t->normaliser;
  const Block space = block_of(' ');
  const u8 *begin = s->at;
  for (;;) {
    i64 left = s->end - s->at;
    Block block = block_load_last(s->at, left, readable), is_space = block_in(block, &t->spaces);
    u32 spaces = block_mask(is_space), bad = ~block_mask(block_in(block, &t->kept));
    if (z->collapse) bad |= spaces & (spaces << 1 | s->after_space);
    bad &= BLOCK_ALL;
    i64 run = bad ? __builtin_ctz(bad) : BLOCK;
    if (run > left) run = left;
    // An ASCII character that may combine with the next one.
    if (run && run < left && s->at[run] >= 0x80 && joins(z, s->at + run)) run--;
    block_store(s->out, block_select(is_space, space, block));
    if (pauses && run > 2 && s->at - begin >= PAUSE_BYTES && left > MOST_PAUSED) {
      u32 ends = spaces & ~(spaces << 1 | 1) & ((1u << (run - 1)) - 1);
      if (ends) {
        i64 size = __builtin_ctz(ends);
        s->out += size;
        s->at += size;
        return true;
      }
    }
    s->out += run;
    s->at += run;
    if (run) s->after_space = z->collapse && spaces >> (run - 1) & 1;
    if (s->at == s->end) return false;
    if (run == BLOCK) continue;
    if (!(spaces >> run & 1)) return false;
    // Skip repeated spaces, but for one that may combine with the next character.
    i64 skip = __builtin_ctzll(~((u64)spaces >> run));
    if (skip > left - run) skip = left - run;
    if (skip < left - run && s->at[skip] >= 0x80 && joins(z, s->at + skip)) skip--;
    if (!skip) return false;
    s->at += skip;
    if (s->at == s->end) return false;
  }
}

// Copies characters that begin no rule, from a non-ASCII one on.
INLINE void copy_characters(const Normaliser *z, Progress *s) {
  while (s->end - s->at >= 4 && *s->at >= 0x80) {
    i64 width = character_bytes(*s->at);
    if (width == 4 || z->points[code_point(s->at, width)] & BEGINS) return;
    if (z->begins_symbol[*s->at]) return;
    memcpy(s->out, s->at, 4);
    s->out += width;
    s->at += width;
    s->after_space = false;
  }
}

INLINE u8 flags_of(const Normaliser *z, const u8 *at) {
  return z->points[code_point(at, character_bytes(*at))];
}

// Returns the bytes at `s->at` that one rule replaces, 0 if none: a grapheme of less than WHOLE_BYTES
// with a rule for its beginning, or a character. Emoji, Hangul and Indic consonants may join those
// before or after them to longer graphemes: such places are hard.
// Source: huggingface/tokenizers, `normalizers/precompiled.rs`, and spm_precompiled, `transform`.
static i64 grapheme_rule(const Normaliser *z, Progress *s, u32 *place) {
  const u8 *at = s->at, *before = at;
  const i64 width = character_bytes(*at);
  const u8 flags = flags_of(z, at);
  u8 flags_before = LONE;
  if (before > s->begin) {
    do before--;
    while ((*before & 0xC0) == 0x80);
    flags_before = flags_of(z, before);
  }
  const i64 width_before = at - before;
  i64 size = width, reached;
  if (*at == '\r' && s->end - at > 1 && at[1] == '\n')
    size = 2;
  else if (!(flags & LONE) && (!(flags & JOINS) || flags_before & LONE))
    while (at + size < s->end && size < WHOLE_BYTES && flags_of(z, at + size) & JOINS)
      size += character_bytes(at[size]);
  s->hard |= (flags & HARD) != 0;
  if (size > width && size < WHOLE_BYTES && find_rule(z, at, at + size, true, place, &reached)) {
    const u32 point = code_point(at, width);
    s->hard |= point == 0xA9 || point == 0xAE;  // the emoji of two bytes
    s->hard |= width > 2 && (width_before > 2 || flags_before & JOINS);
    return size;
  }
  if (!find_rule(z, at, at + width, true, place, &reached)) return 0;
  // Which characters of four bytes are alone is unknown.
  s->hard |= flags & JOINS && width_before == 4 && !(flags_before & JOINS) &&
             at + width < s->end && flags_of(z, at + width) & JOINS;
  return width;
}

// Writes the replacement of the character or symbol at `s->at`.
static void replace(const Normaliser *z, Progress *s) {
  const u8 *from = s->at, *to;
  i64 length = 0, reached;
  i32 value;
  u32 place = 0;
  if (z->begins_symbol[*s->at]) length = trie_longest(z->symbols, s->at, s->end, &value);
  to = from + length;
  if (!length) {
    length = z->graphemes ? grapheme_rule(z, s, &place)
                          : longest_rule(z, s->at, s->end, &place, &reached);
    if (length) {
      from = z->right_sides + place;
      to = from + strlen((const char *)from);
    } else {
      length = character_bytes(*s->at);
      if (length > s->end - s->at) length = s->end - s->at;
      to = from + length;
    }
  }
  s->at += length;
  if (!s->begun) {
    if (z->strip_left && to - from == 1 && *from == ' ') return;
    while (z->strip_left && from < to && *from == ' ') from++;
    if (from == to && z->graphemes) return;
    begin_text(z, s, from < to ? *from : 0);
  }
  while (s->after_space && from < to && *from == ' ') from++;
  if (from == to) return;
  s->after_space = z->collapse && to[-1] == ' ';
  while (from < to) {
    if (to - from > 2 && from[0] == 0xE2 && from[1] == 0x96 && from[2] == 0x81) {
      *s->out++ = ' ';
      from += 3;
    } else {
      *s->out++ = *from++;
    }
  }
}

// Normalises an ASCII character whose replacement depends on nothing else; returns false for others.
INLINE bool replace_ascii(const Normaliser *z, Progress *s) {
  u8 byte = *s->at;
  if (byte >= 0x80 || z->begins_symbol[byte]) return false;
  if (s->at + 1 < s->end && s->at[1] >= 0x80 && joins(z, s->at + 1)) return false;
  i16 mapped = z->ascii[byte];
  if (mapped == REMOVED && s->begun) {
    s->at++;
    return true;
  }
  if (mapped < 0) return false;
  s->at++;
  if (!s->begun && z->strip_left && mapped == ' ') return true;
  begin_text(z, s, (u8)mapped);
  if (mapped != ' ' || !s->after_space) *s->out++ = (u8)mapped;
  s->after_space = mapped == ' ' && z->collapse;
  return true;
}

i64 normalise_on(NormalText *t, Progress *s, const u8 *readable, bool pauses) {
  const Normaliser *z = t->normaliser;
  // Room for what one turn writes; blocks write as much as they read.
  const i64 most = z->longest + 2 * BLOCK + TEXT_SLACK;
  bool paused = false;
  for (s->out = t->bytes; s->at < s->end && !paused;) {
    i64 size = s->out - t->bytes;
    if (!reserve_text(t, size + (s->end - s->at) + most)) return -1;
    s->out = t->bytes + size;
    if (s->begun) {
      paused = copy_blocks(t, s, readable, pauses);
      if (paused || s->at == s->end) break;
      if (*s->at >= 0x80) {
        copy_characters(z, s);
        if (s->at == s->end || *s->at < 0x80) continue;
      }
    }
    if (!replace_ascii(z, s)) replace(z, s);
    if (UNLIKELY(s->hard)) return -1;
  }
  i64 size = s->out - t->bytes;
  if (!s->begun) return 0;
  if (!paused) {
    if (z->strip_right)
      while (size && t->bytes[size - 1] == ' ') size--;
    if (z->suffix) t->bytes[size++] = ' ';
  }
  memset(t->bytes + size, 0, BLOCK + 16);
  return size;
}

i64 normalise(NormalText *t, const u8 *at, const u8 *end, const u8 *readable) {
  Progress s = {.begin = at, .at = at, .end = end, .after_space = t->normaliser->strip_left};
  return normalise_on(t, &s, readable, false);
}
