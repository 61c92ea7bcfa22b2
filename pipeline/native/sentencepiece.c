// Encodes documents with the ids of SentencePiece, unigram or BPE (see fast_tokenizer.py).
#include <math.h>
#include <stdlib.h>

#include "cuts.h"
#include "memo.h"
#include "normalise.h"

#define UNIGRAM 0
#define BPE 1
#define OLD_LAW 0             // of unigram models: that of SentencePiece up to 0.2.1,
#define NEW_LAW 1             // and that of 0.2.2 and later,
#define MOST_SCORE 100000.0f  // in which a larger score is subtracted from all

// Reasons why `sentencepiece_encode` stops.
#define DONE 0
#define GROW_TOKENS 1  // `out` may be too short for the document's ids
#define GIVE_UP 2      // SentencePiece must encode the document
#define NO_MEMORY 3

#define CHUNK_BYTES 32       // longest string of several segments in the memo
#define BPE_CHARACTERS 512   // longest segment, for the quadratic search below
#define AHEAD 16             // strings whose buckets are fetched before they are needed
#define SPECIAL 16u          // in an entry's meta: some of its ids are unknown or symbols, each appended alone
#define COST_SHIFT 5
#define COST_BITS 11         // then the sum of the scores' sizes, in units, and
#define LIMIT_SHIFT 16       // the limit, the upper half of a float32

// A model; `Model` in fast_tokenizer.py has the same fields.
typedef struct {
  Normaliser normaliser;
  i64 kind, law;
  const i64 *trie;       // piece -> id
  const i64 *frozen;     // user-defined symbols -> id; BPE neither splits nor merges them
  const double *scores;  // [ids] of a piece in a path; of ids of bytes, see `exact_score`
  const float *narrow;   // the same; only user-defined symbols have others in double precision
  i64 unknown_id;        // of a character without a piece; `scores` holds its score
  const i32 *byte_ids;   // [256] they replace the unknown id if `has_bytes`
  i64 has_bytes;
  double cost;  // largest size of a score
  Pairs pairs;
  i64 spaces_apart;  // whether no piece has a space after another character
  i64 pieces, entries, pool_words;
} Model;

// The best path up to a position: its score, the next best, its last piece and where that starts.
typedef struct {
  double best, rival;
  i32 id, start;
} Node;

typedef struct {
  float best;
  i32 id, start;
} Narrow;

typedef struct {
  i32 ids[MEMO_IDS + ID_SLACK];
  i64 count;
  double cost;   // sum of the scores' sizes
  double limit;  // largest preceding score for which the path is certain
  bool special;
} Path;

typedef struct {
  Model model;
  Memo memo;
  double unit;  // of costs in entries
  NormalText text;  // of a document
  i32 *ends, *cuts;  // of strings and of segments
  i64 ends_room;
  Narrow *nodes;
  i64 nodes_room;
  // The document's score: exact after the first `exact_ids` of its ids, at most `bound` now.
  float exact;
  i64 exact_ids;
  double bound;
} Encoder;

EXPORT void sentencepiece_free(Encoder *e) {
  if (!e) return;
  memo_free(&e->memo);
  free(e->text.bytes);
  free(e->ends);
  free(e->cuts);
  free(e->nodes);
  free(e);
}

// Returns an encoder of a model, whose tables must outlive it; NULL if memory is short.
EXPORT Encoder *sentencepiece_new(const Model *model) {
  Encoder *e = calloc(1, sizeof(Encoder));
  if (!e) return NULL;
  e->model = *model;
  if (!memo_make(&e->memo, model->entries, model->pool_words, model->pieces >> 16)) {
    sentencepiece_free(e);
    return NULL;
  }
  e->unit = (MEMO_BYTES + 1) * model->cost / ((1 << COST_BITS) - 2);
  normal_text_begin(&e->text, &e->model.normaliser);
  return e;
}

// ---- Paths. In all of them nodes[p] is about the first p bytes of a segment.

// Finds the best path through a segment of up to MEMO_BYTES without rounding to float32. Returns
// the largest preceding score for which the float32 path is provably the same, negative if none.
//
// With n characters, scores of at most C and M = |score before| + n C, each rounding errs by at
// most u = M 2^-24. So SentencePiece's best scores and candidates differ from the true ones by at
// most n u, and the stored best by another u. If the two best candidates are more than (2 n + 2) u
// apart, SentencePiece chooses the same one. Under the new law, no score within the segment may
// exceed MOST_SCORE; 1 covers their rounding.
static double certain_path(const Model *m, const u8 *text, i64 size, Node *nodes) {
  const i64 *trie = m->trie, root = trie[0];
  for (i64 p = 1; p <= size; p++) nodes[p] = (Node){-INFINITY, -INFINITY, 0, -1};
  nodes[0].best = 0.0;
  i64 characters = 0;
  for (i64 begin = 0, width; begin < size; begin += width, characters++) {
    width = character_bytes(text[begin]);
    const double before = nodes[begin].best;
    bool single = false;
    i64 node = root;
    for (i64 p = begin; p < size;) {
      u8 byte = text[p];
      node = trie_child(trie, node, byte);
      if (!trie_has(node, byte)) break;
      p++;
      i32 id = trie_value(node);
      if (id < 0) continue;
      double candidate = m->scores[id] + before;
      Node *to = nodes + p;
      if (candidate > to->best || to->start < 0) {
        *to = (Node){candidate, to->best, id, (i32)begin};
      } else if (candidate > to->rival) {
        to->rival = candidate;
      }
      single |= p - begin == width;
    }
    if (single) continue;
    Node *to = nodes + begin + width;
    double candidate = m->scores[m->unknown_id] + before;
    if (candidate > to->best || to->start < 0) {
      *to = (Node){candidate, to->best, (i32)m->unknown_id, (i32)begin};
    } else if (candidate > to->rival) {
      to->rival = candidate;
    }
  }
  double margin = INFINITY;
  for (i64 p = size; p > 0; p = nodes[p].start)
    if (nodes[p].best - nodes[p].rival < margin) margin = nodes[p].best - nodes[p].rival;
  // 1% and 1e-9 cover this computation's own rounding, about 1e-16 of the scores.
  double most = (margin - 1e-9) * 0.99 * 16777216.0 / (double)(2 * characters + 2);
  if (m->law == NEW_LAW) most = fmin(most, MOST_SCORE - 1);
  return most - (double)characters * m->cost;
}

// Finds SentencePiece's best path through a segment after a path of `score`. The old law compares
// candidates in double precision with a best score rounded to float32; the new one rounds both, and
// lets scores begin at 0 again where the best is too large.
// Source: SentencePiece unigram_model.cc, Model::EncodeOptimized.
INLINE void path_by(i64 law, const Model *m, const u8 *text, i64 size, float score, Narrow *nodes) {
  const i64 *trie = m->trie, root = trie[0];
  i64 reached = 0;
  for (i64 p = 1; p <= size; p++) nodes[p].start = -1;
  nodes[0] = (Narrow){score, 0, 0};
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
    for (i64 p = begin; p < size;) {
      u8 byte = text[p];
      node = trie_child(trie, node, byte);
      if (!trie_has(node, byte)) break;
      p++;
      i32 id = trie_value(node);
      if (id < 0) continue;
      double candidate = m->scores[id] + before;
      if (law == NEW_LAW) candidate = (float)candidate;
      if (p > reached) reached = p;
      if (nodes[p].start < 0 || candidate > nodes[p].best)
        nodes[p] = (Narrow){(float)candidate, id, (i32)begin};
      single |= p - begin == width;
    }
    if (single) continue;
    if (begin + width > reached) reached = begin + width;
    Narrow *to = nodes + begin + width;
    double candidate = (float)(m->scores[m->unknown_id] + before);
    if (to->start < 0 || candidate > to->best)
      *to = (Narrow){(float)candidate, (i32)m->unknown_id, (i32)begin};
  }
}

static void exact_path(const Model *m, const u8 *text, i64 size, float score, Narrow *nodes) {
  if (m->law == NEW_LAW)
    path_by(NEW_LAW, m, text, size, score, nodes);
  else
    path_by(OLD_LAW, m, text, size, score, nodes);
}

typedef struct {
  i32 begin, after;  // its first byte, and the next symbol's number
  i32 id;            // -1 if it is no piece
  i32 merged;        // id after merging with the next symbol, or -1
  bool whole;        // a user-defined symbol, or its neighbour is one
} Symbol;

static void set_merged(const Model *m, const u8 *text, Symbol *symbols, i64 count, i32 at) {
  Symbol *left = symbols + at, *right = symbols + left->after;
  left->merged = -1;
  if (left->after < count && !left->whole && !right->whole)
    left->merged = trie_find(m->trie, text + left->begin, text + symbols[right->after].begin);
}

// Merges the characters of a segment by BPE: the adjacent pair whose piece scores best, leftmost
// first, until no pair is a piece. Returns false if the segment has too many characters.
// Source: SentencePiece bpe_model.cc, Model::SampleEncode with alpha 0.
static bool merged_path(const Model *m, const u8 *text, i64 size, Narrow *nodes) {
  Symbol symbols[BPE_CHARACTERS + 2];
  i32 count = 0;
  for (i64 at = 0, length; at < size; at += length) {
    if (count == BPE_CHARACTERS) return false;
    i32 value;
    length = trie_longest(m->frozen, text + at, text + size, &value);
    bool whole = length > 0;
    if (!whole) length = character_bytes(text[at]);
    i32 id = trie_find(m->trie, text + at, text + at + length);
    symbols[count] = (Symbol){(i32)at, count + 1, id, -1, whole};
    count++;
  }
  symbols[count] = (Symbol){(i32)size, count + 1, -1, -1, true};
  for (i32 at = 0; at < count; at++) set_merged(m, text, symbols, count, at);
  for (;;) {
    i32 top = -1, before_top = -1;
    for (i32 at = 0, before = -1; at < count; before = at, at = symbols[at].after) {
      if (symbols[at].merged < 0) continue;
      if (top >= 0 && !(m->scores[symbols[at].merged] > m->scores[symbols[top].merged])) continue;
      top = at;
      before_top = before;
    }
    if (top < 0) break;
    symbols[top].id = symbols[top].merged;
    symbols[top].after = symbols[symbols[top].after].after;
    set_merged(m, text, symbols, count, top);
    if (before_top >= 0) set_merged(m, text, symbols, count, before_top);
  }
  for (i32 at = 0; at < count; at = symbols[at].after) {
    Narrow *to = nodes + symbols[symbols[at].after].begin;
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

INLINE void begin_path(Path *path) {  // ids need no zeros
  path->count = 0;
  path->cost = 0;
  path->limit = INFINITY;
  path->special = false;
}

// Appends a segment of up to MEMO_BYTES to a path.
static bool extend_path(Encoder *e, const u8 *text, i64 size, Path *path) {
  const Model *m = &e->model;
  Node nodes[MEMO_BYTES + 1];
  Narrow merged[MEMO_BYTES + 1];
  double limit = INFINITY;
  if (m->kind == UNIGRAM)
    limit = certain_path(m, text, size, nodes);
  else if (!merged_path(m, text, size, merged))
    return false;
  i32 ends[MEMO_BYTES + 1];
  i64 pieces = 0;
  for (i64 p = size; p > 0; p = m->kind == UNIGRAM ? nodes[p].start : merged[p].start)
    ends[pieces++] = (i32)p;
  if (limit - path->cost < path->limit) path->limit = limit - path->cost;
  for (i64 begin = 0; pieces--; begin = ends[pieces]) {
    i64 end = ends[pieces];
    i32 id = m->kind == UNIGRAM ? nodes[end].id : merged[end].id;
    path->count += put_piece(m, text, begin, end, id, path->ids + path->count);
    path->cost += fabs(m->scores[id]);
    path->special |= (id == m->unknown_id && !m->has_bytes) || m->narrow[id] != m->scores[id];
  }
  return true;
}

// ---- The memo.

static u32 pack(const Encoder *e, const Path *path) {
  // Rounded up, so that bounds are bounds; a limit is rounded towards zero, and none is NaN.
  double units = e->unit > 0 ? ceil(path->cost / e->unit) : 0;
  float limit = path->limit >= 0 ? (float)(path->limit * (1 - 1e-6)) : NAN;
  u32 bits;
  memcpy(&bits, &limit, 4);
  return (bits & 0xFFFF0000u) | (u32)units << COST_SHIFT | (path->special ? SPECIAL : 0);
}

INLINE double entry_cost(const Encoder *e, const Entry *entry) {
  return e->unit * (entry->meta >> COST_SHIFT & ((1 << COST_BITS) - 1));
}

INLINE float entry_limit(const Entry *entry) {
  u32 bits = entry->meta & 0xFFFF0000u;
  float limit;
  memcpy(&limit, &bits, 4);
  return limit;
}

// Returns the entry of a segment that the memo lacks, after storing it; NULL: SentencePiece must
// encode it.
static Entry *learn_segment(Encoder *e, const u8 *text, i64 size, Key key, u64 hash) {
  Path path;
  begin_path(&path);
  if (!extend_path(e, text, size, &path)) return NULL;
  u32 meta = pack(e, &path);
  return memo_store(&e->memo, key, hash, text, size, path.ids, path.count, meta);
}

// The same for a string of several segments.
static Entry *learn_string(Encoder *e, const u8 *text, i64 length, Key key, u64 hash,
                           const i32 *ends, i64 count) {
  Path path;
  begin_path(&path);
  for (i64 i = 0, at = 0; i < count; at = ends[i++]) {
    i64 size = ends[i] - at;
    Key part = memo_key(text + at, size);
    u64 part_hash = memo_hash(part);
    Entry *entry = memo_find(&e->memo, part, part_hash, text + at, size);
    if (!entry) entry = learn_segment(e, text + at, size, part, part_hash);
    if (!entry) return NULL;
    memo_mark(entry);
    double limit = entry_limit(entry);
    limit = isnan(limit) ? -1 : limit - path.cost;
    if (limit < path.limit) path.limit = limit;
    path.cost += entry_cost(e, entry);
    path.special |= (entry->meta & SPECIAL) != 0;
    path.count += memo_ids(&e->memo, entry, path.ids + path.count);
  }
  u32 meta = pack(e, &path);
  return memo_store(&e->memo, key, hash, text, length, path.ids, path.count, meta);
}

// ---- Documents.

// Makes e->exact the score of out[begin:used], whose last ids are of entries that are not special.
static void sync(Encoder *e, const i32 *out, i64 used) {
  float exact = e->exact;
  for (i64 i = e->exact_ids; i < used; i++) exact += e->model.narrow[out[i]];
  e->exact = exact;
  e->exact_ids = used;
  e->bound = fabs(exact);
}

// Appends an id of an exact path, of one character if it is unknown; returns the new `used`.
INLINE i64 append(Encoder *e, i32 id, i32 *out, i64 begin, i64 used) {
  e->exact = (float)(e->model.scores[id] + (double)e->exact);
  if (id != e->model.unknown_id || used == begin || out[used - 1] != id) out[used++] = id;
  e->exact_ids = used;
  return used;
}

// Appends the ids of a segment or several, the path found from the document's exact score.
static i64 encode_exactly(Encoder *e, const u8 *text, i64 size, i32 *out, i64 begin, i64 used) {
  const Model *m = &e->model;
  if (size >= e->nodes_room) {
    Narrow *nodes = realloc(e->nodes, (size_t)(2 * size + 1) * sizeof(Narrow));
    if (!nodes) return -1;
    e->nodes = nodes;
    e->nodes_room = 2 * size + 1;
  }
  Narrow *nodes = e->nodes;
  if (m->kind == UNIGRAM) {
    sync(e, out, used);
    exact_path(m, text, size, e->exact, nodes);
  } else if (!merged_path(m, text, size, nodes)) {
    return -2;
  }
  // Reverse the path: nodes[p].start becomes the end of the piece that starts at p.
  for (i64 p = size, after = size; p >= 0;) {
    i64 before = p ? nodes[p].start : -1;
    nodes[p].start = (i32)after;
    after = p;
    p = before;
  }
  for (i64 p = 0; p < size;) {
    i64 end = nodes[p].start;
    i32 id = nodes[end].id;
    if (id == m->unknown_id && m->has_bytes) {
      used += put_piece(m, text, p, end, id, out + used);
      e->exact_ids = used;
    } else {
      used = append(e, id, out, begin, used);
    }
    p = end;
  }
  if (m->kind == UNIGRAM) e->exact = nodes[size].best;
  e->bound = fabs(e->exact);
  return used;
}

// Appends the ids of a string in the memo, or those of its exact path if the entry is not certain.
INLINE i64 put_entry(Encoder *e, const Entry *entry, const u8 *text, i64 length, i32 *out,
                     i64 begin, i64 used) {
  if (UNLIKELY(!(e->bound <= entry_limit(entry)))) {
    sync(e, out, used);
    if (!(e->bound <= entry_limit(entry)))
      return encode_exactly(e, text, length, out, begin, used);
  }
  if (LIKELY(!(entry->meta & SPECIAL))) {
    // 0.1 % covers the rounding of SentencePiece's sum and of this one.
    e->bound += 1.001 * entry_cost(e, entry);
    return used + memo_ids(&e->memo, entry, out + used);
  }
  i32 ids[MEMO_IDS + ID_SLACK];
  i64 count = memo_ids(&e->memo, entry, ids);
  sync(e, out, used);
  for (i64 i = 0; i < count; i++) used = append(e, ids[i], out, begin, used);
  e->bound = fabs(e->exact);
  return used;
}

static i64 encode_new(Encoder *e, const u8 *text, i64 length, Key key, u64 hash, i32 *out,
                      i64 begin, i64 used);

// Appends the ids of `count` strings that end at ends[0], ends[1] ..., or of segments.
INLINE i64 encode_parts(Encoder *e, const u8 *text, const i32 *ends, i64 count, bool segments,
                        i32 *out, i64 begin, i64 used) {
  const i64 longest = segments ? MEMO_BYTES : CHUNK_BYTES;
  Key keys[AHEAD];
  u64 hashes[AHEAD];
  for (i64 first = 0, at = 0; first < count && used >= 0; first += AHEAD) {
    i64 many = count - first < AHEAD ? count - first : AHEAD;
    for (i64 i = 0, from = at; i < many; from = ends[first + i++]) {
      i64 length = ends[first + i] - from;
      keys[i] = LIKELY(length <= longest) ? memo_key(text + from, length) : (Key){0, 0};
      hashes[i] = memo_hash(keys[i]);
      __builtin_prefetch(memo_bucket(&e->memo, hashes[i]));
    }
    for (i64 i = 0; i < many && used >= 0; at = ends[first + i++]) {
      i64 length = ends[first + i] - at;
      Entry *entry = NULL;
      if (LIKELY(length <= longest))
        entry = memo_find(&e->memo, keys[i], hashes[i], text + at, length);
      if (UNLIKELY(!entry)) {
        if (!segments) {
          used = encode_new(e, text + at, length, keys[i], hashes[i], out, begin, used);
          continue;
        }
        if (length > MEMO_BYTES) {
          used = encode_exactly(e, text + at, length, out, begin, used);
          continue;
        }
        entry = learn_segment(e, text + at, length, keys[i], hashes[i]);
        if (!entry) return -2;
      } else {
        memo_mark(entry);
      }
      used = put_entry(e, entry, text + at, length, out, begin, used);
    }
  }
  return used;
}

// Appends the ids of a string that the memo lacks; it stores one of several segments when it meets
// it again.
static i64 encode_new(Encoder *e, const u8 *text, i64 length, Key key, u64 hash, i32 *out,
                      i64 begin, i64 used) {
  i64 count = cut_pairs(&e->model.pairs, text, 0, length, e->cuts);
  if (count == 1 || length > CHUNK_BYTES || !memo_seen(&e->memo, hash))
    return encode_parts(e, text, e->cuts, count, true, out, begin, used);
  Entry *entry = learn_string(e, text, length, key, hash, e->cuts, count);
  return entry ? put_entry(e, entry, text, length, out, begin, used) : -2;
}

static bool reserve_ends(Encoder *e, i64 size) {
  if (LIKELY(size <= e->ends_room)) return true;
  i64 room = size + size / 2;
  i32 *ends = realloc(e->ends, (size_t)room * 4);
  if (ends) e->ends = ends;
  i32 *cuts = realloc(e->cuts, (size_t)room * 4);
  if (cuts) e->cuts = cuts;
  if (!ends || !cuts) return false;
  e->ends_room = room;
  return true;
}

// Encodes documents data[offsets[i]:offsets[i + 1]] from `*first` on, into `out` from `*used` on;
// `lengths` receives the number of ids of each. Returns DONE or why it stops, with the document in
// `*first`, and in `*need` the length of `out` that it needs.
EXPORT i64 sentencepiece_encode(Encoder *e, const u8 *data, const i64 *offsets, i64 documents,
                                i64 *first, i32 *out, i64 room, i64 *used, i64 *lengths,
                                i64 *need) {
  const Model *m = &e->model;
  const u8 *readable = data + offsets[documents];
  for (; *first < documents; ++*first) {
    i64 size = normalise(&e->text, data + offsets[*first], data + offsets[*first + 1], readable);
    if (size < 0 || !reserve_ends(e, size + BLOCK)) return NO_MEMORY;
    i64 most = *used + (m->has_bytes ? 3 : 1) * size + ID_SLACK;
    if (most > room) {
      *need = most;
      return GROW_TOKENS;
    }
    e->exact = 0;
    e->exact_ids = *used;
    e->bound = 0;
    i64 end = *used;
    if (size) {
      i64 count = m->spaces_apart ? cut_spaces(e->text.bytes, size, e->ends)
                                  : cut_pairs(&m->pairs, e->text.bytes, 0, size, e->ends);
      end = encode_parts(e, e->text.bytes, e->ends, count, !m->spaces_apart, out, *used, *used);
    }
    if (end < 0) return end == -1 ? NO_MEMORY : GIVE_UP;
    lengths[*first] = end - *used;
    *used = end;
  }
  return DONE;
}
