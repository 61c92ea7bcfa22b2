// Encodes documents with the ids of SentencePiece, unigram or BPE (see fast_tokenizer.py), and of the
// unigram models of a tokenizer.json (see unigrams.py).
#include <float.h>
#include <math.h>

#include "cuts.h"
#include "normalise.h"
#include "word_memo.h"

#define UNIGRAM 0
#define BPE 1
#define OLD_LAW 0             // of unigram models: that of SentencePiece up to 0.2.1,
#define NEW_LAW 1             // that of 0.2.2 and later,
#define MOST_SCORE 100000.0f  // in which a larger score is subtracted from all,
#define WORD_LAW 2            // and that of `tokenizers`: scores are summed in float64 for each word

#define MEMO_BYTES 64        // longest string in the memo
#define MEMO_IDS 192         // most ids of one: a space spelt in bytes has three
#define BPE_CHARACTERS 512   // longest segment, for the quadratic search below
#define AHEAD 64             // words whose entries are fetched before they are needed
#define PLACES (AHEAD + 64 + 8)

// The memo's note of a word, and its number of ids, as one number: some ids are unknown or symbols,
// each appended alone; the sum of the scores' sizes, in units; the limit, bits 16-30 of a float32.
#define SPECIAL 1u
#define COST_SHIFT 1
#define MOST_COST 255
#define LIMIT_SHIFT 9
#define COUNT_SHIFT 24

// A model; `Model` in fast_tokenizer.py has the same fields.
typedef struct {
  Normaliser normaliser;
  i64 kind, law;
  const i64 *trie;       // piece -> id
  const i64 *frozen;     // user-defined symbols -> id; BPE neither splits nor merges them
  const double *scores;  // [ids] of a piece in a path; of ids of bytes, see `exact_score`
  const float *narrow;   // the same; only user-defined symbols have others in double precision
  double unknown_score;  // of a character without a piece
  i64 unknown_id;        // its id; in SentencePiece's laws `scores` has the same score
  const i32 *byte_ids;   // [256] they replace the unknown id if `has_bytes`
  i64 has_bytes;
  double cost;  // largest size of a score
  Pairs pairs;
  i64 spaces_apart;  // whether no piece has a space after another character
  i64 pieces, memo_bytes;
  const i64 *tokens;       // trie of added tokens whose texts are refused
  const u8 *begins_token;  // [256] their first bytes
} Model;

// The best path up to a position: its score, its last piece and where that starts.
typedef struct {
  float best;
  i32 id, start;
} Node;

// The best and the next best score up to a position.
typedef struct {
  double best, rival;
} Score;

typedef struct {
  Model model;
  WordMemo memo;
  double unit;           // of costs in notes
  NormalText text;       // of a document, or of a word of it
  WordSets raw, normal;  // of plain text before and after normalisation
  u8 spelt[256], same[256];  // ASCII as normalised if it is plain, and as it is
  u32 *cuts;             // of a word or a document
  i64 cuts_room;  // more than the bytes of its text
  Node *nodes;
  i64 nodes_room;
  Score *scores;  // as many, for WORD_LAW
  // The document's score: exact after the first `exact_ids` of its ids, at most `bound` now.
  float exact;
  i64 exact_ids;
  double bound;
  i32 *out;
  i64 begin;  // of the document's ids in `out`
} Encoder;

EXPORT void sentencepiece_free(Encoder *e) {
  word_memo_free(&e->memo);
  free(e->text.bytes);
  free(e->cuts);
  free(e->nodes);
  free(e->scores);
  free(e);
}

INLINE bool is_letter(int byte) { return (byte | 32) >= 'a' && (byte | 32) <= 'z'; }

static bool joins_letters(const Pairs *pairs, int byte) {
  for (int letter = 'A'; letter <= 'z'; letter++)
    if (is_letter(letter) && (pairs->ascii[letter << 7 | byte] || pairs->ascii[byte << 7 | letter]))
      return true;
  return false;
}

static void make_sets(Encoder *e) {
  const NormalText *t = &e->text;
  add_to_set(&e->normal.spaces, ' ');
  for (int byte = 0; byte < 128 && e->model.law != WORD_LAW; byte++) {
    if (is_letter(byte))
      add_to_set(&e->normal.letters, (u8)byte);
    else if (!joins_letters(&e->model.pairs, byte))
      add_to_set(&e->normal.signs, (u8)byte);
  }
  e->raw = e->normal;
  for (int byte = 0; byte < 256; byte++) {
    e->same[byte] = e->spelt[byte] = (u8)byte;
    if (!in_set(&t->kept, (u8)byte)) continue;
    if (in_set(&t->spaces, (u8)byte)) {
      if (byte != ' ' && !t->normaliser->collapse) continue;
      add_to_set(&e->raw.spaces, (u8)byte);
      e->spelt[byte] = ' ';
    }
    add_to_set(&e->raw.plain, (u8)byte);
  }
}

// Returns an encoder of a model, whose tables must outlive it; NULL if memory is short.
EXPORT Encoder *sentencepiece_new(const Model *model) {
  Encoder *e = calloc(1, sizeof(Encoder));
  if (!e) return NULL;
  e->model = *model;
  if (!word_memo_make(&e->memo, model->memo_bytes, model->pieces >> 16, NOTE_BYTES)) {
    sentencepiece_free(e);
    return NULL;
  }
  e->unit = fmax(16 * model->cost / MOST_COST, 1e-30);
  normal_text_begin(&e->text, &e->model.normaliser);
  make_sets(e);
  return e;
}

// ---- Paths. In all of them nodes[p] is about the first p bytes of a segment.

INLINE void take(Score *of, Node *to, double score, i32 id, i64 start) {
  const bool better = score > of->best;
  const double less = better ? of->best : score;
  of->rival = less > of->rival ? less : of->rival;
  if (!better) return;
  of->best = score;
  to->id = id;
  to->start = (i32)start;
}

// Finds the best path through a segment without rounding to float32: the law of `tokenizers`.
// `scores` has room for one more than the bytes. Returns the largest preceding score for which the
// float32 path is provably the same, negative if there is none.
//
// With n characters, scores of at most C and M = |score before| + n C, each rounding errs by at
// most u = M 2^-24. So SentencePiece's best scores and candidates differ from the true ones by at
// most n u, and the stored best by another u. If the two best candidates are more than (2 n + 2) u
// apart, SentencePiece chooses the same one. Under the new law, no score within the segment may
// exceed MOST_SCORE; 1 covers their rounding.
static double certain_path(const Model *m, const u8 *text, i64 size, Node *nodes, Score *scores) {
  const i64 *trie = m->trie, root = trie[0];
  for (i64 p = 1; p <= size; p++) scores[p] = (Score){-INFINITY, -INFINITY};
  scores[0].best = 0.0;
  i64 characters = 0;
  for (i64 begin = 0, width; begin < size; begin += width, characters++) {
    width = character_bytes(text[begin]);
    const double before = scores[begin].best;
    bool single = false;
    i64 node = root;
    const u8 *at = text + begin;
    for (i32 id; (id = trie_next(trie, &node, &at, text + size)) >= 0;) {
      const i64 p = at - text;
      take(scores + p, nodes + p, m->scores[id] + before, id, begin);
      single |= p - begin == width;
    }
    const i32 unknown = (i32)m->unknown_id;
    const i64 end = begin + width;
    if (!single) take(scores + end, nodes + end, m->unknown_score + before, unknown, begin);
  }
  double margin = INFINITY;
  for (i64 p = size; p > 0; p = nodes[p].start)
    if (scores[p].best - scores[p].rival < margin) margin = scores[p].best - scores[p].rival;
  // 1% and 1e-9 cover this computation's own rounding, about 1e-16 of the scores.
  double most = (margin - 1e-9) * 0.99 * 16777216.0 / (double)(2 * characters + 2);
  if (m->law == NEW_LAW) most = fmin(most, MOST_SCORE - 1);
  return most - (double)characters * m->cost;
}

// Finds SentencePiece's best path through a segment after a path of `score`. The old law compares
// candidates in double precision with a best score rounded to float32; the new one rounds both, and
// lets scores begin at 0 again where the best is too large.
// Source: SentencePiece unigram_model.cc, Model::EncodeOptimized.
INLINE void path_by(i64 law, const Model *m, const u8 *text, i64 size, float score, Node *nodes) {
  const i64 *trie = m->trie, root = trie[0];
  i64 reached = 0;
  for (i64 p = 1; p <= size; p++) nodes[p].start = -1;
  nodes[0] = (Node){score, 0, 0};
  for (i64 begin = 0, width; begin < size; begin += width) {
    width = character_bytes(text[begin]);
    if (law == NEW_LAW && fabsf(nodes[begin].best) > MOST_SCORE) {
      const float most = nodes[begin].best;
      for (i64 p = begin; p <= reached; p++)
        if (nodes[p].start >= 0) nodes[p].best -= most;
    }
    const double before = nodes[begin].best;
    bool single = false;
    i64 node = root;
    const u8 *at = text + begin;
    for (i32 id; (id = trie_next(trie, &node, &at, text + size)) >= 0;) {
      const i64 p = at - text;
      double candidate = m->scores[id] + before;
      if (law == NEW_LAW) candidate = (float)candidate;
      if (p > reached) reached = p;
      if (nodes[p].start < 0 || candidate > nodes[p].best)
        nodes[p] = (Node){(float)candidate, id, (i32)begin};
      single |= p - begin == width;
    }
    if (single) continue;
    if (begin + width > reached) reached = begin + width;
    Node *to = nodes + begin + width;
    double candidate = (float)(m->scores[m->unknown_id] + before);
    if (to->start < 0 || candidate > to->best)
      *to = (Node){(float)candidate, (i32)m->unknown_id, (i32)begin};
  }
}

typedef struct {
  i32 begin, before, after;  // its first byte, and the numbers of the symbols beside it
  i32 id;                    // -1 if it is no piece
  i32 merged;                // id after merging with the next symbol, or -1
  bool whole;                // a user-defined symbol or the end, which are not merged
} Symbol;

// Sets a symbol's `merged`, and its score in `scores`, the lowest of all if it is no piece.
static void set_merged(const Model *m, const u8 *text, Symbol *symbols, float *scores, i32 at) {
  Symbol *left = symbols + at, *right = symbols + left->after;
  left->merged = -1;
  if (!left->whole && !right->whole)
    left->merged = trie_find(m->trie, text + left->begin, text + symbols[right->after].begin);
  scores[at] = left->merged < 0 ? -INFINITY : m->narrow[left->merged];
}

// Merges the characters of a segment by BPE: the adjacent pair whose piece scores best, leftmost
// first, until no pair is a piece. Returns false if the segment has too many characters.
// Source: SentencePiece bpe_model.cc, Model::SampleEncode with alpha 0.
static bool merged_path(const Model *m, const u8 *text, i64 size, Node *nodes) {
  Symbol symbols[BPE_CHARACTERS + 1];
  float scores[BPE_CHARACTERS + 1];
  i32 count = 0;
  for (i64 at = 0, length; at < size; at += length) {
    if (count == BPE_CHARACTERS) return false;
    i32 value;
    length = trie_longest(m->frozen, text + at, text + size, &value);
    bool whole = length > 0;
    if (!whole) length = character_bytes(text[at]);
    i32 id = trie_find(m->trie, text + at, text + at + length);
    symbols[count] = (Symbol){(i32)at, count - 1, count + 1, id, -1, whole};
    count++;
  }
  symbols[count] = (Symbol){(i32)size, count - 1, count, -1, -1, true};
  for (i32 at = 0; at < count; at++) set_merged(m, text, symbols, scores, at);
  for (;;) {
    float best = -INFINITY;
    i32 top = 0;
    for (i32 at = 0; at < count; at++) {  // which is better is unpredictable: no branch
      top = scores[at] > best ? at : top;
      best = scores[at] > best ? scores[at] : best;
    }
    if (best == -INFINITY) break;
    const i32 before = symbols[top].before, gone = symbols[top].after, after = symbols[gone].after;
    scores[gone] = -INFINITY;
    symbols[top].id = symbols[top].merged;
    symbols[top].after = after;
    symbols[after].before = top;
    set_merged(m, text, symbols, scores, top);
    if (before >= 0) set_merged(m, text, symbols, scores, before);
  }
  for (i32 at = 0; at < count; at = symbols[at].after) {
    Node *to = nodes + symbols[symbols[at].after].begin;
    to->id = symbols[at].id >= 0 ? symbols[at].id : (i32)m->unknown_id;
    to->start = symbols[at].begin;
  }
  return true;
}

// Writes the ids of one piece at text[begin:end], for an unknown character those of its bytes;
// returns their number.
INLINE i64 put_piece(const Model *m, const u8 *text, i64 begin, i64 end, i32 id, i32 *out) {
  if (LIKELY(id != m->unknown_id) || !m->has_bytes) {
    *out = id;
    return 1;
  }
  if (text[begin] == ' ') {
    for (int i = 0; i < 3; i++) out[i] = m->byte_ids[(u8) "\xE2\x96\x81"[i]];
    return 3;
  }
  for (i64 at = begin; at < end; at++) out[at - begin] = m->byte_ids[text[at]];
  return end - begin;
}

// Reverses a path: nodes[p].start becomes the end of the piece that starts at p.
static void reverse(Node *nodes, i64 size) {
  for (i64 p = size, after = size; p >= 0;) {
    i64 before = p ? nodes[p].start : -1;
    nodes[p].start = (i32)after;
    after = p;
    p = before;
  }
}

// Writes the ids of a reversed path by WORD_LAW, adjacent unknown characters as one; returns their
// number.
static i64 put_word(const Model *m, const u8 *text, i64 size, const Node *nodes, i32 *ids) {
  i64 count = 0;
  i32 before = -1;
  for (i64 p = 0, end; p < size; p = end) {
    end = nodes[p].start;
    const i32 id = nodes[end].id;
    if (id != m->unknown_id || m->has_bytes || id != before)
      count += put_piece(m, text, p, end, id, ids + count);
    before = id;
  }
  return count;
}

// Finds the path of a word of up to MEMO_BYTES; adds its ids, and returns its note.
static u32 find_path(const Encoder *e, const u8 *text, i64 size, i32 *ids, i64 *count) {
  const Model *m = &e->model;
  Node nodes[MEMO_BYTES + 1];
  double cost = 0, certain = INFINITY;
  bool special = false;
  if (m->kind == UNIGRAM) {
    Score scores[MEMO_BYTES + 1];
    certain = certain_path(m, text, size, nodes, scores);
  } else {
    merged_path(m, text, size, nodes);
  }
  reverse(nodes, size);
  if (m->law == WORD_LAW) {
    *count += put_word(m, text, size, nodes, ids + *count);
    certain = FLT_MAX;
    size = 0;
  }
  for (i64 p = 0, end; p < size; p = end) {
    end = nodes[p].start;
    const i32 id = nodes[end].id;
    *count += put_piece(m, text, p, end, id, ids + *count);
    cost += m->kind == UNIGRAM ? fabs(m->scores[id]) : 0;
    special |= (id == m->unknown_id && !m->has_bytes) || m->narrow[id] != m->scores[id];
  }
  // Rounded up, so that bounds are bounds; a limit is rounded towards zero, and none is NaN.
  // 0.1 % covers the rounding of SentencePiece's sum and of this one.
  const double units = ceil(1.001 * cost / e->unit);
  const float limit = certain >= 0 ? (float)(certain * (1 - 1e-6)) : NAN;
  u32 bits;
  memcpy(&bits, &limit, sizeof(bits));
  bits = (bits & 0x7FFF0000u) >> (16 - LIMIT_SHIFT);
  return bits | (special || units > MOST_COST ? SPECIAL : (u32)units << COST_SHIFT);
}

// ---- The memo.

INLINE u32 note_of(const WordEntry *entry) {
  u32 note;
  memcpy(&note, entry->ids + sizeof(entry->ids) - NOTE_BYTES, sizeof(note));
  return note;
}

INLINE double cost_of(u32 note, double unit) {
  return unit * (double)(int)(note >> COST_SHIFT & MOST_COST);
}

INLINE float limit_of(u32 note) {
  u32 bits = note << (16 - LIMIT_SHIFT) & 0x7FFF0000u;
  float limit;
  memcpy(&limit, &bits, sizeof(limit));
  return limit;
}

// Returns the entry of a word that the memo lacks, after storing it.
static const WordEntry *learn(Encoder *e, const u8 *text, i64 size, Key key, u64 hash) {
  i32 ids[MEMO_IDS];
  i64 count = 0;
  const u32 note = find_path(e, text, size, ids, &count);
  WordEntry *entry = word_memo_store(&e->memo, key, hash, text, size, ids, count,
                                     note & SPECIAL ? 0 : e->memo.most);
  memcpy(entry->ids + sizeof(entry->ids) - NOTE_BYTES, &note, NOTE_BYTES);
  return entry;
}

// ---- Documents.

// Makes e->exact the score of e->out[e->begin:used], whose last ids are of entries that are not special.
static void sync(Encoder *e, i64 used) {
  float exact = e->exact;
  for (i64 i = e->exact_ids; i < used; i++) exact += e->model.narrow[e->out[i]];
  e->exact = exact;
  e->exact_ids = used;
  e->bound = fabs(exact);
}

// Appends an id of an exact path, of one character if it is unknown; returns the new `used`.
INLINE i64 append(Encoder *e, i32 id, i64 used) {
  e->exact = (float)(e->model.scores[id] + (double)e->exact);
  if (id != e->model.unknown_id || used == e->begin || e->out[used - 1] != id) e->out[used++] = id;
  e->exact_ids = used;
  return used;
}

// Appends the ids of a segment or several, the path found from the document's exact score.
static i64 encode_exactly(Encoder *e, const u8 *text, i64 size, i64 used) {
  const Model *m = &e->model;
  if (size >= e->nodes_room) {
    if (!RESIZE(e->nodes, 2 * size + 1)) return -NO_MEMORY;
    if (m->law == WORD_LAW && !RESIZE(e->scores, 2 * size + 1)) return -NO_MEMORY;
    e->nodes_room = 2 * size + 1;
  }
  Node *nodes = e->nodes;
  if (m->law == WORD_LAW) {
    certain_path(m, text, size, nodes, e->scores);
    reverse(nodes, size);
    return used + put_word(m, text, size, nodes, e->out + used);
  }
  if (m->kind == UNIGRAM) {
    sync(e, used);
    if (m->law == NEW_LAW)
      path_by(NEW_LAW, m, text, size, e->exact, nodes);
    else
      path_by(OLD_LAW, m, text, size, e->exact, nodes);
  } else if (!merged_path(m, text, size, nodes)) {
    return -LIBRARY;
  }
  const float score = nodes[size].best;
  reverse(nodes, size);
  for (i64 p = 0, end; p < size; p = end) {
    end = nodes[p].start;
    const i32 id = nodes[end].id;
    if (id == m->unknown_id && m->has_bytes) {
      used += put_piece(m, text, p, end, id, e->out + used);
      e->exact_ids = used;
    } else {
      used = append(e, id, used);
    }
  }
  if (m->kind == UNIGRAM) e->exact = score;
  e->bound = fabs(e->exact);
  return used;
}

// Appends the ids of a word in the memo, or those of its exact path if the entry is not certain.
static i64 put_entry(Encoder *e, const WordEntry *entry, const u8 *text, i64 length, i64 used) {
  const u32 note = note_of(entry);
  if (!(e->bound <= limit_of(note))) {
    sync(e, used);
    if (!(e->bound <= limit_of(note))) return encode_exactly(e, text, length, used);
  }
  if (!(note & SPECIAL)) {
    e->bound += cost_of(note, e->unit);
    return used + word_ids(&e->memo, entry, e->memo.wide, e->out + used);
  }
  i32 ids[MEMO_IDS + ID_SLACK];
  i64 count = word_ids(&e->memo, entry, e->memo.wide, ids);
  sync(e, used);
  for (i64 i = 0; i < count; i++) used = append(e, ids[i], used);
  e->bound = fabs(e->exact);
  return used;
}

// Words between begins[i] and ends[i] of a text. Their first bytes are read as `spelt` says.
typedef struct {
  const u8 *text;
  const u32 *begins, *ends;
  const u8 *spelt;
  bool whole;  // none is cut further
} Words;

static i64 encode_words(Encoder *e, const Words *words, i64 count, i64 used);

// Appends the ids of text that is cut wherever no piece crosses.
static i64 encode_segments(Encoder *e, const u8 *text, i64 size, i64 used) {
  if (size >= e->cuts_room) {
    if (!RESIZE(e->cuts, 2 * size)) return -NO_MEMORY;
    e->cuts_room = 2 * size;
    e->cuts[0] = 0;
  }
  i64 count = cut_pairs(&e->model.pairs, text, 0, size, e->cuts + 1);
  return encode_words(e, &(Words){text, e->cuts, e->cuts + 1, e->same, true}, count, used);
}

// Appends the ids of a word that is not in its line of the memo, is not certain, or has its ids in the
// pool.
static __attribute__((noinline)) i64 encode_other(Encoder *e, const Words *words, i64 i, i64 used) {
  const u8 *text = words->text + words->begins[i];
  const i64 length = words->ends[i] - words->begins[i];
  if (words->spelt[*text] != *text) {
    if (!reserve_text(&e->text, length + TEXT_SLACK)) return -NO_MEMORY;
    memcpy(e->text.bytes, text, (size_t)length);
    memset(e->text.bytes + length, 0, TEXT_SLACK);
    e->text.bytes[0] = words->spelt[*text];
    text = e->text.bytes;
  }
  if (length > MEMO_BYTES)
    return words->whole ? encode_exactly(e, text, length, used)
                        : encode_segments(e, text, length, used);
  const Key key = memo_key(text, length);
  const u64 hash = memo_hash(key);
  const WordEntry *entry = word_memo_find(&e->memo, key, hash, text, length);
  if (!entry && length > SHORT_BYTES && !words->whole)
    return encode_segments(e, text, length, used);
  if (!entry) entry = learn(e, text, length, key, hash);
  return put_entry(e, entry, text, length, used);
}

// Appends the ids of up to AHEAD words; returns the new `used`, or less than 0: why it stops.
INLINE i64 encode_some(Encoder *e, const Words *words, i64 first, i64 count, bool wide, i64 used) {
  Key keys[AHEAD];
  const WordEntry *lines[AHEAD];
  const WordMemo memo = e->memo;
  const u32 *begins = words->begins + first, *ends = words->ends + first;
  const double unit = e->unit;
  double bound = e->bound;
  for (i64 i = 0; i < count; i++) {
    const i64 length = ends[i] - begins[i];
    const u8 *text = words->text + begins[i];
    // A longer word has a key that no word in the memo has.
    keys[i] = LIKELY(length <= SHORT_BYTES) ? short_key(text, length) : (Key){0, ~0ull};
    keys[i].low = (keys[i].low & ~0xFFull) | words->spelt[*text];
    lines[i] = word_line(&memo, memo_hash(keys[i]));
    __builtin_prefetch(lines[i]);
  }
  for (i64 i = 0; i < count; i++) {
    const WordEntry *entry = lines[i] + key_equal(lines[i][1].key, keys[i]);
    const u32 note = note_of(entry);
    // Lines of a memo that has grown since are in its first half, and hold other words at worst.
    if (LIKELY(key_equal(entry->key, keys[i]) && note >> COUNT_SHIFT != POOLED &&
               bound <= limit_of(note))) {
      bound += cost_of(note, unit);
      used += inline_ids(entry, wide, e->out + used);
      continue;
    }
    e->bound = bound;
    used = encode_other(e, words, first + i, used);
    if (UNLIKELY(used < 0)) return used;
    bound = e->bound;
  }
  e->bound = bound;
  return used;
}

static i64 encode_words(Encoder *e, const Words *words, i64 count, i64 used) {
  for (i64 first = 0; first < count && used >= 0; first += AHEAD) {
    const i64 some = count - first < AHEAD ? count - first : AHEAD;
    used = e->memo.wide ? encode_some(e, words, first, some, true, used)
                        : encode_some(e, words, first, some, false, used);
  }
  return used;
}

// Returns the bytes at `at` that begin words after other bytes.
INLINE u64 next_words(const Encoder *e, WordKinds k, WordKinds before, bool first) {
  if (e->model.law == WORD_LAW) return k.spaces & ~(u64)first;
  return first_spaces(k, before) | meetings(k, before);
}

// Appends the ids of e->text.bytes[:size].
static i64 encode_normal(Encoder *e, i64 size, i64 used) {
  const u8 *text = e->text.bytes;
  u32 places[PLACES] = {0};
  const Words words = {text, places, places + 1, e->same, e->model.law == WORD_LAW};
  i64 count = 1;
  WordKinds before = {.spaces = ~0ull};
  for (i64 at = 0; at < size && used >= 0; at += 64) {
    const WordKinds k = word_kinds(&e->normal, text + at);
    u64 begins = next_words(e, k, before, !at);
    if (size - at < 64) begins &= (1ull << (size - at)) - 1;
    before = k;
    count += write_places(begins, (u32)at, places + count);
    if (count <= AHEAD) continue;
    used = encode_words(e, &words, AHEAD, used);
    count -= AHEAD;
    memmove(places, places + AHEAD, (size_t)count * sizeof(*places));
  }
  places[count] = (u32)size;
  return used < 0 ? used : encode_words(e, &words, count, used);
}

// Appends the ids of words of plain text from a space after a word on. Moves `*at` to where it has to
// be normalised: to a space after a word or the begin of one.
static i64 encode_plain(Encoder *e, const u8 **at, const u8 *end, i64 used) {
  u32 begins[PLACES] = {0}, ends[PLACES];
  const Words words = {*at, begins, ends, e->spelt, e->model.law == WORD_LAW};
  // Of several spaces, the last begins a word if the others are removed.
  const bool removes = e->model.normaliser.collapse;
  i64 begun = !removes, ended = 0;
  u32 last = 0;  // end of a word, or where the text begins
  WordKinds before = {.spaces = ~0ull};
  for (const u8 *text = *at; end - text >= 64 + TEXT_SLACK && used >= 0; text += 64) {
    const WordKinds k = word_kinds(&e->raw, text);
    const u64 next_plain = in_set(&e->raw.plain, text[64]);
    const u64 next_space = in_set(&e->raw.spaces, text[64]);
    // A byte before another kind of text may change with it.
    const u64 changes = ~(k.plain & (k.plain >> 1 | next_plain << 63));
    const u64 valid = changes ? (changes & -changes) - 1 : ~0ull;
    const u64 cuts = meetings(k, before);
    const u64 stops = removes ? first_spaces(k, before) : next_words(e, k, before, text == *at);
    const u64 lasts = k.spaces & ~(k.spaces >> 1 | next_space << 63);
    before = k;
    const u32 from = (u32)(text - *at);
    begun += write_places(((removes ? lasts : stops) | cuts) & valid, from, begins + begun);
    ended += write_places((stops | cuts) & valid, from, ends + ended);
    if (changes) break;
    if (ended < AHEAD) continue;
    used = encode_words(e, &words, AHEAD, used);
    last = ends[AHEAD - 1];
    begun -= AHEAD;
    ended -= AHEAD;
    memmove(begins, begins + AHEAD, (size_t)begun * sizeof(*begins));
    memmove(ends, ends + AHEAD, (size_t)ended * sizeof(*ends));
  }
  used = used < 0 ? used : encode_words(e, &words, ended, used);
  if (ended) last = ends[ended - 1];
  *at += begun > ended ? begins[ended] : last;
  return used;
}

static i64 encode_part(void *encoder, const Call *call, const u8 *at, const u8 *end) {
  Encoder *e = encoder;
  const Model *m = &e->model;
  const u8 *readable = call->data + call->offsets[call->parts];
  Progress s = {.begin = at, .at = at, .end = end, .after_space = m->normaliser.strip_left};
  const i64 ids = m->has_bytes ? 3 : 1;  // most of a byte
  i64 used = call->used;
  e->out = call->out;
  e->exact = 0;
  e->exact_ids = e->begin = used;
  e->bound = 0;
  if (end - at > INT32_MAX) return -LIBRARY;
  const bool pauses = m->spaces_apart && !m->normaliser.suffix;
  while (s.at < end && used >= 0) {
    const i64 size = normalise_on(&e->text, &s, readable, pauses);
    if (size < 0) return s.hard ? -LIBRARY : -NO_MEMORY;
    const u8 *text = e->text.bytes;
    if (m->law == WORD_LAW && trie_occurs(m->tokens, m->begins_token, text, text + size))
      return -LIBRARY;
    if (used + ids * (size + end - s.at) + ID_SLACK > call->room) return -GROW;
    if (size)
      used = m->spaces_apart ? encode_normal(e, size, used)
                             : encode_segments(e, text, size, used);
    if (s.at < end && used >= 0) {
      used = encode_plain(e, &s.at, end, used);
      s.after_space = false;
    }
  }
  return used;
}

EXPORT i64 sentencepiece_encode(Encoder *e, Call *call) {
  return encode_parts(e, call, encode_part);
}

// White space: 9 to 13, 28 to 32 and some beyond ASCII. Source: Python's `str.isspace`.
static const AsciiSet WHITE = {{4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 3, 3, 2, 2}};

static bool is_space(u32 point) {
  if (point < 0x80) return in_set(&WHITE, (u8)point);
  return point == 0x85 || point == 0xA0 || point == 0x1680 || point - 0x2000 <= 10 ||
         point - 0x2028 <= 1 || point == 0x202F || point == 0x205F || point == 0x3000;
}

// Returns the bytes of a text once normalised, without white space, -1 if memory is short.
EXPORT i64 sentencepiece_normalised(Encoder *e, const u8 *text, i64 size) {
  const i64 all = normalise(&e->text, text, text + size, text + size);
  i64 found = all < 0 ? -1 : 0;
  text = e->text.bytes;
  for (i64 at = 0, width; at < all; at += width) {
    const Block block = block_load(text + at);
    if (at + BLOCK <= all && !block_mask(block)) {
      width = BLOCK;
      found += BLOCK - __builtin_popcount(block_mask(block_in(block, &WHITE)));
      continue;
    }
    width = character_bytes(text[at]);
    found += is_space(code_point(text + at, width)) ? 0 : width;
  }
  return found;
}
