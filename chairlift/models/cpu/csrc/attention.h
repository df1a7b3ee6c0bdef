// Attention over the slots, in place: online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) with
// the query heads of a group as rows of one product, so that keys and values are read once for all of them.
//
// Keys are taken in chunks of CHUNK, counted from the start of the sequence. A chunk gives its queries a partial result
// (maximum, sum, output), and partial results are merged in the order of the chunks. Whether one thread did them all
// or several did some each makes no difference to a single bit, nor does who else is in the batch.
#pragma once

#include "product.h"

constexpr int CHUNK = 128;
constexpr int MOST_QUERIES = 64;  // queries of a task: tokens times heads of a group
constexpr float LOWEST = -1e30f;  // the maximum over no keys at all: finite, so that differences are numbers

// The softmax so far of `MOST_QUERIES` queries: output [queries, head_dim] not yet divided by the sum.
struct Partial {
    float* maximum;
    float* sum;
    float* output;

    static int64_t floats(int64_t queries, int64_t head_dim) { return queries * (2 + head_dim); }
    static Partial at(float* from, int64_t queries, int64_t head_dim) {
        (void)head_dim;
        return {from, from + queries, from + 2 * queries};
    }
};

template <class T> struct AttentionScratch {
    T* queries;     // panels of 16 queries: [MOST_QUERIES / 16][head_dim / Pack][16][Pack]
    T* values;      // panels of 16 elements: [head_dim / 16][CHUNK / Pack][16][Pack]
    T* weights;     // [MOST_QUERIES][CHUNK]
    float* scores;  // [CHUNK][MOST_QUERIES]
    Partial chunk, merged;
};

// Queries [n, head_dim] -> panels.
template <class T> static void pack_queries(const T* queries, int n, int head_dim, T* panels) {
    constexpr int PACK = Pack<T>;
    for (int first = 0; first < n; first += LANES) {
        T* panel = panels + first * head_dim;
        for (int k = 0; k < head_dim; k += LANES * PACK) {
            u32x16 words[LANES];
            for (int q = 0; q < LANES; q++)
                words[q] = first + q < n ? load<u32x16>(queries + (first + q) * head_dim + k) : u32x16{};
            transpose16(words);
            for (int i = 0; i < LANES; i++) store_raw(panel + (k / PACK + i) * LANES * PACK, words[i]);
        }
    }
}

// Values of `n` tokens, `stride` elements apart -> panels of depth `depth` >= n, the rest zeros.
INLINE void pack_values(const float* values, int64_t stride, int n, int depth, int head_dim, float* panels) {
    for (int d = 0; d < head_dim; d += LANES)
        for (int key = 0; key < depth; key++)
            store16(panels + d * depth + key * LANES, key < n ? load16(values + key * stride + d) : f32x16{});
}

INLINE void pack_values(const bf16* values, int64_t stride, int n, int depth, int head_dim, bf16* panels) {
    for (int key = 0; key < depth; key += 2) {
        const bf16* even = values + key * stride;
        for (int d = 0; d < head_dim; d += LANES) {
            u32x16 low{}, high{};
            if (key < n) low = __builtin_convertvector(load<u16x16>(even + d), u32x16);
            if (key + 1 < n) high = __builtin_convertvector(load<u16x16>(even + stride + d), u32x16);
            store_raw(panels + d * depth + key * LANES, low | (high << 16));
        }
    }
}

// Weights of Pack keys for 16 queries, as the words that are to be transposed.
INLINE u32x16 pack_weights(float, const f32x16* weights) { return bit_cast<u32x16>(weights[0]); }
INLINE u32x16 pack_weights(bf16, const f32x16* weights) {
    return round_to_bf16(weights[0]) | (round_to_bf16(weights[1]) << 16);
}

// Scores [n keys][width] of one panel of queries -> weights [queries][CHUNK] and their maximum and sum.
// A query sees keys below its limit, counted from this chunk's first.
template <class T>
static void softmax(float* scores, int n, int width, i32x16 limits, int shortest, int num_queries, T* weights,
                    float* maximum, float* sum) {
    constexpr int PACK = Pack<T>, KEYS = LANES * PACK;
    f32x16 best = splat(LOWEST);
    for (int key = 0; key < n; key++) {
        f32x16 score = load16(scores + key * width);
        if (key >= shortest) {
            score = key < limits ? score : splat(2 * LOWEST);
            store16(scores + key * width, score);
        }
        best = max16(score, best);
    }
    f32x16 total{};
    for (int first = 0; first < n; first += KEYS) {
        u32x16 words[LANES];
        for (int i = 0; i < LANES; i++) {
            f32x16 pair[PACK];
            for (int j = 0; j < PACK; j++) {
                const int key = first + i * PACK + j;
                pair[j] = key < n ? exp2_16(load16(scores + key * width) - best) : f32x16{};
                total += pair[j];
            }
            words[i] = pack_weights(T{}, pair);
        }
        transpose16(words);
        for (int q = 0; q < num_queries && q < LANES; q++) store_raw(weights + q * CHUNK + first, words[q]);
    }
    store16(maximum, best);
    store16(sum, total);
}

// One chunk of `n` keys, the first of which is key number `first` of its sequence: queries (packed) -> partial result.
template <class T>
static void attend_chunk(const AttentionScratch<T>& scratch, const T* keys, const T* values, int64_t stride, int first,
                         int n, const int32_t* limits, int num_queries, int head_dim, const Partial& result) {
    constexpr int KEYS = LANES * Pack<T>;
    const int panels = (num_queries + LANES - 1) / LANES, width = panels * LANES;
    multiply<T>(keys, stride, n, scratch.queries, panels, head_dim, nullptr, scratch.scores, width);
    for (int p = 0; p < panels; p++) {
        const int32_t* panel_limits = limits + p * LANES;
        int shortest = n;
        for (int q = 0; q < LANES; q++) shortest = panel_limits[q] - first < shortest ? panel_limits[q] - first : shortest;
        softmax(scratch.scores + p * LANES, n, width, load<i32x16>(panel_limits) - first, shortest,
                num_queries - p * LANES, scratch.weights + p * LANES * CHUNK, result.maximum + p * LANES,
                result.sum + p * LANES);
    }
    const int depth = (n + KEYS - 1) / KEYS * KEYS;
    pack_values(values, stride, n, depth, head_dim, scratch.values);
    multiply<T>(scratch.weights, CHUNK, num_queries, scratch.values, head_dim / LANES, depth, nullptr, result.output,
                head_dim);
}

INLINE void start_merging(const Partial& merged, int num_queries, int head_dim) {
    const int width = (num_queries + LANES - 1) / LANES * LANES;
    for (int q = 0; q < width; q++) merged.maximum[q] = LOWEST, merged.sum[q] = 0;
    std::memset(merged.output, 0, sizeof(float) * num_queries * head_dim);
}

static void merge(const Partial& merged, const Partial& chunk, int num_queries, int head_dim) {
    for (int p = 0; p < num_queries; p += LANES) {
        const f32x16 before = load16(merged.maximum + p), own = load16(chunk.maximum + p), best = max16(before, own);
        float old_share[LANES], new_share[LANES];
        store16(old_share, exp2_16(before - best));
        store16(new_share, exp2_16(own - best));
        store16(merged.maximum + p, best);
        store16(merged.sum + p, load16(merged.sum + p) * load16(old_share) + load16(chunk.sum + p) * load16(new_share));
        for (int q = 0; q < LANES && p + q < num_queries; q++) {
            float* output = merged.output + (p + q) * head_dim;
            const float* addend = chunk.output + (p + q) * head_dim;
            for (int d = 0; d < head_dim; d += LANES)
                store16(output + d, load16(output + d) * old_share[q] + load16(addend + d) * new_share[q]);
        }
    }
}
