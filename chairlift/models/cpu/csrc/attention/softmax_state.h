// The state of an online softmax, and how two of them are merged.
#pragma once

#include "../vector/arithmetic.h"

constexpr float LOWEST = -1e30f;  // the maximum over no keys at all: finite, so that differences are numbers

// The softmax of some queries over the keys so far: output [queries, head_dim] not yet divided by the sum.
struct SoftmaxState {
    float* maximum;
    float* sum;
    float* output;

    static int64_t floats(int64_t queries, int64_t head_dim) { return queries * (2 + head_dim); }
    static SoftmaxState at(float* from, int64_t queries) { return {from, from + queries, from + 2 * queries}; }
    SoftmaxState from_query(int q, int head_dim) const { return {maximum + q, sum + q, output + q * head_dim}; }
};

INLINE void start_merging(const SoftmaxState& merged, int num_queries, int head_dim) {
    const int width = (num_queries + LANES - 1) / LANES * LANES;
    for (int q = 0; q < width; q++) merged.maximum[q] = LOWEST, merged.sum[q] = 0;
    std::memset(merged.output, 0, sizeof(float) * num_queries * head_dim);
}

// Merges the state of a chunk of keys into that of the chunks before it.
static void merge(const SoftmaxState& merged, const SoftmaxState& chunk, int num_queries, int head_dim) {
    for (int p = 0; p < num_queries; p += LANES) {
        const f32x16 before = load16(merged.maximum + p), own = load16(chunk.maximum + p), best = max16(before, own);
        float old_scale[LANES], new_scale[LANES];
        store16(old_scale, exp2_16(before - best));
        store16(new_scale, exp2_16(own - best));
        store16(merged.maximum + p, best);
        store16(merged.sum + p, load16(merged.sum + p) * load16(old_scale) + load16(chunk.sum + p) * load16(new_scale));
        for (int q = 0; q < LANES && p + q < num_queries; q++) {
            float* output = merged.output + (p + q) * head_dim;
            const float* addend = chunk.output + (p + q) * head_dim;
            for (int d = 0; d < head_dim; d += LANES)
                store16(output + d, fma16(load16(output + d), splat(old_scale[q]), load16(addend + d) * new_scale[q]));
        }
    }
}
