// Attention over the slots, in place: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) with
// the query heads of a key/value head as rows of one product, so that keys and values are read once for all of them.
//
// Keys are read in chunks of CHUNK, counted from the start of the sequence. A chunk gives its queries a SoftmaxState,
// and these are merged in the order of the chunks. So the result is the same, bit for bit, however many threads share
// the chunks and whatever else is in the batch. Keys before a window are not read, except those in the same block of
// KEYS_PADDING keys as its first, which have weights of exactly 0.
#pragma once

#include "few_queries.h"

// Packs the keys and values of a head for many queries.
template <class T>
static void pack_chunk(const AttentionScratch<T>& scratch, const KvView<T>& view, const Chunk& chunk) {
    const T *keys = view.keys + chunk.first * view.stride, *values = view.values + chunk.first * view.stride;
    const int dim = view.head_dim, depth = chunk.depth();
    for (int key = 0; key < depth; key += KEYS_AT_ONCE) {
        pack_columns(keys + key * view.stride, view.stride, chunk.count - key, KEYS_AT_ONCE, dim,
                     scratch.keys + key * dim);
        pack_values(values, view.stride, chunk.count, {key, key + KEYS_AT_ONCE}, depth, 1, dim, scratch.values);
    }
}

// Attention of many queries to a chunk whose keys and values are packed: `count` queries from `q` on.
template <class T>
static void attend_many(const AttentionScratch<T>& scratch, const Queries<T>& queries, int dim, int q, int count,
                        const Chunk& chunk, const SoftmaxState& state) {
    const int depth = chunk.depth(), longest = queries.mask.limits[q + count - 1] - chunk.first;
    const int visible = longest < chunk.count ? longest : chunk.count;
    const int padded = int(pad(visible, KEYS_PADDING));
    multiply(queries.data + q * dim, dim, count, scratch.keys, padded / LANES, dim, scratch.scores, CHUNK);
    for (int r = 0; r < count; r += LANES)
        softmax(scratch.scores + r * CHUNK, visible, queries.mask.from_query(q + r), queries.cap, chunk.first,
                count - r < LANES ? count - r : LANES, scratch.weights + r * CHUNK, state.maximum + r, state.sum + r);
    if (padded < depth)
        for (int r = 0; r < count; r++)
            std::memset((void*)(scratch.weights + r * CHUNK + padded), 0, (depth - padded) * sizeof(T));
    multiply(scratch.weights, CHUNK, count, scratch.values, dim / LANES, depth, state.output, dim);
}

// Attention of all heads to one chunk. Its states are merged into the scratch's, or, for at most 16 queries, left in
// `results`, one per head. Elements that are keys and values are read from the slot once, and then found in the
// first-level cache, since the values of some tokens are packed when their keys have been.
template <class T>
static void attend_chunk(const AttentionScratch<T>& scratch, const Queries<T>& queries, const KvView<T>& view,
                         const Chunk& chunk, const SoftmaxState* results) {
    const int dim = view.head_dim, end = chunk.first + chunk.count;
    if (queries.count <= LANES) {
        attend_few(scratch, queries, view, chunk, results ? results : scratch.chunk);
        for (int head = 0; !results && head < view.num_heads; head++)
            merge(scratch.merged[head], scratch.chunk[head], queries.count, dim);
        return;
    }
    pack_chunk(scratch, view, chunk);
    for (int q = 0; q < queries.count; q += QUERIES_AT_ONCE) {
        const int left = queries.count - q, count = left < QUERIES_AT_ONCE ? left : QUERIES_AT_ONCE;
        if (queries.mask.limits[q + count - 1] <= chunk.first || queries.mask.start(q) >= end) continue;  // unseen
        attend_many(scratch, queries, dim, q, count, chunk, scratch.chunk[0]);
        merge(scratch.merged[0].from_query(q, dim), scratch.chunk[0], count, dim);
    }
}
