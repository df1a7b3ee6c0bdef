// Attention over the slots, in place: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) with
// the query heads of a key/value head as rows of one product, so that keys and values are read once for all of them.
//
// Keys are read in chunks of CHUNK, counted from the start of the sequence. A chunk gives its queries a SoftmaxState,
// and these are merged in the order of the chunks. So the result is the same, bit for bit, however many threads share
// the chunks and whatever else is in the batch. Keys before a window are not read, except those in the same block of
// KEYS_PADDING keys as its first, which have weights of exactly 0.
#pragma once

#include "pack.h"
#include "softmax.h"

static_assert(KEYS_PADDING % KEYS_AT_ONCE == 0, "values are packed up to a multiple of KEYS_PADDING");

constexpr int MOST_QUERIES = 512;    // queries of a task: tokens times query heads of a key/value head
constexpr int QUERIES_AT_ONCE = 32;  // if there are many
constexpr int MOST_HEADS = 8;        // key/value heads of a task; more than one only with at most 16 queries

template <class T> struct AttentionScratch {
    T* queries;     // by head, if there are few: one panel of queries, [head_dim / Pack][16][Pack]
    T* keys;        // if they are packed: panels of 16 keys, [CHUNK / 16][head_dim / Pack][16][Pack]
    T* values;      // panels of 16 elements: [heads * head_dim / 16][CHUNK / Pack][16][Pack]
    T* weights;     // few queries: by head, [16][CHUNK]; many: [QUERIES_AT_ONCE][CHUNK]
    float* scores;  // few queries: by head, [CHUNK][16]; many: [QUERIES_AT_ONCE][CHUNK]
    SoftmaxState chunk[MOST_HEADS];   // of at most QUERIES_AT_ONCE
    SoftmaxState merged[MOST_HEADS];  // of all queries of the task
};

// The keys and values of a slot: some neighbouring heads of a layer, read in place.
template <class T> struct KvView {
    const T *keys, *values;  // of the first head
    int64_t stride;          // from token to token
    int num_heads, head_dim;
    bool has_common;         // keys and values have elements in common, and there is one head
};

// The queries of a task to these heads, and the keys that they see.
template <class T> struct Queries {
    const T* data;  // of the first head: [count][head_dim]
    int count;
    int64_t head_stride;  // from one head's queries to the next's
    Mask mask;
    float cap;  // soft cap of scores; 0 for none
};

// Neighbouring keys of a sequence: at most CHUNK.
struct Chunk {
    int first, count;

    int depth() const { return int(pad(count, KEYS_PADDING)); }  // to which values are packed
};

// Packs keys and values that have elements in common, in one pass over a chunk: when a token's values are packed, its
// keys have just been, so that elements which are both are read from the slot once and then from the first-level cache.
template <class T>
static void pack_common(const AttentionScratch<T>& scratch, const KvView<T>& view, const Chunk& chunk) {
    const T *keys = view.keys + chunk.first * view.stride, *values = view.values + chunk.first * view.stride;
    const int dim = view.head_dim, depth = chunk.depth();
    for (int key = 0; key < depth; key += KEYS_AT_ONCE) {
        pack_columns(keys + key * view.stride, view.stride, chunk.count - key, KEYS_AT_ONCE, dim,
                     scratch.keys + key * dim);
        pack_values(values, view.stride, chunk.count, {key, key + KEYS_AT_ONCE}, depth, 1, dim, scratch.values);
    }
}

// Attention of few queries of each head to a chunk, whose values are packed. Keys are read token by token, all heads of
// each, in the order of memory, and multiplied as they are.
template <class T>
static void attend_few(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                       const Chunk& chunk, const SoftmaxState* states) {
    const int dim = view.head_dim, depth = chunk.depth();
    for (int key = 0; key < chunk.count; key += KEYS_AT_ONCE)
        for (int head = 0; head < view.num_heads; head++)
            multiply(view.keys + (chunk.first + key) * view.stride + head * dim, view.stride,
                     chunk.count - key < KEYS_AT_ONCE ? chunk.count - key : KEYS_AT_ONCE,
                     scratch.queries + head * LANES * dim, 1, dim, scratch.scores + (head * CHUNK + key) * LANES,
                     LANES);
    for (int head = 0; head < view.num_heads; head++) {
        const SoftmaxState& state = states[head];
        T* weights = scratch.weights + head * LANES * CHUNK;
        softmax_few(scratch.scores + head * CHUNK * LANES, chunk.count, queries.mask, queries.cap, chunk.first,
                    queries.count, weights, state.maximum, state.sum);
        multiply(weights, CHUNK, queries.count, scratch.values + head * dim * depth, dim / LANES, depth, state.output,
                 dim);
    }
}

// Attention of many queries of one head, which makes up for packing the keys: `count` queries from `q` on.
template <class T>
static void attend_many(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view, int head,
                        int q, int count, const Chunk& chunk, const SoftmaxState& state) {
    const int dim = view.head_dim, depth = chunk.depth();
    const int longest = queries.mask.limits[q + count - 1] - chunk.first;
    const int visible = longest < chunk.count ? longest : chunk.count;
    const int padded = int(pad(visible, KEYS_PADDING));
    const T* data = queries.data + head * queries.head_stride + q * dim;
    multiply(data, dim, count, scratch.keys, padded / LANES, dim, scratch.scores, CHUNK);
    for (int r = 0; r < count; r += LANES)
        softmax(scratch.scores + r * CHUNK, visible, queries.mask.from_query(q + r), queries.cap, chunk.first,
                count - r < LANES ? count - r : LANES, scratch.weights + r * CHUNK, state.maximum + r, state.sum + r);
    if (padded < depth)
        for (int r = 0; r < count; r++)
            std::memset((void*)(scratch.weights + r * CHUNK + padded), 0, (depth - padded) * sizeof(T));
    multiply(scratch.weights, CHUNK, count, scratch.values + head * dim * depth, dim / LANES, depth, state.output, dim);
}

// Attention of all heads to one chunk. Its states are merged into the scratch's, or, for at most 16 queries, left in
// `results`, one per head.
template <class T>
static void attend_chunk(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                         const Chunk& chunk, const SoftmaxState* results) {
    const int dim = view.head_dim, depth = chunk.depth(), end = chunk.first + chunk.count;
    const SoftmaxState* states = results ? results : scratch.chunk;
    const bool is_few = queries.count <= FEW && !view.has_common;
    if (view.has_common)
        pack_common(scratch, view, chunk);
    else
        pack_values(view.values + chunk.first * view.stride, view.stride, chunk.count, {0, depth}, depth,
                    view.num_heads, dim, scratch.values);
    if (is_few) attend_few(scratch, queries, view, chunk, states);
    for (int head = 0; head < view.num_heads; head++) {
        if (!is_few && !view.has_common)
            pack_columns(view.keys + chunk.first * view.stride + head * dim, view.stride, chunk.count, depth, dim,
                         scratch.keys);
        for (int q = 0; q < queries.count; q += QUERIES_AT_ONCE) {
            const int left = queries.count - q, count = left < QUERIES_AT_ONCE ? left : QUERIES_AT_ONCE;
            if (queries.mask.limits[q + count - 1] <= chunk.first || queries.mask.start(q) >= end) continue;  // unseen
            if (!is_few) attend_many(scratch, queries, view, head, q, count, chunk, states[head]);
            if (!results) merge(scratch.merged[head].from_query(q, dim), states[head], count, dim);
        }
    }
}
